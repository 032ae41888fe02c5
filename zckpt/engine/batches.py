"""Work in batches on a pool, with results in order and a bounded number of batches waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

BATCH_NBYTES = 16 << 20
"""Read by one task."""

BATCH_ITEMS = 1 << 10
"""Most items in a task: a batch of tiny tensors ends here."""

QUEUED_BATCHES = 64
"""Enough to keep every worker busy."""

Item = TypeVar("Item")
Result = TypeVar("Result")


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


def run_in_order(
    pool: Executor, batches: Iterator[Item], work: Callable[[Item], Result]
) -> Generator[tuple[Item, Result]]:
    """Yield every batch with its result, in order; what waits is cancelled when the caller stops, or a batch fails."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        while True:
            for batch in islice(batches, QUEUED_BATCHES - len(waiting)):
                waiting.append((batch, pool.submit(work, batch)))
            if not waiting:
                return
            batch, future = waiting.popleft()
            yield batch, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
