"""Who does the work, in what portions and with how much memory, for all that is written, read or looked at.

    items -> batches of some megabytes -> a bounded queue -> threads -> results, in order
                                      `-> tasks of many batches -> other processes -> results, in order    tasks

No other module starts threads for elements, or decides how many there are and what each may hold.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from contextvars import ContextVar
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from zckpt.engine.tasks import Portions, results_of, settled, tasks_of, worker_errors, workers_of
from zckpt.immutable import immutable
from zckpt.state.context import during
from zckpt.storage.distant import found
from zckpt.storage.memory import buffers_within, confine_threads, give_back

if TYPE_CHECKING:
    from typing_extensions import Self

THREADS = range(2, 9)
"""Fewest and most threads: more than there are cores get in each other's way."""

WAITING_THREADS = range(4, 9)
"""Fewest and most that wait: past the page cache each for the disk, or for a store, which few keep busy."""

BATCH_NBYTES = 8 << 20
"""Moved by one task: large enough to cost nothing, small enough to keep all workers busy and progress moving."""

BATCH_ITEMS = 1 << 10
"""Most items in a task: a batch of tiny tensors ends here."""

QUEUED = 4
"""Batches or tasks for each worker: results come in order, and none waits for work while the first is awaited."""

LEAST_BUFFER_NBYTES = 1 << 12
"""Below a page per read, a smaller memory budget would cost much and save nothing."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_EXECUTOR: ContextVar[Executor | None] = ContextVar("executor", default=None)


def threads_for(paths: Iterable[str], *, direct: bool) -> range:
    """Return how many threads read these files, and write: fewest and most; `direct`: past the page cache."""
    return WAITING_THREADS if direct or any(found(one) is not None for one in paths) else THREADS


def running_on(executor: Executor | None) -> AbstractContextManager[None]:
    """Let an executor of the caller's, of threads or processes, run what runs on threads of our own under None."""
    return during(_EXECUTOR, executor)


def batched(
    items: Iterable[Item],
    nbytes_of: Callable[[Item], int],
    most: int | None = None,
    count: int | None = BATCH_ITEMS,
) -> Iterator[tuple[Item, ...]]:
    """Yield items in batches of at most `most` bytes, by default `BATCH_NBYTES`; one that is larger is a batch."""
    batch: list[Item] = []
    total = 0
    for item in items:
        nbytes = nbytes_of(item)
        if batch and (total + nbytes > (most or BATCH_NBYTES) or len(batch) == count):
            yield tuple(batch)
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield tuple(batch)


@immutable
class Budget:
    """What all workers together may hold, divided among them.

    `at_once`: batches that run at the same time, in whichever processes; `nbytes`: of each buffer.
    """

    at_once: int
    nbytes: int


def budget(memory: int, threads: range, *, buffers: int, most: int, least: int = LEAST_BUFFER_NBYTES) -> Budget:
    """Divide memory among all that run at once: threads of this process, or all workers of an executor together.

    Where a limit of the process leaves less than that, it is what the limit leaves. Where memory is too little for the
    least buffers of all, fewer run at once; one does in any case.

    `memory`: bytes; `buffers`: held by each batch while it runs; `most`, `least` (bytes): of a buffer.
    """
    memory = buffers_within(memory)
    at_once = max(min(_at_once(_EXECUTOR.get(), threads), memory // (buffers * least)), 1)
    nbytes = min((memory - memory // 64) // at_once // buffers, most)  # besides, there are objects of Python
    return Budget(at_once, max(nbytes - nbytes % LEAST_BUFFER_NBYTES, least))


def _at_once(given: Executor | None, threads: range) -> int:
    """Return how much an executor runs at once; without one, as many threads as there are cores, within a range."""
    return min(max(os.cpu_count() or 1, threads[0]), threads[-1]) if given is None else workers_of(given)


class Workers:
    """Who runs batches: threads of our own, or the executor of `running_on`. A context, which ends when all are done.

    Parameters
    ----------
    threads : range
        Those of `threads_for`: between its ends, as many as there are cores.
    here : bool
        What is run needs the memory of this process: the executor is used only if it has threads of it.
    at_once : int, optional
        Most batches that run at the same time; see `budget`.
    """

    def __init__(self, threads: range, *, here: bool = False, at_once: int | None = None) -> None:
        confine_threads()
        given = _EXECUTOR.get()
        if here and not isinstance(given, ThreadPoolExecutor):
            given = None
        count = _at_once(given, threads)
        self._at_once = min(at_once or count, count)
        self._is_own = given is None
        self._pool = given or ThreadPoolExecutor(self._at_once, thread_name_prefix="zckpt")
        self.are_here = isinstance(self._pool, ThreadPoolExecutor)
        is_bounded = given is not None and self._at_once < count  # others' threads run all that is queued
        self._queued = self._at_once if is_bounded else QUEUED * self._at_once
        self.is_ending = False
        """Whether nothing is waited for but work that runs: what takes long may look, and end at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_own:
            self._pool.shutdown(wait=True, cancel_futures=True)
            give_back()

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Return the results of items."""
        return (result for _, result in self.run(work, items, Portions()))

    def run(
        self, work: Callable[[Item], Result], batches: Iterable[Item], portions: Portions[Item]
    ) -> Generator[tuple[Item, Result]]:
        """Yield every batch with its result, in order; the only one is worked on in the calling thread.

        When one fails or the caller stops, those that wait are cancelled and those that run are waited for: none of
        them writes to a file that a later run may have begun.

        Parameters
        ----------
        work : callable
            Of a batch; picklable where the executor is of other processes, as are batches and results.
        batches : iterable
        portions : Portions
            How batches become tasks for other processes.

        Raises
        ------
        WorkerError
            Another process was lost, or cannot do what it is sent.
        """
        if self.are_here:
            remaining = iter(batches)
            first = list(islice(remaining, 2))
            if len(first) == 1 and self._is_own:
                yield first[0], work(first[0])
            else:
                yield from self._run(work, chain(first, remaining))
            return
        tasks = tasks_of(work, batches, portions, workers_of(self._pool))
        with closing(self._run(results_of, tasks)) as done:
            for task, results in done:
                yield from zip(task.batches, results, strict=True)

    def _run(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[tuple[Item, Result]]:
        queue: deque[tuple[Item, Future[Result]]] = deque()
        remaining = iter(items)
        try:
            while True:
                for item in islice(remaining, self._queued - len(queue)):
                    with self._errors():
                        queue.append((item, self._pool.submit(work, item)))
                if not queue:
                    return
                item, future = queue[0]
                with self._errors():
                    result = future.result()
                queue.popleft()
                yield item, result
        finally:
            self.is_ending = True
            wait([future for _, future in queue if not future.cancel()])
            if queue and not self.are_here:
                settled(self._pool)

    def _errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self.are_here else worker_errors(self._pool)
