"""Ranks are used again only if nothing of what ran in them before can be seen."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests import gloo
from tests.gloo import WorkerError, run

pytestmark = pytest.mark.interop


def process(rank: int, world_size: int) -> int:
    return os.getpid()


def total(rank: int, world_size: int) -> int:
    number = torch.tensor(rank + 1)
    dist.all_reduce(number)
    return int(number)


def leave_behind(rank: int, world_size: int, what: str) -> None:
    if what == "environment":
        os.environ["LEFT_BEHIND"] = "1"
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif what == "signal":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "function":
        dist.all_reduce = print
    elif what == "group":
        leave_behind.group = dist.new_group()  # its threads stay


def left(rank: int, world_size: int) -> tuple[object, ...]:
    return (
        os.environ.get("LEFT_BEHIND"), threading.active_count(), signal.getsignal(signal.SIGUSR1),
        torch.get_default_dtype(), dist.all_reduce.__name__,
    )  # fmt: skip


def end(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raised":
            raise LookupError("here")
        elif how == "exited":
            os._exit(7)
    time.sleep(60)


def arguments_of_torch(rank: int, world_size: int) -> list[bool]:
    """Make groups with the arguments that torch 2.13 and 2.15 give; tell which have the device that ranks share."""
    from torch.distributed import ProcessGroupGloo

    limit, store = datetime.timedelta(seconds=9), dist.HashStore()
    made = [
        ProcessGroupGloo(store, 0, 1, limit),
        ProcessGroupGloo(store, 0, 1, timeout=limit),
        ProcessGroupGloo(store, 0, 1, timeout=limit, enable_reconfigure=False),
        ProcessGroupGloo(store, 0, 1),
    ]
    devices = [one.options._devices[0] for one in made]
    return [one is devices[0] for one in devices]


def test_groups_share_a_device_whatever_torch_gives_them():
    assert run(arguments_of_torch, 1) == [[True, True, True, False]]


def test_ranks_are_used_again_at_any_number():
    first = run(process, 3)
    assert run(process, 2) == first[:2]
    assert [run(total, world_size) for world_size in (1, 2, 3)] == [[1], [3, 3], [6, 6, 6]]
    assert run(process, 3) == first
    assert not set(run(process, 2, fresh=True)) & set(first)


@pytest.mark.parametrize("what", ["environment", "thread", "signal", "dtype", "function", "group"])
def test_nothing_that_is_left_behind_is_seen_by_the_next(what):
    before, seen = run(process, 2), run(left, 2)
    run(leave_behind, 2, what)
    assert (run(process, 2) == before) is (what == "environment")
    assert run(left, 2) == seen


@pytest.mark.parametrize(("how", "words"), [("killed", "-9"), ("raised", "LookupError: here"), ("exited", "7")])
def test_a_rank_that_ends_ends_the_others_and_all_are_replaced(how, words, monkeypatch):
    monkeypatch.setattr(gloo, "GRACE", 0.2)
    before = run(process, 2)
    with pytest.raises(WorkerError, match=words):
        run(end, 2, how)
    assert not set(run(process, 2)) & set(before)
    assert run(total, 2) == [3, 3]


def test_ranks_that_hang_are_stopped():
    with pytest.raises(WorkerError, match=r"no end within 0.5 s"):
        run(end, 2, "never", timeout=0.5)
    assert run(total, 2) == [3, 3]
