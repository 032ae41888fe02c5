"""Sharded optimizers in files: written by those who have the state, read by everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

import zckpt
from tests.folders import contents
from tests.gloo import on_ranks, run
from tests.live import Words, equal, groups_of, same, train, whole
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.optim import ZeroRedundancyOptimizer, files

pytestmark = pytest.mark.interop


def net() -> Words:
    """Odd sizes, a tied and a frozen parameter, buffers, and parameters that are never used."""
    torch.manual_seed(3)
    model = Words(7, 5, unused=True)
    model.register_buffer("count", torch.tensor(3))
    return model


def make(kind: str, model: Words, *, named: bool) -> ZeroRedundancyOptimizer:
    options: dict[str, Any] = {"adamw": {}, "sgdm": {"momentum": 0.9}}[kind]
    optimizer_class = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    return ZeroRedundancyOptimizer(groups_of(model, named=named), optimizer_class, lr=0.01, **options)


def save_run(rank, world_size, path: Path, kind: str, named: bool) -> list[torch.Tensor]:
    """Train three steps, save, train three more; return the parameters."""
    model = net()
    optimizer = make(kind, model, named=named)
    train(model, optimizer, range(3))
    files.save(optimizer, path, model=model)
    train(model, optimizer, range(3, 6))
    return whole([*model.parameters()])


def weights_of(path: Path) -> Words:
    """Return the model that a checkpoint has."""
    model, checkpoint = net(), zckpt.open(path)
    model.load_state_dict({n: checkpoint.read(n, "weight") for n in [*checkpoint.parameters, *checkpoint.buffers]})
    return model


def load_run(rank, world_size, path: Path, kind: str, named: bool, wanted: list[torch.Tensor]) -> None:
    """Take model and optimizer from a checkpoint, and train the next three steps."""
    model = weights_of(path)
    optimizer = make(kind, model, named=named)
    files.load(optimizer, path, model=model)
    train(model, optimizer, range(3, 6))
    assert same(whole([*model.parameters()]), wanted)


TARGETS: list[tuple[int, str | None, dict[str, int]]] = [
    (1, None, {}), (4, "zckpt", {"world_size": 4}), (2, "zero-redundancy", {"world_size": 2}), (5, "consolidated", {}),
]  # fmt: skip
"""At how many ranks it is loaded, and what it is converted to before."""


@pytest.mark.parametrize(
    ("kind", "named", "targets"), each(["adamw", "sgdm"], [True, False], [TARGETS[::2], TARGETS[1::2]])
)
def test_what_ranks_write_continues_at_any_number_of_them(kind, named, targets):
    wanted, *others = run(save_run, 3, "saved", kind, named)
    assert all(same(wanted, other) for other in others)
    for world_size, to, options in targets:
        path = Path(to or "saved")
        if to is not None:
            zckpt.convert("saved", path, to=to, **options)
        run(load_run, world_size, path, kind, named, wanted)


def test_tools_treat_it_like_any_other():
    run(save_run, 2, "saved", "adamw", True)
    checkpoint = zckpt.open("saved")
    assert checkpoint.format == "zero-redundancy"
    assert checkpoint.world_size == 2
    assert {n: p.tied_to for n, p in checkpoint.parameters.items() if p.tied_to} == {"head.weight": "embed.weight"}
    assert [n for n, p in checkpoint.parameters.items() if p.frozen] == ["frozen"]
    assert set(checkpoint.buffers) == {"scale", "count"}
    assert checkpoint.param_groups[0].hyperparameters["weight_decay"] == 0.1
    zckpt.consolidate("saved", "model.safetensors", slots="all")
    zckpt.convert("saved", "deepspeed", to="deepspeed", world_size=3, stage=2)
    found = zckpt.open("deepspeed")
    for name in ("embed.weight", "up.bias"):
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.read(name, slot), checkpoint.read(name, slot))


def load_by_torch(rank, world_size, path: Path) -> None:
    """PyTorch's own optimizer takes the rank's file, and goes on as ours does."""
    model, other = weights_of(path), weights_of(path)
    theirs = TorchOptimizer(groups_of(model), torch.optim.AdamW, lr=0.01)
    theirs.optim.load_state_dict(torch.load(f"{path}/optimizer_rank_{rank}.pt", weights_only=True))
    for mine, its in zip(theirs.param_groups, theirs.optim.param_groups, strict=True):
        mine.update({key: value for key, value in its.items() if key != "params"})
    ours = make("adamw", other, named=True)
    files.load(ours, path)
    for net, optimizer in ((model, theirs), (other, ours)):
        train(net, optimizer, range(3, 6))
    assert equal(model, other)


def test_torchs_own_optimizer_loads_what_ranks_write():
    run(save_run, 3, "saved", "adamw", True)
    run(load_by_torch, 3, "saved")


@on_ranks(2)
def test_refusals_reach_all_ranks():
    model, path = net(), Path("saved")
    files.save(make("adamw", model, named=True), path, model=model)
    before = contents()
    optimizer = ZeroRedundancyOptimizer([("embed.weight", model.embed.weight)], torch.optim.AdamW, lr=1.0)
    with refusing(zckpt.UsageError, "param groups"):
        files.load(optimizer, path)
    unnamed = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0)
    with refusing(zckpt.UsageError, "has no name"):
        files.save(unnamed, "other")
    with pytest.raises(zckpt.TargetExistsError):
        files.save(optimizer, path)
    assert contents() == before
