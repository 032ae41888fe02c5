"""Run a plan: copy byte ranges into files in parallel and in bounded memory. Knows no format.

Each target file is made at its full size, its literals written, its copies cut into pieces of bounded size and
the pieces run in batches on a pool. As soon as a batch is written, its way to the disk begins, so that the final
sync finds most of the work done.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from zckpt.engine.checking import Checked, Checks, Part, WatchedSources, part_of
from zckpt.engine.pieces import Piece, elements, pieces
from zckpt.engine.plan import Copy, FilePlan, Literal, Plan
from zckpt.engine.written_sums import Written, patch_checksums
from zckpt.errors import TargetError
from zckpt.storage.crc32 import crc32
from zckpt.storage.disk import start_writeback
from zckpt.storage.durable import check_space, written_directory, written_files
from zckpt.storage.files import read_into
from zckpt.storage.ownership import Owned, check_target

DEFAULT_MEMORY_NBYTES = 64 * 10**6
"""Bytes that all copy buffers together may take."""

BATCH_NBYTES = 8 << 20
"""Written by one task: large enough to cost nothing, small enough to keep all workers busy and progress moving."""

BUFFER_NBYTES = 1 << 19
"""What moves bytes as they are reads and writes at once: few calls, of what a core sums and writes from its cache."""

MINIMUM_PIECE_NBYTES = 1 << 12
"""Below a page per read, a smaller memory budget would cost much and save nothing."""

THREADS = range(4, 9)
"""Fewest and most copy threads: some wait for the disk, and one disk is kept busy by few."""

LARGE_LITERAL_NBYTES = 1 << 20
"""A literal of this size is written by the pool: it is a tensor in memory."""

QUEUED_BATCHES = 64
"""Enough to keep every worker busy; a plan of a million batches is not queued at once."""

BUFFERS_PER_WORKER = 4
"""What a piece may need at once: the bytes read, the elements gathered, cast, and a float32 intermediate."""


class Reporter(Protocol):
    """Told of progress by `execute`, in the thread that called it: `begin` once, `advance` often, `end` once."""

    def begin(self, nbytes: int) -> None:
        """Start; `nbytes` bytes will be written."""

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes have been written."""

    def end(self) -> None:
        """Finish, successfully or not."""


class SilentReporter:
    """A reporter that does nothing."""

    def begin(self, nbytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of one target file, or of memory, that one worker runs in order, and the size of its buffer.

    What it reads of the source files in `watched` is summed.
    """

    path: str
    pieces: tuple[Piece | Literal, ...]
    checksummed: bool
    buffer_nbytes: int
    watched: frozenset[str] = frozenset()


def execute(
    plan: Plan,
    targets: Sequence[str | os.PathLike[str]],
    *,
    overwrite: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    executor: Executor | None = None,
    check: Callable[[list[Path]], None] | None = None,
    checks: Checks | None = None,
    beside: Sequence[Path] = (),
) -> Checked:
    """Write the files of a plan, each under its target's name, whole or not at all.

    Parameters
    ----------
    plan : Plan
    targets : sequence of path-like
        One for each file of the plan, in its order, all in one directory; the last one is the target itself. They are
        named when all are written, so that no new one is ever beside an old one.
    overwrite : bool
        Replace regular files that have these names.
    memory : int, bytes
        Upper bound of what copy buffers take together.
    reporter : Reporter, optional
    executor : concurrent.futures.Executor, optional
        Runs the batches; by default threads of this process.
    check : callable, optional
        Called with what was written, still under temporary names; what it raises leaves no target behind.
    checks : Checks, optional
        Hold what is copied against the checksums of the sources, before a target gets its name.
    beside : sequence of Path
        Further files that belong to the target. `check` is given their temporary names before the others, and writes
        them.

    Returns
    -------
    Checked

    Raises
    ------
    TargetError
        A target exists, or cannot be written.
    DamagedFileError
        A source file ends before the bytes that the plan reads, or they are not those of its checksum.
    """
    paths = [*beside, *(Path(target) for target in targets)]
    with _write_errors(paths[-1]):
        for path in paths:
            check_target(path, overwrite=overwrite)
        check_space(paths[0].parent, plan.write_nbytes)
    with _write_errors(paths[-1]), written_files(paths, overwrite=overwrite) as partials:
        written = partials[len(beside) :]
        checked = _write(plan, written, memory, reporter or SilentReporter(), executor, checks or Checks())
        if check is not None:
            check(partials)
    return checked


def execute_directory(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    owned: Owned | None = None,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    executor: Executor | None = None,
    check: Callable[[Path], None] | None = None,
    checks: Checks | None = None,
) -> Checked:
    """Write the files of a plan, by their names, into a new directory that appears whole or not at all.

    Parameters, result and errors are those of `execute`; `check` gets the directory. `owned` tells which directories
    may be replaced; by default those that hold files of the plan's names and no others.
    """
    path = Path(target)
    owned = owned or Owned(frozenset(one.file.name for one in plan.files).__contains__)
    with _write_errors(path):
        check_target(path, overwrite=overwrite, owned=owned)
        check_space(path.parent, plan.write_nbytes)
    with _write_errors(path), written_directory(path, overwrite=overwrite, owned=owned) as partial:
        names = [partial / one.file.name for one in plan.files]
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
        checked = _write(plan, names, memory, reporter or SilentReporter(), executor, checks or Checks())
        if check is not None:
            check(partial)
    return checked


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into a TargetError."""
    try:
        yield
    except TargetError:
        raise
    except OSError as error:
        raise TargetError(
            "cannot be written",
            path=path,
            found=error.strerror or str(error),
            advice="nothing was left behind",
        ) from error


def _write(
    plan: Plan, paths: Sequence[Path], memory: int, reporter: Reporter, executor: Executor | None, checks: Checks
) -> Checked:
    reporter.begin(plan.copy_nbytes)
    threads = min(max(os.cpu_count() or 1, THREADS[0]), THREADS[-1])
    limit = max(memory // threads // BUFFERS_PER_WORKER, MINIMUM_PIECE_NBYTES)
    pool = executor or ThreadPoolExecutor(threads, thread_name_prefix="zckpt-copy")
    try:
        large = LARGE_LITERAL_NBYTES if executor is None else sys.maxsize  # what is in memory stays in this process
        batches = (
            batch
            for path, one in zip(paths, plan.files, strict=True)
            for batch in _batches(path, one, limit, large, checks)
        )
        made: set[tuple[int, int]] = set()
        for path, one in zip(paths, plan.files, strict=True):
            _write_literals(path, one, large, made)
        written = _run(pool, batches, reporter, checks)
        checked = checks.finish(pool.map)
        for path, one in zip(paths, plan.files, strict=True):
            if one.file.checksums:
                patch_checksums(path, one, written.get(str(path), []), large)
        return checked
    finally:
        reporter.end()
        if executor is None:
            pool.shutdown(wait=True, cancel_futures=True)


def _run(pool: Executor, batches: Iterable[Batch], reporter: Reporter, checks: Checks) -> dict[str, list[Written]]:
    """Run batches; the first failure stops the rest. Return what was written, for files that have checksums.

    Batches that are running when one fails are waited for: none writes to a file that a later run may have made.
    """
    written: dict[str, list[Written]] = {}
    waiting = iter(batches)
    pending: dict[Future[tuple[list[Written], list[Part]]], Batch] = {}
    try:
        while True:
            for batch in islice(waiting, QUEUED_BATCHES - len(pending)):
                pending[pool.submit(run_batch, batch)] = batch
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                batch = pending.pop(future)
                runs, parts = future.result()
                checks.add(parts)
                if batch.checksummed:
                    written.setdefault(batch.path, []).extend(runs)
                reporter.advance(sum(piece.nbytes for piece in batch.pieces if isinstance(piece, Piece)))
    except BaseException:
        for future in pending:
            future.cancel()
        wait(pending)
        raise
    return written


def _batches(path: Path, one: FilePlan, limit: int, large: int, checks: Checks) -> Iterator[Batch]:
    checksummed = bool(one.file.checksums)
    buffer = min(limit, BUFFER_NBYTES)
    for literal in one.file.literals:
        data = memoryview(literal.data)
        for at in range(0, len(data) if len(data) >= large else 0, BATCH_NBYTES):
            part = Literal(literal.offset + at, data[at : at + BATCH_NBYTES])
            yield Batch(str(path), (part,), checksummed, buffer)
    batch: list[Piece] = []
    nbytes = 0
    for fill in one.fills:
        for piece in checks.cut(pieces(fill, min(limit, BATCH_NBYTES), BATCH_NBYTES)):
            batch.append(piece)
            nbytes += piece.nbytes
            if nbytes >= BATCH_NBYTES:
                yield Batch(str(path), tuple(batch), checksummed, buffer, _watched(batch, checks))
                batch, nbytes = [], 0
    if batch:
        yield Batch(str(path), tuple(batch), checksummed, buffer, _watched(batch, checks))


def _watched(batch: Iterable[Piece], checks: Checks) -> frozenset[str]:
    return checks.watched.intersection(s.path for piece in batch for copy in piece.copies for s in copy.sources)


def _write_literals(path: Path, one: FilePlan, large: int, made: set[tuple[int, int]]) -> None:
    """Make a file of its size, with the literals that are not large; `made` tells the files by device and inode."""
    with path.open("wb") as file:
        there = os.fstat(file.fileno())
        if (there.st_dev, there.st_ino) in made:
            raise TargetError(
                "the file system takes two names for one",
                path=path,
                advice="write to one that tells upper and lower case apart",
            )
        made.add((there.st_dev, there.st_ino))
        file.truncate(one.file.nbytes)
        for literal in one.file.literals:
            if len(literal.data) < large:
                file.seek(literal.offset)
                file.write(literal.data)


def run_batch(batch: Batch) -> tuple[list[Written], list[Part]]:
    """Run the pieces of a batch in order and return the runs written and what was read; maybe in another process."""
    target = os.open(batch.path, os.O_WRONLY)
    buffer = bytearray(batch.buffer_nbytes)
    try:
        with WatchedSources(batch.watched) as sources:
            runs = [_run_piece(piece, target, sources, batch, buffer) for piece in batch.pieces]
        first = runs[0].offset
        start_writeback(target, first, runs[-1].offset + runs[-1].nbytes - first)
        return runs, sources.parts
    finally:
        os.close(target)


def _run_piece(
    piece: Piece | Literal, target: int, sources: WatchedSources, batch: Batch, buffer: bytearray
) -> Written:
    if isinstance(piece, Literal):
        return _write_memory(piece, target, len(buffer), checksummed=batch.checksummed)
    if piece.is_bytewise:
        watched = piece.copies[0].sources[0].path in batch.watched
        crc = _copy_bytes(piece.copies[0], target, sources, buffer, checksummed=batch.checksummed or watched)
        if watched and crc is not None:
            sources.parts.append(part_of(piece, crc))
        return Written(piece.offset, piece.nbytes, crc)
    data = elements(piece, sources)
    _write_all(target, data, piece.offset)
    return Written(piece.offset, piece.nbytes, crc32(data) if batch.checksummed else None)


def _copy_bytes(
    copy: Copy, target: int, sources: WatchedSources, buffer: bytearray, *, checksummed: bool
) -> int | None:
    """Copy a contiguous run of bytes through a buffer; return its CRC-32 if wanted."""
    source = copy.sources[0]
    descriptor = sources.descriptor(source.path)
    crc = 0
    for at in range(0, copy.nbytes, len(buffer)):
        view = memoryview(buffer)[: min(len(buffer), copy.nbytes - at)]
        read_into(descriptor, source.offset + at, view, path=source.path)
        if checksummed:
            crc = crc32(view, crc)
        _write_all(target, view, copy.offset + at)
    return crc if checksummed else None


def _write_memory(literal: Literal, target: int, step: int, *, checksummed: bool) -> Written:
    """Write what is in memory, each part of it while it is in the cache of the core that sums it."""
    data = memoryview(literal.data)
    crc = 0
    for at in range(0, len(data), step):
        view = data[at : at + step]
        if checksummed:
            crc = crc32(view, crc)
        _write_all(target, view, literal.offset + at)
    return Written(literal.offset, len(data), crc if checksummed else None)


def _write_all(target: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], offset + done)
