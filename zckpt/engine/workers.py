"""Who does the work, in what portions and with how much memory, for all that is written, read or looked at.

    items -> batches of some megabytes -> a bounded queue -> threads -> results, in order
                                      `-> tasks of many batches -> other processes -> results, in order

No other module starts threads for elements, or decides how many there are and what each may hold.

Tasks are for processes that are not this one, perhaps on other machines.

    batch batch batch ... | batch batch batch ... |     consecutive ones, as many bytes in each task
    task = work, batches, the files they read and write as the driver knows them

A task may be run twice, or begun on a worker that dies: it writes the same bytes to the same places. What it wrote on
another machine is on disk when its results arrive, for that one's cache cannot be synced from here; what it wrote to
the very file of this one, the driver syncs at the end. A worker that finds another file than the driver's under a path
stops: it would write something else without a word.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Generic, TypeVar

from zckpt.errors import WorkerError, ZckptError
from zckpt.immutable import immutable
from zckpt.state.context import during
from zckpt.storage.memory import buffers_within, confine_threads, give_back
from zckpt.storage.stand_ins import MARK, found
from zckpt.version import __version__

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
    at_once = max(min(run_at_once(_EXECUTOR.get(), threads), memory // (buffers * least)), 1)
    nbytes = min((memory - memory // 64) // at_once // buffers, most)  # besides, there are objects of Python
    return Budget(at_once, max(nbytes - nbytes % LEAST_BUFFER_NBYTES, least))


def run_at_once(given: Executor | None, threads: range) -> int:
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
        count = run_at_once(given, threads)
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
            running = [future for _, future in queue if not future.cancel()]
            if queue and not self.are_here:
                tell(self._pool, "end")
            wait(running)
            if queue and not self.are_here:
                tell(self._pool, "settle")

    def _errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self.are_here else worker_errors(self._pool)


TASK_NBYTES = 512 << 20
"""Moved by a task at most: a tenth of a second of CPU time, of which sending it takes Dask 10 ms in all its processes;
small enough to be done again."""

LEAST_TASK_NBYTES = 64 << 20
"""Moved by a task at least, where there are so many: of 32 MB in memory, sending it would take as long as doing it."""

TASK_BATCHES = 64
"""Most batches in a task: of tiny tensors they have many items and few bytes."""

TASKS_PER_WORKER = 2
"""Of what is left: tasks get smaller towards the end, so that workers end at the same time."""


WANTED: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)
"""On a worker, whether anybody waits for the task that it runs: if nobody does, it ends before the next batch."""


@immutable
class Portions(Generic[Item]):
    """What batches mean to the task that they are in."""

    total: int = 0  # bytes; of all batches, about
    nbytes: Callable[[Item], int] = lambda _: LEAST_TASK_NBYTES  # returns those of a batch
    reads: Callable[[Item], Iterable[str]] = lambda _: ()  # return the paths of files that a batch reads, and writes
    writes: Callable[[Item], Iterable[str]] = lambda _: ()


@immutable
class Known:
    """A file as the driver sees it: its size in bytes, and of one that is read when it was changed last, in seconds.

    Of one that is written, `cached` is in which cache of which machine its bytes are, where that is known.
    """

    path: str
    nbytes: int
    changed: int | None
    cached: tuple[str, int, int] | None = None

    def check(self) -> None:
        """Raise WorkerError unless it is the same file here."""
        found = _looked_at(self.path, is_written=self.changed is None)
        if found is None:
            raise self._error("does not exist", None, None)
        if found.st_size != self.nbytes:
            raise self._error("is another file", f"{self.nbytes} bytes", found.st_size)
        if self.changed is not None and int(found.st_mtime) != self.changed:
            raise self._error("is another file", f"last changed at {self.changed}", int(found.st_mtime))

    def _error(self, what: str, expected: str | None, found: int | None) -> WorkerError:
        return WorkerError(
            f"{what} on the worker's host {_host()}",
            path=self.path,
            expected=expected,
            found=found,
            advice="all workers need one file system, under the same paths; see docs/scale.md",
        )


def _looked_at(path: str, *, is_written: bool) -> os.stat_result | None:
    """Return what the file system says of a file; of one that another machine has just made, not what it remembers."""
    try:
        if not is_written:
            return os.stat(path)  # noqa: PTH116
        try:
            descriptor = os.open(path, os.O_WRONLY)
        except FileNotFoundError:
            os.close(os.open(os.path.dirname(path) or ".", os.O_RDONLY))  # noqa: PTH120  # NFS: names are asked for anew
            descriptor = os.open(path, os.O_WRONLY)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return None


@immutable
class Task(Generic[Item, Result]):
    """Batches that one worker runs in order."""

    work: Callable[[Item], Result]  # of a batch
    batches: tuple[Item, ...]
    files: tuple[Known, ...]  # what they read and write
    version: str = __version__  # of zckpt


def results_of(task: Task[Item, Result]) -> list[Result]:
    """Run a task, on a worker; return the result of each batch once all that was written is on disk.

    Raises WorkerError: the worker has another zckpt, or sees other files than the driver.
    """
    if task.version != __version__:
        raise WorkerError(
            f"the worker's host {_host()} has another version of zckpt",
            expected=task.version,
            found=__version__,
            advice="install the same version everywhere",
        )
    for file in task.files:
        file.check()
    wanted, results = WANTED.get(), []
    for batch in task.batches:
        if not wanted():
            raise CancelledError
        results.append(task.work(batch))
    for file in (file for file in task.files if file.changed is None):
        descriptor = os.open(file.path, os.O_WRONLY)
        try:
            if file.cached is None or file.cached != _cached(os.fstat(descriptor)):  # the driver syncs another cache
                getattr(os, "fdatasync", os.fsync)(descriptor)
        finally:
            os.close(descriptor)
    return results


def tasks_of(
    work: Callable[[Item], Result], batches: Iterable[Item], portions: Portions[Item], workers: int
) -> Iterator[Task[Item, Result]]:
    """Yield batches as tasks, which have fewer and fewer bytes. `work`: of a batch; `workers`: how many run at once."""
    left, known = portions.total, cache(_known)

    def task() -> Task[Item, Result]:
        reads = dict.fromkeys((path, False) for batch in some for path in portions.reads(batch))
        writes = dict.fromkeys((path, True) for batch in some for path in portions.writes(batch))
        files = tuple(file for one in (*reads, *writes) if (file := known(*one)) is not None)
        return Task(work, tuple(some), files)

    some: list[Item] = []
    nbytes = 0
    for batch in batches:
        some.append(batch)
        nbytes += portions.nbytes(batch)
        most = min(max(left // (TASKS_PER_WORKER * workers), LEAST_TASK_NBYTES), TASK_NBYTES)
        if nbytes >= most or len(some) >= TASK_BATCHES:
            yield task()
            left -= nbytes
            some, nbytes = [], 0
    if some:
        yield task()


def _known(path: str, is_written: bool) -> Known | None:
    """Return a file as it is here; None of one in a store, which knows it by itself, and of what cannot be read."""
    if MARK in path:
        return None
    try:
        found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    if is_written:
        return Known(path, found.st_size, None, _cached(found))
    return Known(path, found.st_size, int(found.st_mtime))


def _cached(found: os.stat_result) -> tuple[str, int, int] | None:
    """Return which cache has the pages of a file: that of a running kernel, a file system mounted there, and a file."""
    kernel = _kernel()
    return None if kernel is None else (kernel, found.st_dev, found.st_ino)


@lru_cache(maxsize=1)
def _kernel() -> str | None:
    """Return what tells a running kernel from all others; None: nothing does.

    A virtual machine that was begun from another's memory has its number, and not its name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # noqa: PTH123
            return f"{os.uname().nodename} {file.read(64).decode('ascii', 'replace').strip()}"
    except OSError:  # not Linux
        return None


def _host() -> str:
    from socket import gethostname  # half a dozen modules, for an error

    return gethostname()


def workers_of(executor: Executor) -> int:
    """Return how many tasks an executor runs at once; the cores of this machine where it does not say."""
    for name in ("workers", "num_workers", "_max_workers"):
        count = getattr(executor, name, None)
        if isinstance(count, int) and count > 0:
            return count
    return os.cpu_count() or 1


def tell(executor: Executor, what: str) -> None:
    """Let an executor `end` what nobody waits for, or `settle`, where it can: see `zckpt.executors`."""
    function = getattr(executor, what, None)
    if function is not None:
        function()


@contextmanager
def worker_errors(executor: Executor) -> Iterator[None]:
    """Turn what an executor raises of its own into a WorkerError; errors of a task pass."""
    try:
        yield
    except (BrokenExecutor, CancelledError, *getattr(executor, "lost", ())) as error:
        raise WorkerError(
            "workers were lost",
            found=getattr(executor, "why", None) or str(error) or type(error).__name__,
            advice="nothing was written under the target's name; run it again",
        ) from error
    except (ZckptError, OSError, MemoryError):
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise WorkerError(
            f"a worker cannot perform its task: {type(first).__name__}: {first}",
            advice="every worker needs the same zckpt and Python; `zckpt --debug ...` shows where it failed",
        ) from error
