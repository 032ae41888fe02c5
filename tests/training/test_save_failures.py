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
from tests.folders import names_in
from tests.gloo import WorkerError, on_ranks, run
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.trainings import BY_NAME, Training, differences
from zckpt.errors import SourceError, TargetError, TargetExistsError, UnsupportedError, UsageError, ZckptError

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
            with refusing(SourceError, "did not finish"):
                zckpt.open(left)
    shutil.rmtree(directory)
    return step


@pytest.mark.nightly
@pytest.mark.parametrize("kills", some([8], [50]))
def test_whenever_a_rank_is_killed_the_newest_sound_checkpoint_is_what_was_saved(kills):
    chance = random.Random(7)
    shares = [0.0, 2.0, *(chance.random() * 1.2 for _ in range(kills))]  # at once, when all is done, and in between
    with ThreadPoolExecutor(AT_ONCE) as pool:
        steps = {
            done.result()
            for done in [
                pool.submit(kill, Path(str(number)), chance.randrange(2), share) for number, share in enumerate(shares)
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


def fail(rank, world_size, directory: Path, failure: str, async_: bool) -> str:
    training = Training.of(BY_NAME["zero2-plain-float32"])
    training.train(range(2))
    before, both = training.state(), {"model": training.model, "optimizer": training.optimizer}
    directory.mkdir(exist_ok=True)
    zckpt.save(directory / "first", **both, step=2)
    bulk = {"bulk": torch.zeros(1 << 23)} if failure == "vanished" else {}
    undo = fail_on(rank, directory, failure) if rank == world_size - 1 else None
    try:
        saving = zckpt.save(directory / "second", **both, extra=bulk, async_=async_)
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
    zckpt.save(directory / "fourth", **both, step=4)
    assert zckpt.load(directory / "fourth", **both).step == 4
    return said


@pytest.mark.parametrize("failure", ["no space", "vanished"])
@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.every(3)
def test_a_failure_of_one_rank_is_one_of_all(failure, async_):
    directory = Path("run")
    for _ in range(5):  # on a busy machine the directory may go when all of it has been written
        told = run(fail, 2, directory, failure, async_, fresh=True)
        if failure == "no space" or set(told) != {"saved"}:
            break
        shutil.rmtree(directory, ignore_errors=True)
    assert all("cannot be written" in said or "disappeared" in said for said in told)
    if failure == "no space":
        assert names_in(directory) == ["first", "fourth"]


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_in_a_line_on_all_ranks(rank):
    training = Training.of(BY_NAME["adamw-ddp-float32"])
    both = {"model": training.model, "optimizer": training.optimizer}

    def refused(kind: type[ZckptError], words: str, path: Path, **options: Any) -> None:
        with refusing(kind, words):
            zckpt.save(path, **{**both, **options})

    refused(TargetError, "cannot be written", Path("/proc/zckpt/checkpoint"))
    odd = {"thing": object()} if rank == 0 else {}
    refused(UnsupportedError, r"extra\['thing'\] is a builtins\.object", "a", extra=odd)
    zckpt.save("b", **both)
    refused(TargetExistsError, "already exists", "b")
    before = Path("b/checkpoint.json").read_bytes()
    zckpt.save("b", **both, step=9, overwrite=True)
    assert Path("b/checkpoint.json").read_bytes() != before
    nameless = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    refused(UsageError, "has no name", "c", optimizer=nameless)
    refused(UsageError, "unknown format frobnicated", "c", format="frobnicated")
    refused(UsageError, "does not suit AdamW", "c", format="deepspeed")
    other = "zckpt's format: found format deepspeed; use zckpt fingerprint"
    refused(UsageError, other, "c", format="deepspeed", fingerprint=True)
    if rank == 0:  # who removes what it began
        assert names_in() == ["b"]
