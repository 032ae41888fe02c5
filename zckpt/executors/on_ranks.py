"""The ranks that torchrun started, over torch.distributed. The first drives and works, the others work.

One thread of the first rank for each rank: sends it a call, waits for its result, takes the next call. When a rank is
lost, its connection is, and all calls fail; torchrun then ends the others, and the first leaves in order.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from zckpt.errors import UsageError, WorkerError, require_torch

PATIENCE = timedelta(days=30)
"""For a rank that has nothing to do; that another one is gone, the connection to it says at once."""

Result = TypeVar("Result")

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class RanksExecutor(Executor):
    """Runs calls on all ranks, this one included; the first rank alone makes one."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.workers = dist.get_world_size()
        self.broken: BrokenExecutor | None = None
        self._queue: SimpleQueue[tuple[Future[Any], _Call] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"zckpt-rank-{rank}", daemon=True)
            for rank in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:  # noqa: ANN401
        """Queue a call."""
        if self.broken is not None:
            raise self.broken
        future: Future[Result] = Future()
        self._queue.put((future, (fn, args, kwargs)))
        return future

    def _serve(self, rank: int) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self.broken is not None:
                    raise self.broken
                done, found = _called(call) if rank == 0 else self._asked(rank, call)
            except BrokenExecutor as error:
                done, found = False, error
            (future.set_result if done else future.set_exception)(found)

    def _asked(self, rank: int, call: _Call) -> tuple[bool, Any]:
        try:
            _send(call, rank)
            found: tuple[bool, Any] = _receive(rank)
        except RuntimeError as error:
            self.broken = BrokenExecutor(f"rank {rank} is gone")
            raise self.broken from error
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Let the other ranks go."""
        for _ in self._threads:
            self._queue.put(None)
        if self.broken is not None:
            return
        for thread in self._threads:
            thread.join()
        for rank in range(1, self.workers):
            with suppress(RuntimeError):  # it is gone, and nothing is asked of it any more
                _send(None, rank)


def _called(call: _Call) -> tuple[bool, Any]:
    """Return whether a call succeeded, and its result or its error."""
    fn, args, kwargs = call
    try:
        return True, fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is raised on the first rank
        return False, error


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
                _send(_called(call), 0)
        yield None
        return
    executor = RanksExecutor()
    previous = signal.signal(signal.SIGTERM, _ended)
    try:
        yield executor
    finally:
        signal.signal(signal.SIGTERM, previous)
        executor.shutdown()


def _ended(*_: object) -> None:
    raise WorkerError(
        "torchrun ended this run", found="SIGTERM: another rank has ended", advice="nothing was written; run it again"
    )
