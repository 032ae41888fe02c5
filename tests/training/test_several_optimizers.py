"""Several optimizers over the parameters of one model: saved at some number of ranks, resumed at another.

State is bit-equal by name, and the next losses are bit-equal at the same number of ranks, equal to rounding at others.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

import zckpt
from tests.gloo import run
from tests.live import equal, whole
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.trainings import State, differences, slots_of
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop

ROWS, STEPS, MORE = 4, 2, 2
KINDS = ("torch", "redundancy", "torch-redundancy", "zero", "mixed")
NAMED = ("redundancy", "zero")
"""Kinds whose optimizers are given by name, the others in a list."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class Training:
    """Muon for matrices with AdamW for the rest; where elements are cut, momentum instead of Muon."""

    def __init__(self, kind: str, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        matrices = [{"params": [(name, p)], "lr": lr} for (name, p), lr in zip(self._of(2), (0.02, 0.01), strict=True)]
        self.every = made = _made(kind, matrices, self._of(1))
        self.given: Any = {"matrices": made[0], "rest": made[1]} if kind in NAMED else made

    def _of(self, dim: int) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.dim() == dim]

    def train(self, steps: range) -> list[float]:
        """Take steps with data, and so gradients, that are the same on every rank."""
        losses = []
        for step in steps:
            x, expected = torch.randn(2, ROWS, 6, generator=torch.Generator().manual_seed(step))
            loss = (self.model(x) - expected[:, :5]).square().mean()
            loss.backward()
            for optimizer in self.every:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> State:
        """Return everything by name, whole, on every rank, without zckpt's means to save."""
        found: State = {}
        for optimizer in self.every:
            mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in self.model.named_parameters():
                if parameter in mine:
                    found[name] = {"weight": whole(parameter), **slots_of(optimizer, name, parameter)}
        return found


def _made(kind: str, matrices: list[dict[str, Any]], rest: list[tuple[str, nn.Parameter]]) -> list[Any]:
    if kind == "zero":
        return [
            ZeroOptimizer(matrices, torch.optim.SGD, stage=2, momentum=0.9),
            ZeroOptimizer(rest, torch.optim.AdamW, stage=1, lr=0.01),
        ]
    if kind == "torch-redundancy":
        bare = [{**group, "params": [p for _, p in group["params"]]} for group in matrices]
        return [
            TorchZeroRedundancyOptimizer(bare, torch.optim.SGD, momentum=0.9, lr=0.01),
            TorchZeroRedundancyOptimizer([p for _, p in rest], torch.optim.AdamW, lr=0.01),
        ]
    if kind == "torch":
        return [torch.optim.Muon(matrices, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01)]
    cls: Any = ZeroOptimizer if kind == "mixed" else ZeroRedundancyOptimizer
    return [
        ZeroRedundancyOptimizer(matrices, torch.optim.Muon, weight_decay=0.1),
        cls(rest, torch.optim.AdamW, lr=0.01),
    ]


def groups(checkpoint: zckpt.OpenedCheckpoint) -> list[tuple[str | None, float, list[str]]]:
    return [(one.optimizer, one.hyperparameters["lr"], one.parameters) for one in checkpoint.param_groups]


def save_all(rank, world_size, directory: Path) -> dict[str, list[float]]:
    losses = {}
    for number, kind in enumerate(KINDS):
        training = Training(kind)
        training.train(range(STEPS))
        truth = training.state()
        both = {"model": training.model, "optimizer": training.given}
        saving = zckpt.save(directory / kind, **both, step=STEPS, async_=bool(number % 2))
        losses[kind] = training.train(range(STEPS, STEPS + MORE))
        if saving is not None:
            saving.result()
        if rank == 0:
            torch.save(truth, directory / f"{kind}.truth")
    return losses


def resume_all(rank, world_size, directory: Path) -> dict[str, list[float]]:
    losses = {}
    for kind in KINDS:
        training = Training(kind, seed=1)
        training.train(range(1))  # other state than was saved
        for optimizer in training.every:
            for group in optimizer.param_groups:
                group["lr"] = 1.0
        given = training.given
        if isinstance(given, dict):
            given = dict(reversed(given.items()))  # names say which is which
        restored = zckpt.load(directory / kind, model=training.model, optimizer=given)
        assert (restored.step, restored.notes) == (
            STEPS,
            [f"no random states for rank {rank}: only 2 ranks saved theirs"] * (rank > 1),
        )
        assert [g["lr"] for one in training.every for g in one.param_groups] == [0.02, 0.01, 0.01]
        assert differences(training.state(), torch.load(directory / f"{kind}.truth", weights_only=True)) == [], kind
        losses[kind] = training.train(range(STEPS, STEPS + MORE))
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    directory = tmp_path_factory.mktemp("several")
    return directory, run(save_all, 2, directory)[0]


@pytest.mark.parametrize("world_size", some([2, 3], [1]))
def test_several_optimizers_go_on_as_if_nothing_had_happened(world_size, saved):
    directory, expected = saved
    for kind, losses in run(resume_all, world_size, directory)[0].items():
        if world_size == 2:
            assert losses == expected[kind], kind
        close = 2e-2 if kind in ("torch", "redundancy", "mixed") else 2e-6  # Muon works in bfloat16
        assert all(math.isclose(a, b, rel_tol=close) for a, b in zip(losses, expected[kind], strict=True)), kind


def test_every_tool_sees_which_optimizer_a_group_is_of(saved):
    directory, _ = saved
    expected = [
        ("matrices", 0.02, ["first.weight"]),
        ("matrices", 0.01, ["second.weight"]),
        ("rest", 0.01, ["scale", "first.bias", "second.bias"]),
    ]
    source = directory / "redundancy"
    assert groups(zckpt.open(source)) == expected
    assert [group["optimizer"] for group in zckpt.inspect(source).param_groups] == [name for name, _, _ in expected]
    for to in ("zckpt", "dcp", "zero-redundancy", "consolidated"):
        done = zckpt.convert(source, to, to=to)
        assert groups(zckpt.open(to)) == expected, to
        assert any("matrices and rest" in note for note in done.notes) == (to != "zckpt")
        assert not zckpt.diff(source, to).settings, to
        zckpt.convert(directory / "zero", f"zero-{to}", to=to)  # with a loss scaler of each
        assert not zckpt.diff(directory / "zero", f"zero-{to}").settings, to
    for name in ("model.safetensors", "model.pt"):
        zckpt.consolidate(source, name, slots="all")
    assert groups(zckpt.open("model.optimizer.pt"))[2][0] == "rest"
    zckpt.consolidate(source, "folder", slots="all")
    assert groups(zckpt.open("folder")) == expected
    assert zckpt.verify(directory / "zero").sound
    scalers = zckpt.open(directory / "zero").optimizer_metadata["optimizers"]
    assert list(getattr(scalers, "node", scalers)) == ["matrices", "rest"]
    for to, options in (("universal", {}), ("deepspeed", {"world_size": 2, "stage": 1})):
        with refusing(zckpt.UnsupportedError, r"several optimizers.*matrices, rest"):
            zckpt.convert(source, to, to=to, **options)


def test_what_does_not_fit_is_refused_and_nothing_is_changed():
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    model = nn.ModuleDict({"gen": nn.Linear(2, 3), "disc": nn.Linear(3, 1)})
    gen, disc = (adam(model[name].parameters(), lr=0.1) for name in ("gen", "disc"))
    both = adam(model.parameters(), lr=0.1)
    alike = [adam(model[name].named_parameters()) for name in ("gen", "disc")]
    for given, said in (
        ({"model": model, "optimizer": [both, gen]}, r"gen\.weight is in two optimizers: found 0, 1"),
        ({"model": model, "optimizer": [gen, disc], "format": "deepspeed"}, "one optimizer"),
        ({"model": model, "optimizer": {"": gen}}, "name"),
        ({"optimizer": alike}, "are named weight"),
    ):
        with refusing(zckpt.UsageError, said):
            zckpt.save("x", **given)
    assert not Path("x").exists()

    zckpt.save("named", model=model, optimizer={"gen": gen, "disc": disc})
    zckpt.save("one", model=model, optimizer=both)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.add_(1)
    for name, given, said in (
        ("named", both, r"the checkpoint has 2 optimizers, but 1 was given"),
        ("named", [gen, disc, sgd([torch.zeros(1, requires_grad=True)])], "no name"),
        ("named", [gen, disc], r"optimizers of other names: expected gen, disc, found 0, 1"),
        ("named", {"gen": gen, "dis": disc}, r"other names: expected gen, disc, found gen, dis"),
        ("named", {"gen": disc, "disc": gen}, r"param group 0 has other parameters"),
        ("one", [gen, disc], r"the checkpoint has 1 optimizer, but 2 were given"),
    ):
        with refusing(zckpt.UsageError, said):
            zckpt.load(name, model=model, optimizer=given)
    assert not any(map(torch.equal, before.parameters(), model.parameters()))
    assert not zckpt.load("named", model=model, optimizer={"disc": disc}, strict=False).notes
    assert zckpt.load("named", model=model, optimizer=both, strict=False).notes == [
        "no state of the optimizer: the checkpoint has gen, disc"
    ]
    zckpt.load("named", model=model, optimizer={"disc": disc, "gen": gen})
    zckpt.load("one", model=model, optimizer=[both])
    assert equal(before, model)


def test_groups_of_a_checkpoint_that_does_not_name_optimizers_are_taken_in_order():
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def made(first: float, second: float) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = Net()
        weights, others = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        return model, [torch.optim.SGD(weights, lr=first, momentum=0.9), torch.optim.AdamW(others, lr=second)]

    model, optimizers = made(0.5, 0.25)
    model(torch.ones(2, 6)).sum().backward()
    for one in optimizers:
        one.step()
    its_model, its_optimizers = get_state_dict(model, optimizers)
    save({"model": its_model, "optimizer": its_optimizers}, checkpoint_id="dcp", no_dist=True)
    other, fresh = made(1.0, 1.0)
    zckpt.load("dcp", model=other, optimizer=fresh)
    assert equal(model, other)
    assert_same_optimizers(fresh, optimizers)


def assert_same_optimizers(found: list[torch.optim.Optimizer], expected: list[torch.optim.Optimizer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_tree(one.state_dict(), other.state_dict())


def test_a_run_is_resumed_with_several_optimizers():
    def made(lr: float) -> dict[str, torch.optim.Optimizer]:
        return {name: torch.optim.Adam(part.parameters(), lr=lr) for name, part in model.items()}

    model = nn.ModuleDict({"gen": nn.Linear(2, 3), "disc": nn.Linear(3, 1)})
    optimizer = made(0.1)
    model["disc"](model["gen"](torch.ones(1, 2))).sum().backward()
    for one in optimizer.values():
        one.step()
    checkpointer = zckpt.Checkpointer("run", every=1, on_sigterm=False)
    assert checkpointer.step(1, model=model, optimizer=optimizer)
    fresh = made(1.0)
    restored = checkpointer.resume(model=model, optimizer=fresh)
    assert restored.step == 1
    assert_same_optimizers([*fresh.values()], [*optimizer.values()])
