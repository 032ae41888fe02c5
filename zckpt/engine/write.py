"""A plan run into files: byte ranges are copied in parallel and in bounded memory. Knows no format, and no names.

Each file is made at its full size, its literals written, its copies cut into pieces of bounded size and the pieces run
in batches. As soon as a batch is written, its way to the disk begins, so that the final sync finds most of the work
done. Whose files these are, and under which names they appear, is the caller's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter, SilentReporter
from zckpt.engine.checking import Checked, Checks, Overflowed, Seen, WatchedSources, crc_of, patch_checksums
from zckpt.engine.copy import Piece, pieces, ranges_read
from zckpt.engine.identity import key_of, names_of, whole
from zckpt.engine.move import BufferedTarget, Target, write_pieces
from zckpt.engine.packs import PackPiece
from zckpt.engine.plan import FilePlan, Plan
from zckpt.engine.targets import Literal
from zckpt.engine.tasks import Portions
from zckpt.engine.workers import BATCH_NBYTES, WRITERS, Workers, batched, budget
from zckpt.errors import SourceError, TargetError
from zckpt.state import ZEROS
from zckpt.storage.crc32 import crc32
from zckpt.storage.disk import start_writeback
from zckpt.storage.distant import Range, ahead
from zckpt.storage.files import Sources
from zckpt.storage.journal import Journal, Work

BUFFER_NBYTES = 1 << 19
"""What moves bytes as they are reads and writes at once: few calls, of what a core sums and writes from its cache."""

DIRECT_NBYTES = 1 << 21
"""The same past the page cache, where each read waits for the disk, and nothing is read ahead."""

LARGE_LITERAL_NBYTES = 1 << 20
"""A literal of this size is written by the workers: it is a tensor in memory."""

BUFFERS_PER_WORKER = 4
"""What a piece may need at once: the bytes read, the elements gathered, cast, and a float32 intermediate."""

BUFFERS_OF_DIRECT = 2
"""And what is read into past the page cache, and written from."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of one file that one worker writes in order, and the size of its buffer.

    What it writes is summed if it is `checksummed`, and what it reads of the source files in `watched`; if it is
    `recorded`, all that is not cloned. It is moved past the page cache if it is `direct`.
    """

    path: str
    pieces: tuple[Piece | PackPiece | Literal, ...]
    checksummed: bool
    buffer_nbytes: int
    watched: frozenset[str] = frozenset()
    recorded: bool = False
    direct: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """A batch, its key in the journal, and what an earlier run wrote and read of it."""

    batch: Batch
    key: str | None
    done: tuple[list[Seen], list[Seen]] | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    """What was written and read; and whether it was now."""

    written: list[Seen]
    read: list[Seen]
    is_new: bool = True


def write(
    plan: Plan,
    paths: Sequence[Path],
    *,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    checks: Checks | None = None,
    journal: Journal | None = None,
    direct: bool = False,
) -> Checked:
    """Write the files of a plan.

    Parameters
    ----------
    plan : Plan
    paths : sequence of Path
        One for each file of the plan, in its order; what is there is overwritten.
    memory : int, bytes
        Upper bound of what the buffers of all workers take together.
    reporter : Reporter, optional
    checks : Checks, optional
        Hold what is copied against the checksums of the sources.
    journal : Journal, optional
        Record what is written, and go on with what it has.
    direct : bool
        Read and write long ranges past the page cache, where the file systems can.

    Raises
    ------
    DamagedFileError
        A source file ends before the bytes that the plan reads, or they are not those of its checksum.
    TargetError
        The file system takes two of the paths for one.
    OSError
        A file cannot be written.
    """
    progress, checks = reporter or SilentReporter(), checks or Checks()
    if journal is not None and not journal.is_worth_it:
        journal = None
    progress.begin(plan.copy_nbytes)
    try:
        held = BUFFERS_PER_WORKER + BUFFERS_OF_DIRECT * direct
        share = budget(memory, WRITERS, buffers=held, most=BATCH_NBYTES)
        with Workers(WRITERS, at_once=share.at_once) as workers:
            large = LARGE_LITERAL_NBYTES if workers.are_here else sys.maxsize  # memory is not sent to processes
            files = _Files(zip(paths, plan.files, strict=True), large, resumes=journal is not None and journal.resumes)
            batches = (
                (one.file.name, replace(batch, recorded=journal is not None, direct=direct))
                for path, one in files
                for batch in _batches(path, one, share.nbytes, large, checks, direct=direct)
            )
            recording = _Recording(journal, plan.sources)
            portions = Portions(plan.copy_nbytes, _task_nbytes, _reads, _writes)
            run = recording.worker(here=workers.are_here)
            for task, done in workers.run(run, map(recording.task, batches), portions):
                recording.note(task, done)
                checks.add(done.read)
                files.note(task.batch, done.written)
                progress.advance(_task_nbytes(task))
            files.finish()
            return checks.finish(workers.map)
    finally:
        progress.end()


class _Recording:
    """Makes tasks of batches, and records those that are done: in the thread that did, or when another process has."""

    def __init__(self, journal: Journal | None, sources: frozenset[str]) -> None:
        self._journal = journal
        self._names = {} if journal is None else names_of(sources)
        self._here = False

    def task(self, batch_of: tuple[str, Batch]) -> _Task:
        """Return a batch of a file with what is known of it."""
        name, batch = batch_of
        if self._journal is None:
            return _Task(batch, None)
        key = key_of(batch, name)
        work = None if key is None else self._journal.found.get(key)
        if work is None or not work.read.keys() <= self._names.keys():
            return _Task(batch, key)
        written = [Seen(batch.path, *one) for one in work.written]
        return _Task(
            batch, key, (written, [Seen(self._names[path], *r) for path, some in work.read.items() for r in some])
        )

    def worker(self, *, here: bool) -> Callable[[_Task], _Done]:
        """Return what runs a task."""
        self._here = here
        return self._run if here else partial(run_task, write_batch)

    def _run(self, task: _Task) -> _Done:
        done = run_task(write_batch, task)
        self._record(task, done)
        return done

    def note(self, task: _Task, done: _Done) -> None:
        """Note what has come from another process."""
        if not self._here:
            self._record(task, done)

    def _record(self, task: _Task, done: _Done) -> None:
        if self._journal is None or task.key is None or not done.is_new:
            return
        if any(isinstance(one, Overflowed) for one in done.read):
            return  # it is done again, and counted again
        read: dict[str, list[Seen]] = {}
        for one in done.read:
            read.setdefault(whole(one.path), []).append(one)
        work = Work(_summed(done.written), {path: _summed(some) for path, some in read.items()})
        self._journal.record(task.key, work)


def _summed(seen: Iterable[Seen]) -> tuple[tuple[int, int, int | None], ...]:
    return tuple((one.offset, one.nbytes, one.crc32) for one in seen)


def run_task(work: Callable[[Batch], tuple[list[Seen], list[Seen]]], task: _Task) -> _Done:
    """Write a batch with `work`, unless what an earlier run wrote of it is there. May run in another process."""
    if task.done is not None:
        written, read = task.done
        if _is_there(task.batch.path, written):
            return _Done(written, read, is_new=False)
    return _Done(*work(task.batch))


def _is_there(path: str, written: Sequence[Seen]) -> bool:
    try:
        with Sources() as sources:
            return all(one.crc32 == crc_of(path, one.offset, one.offset + one.nbytes, (), sources) for one in written)
    except SourceError:
        return False


class _Files:
    """Makes the files as they are come to, and states their checksums once all of a file is written.

    Batches come back in the order in which they were given out: when one of a file does, those before it are written.
    """

    def __init__(self, files: Iterable[tuple[Path, FilePlan]], large: int, *, resumes: bool) -> None:
        self._files = files
        self._large = large
        self._resumes = resumes
        self._known: set[tuple[int, int]] = set()
        self._open: dict[str, tuple[Path, FilePlan, list[Seen]]] = {}

    def __iter__(self) -> Iterator[tuple[Path, FilePlan]]:
        for path, one in self._files:
            seen = _write_literals(path, one, self._large, self._known, resumes=self._resumes)
            if one.file.checksums:
                self._open[str(path)] = path, one, seen
            yield path, one

    def note(self, batch: Batch, seen: Iterable[Seen]) -> None:
        """Note what was written."""
        if batch.path not in self._open:
            return
        while (first := next(iter(self._open))) != batch.path:
            self._patch(first)
        self._open[batch.path][2].extend(seen)

    def finish(self) -> None:
        """State the checksums of what is left."""
        for path in list(self._open):
            self._patch(path)

    def _patch(self, name: str) -> None:
        path, one, seen = self._open.pop(name)
        patch_checksums(path, one, seen)


def _moved(piece: Piece | PackPiece | Literal) -> int:
    """Return the bytes of tensors in a piece."""
    return 0 if isinstance(piece, Literal) else piece.moved_nbytes if isinstance(piece, PackPiece) else piece.nbytes


def _task_nbytes(task: _Task) -> int:
    return sum(_moved(piece) for piece in task.batch.pieces)


def _reads(task: _Task) -> Iterator[str]:
    """Yield the files that a task reads; of a pack, those that the format lists from the first to the last."""
    for piece in task.batch.pieces:
        if isinstance(piece, PackPiece):
            yield from piece.pack.paths(piece.low, piece.high)
        elif isinstance(piece, Piece):
            yield from (source.path for copy in piece.copies for source in copy.sources if source.path != ZEROS)


def _writes(task: _Task) -> tuple[str]:
    return (task.batch.path,)


def _write_literals(path: Path, one: FilePlan, large: int, known: set[tuple[int, int]], *, resumes: bool) -> list[Seen]:
    """Make a file of its size, with the literals that are not large; `known` has each file's device and inode."""
    with path.open("r+b" if resumes and path.exists() else "wb") as file:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) in known:
            raise TargetError(
                "the file system takes two names for one",
                path=path,
                advice="write to one that tells upper and lower case apart",
            )
        known.add((found.st_dev, found.st_ino))
        file.truncate(one.file.nbytes)
        small = [literal for literal in one.file.literals if len(literal.data) < large]
        for literal in small:
            file.seek(literal.offset)
            file.write(literal.data)
    if not one.file.checksums:
        return []
    return [Seen(str(path), literal.offset, len(literal.data), crc32(literal.data)) for literal in small]


def _batches(
    path: Path, one: FilePlan, most: int, large: int, checks: Checks, *, direct: bool = False
) -> Iterator[Batch]:
    checksummed, buffer = bool(one.file.checksums), min(most, DIRECT_NBYTES if direct else BUFFER_NBYTES)
    for literal in one.file.literals:
        data = memoryview(literal.data)
        for at in range(0, len(data) if len(data) >= large else 0, BATCH_NBYTES):
            block = Literal(literal.offset + at, data[at : at + BATCH_NBYTES])
            yield Batch(str(path), (block,), checksummed, buffer)
    found = (piece for fill in one.fills for piece in checks.cut(pieces(fill, most, BATCH_NBYTES)))
    for batch in batched(found, lambda piece: piece.nbytes):
        read = (s.path for piece in batch for copy in piece.copies for s in copy.sources) if checks.watched else ()
        yield Batch(str(path), batch, checksummed, buffer, checks.watched.intersection(read))
    for pack in one.file.packs:
        for packed in batched(pack.pieces(most * BUFFERS_PER_WORKER), lambda piece: piece.nbytes):
            watched = checks.watched.intersection(pack.paths(packed[0].low, packed[-1].high))
            yield Batch(str(path), packed, checksummed, buffer, watched)


def write_batch(batch: Batch) -> tuple[list[Seen], list[Seen]]:
    """Write the pieces of a batch in order; return what was written and what was read. May run in another process."""
    descriptor = os.open(batch.path, os.O_WRONLY)
    buffer = memoryview(bytearray(batch.buffer_nbytes))
    try:
        sums = {"checksummed": batch.checksummed, "recorded": batch.recorded}
        with (
            WatchedSources(batch.watched, len(buffer) if batch.direct else 0) as sources,
            _target(batch, descriptor) as target,
            ahead(_ranges(batch)),
        ):
            seen = write_pieces(batch.pieces, target, sources, buffer, path=batch.path, **sums)
        first = min(one.offset for one in seen)
        start_writeback(descriptor, first, max(one.offset + one.nbytes for one in seen) - first)
        return seen, sources.seen
    finally:
        os.close(descriptor)


@contextmanager
def _target(batch: Batch, descriptor: int) -> Iterator[Target]:
    if not batch.direct:
        yield BufferedTarget(descriptor)
        return
    from zckpt.storage.direct import DirectTarget

    target = DirectTarget(descriptor, batch.path, batch.buffer_nbytes)
    try:
        yield target
    finally:
        target.close()


def _ranges(batch: Batch) -> Iterator[Range]:
    """Yield what a batch reads of files that are elsewhere."""
    return ranges_read([piece for piece in batch.pieces if isinstance(piece, Piece)])
