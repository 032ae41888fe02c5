"""The ranks that torchrun started, over torch.distributed. The first drives and works, the others work.

When a rank is lost, its connection is, and all calls fail; torchrun then ends the others, and the first leaves in
order.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from zckpt.engine.workers import WANTED
from zckpt.errors import UsageError, WorkerError, require_torch
from zckpt.executors.asking import Answer, AskingExecutor, Call, answer
from zckpt.state.context import during

PATIENCE = timedelta(days=30)
"""For a rank that has nothing to do; that another one is gone, the connection to it says at once."""

LAST_WORDS_SECONDS = 5
"""For the connection to a rank that is lost to say so."""


class RanksExecutor(AskingExecutor):
    """Runs calls on all ranks, this one included; the first rank alone makes one."""

    def __init__(self) -> None:
        import torch.distributed as dist

        others = (partial(_asked, rank) for rank in range(1, dist.get_world_size()))
        super().__init__("rank", [self._own, *others], RuntimeError)

    def _own(self, call: Call) -> Answer:
        """Run a call here: where another rank is lost, it ends before its next batch, for torchrun waits 30 seconds."""
        with during(WANTED, lambda: self.broken is None):
            found = answer(call)
        return found if self.broken is None else (False, self.broken)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the other ranks go."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        for rank in range(1, self.workers if self.broken is None else 1):
            with suppress(RuntimeError):  # it is gone, and nothing is asked of it any more
                _send(None, rank)


def _asked(rank: int, call: Call) -> Answer:
    _send(call, rank)
    found: Answer = _receive(rank)
    return found


def _send(what: object, rank: int) -> None:
    import torch.distributed as dist

    dist.send_object_list([what], dst=rank)


def _receive(rank: int) -> Any:  # noqa: ANN401
    import torch.distributed as dist

    found: list[Any] = [None]
    dist.recv_object_list(found, src=rank)
    return found[0]


@contextmanager
def ranks() -> Iterator[Executor | None]:
    """Yield the executor of all ranks on the first, and None on the others, once the first has left it.

    Raises
    ------
    UsageError
        torchrun has not started this process.
    WorkerError
        The ranks do not find each other; or, on the first, torchrun ends it since another one is gone.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise UsageError("torchrun has not started this process", expected="`torchrun --nproc-per-node N -m zckpt ...`")
    require_torch("--executor torchrun", since=(2, 0))
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise WorkerError("the ranks cannot find each other", found=str(error)) from error
    if dist.get_rank() != 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends us
        with suppress(RuntimeError):  # the first one is gone
            while (call := _receive(0)) is not None:
                _send(answer(call), 0)
        yield None
        return
    executor = RanksExecutor()
    previous = signal.signal(signal.SIGTERM, lambda *_: _ended(executor))
    try:
        yield executor
    finally:
        signal.signal(signal.SIGTERM, previous)
        executor.shutdown()


def _ended(executor: AskingExecutor) -> None:
    """Leave it to the calls to fail where a rank is lost, of which torchrun may tell us before the connection does."""
    until = time.monotonic() + LAST_WORDS_SECONDS
    while executor.broken is None and time.monotonic() < until:
        time.sleep(0.05)
    if executor.broken is None:
        raise WorkerError(
            "torchrun ended this run",
            found="SIGTERM: another rank has ended",
            advice="nothing was written; run it again",
        )
