"""What `zckpt.save` wrote in a training loop, converted, goes on in stock DeepSpeed, at other numbers of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import pytest
import torch

import zckpt
from tests.deepspeed_engine import Spec, models, training
from tests.gloo import run
from tests.optim.zero import test_files as zero
from tests.pairwise import each

pytestmark = pytest.mark.interop

SPECS = [Spec("bf16", stage=2, dtype="bf16", world_size=3), Spec("fp32", stage=1, dtype="fp32", world_size=2)]


def save(rank, world_size, spec: Spec, path: Path) -> tuple[zero.Slots, list[float]]:
    model, optimizer = zero.build(spec)
    zero.losses(model, optimizer, spec, range(1, zero.STEPS + 1))
    saving = zckpt.save(path, model=model, optimizer=optimizer, step=zero.STEPS, async_=True)
    trained = zero.losses(model, optimizer, spec, zero.after())
    saving.result()
    again, its = zero.build(spec, seed=5)
    zckpt.load(path, model=again, optimizer=its)
    return zero.full(its), trained


@pytest.mark.parametrize(("spec", "world_size"), each(SPECS, [1, 2, 4]))
@pytest.mark.every(2)
def test_stock_deepspeed_resumes_what_was_saved_in_training(spec, world_size):
    ours = run(save, spec.world_size, spec, "saved")
    stage = 3 if world_size == 4 else spec.stage
    target = Path("run")
    zckpt.convert("saved", target, to="deepspeed", world_size=world_size, stage=stage)
    theirs = run(zero.resume_in_deepspeed, world_size, spec.at(world_size, stage=stage), target)
    state, trained = ours[0]
    found, (steps, _, _), resumed = theirs[0]
    assert steps == zero.STEPS
    zero.assert_state(found, state)
    mean, expected = (fmean(its[-1][-1] for its in every) for every in (theirs, ours))  # each has a share of the batch
    assert math.isclose(mean, expected, rel_tol=1e-5 if spec.dtype == "fp32" else 1e-2), (resumed, trained)


def save_frozen(rank, world_size, spec: Spec, path: Path) -> list[float]:
    model = models.build_model(spec)
    optimizer = torch.optim.AdamW(models.param_groups(spec, model))

    def train(step: int) -> float:
        loss = model(*training.batch(spec, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for step in (1, 2):
        train(step)
    zckpt.save(path, model=model, optimizer=optimizer, step=2)
    return [train(step) for step in (3, 4)]


def resume_frozen(rank, world_size, spec: Spec, path: Path) -> list[float]:
    engine = training.build_engine(spec, seed=5)
    assert engine.load_checkpoint(str(path))[0]
    return [sum(training.train_step(engine, spec, step)) / world_size for step in (3, 4)]


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_in_an_optimizers_groups_are_in_none_of_deepspeeds(stage):
    spec = Spec("frozen", dtype="fp32", world_size=1, frozen_in_group=True)
    [trained] = run(save_frozen, 1, spec, "saved")
    assert zckpt.open("saved").parameters["frozen_odd"].frozen
    zckpt.convert("saved", "run", to="deepspeed", world_size=2, stage=stage)
    resumed, _ = run(resume_frozen, 2, spec.at(2, stage=stage), "run")
    assert resumed == pytest.approx(trained, rel=1e-5)
