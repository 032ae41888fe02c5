"""Which state the classes of torch.optim make, and whether an optimizer goes on with what a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

import zckpt
from tests.gloo import on_ranks
from tests.live import everything, same, trained, whole
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.errors import UsageError
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer
from zckpt.optim.states.expected import WANTED, Keys, wanted

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9}],
    "SGD": [{}, {"momentum": 0.9}],
}


def optional(keys: Keys) -> set[str]:
    return {*keys.optional.split(), *keys.lists.split()}


@pytest.mark.parametrize("name", sorted(name for name in WANTED if hasattr(torch.optim, name) and name != "LBFGS"))
def test_the_keys_are_those_that_a_step_makes(name):
    for settings in SETTINGS.get(name, [{}]):
        for shape in ((3, 2), (3,))[: 1 if name == "Muon" else 2]:
            parameter = nn.Parameter(torch.ones(shape))
            optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **settings)
            ones = torch.ones(shape)
            parameter.grad = ones.to_sparse() if name == "SparseAdam" else ones
            optimizer.step()
            its = wanted(optimizer)
            assert its is not None
            required = its.required(optimizer.param_groups[0], len(shape))
            made = {key for key, value in optimizer.state[parameter].items() if value is not None}
            assert required <= made <= required | optional(its), (name, settings, shape)


def test_lbfgs_goes_on_from_its_own_lists_alone():
    def steps(model: nn.Module, optimizer: Any) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = model(torch.eye(5)).square().sum()
            found.backward()
            return found

        optimizer.step(loss)

    (model, other), made = (net(), net(seed=1)), torch.optim.LBFGS
    ours, its = (made(one.parameters(), max_iter=3) for one in (model, other))
    steps(model, ours)
    zckpt.save("c", model=model, optimizer=ours)
    zckpt.load("c", model=other, optimizer=its)
    known = wanted(its)
    assert known is not None
    assert set(its.state[other[0].weight]) == known.required({}, 1) | optional(known)
    steps(model, ours)
    steps(other, its)
    assert same([*model.parameters()], [*other.parameters()])
    assert_same_tree(its.state_dict()["state"], ours.state_dict()["state"])
    saved("adamw")
    assert_refused("adamw", *begun(made), "LBFGS cannot continue from the state of 0.weight")


def test_every_class_of_torch_is_known():
    classes = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert {name for name in classes if hasattr(getattr(torch.optim, name), "step")} - set(WANTED) == {"Optimizer"}


class Own(torch.optim.AdamW):
    """A class with a step of its own, and state of AdamW."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def stepped(model: nn.Module, make: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer after a step."""
    return trained(model, make(model.named_parameters(), **{"lr": 0.1, **settings}))


def begun(optimizer_class: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, Any]:
    """Return another model than was saved, and its optimizer."""
    model = net(seed=1)
    return model, optimizer_class(model.named_parameters(), **settings)


def saved(path: Path, optimizer_class: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> None:
    model, optimizer = stepped(net(), optimizer_class, **settings)
    zckpt.save(path, model=model, optimizer=optimizer, step=1)


def assert_refused(path: Path, model: nn.Module, optimizer: Any, match: str) -> None:
    before = everything(model, optimizer)
    with refusing(UsageError, match):
        zckpt.load(path, model=model, optimizer=optimizer)
    assert same(before, everything(model, optimizer))


SGD = (torch.optim.SGD, {"momentum": 0.9})
ADAMW = (torch.optim.AdamW, {})
BY_ADAMW = "AdamW cannot continue from the state of 0.weight: expected exp_avg, exp_avg_sq, step, found momentum_buffer"
REFUSED: list[tuple[Any, Any, str]] = [
    (SGD, ADAMW, BY_ADAMW),
    (ADAMW, SGD, "SGD cannot continue from the state of 0.weight: expected momentum_buffer, found"),
    (ADAMW, (torch.optim.RMSprop, {}), "expected square_avg, step, found"),
    (ADAMW, (torch.optim.NAdam, {}), "expected exp_avg, exp_avg_sq, mu_product, step, found"),
    (SGD, (Own, {}), r"Own .* 0\.weight: expected what its load_state_dict accepts \(KeyError: 'step'\), found moment"),
]


@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_state_of_another_optimizer_is_refused_and_nothing_changed(case, stepped_before):
    (source, its), (target, ours), match = REFUSED[case]
    saved("c", source, **its)
    model, optimizer = begun(target, lr=0.5, **ours)
    if stepped_before and target is not Own:
        trained(model, optimizer)
    assert_refused("c", model, optimizer, match)


def test_slots_that_some_parameters_lack_are_refused():
    model, optimizer = stepped(net())
    del optimizer.state[model[1].bias]["exp_avg_sq"]
    zckpt.save("c", model=model, optimizer=optimizer)
    assert_refused("c", *begun(), r"AdamW cannot continue from the state of 1\.bias.*found step, exp_avg")


def test_amsgrad_without_its_slot_is_refused_and_with_it_is_the_checkpoints():
    saved("with", amsgrad=True)
    model, optimizer = begun()
    zckpt.load("with", model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["amsgrad"]
    assert "max_exp_avg_sq" in optimizer.state[model[0].weight]
    model, optimizer = stepped(net())
    optimizer.param_groups[0]["amsgrad"] = True  # from now on, which torch does not take either
    zckpt.save("without", model=model, optimizer=optimizer)
    assert_refused("without", *begun(), "expected exp_avg, exp_avg_sq, max_exp_avg_sq, step, found")


@pytest.mark.parametrize(("source", "steps"), [(torch.optim.Adam, 2), (torch.optim.SGD, 1)])
def test_adamw_goes_on_from_adam_and_says_that_it_makes_state_where_there_is_none(source, steps):
    saved("c", source)
    model, optimizer = begun()
    made = ["no state of 0.weight, 0.bias, 1.weight, 1.bias: AdamW makes it in its next step"]
    assert zckpt.load("c", model=model, optimizer=optimizer).notes == (made if steps == 1 else [])
    trained(model, optimizer)
    assert optimizer.state[model[0].weight]["step"] == steps


@on_ranks(1)
def test_a_zero_optimizer_says_whose_state_is_zero():
    model, optimizer = stepped(net())
    del optimizer.state[model[1].bias]
    zckpt.save("c", model=model, optimizer=optimizer)
    other, ours = begun(partial(ZeroOptimizer, optimizer_class=torch.optim.AdamW))
    assert zckpt.load("c", model=other, optimizer=ours).notes == ["no state of 1.bias"]
    assert not ours.full_state("1.bias", "exp_avg").any()


class Counting(torch.optim.Optimizer):
    """A foreign optimizer with integers for each element, and a class that loads as torch does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["codes"] = torch.arange(parameter.numel(), dtype=torch.uint8).view(parameter.shape) + 200
                state["flags"] = parameter.detach() > 0
                state["scale"] = torch.rand(parameter.shape)


def test_integers_of_an_optimizer_keep_their_type():
    model, optimizer = stepped(net(), Counting)
    zckpt.save("c", model=model, optimizer=optimizer)
    other, its = begun(Counting)
    zckpt.load("c", model=other, optimizer=its)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_tree(its.state[two], optimizer.state[one])


@on_ranks(2)
def test_ranks_refuse_it_together():
    saved("c", torch.optim.SGD, momentum=0.9)
    for name, make in {
        "zero": lambda named: ZeroOptimizer(named, torch.optim.AdamW, lr=0.5, stage=2),
        "redundancy": lambda named: ZeroRedundancyOptimizer(named, torch.optim.AdamW, lr=0.5),
        "torch": lambda named: TorchZeroRedundancyOptimizer([p for _, p in named], torch.optim.AdamW, lr=0.5),
        "own": lambda named: ZeroRedundancyOptimizer(named, Own, lr=0.5),
        "fsdp": lambda named: torch.optim.AdamW(named, lr=0.5),
    }.items():
        model: nn.Module = net(seed=1)
        if name == "fsdp":
            fully_shard(model)
        optimizer = make(list(model.named_parameters()))
        before = whole([*model.parameters()])
        with refusing(UsageError, "momentum_buffer"):
            zckpt.load("c", model=model, optimizer=optimizer)
        assert same(before, whole([*model.parameters()])), name
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert not getattr(optimizer, "optim", optimizer).state


def test_state_lies_in_memory_as_its_parameter_for_a_fused_step():
    def made() -> tuple[nn.Conv2d, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=True)

    def fused_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 192).view(1, 3, 8, 8)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    fused_step(model, optimizer)
    zckpt.save("c", model=model, optimizer=optimizer)
    again, its = made()
    zckpt.load("c", model=again, optimizer=its)
    assert its.state[again.weight]["exp_avg"].stride() == again.weight.stride() != (27, 9, 3, 1)
    fused_step(model, optimizer)
    fused_step(again, its)
    assert torch.equal(model.weight, again.weight)
