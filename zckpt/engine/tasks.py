"""Tasks for processes that are not this one, perhaps on other machines: many batches at once, and what they rely on.

    batch batch batch ... | batch batch batch ... |     consecutive ones, as many bytes in each task
    task = work, batches, the files they read and write as the driver knows them

A task may be run twice, or begun on a worker that dies: it writes the same bytes to the same places. What it wrote on
another machine is on disk when its results arrive, for that one's cache cannot be synced from here; what it wrote to
the very file of this one, the driver syncs at the end. A worker that finds another file than the driver's under a path
stops: it would write something else without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Generic, TypeVar

from zckpt.errors import WorkerError, ZckptError
from zckpt.immutable import immutable
from zckpt.state.context import during
from zckpt.storage.stand_ins import MARK
from zckpt.version import __version__

TASK_NBYTES = 512 << 20
"""Moved by a task at most: a tenth of a second of CPU time, of which sending it takes Dask 10 ms in all its processes;
small enough to be done again."""

LEAST_TASK_NBYTES = 64 << 20
"""Moved by a task at least, where there are so many: of 32 MB in memory, sending it would take as long as doing it."""

TASK_BATCHES = 64
"""Most batches in a task: of tiny tensors they have many items and few bytes."""

TASKS_PER_WORKER = 2
"""Of what is left: tasks get smaller towards the end, so that workers end at the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_WANTED: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)


def while_wanted(wanted: Callable[[], bool]) -> AbstractContextManager[None]:
    """Let tasks that are run within this context end before the next batch when nobody waits for them any more."""
    return during(_WANTED, wanted)


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
    wanted, results = _WANTED.get(), []
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
    left = portions.total
    known = cache(_known)
    some: list[Item] = []
    nbytes = 0
    for batch in batches:
        some.append(batch)
        nbytes += portions.nbytes(batch)
        most = min(max(left // (TASKS_PER_WORKER * workers), LEAST_TASK_NBYTES), TASK_NBYTES)
        if nbytes >= most or len(some) >= TASK_BATCHES:
            yield _task(work, some, portions, known)
            left -= nbytes
            some, nbytes = [], 0
    if some:
        yield _task(work, some, portions, known)


def _task(
    work: Callable[[Item], Result],
    batches: list[Item],
    portions: Portions[Item],
    known: Callable[[str, bool], Known | None],
) -> Task[Item, Result]:
    reads = dict.fromkeys((path, False) for batch in batches for path in portions.reads(batch))
    writes = dict.fromkeys((path, True) for batch in batches for path in portions.writes(batch))
    files = tuple(file for one in (*reads, *writes) if (file := known(*one)) is not None)
    return Task(work, tuple(batches), files)


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


def settled(executor: Executor) -> None:
    """Wait until no worker runs what was cancelled, where an executor does not wait by itself."""
    settle = getattr(executor, "settle", None)
    if settle is not None:
        settle()


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
