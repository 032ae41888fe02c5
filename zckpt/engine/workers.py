"""Who does the work, in what portions and with how much memory, for all that is written, read or looked at.

    items -> batches of some megabytes -> a bounded queue -> threads -> results, in order

No other module starts threads for elements, or decides how many there are and what each may hold.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

WRITERS = range(4, 9)
"""Fewest and most threads where elements are written: some wait for the disk, and one disk is kept busy by few."""

READERS = range(2, 9)
"""Fewest and most where elements are only read; more than there are cores get in each other's way."""

BATCH_NBYTES = 8 << 20
"""Moved by one task: large enough to cost nothing, small enough to keep all workers busy and progress moving."""

BATCH_ITEMS = 1 << 10
"""Most items in a task: a batch of tiny tensors ends here."""

QUEUED_BATCHES = 64
"""Enough to keep every worker busy; a plan of a million batches is not queued at once."""

LEAST_BUFFER_NBYTES = 1 << 12
"""Below a page per read, a smaller memory budget would cost much and save nothing."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_EXECUTOR: ContextVar[Executor | None] = ContextVar("executor", default=None)


@contextmanager
def running_on(executor: Executor) -> Iterator[None]:
    """Let an executor of the caller's, of threads or processes, run what would run on threads of our own."""
    token = _EXECUTOR.set(executor)
    try:
        yield
    finally:
        _EXECUTOR.reset(token)


@contextmanager
def running_here() -> Iterator[None]:
    """Let threads of our own run what only this process can, whatever the caller's executor."""
    token = _EXECUTOR.set(None)
    try:
        yield
    finally:
        _EXECUTOR.reset(token)


def batched(items: Iterable[Item], nbytes_of: Callable[[Item], int]) -> Iterator[tuple[Item, ...]]:
    """Yield items in batches of about `BATCH_NBYTES` bytes."""
    batch: list[Item] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += nbytes_of(item)
        if nbytes >= BATCH_NBYTES or len(batch) >= BATCH_ITEMS:
            yield tuple(batch)
            batch, nbytes = [], 0
    if batch:
        yield tuple(batch)


def buffer_nbytes(memory: int, threads: range, *, buffers: int, most: int) -> int:
    """Return the size of a buffer of which each worker holds `buffers` at once, so that all fit into `memory` bytes."""
    return max(min(memory // _count(threads) // buffers, most), LEAST_BUFFER_NBYTES)


def _count(threads: range) -> int:
    """Return as many threads as there are cores, within a range."""
    return min(max(os.cpu_count() or 1, threads[0]), threads[-1])


class Workers:
    """The threads that run batches; a context, which ends when all of them have.

    Parameters
    ----------
    threads : range
        `WRITERS` or `READERS`: between its ends, as many as there are cores.
    """

    def __init__(self, threads: range) -> None:
        given = _EXECUTOR.get()
        self.are_here = given is None
        self._pool = given or ThreadPoolExecutor(_count(threads), thread_name_prefix="zckpt")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.are_here:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Return the results of items, all of which are queued at once."""
        return self._pool.map(work, items)

    def run(self, work: Callable[[Item], Result], batches: Iterable[Item]) -> Generator[tuple[Item, Result]]:
        """Yield every batch with its result, in order; the only one is worked on in the calling thread.

        When one fails or the caller stops, those that wait are cancelled and those that run are waited for: none of
        them writes to a file that a later run may have begun.
        """
        queue: deque[tuple[Item, Future[Result]]] = deque()
        remaining = iter(batches)
        first = list(islice(remaining, 2))
        if len(first) == 1 and self.are_here:
            yield first[0], work(first[0])
            return
        remaining = chain(first, remaining)
        try:
            while True:
                for batch in islice(remaining, QUEUED_BATCHES - len(queue)):
                    queue.append((batch, self._pool.submit(work, batch)))
                if not queue:
                    return
                batch, future = queue[0]
                result = future.result()
                queue.popleft()
                yield batch, result
        finally:
            for _, future in queue:
                future.cancel()
            wait([future for _, future in queue])
