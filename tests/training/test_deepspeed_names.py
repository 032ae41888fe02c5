"""The real engine's directories of wrapped models, and of models with parameters of no elements."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zckpt
from tests.gloo import on_ranks, run
from tests.live import equal
from tests.training.trainings import compiled
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop


class Net(nn.Module):
    """Two layers, between parameters of no elements that are trained."""

    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.none = nn.Parameter(torch.empty(0 if empty else 1, 3).fill_(0.5))
        self.second = nn.Linear(6, 4)
        self.nothing = nn.Parameter(torch.empty(0 if empty else 1).fill_(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().sum() + self.none.sum() + self.nothing.sum()


def engine_of(model: nn.Module, stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def trained(wrap: bool, empty: bool, stage: int, folder: Path, tag: str | None = None) -> nn.Module:
    """Train in the engine and let it save; return the model."""
    torch.manual_seed(1)
    model: nn.Module = Net(empty=empty)
    engine = engine_of(compiled(model) if wrap else model, stage)
    for step in range(2):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(2, 4)))
        engine.step()
    engine.save_checkpoint(str(folder), tag=tag)
    dist.barrier()
    return model


def optimizers(model: nn.Module) -> list[Any]:
    named = list(model.named_parameters())
    return [
        ZeroOptimizer(named, torch.optim.AdamW, lr=0.5, stage=1),
        ZeroRedundancyOptimizer(named, torch.optim.AdamW, lr=0.5),
        torch.optim.AdamW(named, lr=0.5),
    ]


def assert_loaded_into_the_bare_model(path: Path, model: nn.Module, *, empty: bool) -> None:
    for index in range(3):
        other = Net(empty=empty)
        zckpt.load(path, model=other, optimizer=(optimizer := optimizers(other)[index]))
        assert equal(model, other)
        assert optimizer.param_groups[0]["lr"] == 0.1


@on_ranks(2)
def test_what_is_frozen_and_has_no_elements_has_its_shape_under_zero3(tmp_path):
    import deepspeed

    model = Net(empty=True)
    model.none.requires_grad_(False)
    engine = engine_of(model, 3)
    engine.save_checkpoint(str(tmp_path))
    with deepspeed.zero.GatheredParameters([model.none]):  # after which it is taken away
        pass
    zckpt.assert_restored(tmp_path, model=model, optimizer=engine.optimizer)


@on_ranks(2, each=[(0,), (1,), (2,)])
def test_trained_parameters_of_no_elements_need_no_state(stage):
    path = Path(str(stage))
    assert_loaded_into_the_bare_model(path, trained(False, True, stage, path), empty=True)


@on_ranks(2)
def test_what_has_no_elements_is_in_none_of_zeros_groups(rank):
    saved = trained(False, True, 0, Path("run"), tag="best/one")
    if rank == 0:
        zckpt.convert("run", "dcp", to="dcp")
        zckpt.convert("dcp", "cut", to="deepspeed", world_size=2, stage=2, dtype="float32", verify=True)
    dist.barrier()
    for folder, in_place in (("cut", False), ("run", True), ("dcp", True)):
        engine = engine_of(model := Net(empty=True), 2)
        with zckpt.deepspeed.any_world_size(engine) if in_place else nullcontext():
            assert engine.load_checkpoint(folder)[0] is not None
        assert equal(model, saved)
        assert [int(state["step"]) for state in engine.basic_optimizer.state.values()] == [2]


def save_compiled(rank, world_size, folder: Path) -> list[torch.Tensor]:
    model = trained(True, False, 2, folder)
    assert_loaded_into_the_bare_model(folder, model, empty=False)
    return [one.detach().clone() for one in model.parameters()]


def resume_compiled(rank, world_size, folder: Path) -> list[torch.Tensor]:
    model = Net(empty=False)
    engine = engine_of(compiled(model), 2)
    assert engine.load_checkpoint(str(folder))[0] is not None
    return [one.detach().clone() for one in model.parameters()]


def test_every_verb_and_the_engine_have_the_names_of_a_compiled_model():
    source = Path("run")
    expected = run(save_compiled, 2, source)[0]
    zckpt.reshard(source, "resharded", world_size=3, verify=True)
    checkpoint = zckpt.open("resharded")
    assert checkpoint.wrapped["first.weight"] == "_orig_mod.first.weight"
    for found in run(resume_compiled, 3, "resharded"):
        assert all(map(torch.equal, found, expected))
    assert zckpt.diff(source, "resharded").equal
    zckpt.convert(source, "universal", to="universal", verify=True)
    folders = {path.name for path in Path("universal/zero").iterdir() if path.is_dir()}
    assert "_orig_mod.first.weight" in folders
    zckpt.consolidate(source, "model.pt", dtype="keep")
    bare = Net(empty=False)
    bare.load_state_dict(torch.load("model.pt"))
    zckpt.strip(source, "stripped", optimizer=True)
    assert list(zckpt.open("stripped").parameters) == list(zckpt.open(source).parameters)
    assert not zckpt.verify(source, deep=True).findings
