"""SIGTERM on any rank ends all of them in one step, and until then no rank waits for another."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.gloo import forked, on_ranks
from tests.live import of_all_ranks
from tests.refusals import refusing
from zckpt.errors import WorkerError
from zckpt.training import checkpointer as module
from zckpt.training import ending
from zckpt.training.run_directory import RunPlace

STEPS = 10**6
GIVEN = {"model": torch.nn.LayerNorm(2)}  # the same in every process


@pytest.fixture
def told() -> Iterator[list[int]]:
    """Signals that the program's own handler has had."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


# --- one process


def test_the_handler_that_was_there_is_called_at_once_and_put_back(told):
    before = signal.getsignal(signal.SIGTERM)
    with zckpt.Checkpointer(".") as checkpointer:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
        assert checkpointer.step(1, **GIVEN)
        assert checkpointer.is_ending
    assert signal.getsignal(signal.SIGTERM) == before
    assert told == [signal.SIGTERM]
    assert Path("latest").read_text() == "step-00000001"


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(7)


@pytest.mark.usefixtures("told")
def test_a_handler_that_leaves_does_so_after_the_save():
    signal.signal(signal.SIGTERM, leave)
    with zckpt.Checkpointer(".") as checkpointer:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit, match="7"):
            checkpointer.step(1, **GIVEN)
        assert checkpointer.is_ending
    assert Path("latest").read_text() == "step-00000001"
    unsaved = zckpt.Checkpointer(".")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="7"):
        unsaved.close()


def test_those_that_are_closed_in_another_order_leave_the_others_alone(told):
    before = signal.getsignal(signal.SIGTERM)
    first, second = zckpt.Checkpointer("a"), zckpt.Checkpointer("b")
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGTERM]
    assert second.step(1, **GIVEN)
    second.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(told) == 2
    signal.signal(signal.SIGTERM, before)


def ends(how: str) -> None:
    """Have SIGTERM, and answer it with a save or not."""
    checkpointer = zckpt.Checkpointer(how)
    if how == "forked":
        assert status_of(os.kill, 0, 0, told=True) == -signal.SIGTERM
        return
    os.kill(os.getpid(), signal.SIGTERM)
    if how == "saved":
        checkpointer.step(1, **GIVEN)
        assert checkpointer.is_ending
    try:
        if how == "error":
            raise RuntimeError
    finally:
        checkpointer.close()


def status_of(act: Callable[..., None], *args: Any, told: bool = False) -> int:
    """Return how a process that is forked ends: 3 where it goes on after `act`, 4 after an error."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        act(*args)
        os._exit(3)
    except RuntimeError:
        os._exit(4)
    finally:
        os._exit(5)


def statuses() -> list[int]:
    return [status_of(ends, how) for how in ("saved", "unsaved", "error", "forked")]


def test_what_no_save_has_answered_takes_effect_at_close():
    """One that is saved goes on, one that is not ends, an error is not lost; and what is forked ends as any process."""
    assert forked(statuses) == [3, -signal.SIGTERM, 4, 3]


def test_what_is_no_longer_kept_is_removed_while_training_goes_on(monkeypatch):
    goes_on, real = threading.Event(), module.unsound
    monkeypatch.setattr(module, "unsound", lambda path: real(path) if goes_on.wait(60) else "waited in vain")
    checkpointer = zckpt.Checkpointer(".", every=1, keep=2, on_sigterm=False)
    for step in (1, 2):  # the second one looks whether the first is sound
        checkpointer.step(step, **GIVEN)
    assert Path("latest").read_text() == "step-00000002"
    goes_on.set()
    checkpointer.step(3, **GIVEN)
    checkpointer.close()
    assert sorted(one.name for one in Path().glob("step-*")) == ["step-00000002", "step-00000003"]


def test_what_cannot_be_removed_is_told_and_the_save_holds(monkeypatch):
    def refused(self: RunPlace, checkpoint: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(RunPlace, "remove", refused)
    checkpointer = zckpt.Checkpointer(".", keep=1, on_sigterm=False)
    checkpointer.save(1, **GIVEN)
    checkpointer.save(2, **GIVEN)
    with pytest.warns(UserWarning, match="could not remove checkpoints that are no longer kept: .*Permission denied"):
        checkpointer.close()
    assert Path("latest").read_text() == "step-00000002"


# --- several ranks


@on_ranks(2)
def test_no_rank_waits_for_another_where_nothing_is_due(rank):
    """The first rank makes all of its calls before the others make any."""
    checkpointer = zckpt.Checkpointer("run", every=STEPS)
    deadline = time.monotonic() + 300
    while rank and not Path("done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(checkpointer.step(step) for step in range(1, 1001))
    Path("done").touch()
    checkpointer.close()


@on_ranks(3, each=[([0],), ([2],), ([0, 1, 2],)])
def test_all_ranks_end_in_the_same_step(rank, world_size, who):
    """Ranks meet every five steps only; some are told in between."""
    directory = Path(f"told {who}")
    checkpointer = zckpt.Checkpointer(directory, keep=1)
    for step in range(1, STEPS):
        if rank in who and step == 20 + rank:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002)
        if step % 5 == 0:
            dist.barrier()
        checkpointer.step(step, **GIVEN)
        if checkpointer.is_ending:
            break
    checkpointer.close()
    assert of_all_ranks(step) == [step] * world_size
    assert 20 <= step < 2000
    assert zckpt.open(directory).step == step


@on_ranks(3)
def test_who_is_told_when_all_is_done_waits_for_nobody(rank):
    """One rank is told when the others have made all of their calls, and closed."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: found.append(number))
    checkpointer = zckpt.Checkpointer("run")
    for step in range(1, 4):
        if rank == 1 and step == 3:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGTERM)
        assert not checkpointer.step(step)
    checkpointer.close()
    if rank != 1:
        dist.barrier()
    signal.signal(signal.SIGTERM, before)
    assert found == [signal.SIGTERM] * (rank == 1)
    assert not list(Path("run").glob("step-*"))


@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_answer_is_told_of(rank):
    ending.PATIENCE = 0.2
    checkpointer = zckpt.Checkpointer("run")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        with refusing(WorkerError, "no answer of ranks 1"):
            checkpointer.step(1)
        checkpointer._sigterm.is_told = False
    else:
        checkpointer._ending.stop()
    dist.barrier()
    checkpointer.close()
