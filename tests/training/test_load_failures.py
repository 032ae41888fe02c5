"""Errors while loading: nothing is changed where that could be known, and where it could not, the error says so."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

import zckpt
import zckpt.dcp
from tests import live
from tests.cli.console import FIXTURES
from tests.deepspeed_engine.catalogue import SPECS
from tests.deepspeed_engine.models import build_model, param_groups
from tests.deepspeed_engine.training import batch
from tests.gloo import on_ranks, run
from tests.live import equal, everything, same
from tests.pairwise import each
from tests.refusals import refusing
from tests.training.trainings import mean_over_ranks
from tests.truth import Truth
from zckpt.errors import DamagedFileError, SourceError, UnsupportedError
from zckpt.optim import DynamicLossScaler, LossScaler, ZeroOptimizer, ZeroRedundancyOptimizer, files
from zckpt.optim.states.by_parameter import OptimizerState
from zckpt.training.other_state import read_other_state

FAMILIES = ("zero", "redundancy", "adamw")


def build(family: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 20))
    parameters = list(model.named_parameters())
    if family == "zero":
        return model, ZeroOptimizer(parameters, torch.optim.AdamW, lr=0.1 * seed, stage=1)
    if family == "redundancy":
        return DistributedDataParallel(model), ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1 * seed)
    return DistributedDataParallel(model), torch.optim.AdamW(parameters, lr=0.1 * seed)


step = partial(live.step, shape=(2, 40))


@contextmanager
def cut_after(step: str, path: Path, rank: int) -> Iterator[None]:
    """Let the files of a checkpoint lose their ends, as when a disk is lost, when all ranks have taken a step."""
    taken = getattr(OptimizerState, step)

    def take(*args: Any) -> None:
        taken(*args)
        dist.barrier()
        if rank == 0:
            for file in path.glob("*.safetensors"):
                os.truncate(file, 100)
        dist.barrier()

    with mock.patch.object(OptimizerState, step, take):
        yield


CUT = [(family, taken) for family in FAMILIES for taken in ("restore", "check", "read")]
CUT.remove(("zero", "read"))  # which reads no weights, but masters


@on_ranks(2, each=CUT)
def test_a_file_that_becomes_too_short_changes_nothing_but_weights_that_are_read(rank, family, taken):
    """Where it is found before anything is changed, while state is read, and while weights are, of which it is told."""
    model, optimizer = build(family, 1)
    step(model, optimizer)
    path = Path(f"{family} {taken}")
    zckpt.save(path, model=model, optimizer=optimizer, step=1)
    other, its = build(family, 2)
    step(other, its)
    before = everything(other, its)
    with cut_after(taken, path, rank), refusing(SourceError, "too early") as told:
        zckpt.load(path, model=other, optimizer=its)
    weights = len(list(other.parameters())) if taken == "read" else 0
    assert ("weights are in part the checkpoint's and must not be used" in str(told.value)) == (taken == "read")
    assert same(before[weights:], everything(other, its)[weights:])


@on_ranks(2, each=[("zero",), ("redundancy",)])
def test_an_optimizer_by_itself_is_loaded_on_all_ranks_or_none(rank, family, tmp_path):
    """`optim.files.load`: a rank that fails is told to all, and none has changed."""
    model, optimizer = build(family, 1)
    step(model, optimizer)
    files.save(optimizer, tmp_path / family / "step1", model=model)
    other, its = build(family, 2)
    before = everything(other, its)
    path = tmp_path / family / "step1" if rank else Path("none")
    with pytest.raises(SourceError):
        files.load(its, path, model=other)
    assert same(before, everything(other, its))
    dist.barrier()
    files.load(its, tmp_path / family / "step1", model=other)


def test_dcp_finds_a_file_that_is_too_short_before_anything_is_changed(tmp_path):
    class Cutting(zckpt.dcp.Reader):
        def read_metadata(self, *args: object, **options: object) -> Any:
            found = super().read_metadata(*args, **options)
            for file in tmp_path.glob("step1/*.safetensors"):
                os.truncate(file, file.stat().st_size - 4)
            return found

    model, _ = single()
    zckpt.save("step1", model=model)
    state = {"model": {name: torch.full_like(one, 7.0) for name, one in model.state_dict().items()}}
    with pytest.raises(CheckpointException, match="too early"):
        dcp.load(state, storage_reader=Cutting("step1"))
    assert all((one == 7.0).all() for one in state["model"].values())


# --- by itself


def single(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * seed)


def test_elements_that_cannot_be_cast_are_found_before_anything_is_changed():
    model, _ = single()
    model.register_buffer("count", torch.zeros(3))
    torch.save({"model": model.state_dict()}, "f.pt")
    other, _ = single(2)
    other.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    before = other.weight.clone()
    with refusing(UnsupportedError, "elements of float32 cannot be cast to int64"):
        zckpt.load("f.pt", model=other)
    assert torch.equal(other.weight, before)


EXTRA = [
    {"random_states": 7},
    {"extra": "hello", "epoch": 3},
    {"extra_state": {"x": 1}, "lr_scheduler": 3, "grad_scaler": None},
    {"random_states": [{"torch": b"", "python": 1}], "extra": {"a": 1}},
]


@pytest.mark.parametrize(
    ("extra", "to"), each(EXTRA, [None, "zckpt", "dcp", "consolidated", "zero-redundancy", "universal"])
)
def test_keys_of_the_users_that_are_called_as_ours_are_the_users(extra, to):
    model, optimizer = live.trained(*single())
    source = Path("f.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **extra}, source)
    if to is not None:
        zckpt.convert(source, "converted", to=to)
        source = Path("converted")
    other, its = single(2)
    state = torch.get_rng_state()
    restored = zckpt.load(source, model=other, optimizer=its)
    assert restored.extra == extra
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_scheduler_takes_of_another_programs_file_is_not_extra():
    model, optimizer = single()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.last_epoch = 5
    torch.save({"model": model.state_dict(), "lr_scheduler": scheduler.state_dict(), "epoch": 3}, "f.pt")
    scheduler.last_epoch = 0
    assert zckpt.load("f.pt", model=model, scheduler=scheduler).extra == {"epoch": 3}
    assert scheduler.last_epoch == 5
    with warnings.catch_warnings(record=True) as told:
        zckpt.load("f.pt", model=model, grad_scaler=scheduler)
    assert "no state of a grad_scaler" in str(told[0].message)


def test_a_scheduler_that_does_not_take_its_state_says_what_has_become_of_the_rest():
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("y")

    model, optimizer = single()
    zckpt.save("step1", model=model, optimizer=optimizer, scheduler=Broken())
    with refusing(SourceError, "model and optimizer are the checkpoint's already"):
        zckpt.load("step1", model=model, optimizer=optimizer, scheduler=Broken())


def test_random_states_that_no_generator_takes_are_found_before_anything_is_changed():
    model, optimizer = single()
    zckpt.save("step1", model=model, optimizer=optimizer)
    checkpoint = zckpt.open("step1")
    checkpoint.metadata["random_states"][0]["torch"] = b"abc"
    with refusing(DamagedFileError, "unusable random states of rank 0"):
        read_other_state(checkpoint, None, None, 0)


# --- loss scale


@on_ranks(2, each=[("zckpt",), ("deepspeed",)])
def test_a_dynamic_loss_scale_goes_on_where_it_was(form, tmp_path):
    def made(seed: int, scaler: DynamicLossScaler) -> tuple[nn.Module, ZeroOptimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).half()
        return model, ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1, stage=2, loss_scale=scaler)

    model, optimizer = made(1, DynamicLossScaler(256.0, scale_window=3, cur_iter=7, min_scale=0.5))
    optimizer.backward(model(torch.ones(2, 4).half()).sum())
    optimizer.step()
    target = tmp_path / form / "step1"
    zckpt.save(target, model=model, optimizer=optimizer, format=form)
    other, its = made(2, DynamicLossScaler())
    zckpt.load(target, model=other, optimizer=its)
    assert its.loss_scaler == optimizer.loss_scaler
    assert torch.equal(its.groups[0].master, optimizer.groups[0].master)
    assert equal(model, other)


@on_ranks(1)
def test_a_dynamic_loss_scale_of_stage_0_goes_on_with_the_patience_that_the_optimizer_has():
    spec = SPECS["s0_fp16_dp2"]
    zckpt.convert(FIXTURES / spec.name, "whole", to="consolidated")
    zckpt.convert("whole", "universal", to="universal")
    for source in (FIXTURES / spec.name, Path("whole"), Path("universal")):
        for load in (
            lambda path, model, optimizer: zckpt.load(path, model=model, optimizer=optimizer),
            lambda path, model, optimizer: files.load(optimizer, path, model=model),
        ):
            model = build_model(spec).half()
            own = DynamicLossScaler(8.0, min_scale=0.25, delayed_shift=3, cur_hysteresis=1)
            groups = param_groups(spec, model)
            optimizer = ZeroOptimizer(groups, torch.optim.AdamW, lr=0.1, stage=2, loss_scale=own)
            load(source, model, optimizer)
            counted = {"cur_scale": 512.0, "cur_iter": 5, "scale_window": 3, "last_overflow_iter": -1}
            patience = {"min_scale": 0.25, "delayed_shift": 3, "cur_hysteresis": 3}
            assert vars(optimizer.loss_scaler).items() >= (counted | patience).items()


def after_stage_0(rank, world_size, kind: str) -> list[float]:
    """Go on under ZeRO-1: as it is, without its loss scale, or with gradients as stage 0 has them."""
    spec = SPECS["s0_fp16_dp2"]
    model = build_model(spec).half()
    groups = param_groups(spec, model)
    optimizer = ZeroOptimizer(groups, torch.optim.AdamW, lr=0.1, stage=1, loss_scale=DynamicLossScaler())
    zckpt.load(FIXTURES / spec.name, model=model, optimizer=optimizer)
    if kind == "without scale":
        optimizer.loss_scaler = LossScaler(1.0)
    losses = []
    for step in (6, 7):
        ids, labels = batch(spec, step)
        loss = model(ids, labels)
        optimizer.backward(loss.float() / 512 if kind == "divided" else loss)
        optimizer.step()
        losses.append(mean_over_ranks(loss.double()))
    return losses


def test_losses_after_stage_0_in_fp16_differ_by_its_divided_gradients_and_not_by_the_scale():
    expected = Truth(FIXTURES / "s0_fp16_dp2").facts["mean_losses_next"][:2]
    found = {kind: run(after_stage_0, 2, kind)[0] for kind in ("as it is", "without scale", "divided")}
    assert found["as it is"] == found["without scale"]
    assert found["divided"] == pytest.approx(expected, abs=1e-3)
    assert found["as it is"] == pytest.approx(expected, abs=0.2)
    assert found["as it is"][1] != pytest.approx(expected[1], abs=0.05)
