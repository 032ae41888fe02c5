"""Several optimizers over the parameters of one model: saved at some number of ranks, resumed at another.

State is bit-equal by name, and the next losses are bit-equal at the same number of ranks, equal to rounding at others.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

import zckpt
from tests.gloo import run
from tests.pairwise import some
from tests.training.trainings import State, differences, whole
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop

ROWS, STEPS, MORE = 12, 3, 3
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
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        numbers = torch.Generator().manual_seed(step)
        x = torch.randn(2, ROWS, 6, generator=numbers)[:, rank * ROWS // world_size : (rank + 1) * ROWS // world_size]
        loss = (self.model(x[0]) - x[1][:, :5]).square().mean()
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if not _reduces(self.every, parameter):
                assert parameter.grad is not None, name
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        for optimizer in self.every:
            optimizer.step()
            optimizer.zero_grad()
        found = loss.detach().clone()
        dist.all_reduce(found)
        return found.item() / world_size

    def state(self) -> State:
        """Return everything by name, whole, on every rank, without zckpt's means to save."""
        found: State = {name: {"weight": whole(p)} for name, p in self.model.named_parameters()}
        for optimizer in self.every:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = next(name for name, p in self.model.named_parameters() if p is parameter)
                    found[name] |= _slots(optimizer, name, parameter)
        return found


def _made(kind: str, matrices: list[dict[str, Any]], rest: list[tuple[str, nn.Parameter]]) -> list[Any]:
    if kind == "zero":
        return [
            ZeroOptimizer(matrices, torch.optim.SGD, stage=2, momentum=0.9),
            ZeroOptimizer(rest, torch.optim.AdamW, stage=1, lr=0.01),
        ]
    if kind == "mixed":
        return [
            ZeroRedundancyOptimizer(matrices, torch.optim.Muon, weight_decay=0.1),
            ZeroOptimizer(rest, torch.optim.AdamW, lr=0.01),
        ]
    if kind == "redundancy":
        return [
            ZeroRedundancyOptimizer(matrices, torch.optim.Muon, weight_decay=0.1),
            ZeroRedundancyOptimizer(rest, torch.optim.AdamW, lr=0.01),
        ]
    if kind == "torch-redundancy":
        bare = [{**group, "params": [p for _, p in group["params"]]} for group in matrices]
        return [
            TorchZeroRedundancyOptimizer(bare, torch.optim.SGD, momentum=0.9, lr=0.01),
            TorchZeroRedundancyOptimizer([p for _, p in rest], torch.optim.AdamW, lr=0.01),
        ]
    return [torch.optim.Muon(matrices, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01)]


def _reduces(optimizers: list[Any], parameter: torch.Tensor) -> bool:
    return any(
        one is parameter
        for optimizer in optimizers
        if isinstance(optimizer, ZeroOptimizer)
        for group in optimizer.param_groups
        for one in group["params"]
    )


def _slots(optimizer: Any, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, ZeroOptimizer):
        keys = list(optimizer.optim.state[optimizer.groups[0].master])
        return {key: torch.as_tensor(optimizer.full_state(name, key)).clone() for key in ["master", *keys]}
    mine = getattr(optimizer, "optim", optimizer).state.get(parameter)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if not mine else {key: whole(value) for key, value in mine.items()})
    return next((one for one in told if one is not None), {})


def groups(checkpoint: zckpt.OpenedCheckpoint) -> list[tuple[str | None, float, list[str]]]:
    return [(one.optimizer, one.hyperparameters["lr"], one.parameters) for one in checkpoint.param_groups]  # type: ignore[misc]


def save_all(rank, world_size, directory: Path) -> dict[str, list[float]]:
    losses = {}
    for number, kind in enumerate(KINDS):
        training = Training(kind)
        training.train(range(STEPS))
        truth = training.state()
        saving = zckpt.save(
            directory / kind, model=training.model, optimizer=training.given, step=STEPS, async_=bool(number % 2)
        )
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


def test_every_tool_sees_which_optimizer_a_group_is_of(saved, tmp_path):
    directory, _ = saved
    expected = [
        ("matrices", 0.02, ["first.weight"]),
        ("matrices", 0.01, ["second.weight"]),
        ("rest", 0.01, ["scale", "first.bias", "second.bias"]),
    ]
    source = directory / "redundancy"
    assert groups(zckpt.open(source)) == expected
    assert [group["optimizer"] for group in zckpt.inspect(source).param_groups] == [
        "matrices",
        "matrices",
        "rest",
    ]  # type: ignore[attr-defined]
    for to in ("zckpt", "dcp", "zero-redundancy", "consolidated"):
        done = zckpt.convert(source, tmp_path / to, to=to)
        assert groups(zckpt.open(tmp_path / to)) == expected, to
        assert any("matrices and rest" in note for note in done.notes) == (to != "zckpt")
        assert not zckpt.diff(source, tmp_path / to).settings, to
        zckpt.convert(directory / "zero", tmp_path / f"zero-{to}", to=to)  # with a loss scaler of each
        assert not zckpt.diff(directory / "zero", tmp_path / f"zero-{to}").settings, to
    for name in ("model.safetensors", "model.pt"):
        zckpt.consolidate(source, tmp_path / name, slots="all")
    assert groups(zckpt.open(tmp_path / "model.optimizer.pt"))[2][0] == "rest"
    zckpt.consolidate(source, tmp_path / "folder", slots="all")
    assert groups(zckpt.open(tmp_path / "folder")) == expected
    assert zckpt.verify(directory / "zero").sound
    scalers = zckpt.open(directory / "zero").optimizer_metadata["optimizers"]
    assert list(getattr(scalers, "node", scalers)) == ["matrices", "rest"]
    for to, options in (("universal", {}), ("deepspeed", {"world_size": 2, "stage": 1})):
        with pytest.raises(zckpt.UnsupportedError, match=r"several optimizers.*matrices, rest"):
            zckpt.convert(source, tmp_path / to, to=to, **options)  # type: ignore[arg-type]


def of(model: nn.Module, *kinds: Any) -> list[Any]:
    """Return an optimizer of each parameter, one kind after the other."""
    return [kind([parameter], lr=0.1) for kind, parameter in zip(kinds, model.parameters(), strict=False)]


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path):
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    model = nn.ModuleDict({"gen": nn.Linear(2, 3), "disc": nn.Linear(3, 1)})
    gen, disc = (adam(model[name].parameters(), lr=0.1) for name in ("gen", "disc"))
    both = adam(model.parameters(), lr=0.1)
    with pytest.raises(zckpt.UsageError, match=r"gen\.weight is in two optimizers: found 0, 1"):
        zckpt.save(tmp_path / "x", model=model, optimizer=[both, gen])
    with pytest.raises(zckpt.UsageError, match="one optimizer"):
        zckpt.save(tmp_path / "x", model=model, optimizer=[gen, disc], format="deepspeed")
    with pytest.raises(zckpt.UsageError, match="name"):
        zckpt.save(tmp_path / "x", model=model, optimizer={"": gen})
    with pytest.raises(zckpt.UsageError, match="are named weight"):
        zckpt.save(tmp_path / "x", optimizer=[adam(model[name].named_parameters()) for name in ("gen", "disc")])
    assert not (tmp_path / "x").exists()

    zckpt.save(tmp_path / "named", model=model, optimizer={"gen": gen, "disc": disc})
    zckpt.save(tmp_path / "one", model=model, optimizer=both)
    before = [parameter.clone() for parameter in model.parameters()]
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
        with pytest.raises(zckpt.UsageError, match=said):
            zckpt.load(tmp_path / name, model=model, optimizer=given)  # type: ignore[arg-type]
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not zckpt.load(tmp_path / "named", model=model, optimizer={"disc": disc}, strict=False).notes
    assert zckpt.load(tmp_path / "named", model=model, optimizer=both, strict=False).notes == [
        "no state of the optimizer: the checkpoint has gen, disc"
    ]
    zckpt.load(tmp_path / "named", model=model, optimizer={"disc": disc, "gen": gen})
    zckpt.load(tmp_path / "one", model=model, optimizer=[both])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_groups_of_a_checkpoint_that_does_not_name_optimizers_are_taken_in_order(tmp_path):
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Net()
    weights, others = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    made = [torch.optim.SGD(weights, lr=0.5, momentum=0.9), torch.optim.AdamW(others, lr=0.25)]
    model(torch.ones(2, 6)).sum().backward()
    for one in made:
        one.step()
    model_state, optimizer_state = get_state_dict(model, made)
    save({"model": model_state, "optimizer": optimizer_state}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    other = Net()
    weights, others = ([p for p in other.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    fresh = [torch.optim.SGD(weights, lr=1.0, momentum=0.9), torch.optim.AdamW(others, lr=1.0)]
    zckpt.load(tmp_path / "dcp", model=other, optimizer=fresh)
    assert [one.param_groups[0]["lr"] for one in fresh] == [0.5, 0.25]
    for old, new in zip(made, fresh, strict=True):
        for a, b in zip(old.param_groups[0]["params"], new.param_groups[0]["params"], strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(torch.as_tensor(old.state[a][key]), new.state[b][key]) for key in old.state[a])


def test_a_run_is_resumed_with_several_optimizers(tmp_path):
    model = nn.ModuleDict({"gen": nn.Linear(2, 3), "disc": nn.Linear(3, 1)})
    optimizer = {name: torch.optim.Adam(part.parameters(), lr=0.1) for name, part in model.items()}
    model["disc"](model["gen"](torch.ones(1, 2))).sum().backward()
    for one in optimizer.values():
        one.step()
    checkpointer = zckpt.Checkpointer(tmp_path / "run", every=1, on_sigterm=False)
    assert checkpointer.step(1, model=model, optimizer=optimizer)
    before = {name: one.state_dict() for name, one in optimizer.items()}
    fresh = {name: torch.optim.Adam(part.parameters(), lr=1.0) for name, part in model.items()}
    restored = checkpointer.resume(model=model, optimizer=fresh)
    assert restored is not None
    assert restored.step == 1
    for name, one in fresh.items():
        found, expected = one.state_dict(), before[name]
        assert found["param_groups"] == expected["param_groups"]
        for number, values in expected["state"].items():
            assert all(torch.equal(found["state"][number][key], value) for key, value in values.items())
