"""Files that only number the optimizer's parameters: the live optimizer's order says which is which, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsOptimizer

import zckpt
from tests import live
from tests.gloo import on_ranks
from tests.live import equal, of_all_ranks, save_both
from tests.logical import assert_same_tree
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import UsageError
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer


def build(seed: int = 1, *, frozen: int = 0, layers: int = 3) -> nn.Sequential:
    """Make equal layers, of which the first are frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    return model


step = partial(live.step, shape=(2, 4))


def slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[one]["exp_avg"] for name, one in model.named_parameters() if one in optimizer.state}


Both = tuple[nn.Sequential, torch.optim.Optimizer]


def assert_loaded(path: Path, saved: Both, other: Both, **options: Any) -> None:
    """Load into a model and its optimizer, which then has the state that was saved, under the same names."""
    zckpt.load(path, model=other[0], optimizer=other[1], **options)
    assert_same_tree(slots(*other), slots(*saved))


Chosen = Callable[[nn.Sequential], list[nn.Parameter]]
CHOICES: dict[str, Chosen] = {
    "all": lambda model: list(model.parameters()),
    "trained": lambda model: [one for one in model.parameters() if one.requires_grad],
    "backwards": lambda model: [one for one in reversed(list(model.parameters())) if one.requires_grad],
    "last": lambda model: list(model[2].parameters()),
}


def made(choice: str = "trained", seed: int = 1, *, lr: float = 0.1) -> Both:
    """Make layers, of which the first is frozen, and an optimizer of some of their parameters."""
    model = build(seed, frozen=1)
    return model, torch.optim.AdamW(CHOICES[choice](model), lr=lr)


def saved(path: Path, choice: str = "trained") -> Both:
    """Take a step, and save in one file, as most programs do."""
    model, optimizer = made(choice)
    step(model, optimizer)
    save_both(model, optimizer, path)
    return model, optimizer


GIVEN: dict[str, dict[str, Any]] = {
    "as they are": {}, "stripped": {"strip_prefix": "net."}, "renamed": {"rename": [(r"^net\.", "module.")]}
}  # fmt: skip
FORMS = ["lightning as they are", *(f"{form} {given}" for form in ("file", "dcp") for given in GIVEN)]


@pytest.mark.parametrize(("choice", "how"), each(CHOICES, FORMS))
def test_order_counts_where_layers_are_equal(choice, how):
    """The first of which are frozen; whatever they are called in the file."""
    form, _, called = how.partition(" ")
    given = GIVEN[called]
    model, optimizer = made(choice)
    step(model, optimizer)
    weights = {f"net.{name}" if given else name: one for name, one in model.state_dict().items()}
    told = {"model": weights, "optimizer": optimizer.state_dict()}
    if form == "dcp":
        dcp.save(told, checkpoint_id="f")
    elif form == "lightning":
        torch.save({"state_dict": weights, "optimizer_states": [told["optimizer"]]}, "f")
    else:
        torch.save(told, "f")
    other, its = made(choice, 2, lr=0.5)
    assert_loaded("f", (model, optimizer), (other, its), **given)
    assert its.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("to", ["zckpt", "dcp", "consolidated"])
def test_numbers_without_state_keep_their_order_where_they_are_carried(to):
    def groups(model):
        return [{"params": model[at].parameters(), "lr": 0.1 * at} for at in (2, 1)]

    model, other = build(frozen=1), build(2, frozen=1)
    save_both(model, torch.optim.SGD(groups(model)), "f.pt")
    zckpt.convert("f.pt", "out", to=to)
    its = torch.optim.SGD(groups(other), lr=9.0)
    for group in its.param_groups:
        group["lr"] = 9.0
    zckpt.load("out", model=other, optimizer=its)
    assert [group["lr"] for group in its.param_groups] == [0.2, 0.1]


PAIRS = {
    "dcp": {"left": "opt_left", "right": "opt_right"},
    "accelerate": {"model": "optimizer", "model_1": "optimizer_1"},
}


@pytest.mark.parametrize("to", [None, "zckpt", "dcp"])
@pytest.mark.parametrize("form", PAIRS)
def test_several_optimizers_that_only_number_parameters_keep_their_order(form, to):
    def both(seed):
        model = nn.ModuleDict({key: build(seed, frozen=1) for key in PAIRS[form]})
        trained = {key: [p for p in one.parameters() if p.requires_grad] for key, one in model.items()}
        return model, {PAIRS[form][key]: torch.optim.AdamW(its, lr=0.1) for key, its in trained.items()}

    model, optimizers = both(1)
    for one, its in zip(model.values(), optimizers.values(), strict=True):
        step(one, its)
    every = {key: one.state_dict() for key, one in {**model, **optimizers}.items()}
    (path := Path("state")).mkdir()
    if form == "dcp":
        dcp.save(every, checkpoint_id=str(path))
    else:
        for key, one in every.items():
            save_file(one, path / f"{key}.safetensors") if key in model else torch.save(one, path / f"{key}.bin")
    if to is not None:
        zckpt.convert(path, path := Path("out"), to=to)
    assert len(zckpt.open(path).unnamed) == 8
    other, others = both(2)
    zckpt.load(path, model=other, optimizer=others)
    for key, its in others.items():
        assert len(slots(other, its)) == 4
        assert_same_tree(slots(other, its), slots(model, optimizers[key]))


def test_names_of_the_saved_optimizer_may_be_told():
    model, optimizer = saved("f.pt", "backwards")
    names = [name for name, one in model.named_parameters() if one.requires_grad][::-1]
    other, its = made(seed=2)
    assert_loaded("f.pt", (model, optimizer), (other, its), names=names)
    with refusing(UsageError, "unusable parameter names"):
        zckpt.load("f.pt", model=other, optimizer=its, names=names[:-1])


def test_an_order_that_contradicts_shapes_is_refused_and_nothing_changed():
    saved("f.pt", "last")
    other = build(2, frozen=1)
    before = build(2)
    its = torch.optim.AdamW([other[2].bias, other[2].weight], lr=0.1)
    with refusing(UsageError, "and this optimizer's order does not fit"):
        zckpt.load("f.pt", model=other, optimizer=its)
    assert equal(before, other)
    assert not its.state


def test_shapes_that_tell_all_names_are_believed_before_another_order():
    model, other = (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    save_both(model, optimizer, "f.pt")
    its = torch.optim.AdamW(reversed(list(other.parameters())), lr=0.1)
    assert_loaded("f.pt", (model, optimizer), (other, its))


def test_groups_of_other_sizes_are_refused():
    saved("f.pt")
    other, its = made("all", lr=0.5)
    with refusing(UsageError, "param groups have other sizes: expected 6, found 4"):
        zckpt.load("f.pt", model=other, optimizer=its)
    assert zckpt.load("f.pt", model=other, optimizer=its, strict=False).notes
    assert its.param_groups[0]["lr"] == 0.5


def test_an_optimizers_file_by_itself_is_loaded_by_its_order():
    model, optimizer = saved("both.pt", "all")
    torch.save(optimizer.state_dict(), "optimizer.pt")
    other = build(2, frozen=1)
    its = torch.optim.AdamW(other.named_parameters(), lr=0.5)
    zckpt.load("optimizer.pt", optimizer=its)
    assert_same_tree(slots(other, its), slots(model, optimizer))
    assert its.param_groups[0]["lr"] == 0.1
    assert not torch.equal(model[1].weight, other[1].weight)


@on_ranks(2)
def test_files_of_torchs_zero_redundancy_optimizer_with_equal_layers(rank, tmp_path):
    """torch's own ZeroRedundancyOptimizer: each rank's file, and all in one; into every sharded optimizer."""
    model = build(frozen=1, layers=4)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = TorchsOptimizer(trained, torch.optim.AdamW, lr=0.1)
    torch.manual_seed(7)
    step(model, optimizer)
    Path("ranks").mkdir(exist_ok=True)
    torch.save(optimizer.optim.state_dict(), tmp_path / "ranks" / f"optimizer_rank_{rank}.pt")
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        torch.save(model.state_dict(), "ranks/model.pt")
        save_both(model, optimizer, "whole.pt")
    dist.barrier()
    every = of_all_ranks(slots(model, optimizer.optim))
    expected = {name: value for one in every for name, value in one.items()}
    assert len(expected) == len(trained)
    for source in ("ranks", "whole.pt"):
        other = build(2, frozen=1, layers=4)
        named = [(name, one) for name, one in other.named_parameters() if one.requires_grad]
        for made in (
            ZeroRedundancyOptimizer(named, torch.optim.AdamW, lr=0.5),
            ZeroRedundancyOptimizer([one for _, one in named], torch.optim.AdamW, lr=0.5),
            ZeroOptimizer(named, torch.optim.AdamW, lr=0.5, stage=1),
            torch.optim.AdamW([one for _, one in named], lr=0.5),
        ):
            zckpt.load(source, model=other, optimizer=made)
            for name, value in expected.items():
                found = made.full_state(name, "exp_avg") if isinstance(made, ZeroOptimizer) else None
                inner = made.optim if isinstance(made, ZeroRedundancyOptimizer) else made
                found = inner.state.get(other.get_parameter(name), {}).get("exp_avg") if found is None else found
                assert found is None or torch.equal(found, value), (source, type(made), name)
            assert made.param_groups[0]["lr"] == 0.1


@on_ranks(2)
def test_frozen_parameters_in_a_group_need_no_state():
    model, optimizer = saved("f.pt", "all")
    dist.barrier()
    other = build(2, frozen=1)
    its = ZeroOptimizer(other.named_parameters(), torch.optim.AdamW, lr=0.5, stage=1)
    zckpt.load("f.pt", model=other, optimizer=its)
    assert torch.equal(its.full_state("1.weight", "exp_avg"), optimizer.state[model[1].weight]["exp_avg"])
    assert its.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
@pytest.mark.parametrize("form", ["file", "zckpt"])
def test_numbers_of_whole_parameters_keep_their_type_beside_16_bits(cls, form):
    model = build().bfloat16()
    optimizer = cls(model.parameters(), lr=0.1)

    def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(3)
        model(torch.randn(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    advance(model, optimizer)
    if form == "file":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "f")
    else:
        zckpt.save("f", model=model, optimizer=optimizer)
    other = build(2).bfloat16()
    its = cls(other.parameters(), lr=0.1)
    zckpt.load("f", model=other, optimizer=its)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state[a], its.state[b]
        assert_same_tree(theirs, mine)
    advance(model, optimizer)
    advance(other, its)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
