"""What is trained is held against a checkpoint, whoever loaded it: all that differs is named, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import zckpt
from tests.gloo import on_ranks, run
from tests.pairwise import some
from tests.training.trainings import BY_NAME, KINDS, Training
from zckpt.errors import NotRestoredError, UsageError
from zckpt.optim import ZeroOptimizer

STEPS = 3


def save_all(rank, world_size, directory: Path) -> None:
    for kind in KINDS:
        training = Training.of(kind)
        training.train(range(STEPS))
        zckpt.save(directory / kind.name, **training.given, step=STEPS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run(save_all, 3, directory)  # at 2, what is compiled would be traced
    return directory


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank has, to be changed."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)


def stepped(training: Training) -> Any:
    """Return the optimizer that has this rank's state."""
    return getattr(training.optimizer, "optim", training.optimizer)


def change_weight(training: Training, rank: int) -> str:
    its = training.inner.body[0].weight
    if rank == 0:
        local(its)[3] += 1
    return "weight of body.0.weight differs in 1 of "


def change_state(training: Training, rank: int) -> str:
    key = "momentum_buffer" if training.kind.optimizer == "sgd" else "exp_avg"
    for values in stepped(training).state.values():
        if rank == 0 and local(values[key]).numel():
            local(values[key])[0] += 1
            break
    return f"{key} of "


def change_lr(training: Training, rank: int) -> str:
    training.optimizer.param_groups[1]["lr"] = 0.5
    return "param group 1: lr is "


def change_step(training: Training, rank: int) -> str:
    for values in stepped(training).state.values():
        values["step"] = values["step"] - 1
    return " is 3.0 in the checkpoint, 2.0 here"


def change_scheduler(training: Training, rank: int) -> str:
    training.scheduler.last_epoch = 0
    return "scheduler: last_epoch is 3 in the checkpoint, 0 here"


def forget_state(training: Training, rank: int) -> str:
    if rank == 0:
        stepped(training).state.clear()
    return " is in the checkpoint, and the optimizer has none"


CHANGES = (change_weight, change_state, change_lr, change_step, change_scheduler, forget_state)


@on_ranks(*some([2], [1, 3]), each=[(kind.name,) for kind in KINDS])
def test_what_is_not_restored_is_named(rank, world_size, name, saved):
    kind = BY_NAME[name]
    training = Training.of(kind, seed=1)
    with pytest.raises(NotRestoredError):
        zckpt.assert_restored(saved / name, **training.given)
    zckpt.load(saved / name, **training.given)
    restored = zckpt.assert_restored(saved / name, **training.given)
    assert (restored.step, restored.notes) == (STEPS, [])
    first = KINDS.index(kind) % 3
    for change in CHANGES[first::3] if world_size == 2 else CHANGES:  # at 2 ranks each of some kinds, in every run
        if kind.optimizer == "sgd" and change is change_step:
            continue
        said = change(training, rank)
        if isinstance(training.optimizer, ZeroOptimizer) and change is change_weight:
            said = "of body.0.weight differs in "  # masters follow weights that the program has changed
        with pytest.raises(NotRestoredError) as error:
            zckpt.assert_restored(saved / name, **training.given)
        assert any(said in one for one in error.value.differences), (change, error.value.differences)
        every = [None] * world_size
        torch.distributed.all_gather_object(every, error.value.differences)
        assert len(set(every)) == 1
        zckpt.load(saved / name, **training.given)


def test_the_first_element_that_differs_is_told(tmp_path):
    model = torch.nn.Linear(3, 2)
    zckpt.save(tmp_path / "saved", model=model)
    with torch.no_grad():
        model.weight[1, 0], model.weight[1, 2] = 7, torch.nan
    was = zckpt.open(tmp_path / "saved").read("weight")[1, 0].item()
    with pytest.raises(AssertionError, match="differs in 2 of 6 elements") as error:
        zckpt.assert_restored(tmp_path / "saved", model=model)
    assert error.value.differences == (
        f"weight of weight differs in 2 of 6 elements, first at [1, 0]: {was!r} in the checkpoint, 7.0 here",
    )


def stepped_once(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_that_is_rounded_is_not_restored_unless_that_is_allowed(tmp_path):
    model, optimizer = stepped_once(torch.float32)
    zckpt.save(tmp_path / "saved", model=model, optimizer=optimizer)
    narrow, its = stepped_once(torch.bfloat16)
    zckpt.load(tmp_path / "saved", model=narrow, optimizer=its)
    zckpt.assert_restored(tmp_path / "saved", model=narrow)
    with pytest.raises(NotRestoredError, match="float32 there and bfloat16 here"):
        zckpt.assert_restored(tmp_path / "saved", model=narrow, optimizer=its)
    zckpt.assert_restored(tmp_path / "saved", model=narrow, optimizer=its, allow_rounding=True)


def test_what_the_checkpoint_has_not_is_not_restored(tmp_path):
    model, optimizer = stepped_once(torch.float32)
    zckpt.save(tmp_path / "saved", model=model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for one, said in (
        ({"optimizer": optimizer}, "no state of an optimizer"),
        ({"scheduler": scheduler}, "no state of a scheduler"),
        ({"model": torch.nn.Sequential(model)}, "the checkpoint has no 0.weight"),
    ):
        with pytest.raises(NotRestoredError, match=said):
            zckpt.assert_restored(tmp_path / "saved", **{"model": model, **one})
    with pytest.raises(UsageError, match="nothing was given"):
        zckpt.assert_restored(tmp_path / "saved")
