"""A save that fails on one rank fails on all, leaves nothing behind, and does not touch what is being trained."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.gloo import WorkerError, run
from tests.pairwise import some
from tests.training.trainings import BY_NAME, Training, differences
from zckpt.errors import SourceError, TargetError, TargetExistsError, UnsupportedError, UsageError

pytestmark = pytest.mark.interop

AT_ONCE = 5
ROWS = 1 << 18  # of 4 numbers each: long enough to be killed in the middle


# --- killed


class Table(torch.nn.Module):
    """A model whose weights tell the step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        values = torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4)
        self.weight = torch.nn.Parameter(values * (step + 1))


def save_and_be_killed(rank, world_size, directory: Path, victim: int, share: float) -> None:
    """Save step 1, and step 2, in the middle of which one rank is killed."""
    checkpointer = zckpt.Checkpointer(directory, on_sigterm=False)
    started = time.monotonic()
    checkpointer.save(1, model=Table(1))
    seconds = (time.monotonic() - started) * share
    if rank == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    checkpointer.save(2, model=Table(2))
    time.sleep(2 * seconds + 0.1)  # whoever is to be killed is killed


def kill(directory: Path, victim: int, share: float) -> int:
    """Kill a rank in the middle of a save; check the newest sound checkpoint, and return its step."""
    with pytest.raises(WorkerError):
        run(save_and_be_killed, 2, directory, victim, share, fresh=True)
    model = Table(0)
    restored = zckpt.Checkpointer(directory, on_sigterm=False).resume(model=model, verify=True)
    step = restored.step or 0
    assert torch.equal(model.weight, Table(step).weight)
    for left in directory.glob(".step-*.zckpt-partial"):
        if (left / "checkpoint.json").exists():  # killed between the manifest and the name: nothing is missing
            zckpt.load(left, model=model)
            assert torch.equal(model.weight, Table(2).weight)
        elif any(left.iterdir()):
            with pytest.raises(SourceError, match="did not finish"):
                zckpt.open(left)
    shutil.rmtree(directory)
    return step


@pytest.mark.nightly
@pytest.mark.parametrize("kills", some([8], [50]))
def test_whenever_a_rank_is_killed_the_newest_sound_checkpoint_is_what_was_saved(kills, tmp_path):
    chance = random.Random(7)
    shares = [0.0, 2.0, *(chance.random() * 1.2 for _ in range(kills))]  # at once, when all is done, and in between
    with ThreadPoolExecutor(AT_ONCE) as pool:
        steps = {
            done.result()
            for done in [
                pool.submit(kill, tmp_path / str(number), chance.randrange(2), share)
                for number, share in enumerate(shares)
            ]
        }
    assert steps == {1, 2}  # some were killed before the second was whole, some after


# --- failing


def fail_on(rank, directory: Path, failure: str) -> Any:
    """Make saving fail on the last rank; return what undoes it."""
    if failure == "no space":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if failure == "vanished":
        threading.Thread(target=remove_when_there, args=(directory,), daemon=True).start()
    return lambda: None


def remove_when_there(directory: Path) -> None:
    while not list(directory.glob(".*zckpt-partial/*")):
        time.sleep(0.0005)
    shutil.rmtree(directory, ignore_errors=True)


def fail(rank, world_size, directory: Path, failure: str, async_: bool, name: str) -> str:
    training = Training.of(BY_NAME[name])
    training.train(range(2))
    before = training.state()
    directory.mkdir(exist_ok=True)
    zckpt.save(directory / "first", model=training.model, optimizer=training.optimizer, step=2)
    bulk = {"bulk": torch.zeros(1 << 23)} if failure == "vanished" else {}
    undo = fail_on(rank, directory, failure) if rank == world_size - 1 else None
    try:
        saving = zckpt.save(
            directory / "second", model=training.model, optimizer=training.optimizer, extra=bulk, async_=async_
        )
        if saving is not None:
            if rank % 2:  # has seen it, and the others have not
                # On a busy machine the directory may go when all of it has been written: the next save finds that.
                with pytest.raises(TargetError) if failure == "no space" else contextlib.suppress(TargetError):
                    saving.result()
            zckpt.save(directory / "third", model=training.model)  # which tells all
    except TargetError as error:
        said = str(error)
    else:
        return "saved"
    if undo is not None:
        undo()
    assert differences(training.state(), before) == []
    training.train(range(2, 4))
    directory.mkdir(exist_ok=True)
    zckpt.save(directory / "fourth", model=training.model, optimizer=training.optimizer, step=4)
    assert zckpt.load(directory / "fourth", model=training.model, optimizer=training.optimizer).step == 4
    return said


@pytest.mark.parametrize("failure", ["no space", "vanished"])
@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.every(3)
def test_a_failure_of_one_rank_is_one_of_all(failure, async_, tmp_path):
    directory = tmp_path / "run"
    for _ in range(5):  # on a busy machine the directory may go when all of it has been written
        told = run(fail, 2, directory, failure, async_, "zero2-plain-float32", fresh=True)
        if failure == "no space" or set(told) != {"saved"}:
            break
        shutil.rmtree(directory, ignore_errors=True)
    assert all("cannot be written" in said or "disappeared" in said for said in told)
    if failure == "no space":
        assert sorted(path.name for path in directory.iterdir()) == ["first", "fourth"]


def refuse(rank, world_size, directory: Path) -> list[str]:
    training = Training.of(BY_NAME["adamw-ddp-float32"])
    both = {"model": training.model, "optimizer": training.optimizer}
    said = []

    def refused(kind: type[Exception], path: Path, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            zckpt.save(path, **{**both, **options})
        said.append(str(caught.value))

    refused(TargetError, Path("/proc/zckpt/checkpoint"))
    refused(UnsupportedError, directory / "a", extra={"thing": object()} if rank == 0 else {})
    zckpt.save(directory / "b", **both)
    refused(TargetExistsError, directory / "b")
    before = (directory / "b" / "checkpoint.json").read_bytes()
    zckpt.save(directory / "b", **both, step=9, overwrite=True)
    assert (directory / "b" / "checkpoint.json").read_bytes() != before
    nameless = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    refused(ValueError, directory / "c", optimizer=nameless)
    refused(ValueError, directory / "c", format="frobnicated")
    refused(ValueError, directory / "c", format="deepspeed")
    refused(UsageError, directory / "c", format="deepspeed", fingerprint=True)
    if rank == 0:  # who removes what it began
        assert [path.name for path in directory.iterdir()] == ["b"]
    return said


def test_what_cannot_be_saved_is_refused_in_a_line_on_all_ranks(tmp_path):
    for said in run(refuse, 2, tmp_path):
        assert "cannot be written" in said[0]
        assert "extra['thing'] is a builtins.object" in said[1]
        assert "already exists" in said[2]
        assert "has no name" in said[3]
        assert "unknown format frobnicated" in said[4]
        assert "does not suit AdamW" in said[5]
        assert "zckpt's format: found format deepspeed; use zckpt fingerprint" in said[6]
        assert all("\n" not in line for line in said)
