"""A plan run into files: byte ranges are copied in parallel and in bounded memory. Knows no format, and no names.

Each file is made at its full size, its literals written, its copies cut into pieces of bounded size and the pieces run
in batches. As soon as a batch is written, its way to the disk begins, so that the final sync finds most of the work
done. Whose files these are, and under which names they appear, is the caller's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter, SilentReporter
from zckpt.engine.cast import cast, is_finite, numpy_dtype
from zckpt.engine.checking import Checked, Checks, Overflowed, Seen, WatchedSources, crc_of, patch_checksums
from zckpt.engine.copy import pieces, ranges_read
from zckpt.engine.fine import Cut
from zckpt.engine.identity import Batch, key_of, names_of, whole
from zckpt.engine.move import BufferedTarget, Mover, Target
from zckpt.engine.packs import Pack
from zckpt.engine.plan import FilePlan, Piece, Plan
from zckpt.engine.targets import Hole, Literal, TargetFile
from zckpt.engine.tasks import Portions
from zckpt.engine.together import CutPiece, read_together
from zckpt.engine.workers import BATCH_ITEMS, BATCH_NBYTES, WRITERS, Workers, batched, budget
from zckpt.errors import SourceError, TargetError
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.storage.crc32 import crc32
from zckpt.storage.disk import start_writeback
from zckpt.storage.distant import ahead
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


Ranges = tuple[list[Seen], list[Seen]]
"""What was written, and read."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Batches of some files that one worker runs together: what they read together, each file is opened once for.

    Of each its key in the journal, and what an earlier run wrote and read of it. `most` bytes are read together.
    """

    batches: tuple[Batch, ...]
    keys: tuple[str | None, ...]
    done: tuple[Ranges | None, ...]
    most: int


@dataclass(frozen=True, slots=True)
class _Done:
    """What was written and read of a batch; and whether it was now."""

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
            together = memory // share.at_once // held
            found = _together(files, share.nbytes, large, checks, together)
            buffer = min(share.nbytes, DIRECT_NBYTES if direct else BUFFER_NBYTES)
            how = {"buffer_nbytes": buffer, "recorded": journal is not None, "direct": direct}
            bundles = (_readied(bundle, checks, how) for bundle in found)
            recording = _Recording(journal, plan.sources, together)
            portions = Portions(plan.copy_nbytes, _task_nbytes, _reads, lambda task: (one.path for one in task.batches))
            run = recording.worker(here=workers.are_here)
            for task, done in workers.run(run, map(recording.task, bundles), portions):
                recording.note(task, done)
                for batch, one in zip(task.batches, done, strict=True):
                    checks.add(one.read)
                    files.note(batch, one.written)
                progress.advance(_task_nbytes(task))
            files.finish()
            return checks.finish(workers.map)
    finally:
        progress.end()


class _Recording:
    """Makes tasks of batches, and records those that are done: in the thread that did, or when another process has."""

    def __init__(self, journal: Journal | None, sources: frozenset[str], most: int) -> None:
        self._journal = journal
        self._names = {} if journal is None else names_of(sources)
        self._here = False
        self._most = most

    def task(self, batches: Sequence[Batch]) -> _Task:
        """Return batches of files with what is known of them."""
        known = [self._known(batch) for batch in batches]
        keys, done = tuple(key for key, _ in known), tuple(found for _, found in known)
        return _Task(tuple(batches), keys, done, self._most)

    def _known(self, batch: Batch) -> tuple[str | None, Ranges | None]:
        if self._journal is None:
            return None, None
        key = key_of(batch)
        work = None if key is None else self._journal.found.get(key)
        if work is None or not work.read.keys() <= self._names.keys():
            return key, None
        written = [Seen(batch.path, *one) for one in work.written]
        return key, (written, [Seen(self._names[path], *r) for path, some in work.read.items() for r in some])

    def worker(self, *, here: bool) -> Callable[[_Task], list[_Done]]:
        """Return what runs a task."""
        self._here = here
        return self._run if here else partial(run_task, write_batch)

    def _run(self, task: _Task) -> list[_Done]:
        done = run_task(write_batch, task)
        self._record(task, done)
        return done

    def note(self, task: _Task, done: Sequence[_Done]) -> None:
        """Note what has come from another process."""
        if not self._here:
            self._record(task, done)

    def _record(self, task: _Task, done: Sequence[_Done]) -> None:
        if any(isinstance(each, Overflowed) for one in done for each in one.read):
            return  # it is done again, and counted again
        for key, one in zip(task.keys, done, strict=True):
            if self._journal is not None and key is not None and one.is_new:
                read: dict[str, list[Seen]] = {}
                for each in one.read:
                    read.setdefault(whole(each.path), []).append(each)
                work = Work(_summed(one.written), {path: _summed(some) for path, some in read.items()})
                self._journal.record(key, work)


def _summed(seen: Iterable[Seen]) -> tuple[tuple[int, int, int | None], ...]:
    return tuple((one.offset, one.nbytes, one.crc32) for one in seen)


def run_task(work: Callable[[Batch], Ranges], task: _Task) -> list[_Done]:
    """Write batches with `work`, but for what an earlier run wrote and is there. May run in another process."""
    found: list[_Done | None] = []
    for batch, done in zip(task.batches, task.done, strict=True):
        is_there = done is not None and _is_there(batch.path, done[0])
        found.append(_Done(*done, is_new=False) if done is not None and is_there else None)
    left, read = _gathered([b for b, one in zip(task.batches, found, strict=True) if one is None], task.most)
    made: list[_Done] = []
    for batch in left:
        written, also = work(batch)
        made.append(_Done(written, [*also, *read]))
        read = []
    remaining = iter(made)
    return [one or next(remaining) for one in found]


def _gathered(batches: Sequence[Batch], most: int) -> tuple[list[Batch], list[Seen]]:
    """Return batches with the bytes of what is read together, and what was read for that."""
    cuts: list[tuple[CutPiece, Cut]] = []
    packs: dict[tuple[int, int, int], list[Pack]] = {}
    for piece in (piece for batch in batches for piece in batch.pieces):
        if isinstance(piece, CutPiece):
            cuts.append((piece, replace(piece.cut, position=cuts[-1][1].end if cuts else 0)))
        elif isinstance(piece, Pack):
            packs.setdefault((id(piece.row), piece.low, piece.high), []).append(piece)
    if not cuts and not packs:
        return list(batches), []
    data: dict[int, memoryview] = {}
    watched = frozenset().union(*(batch.watched for batch in batches))
    with WatchedSources(watched, batches[0].buffer_nbytes if batches[0].direct else 0) as sources:
        memory = np.empty(cuts[-1][1].end if cuts else 0, np.uint8)
        read_together([cut for _, cut in cuts], memory.data, sources, most)
        for piece, cut in cuts:
            stored = cut.spans.files.dtype
            values = memory[cut.position : cut.end]
            if stored != piece.dtype:
                given = values.view(numpy_dtype(stored))
                made = cast(given, piece.dtype)
                if is_floating(piece.dtype) and not is_finite(made):
                    count = int((~np.isfinite(made) & np.isfinite(given)).sum())
                    sources.seen += (
                        [Overflowed(piece.label, piece.offset, 0, None, count, piece.dtype)] if count else []
                    )
                values = made.view(np.uint8)
            data[id(piece)] = values.data
        for some in packs.values():
            if len(some) == 1:
                data[id(some[0])] = some[0].read(sources)
                continue
            row, low, high = some[0].row, some[0].low, some[0].high
            found = row.shares(low, high, [one.rank for one in some], sources, most)
            data |= {id(one): each.data for one, each in zip(some, found, strict=True)}
        filled = [
            replace(batch, pieces=tuple(Literal(p.offset, data[id(p)]) if id(p) in data else p for p in batch.pieces))
            for batch in batches
        ]
        return filled, sources.seen


def _is_there(path: str, written: Sequence[Seen]) -> bool:
    try:
        with Sources() as sources:
            return all(one.crc32 == crc_of(path, one.offset, one.offset + one.nbytes, (), sources) for one in written)
    except SourceError:
        return False


class _Files:
    """Makes the files as they are come to, and states the checksums of each once all of it is written."""

    def __init__(self, files: Iterable[tuple[Path, FilePlan]], large: int, *, resumes: bool) -> None:
        self._files = files
        self._large = large
        self._resumes = resumes
        self._known: set[tuple[int, int]] = set()
        self._open: dict[str, tuple[FilePlan, list[Seen]]] = {}
        self._left: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[Path, FilePlan]]:
        for path, one in self._files:
            seen = _write_literals(path, one, self._large, self._known, resumes=self._resumes)
            if one.file.checksums:
                kept = TargetFile(one.file.name, one.file.nbytes, checksums=one.file.checksums)
                self._open[str(path)] = FilePlan(kept, ()), seen
                large = (literal for literal in one.file.literals if literal.nbytes >= self._large)
                filled: list[Hole | Pack | Literal] = [*one.file.holes, *one.file.packs, *large]
                self._left[str(path)] = sum(each.nbytes for each in filled)
            yield path, one

    def note(self, batch: Batch, seen: Iterable[Seen]) -> None:
        """Note what was written."""
        if batch.path in self._open:
            some = list(seen)
            self._open[batch.path][1].extend(some)
            self._left[batch.path] -= sum(one.nbytes for one in some)
            if not self._left[batch.path]:
                self._patch(batch.path)

    def finish(self) -> None:
        """State the checksums of what is left."""
        for path in list(self._open):
            self._patch(path)

    def _patch(self, name: str) -> None:
        patch_checksums(Path(name), *self._open.pop(name))


def _task_nbytes(task: _Task) -> int:
    return sum(piece.moved_nbytes for batch in task.batches for piece in batch.pieces)


def _reads(task: _Task) -> Iterator[str]:
    """Yield the files that a task reads; of a pack, those that the format lists from the first to the last."""
    for batch in task.batches:
        yield from chain.from_iterable(piece.paths() for piece in batch.pieces)


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


def _readied(bundle: Sequence[Batch], checks: Checks, how: Mapping[str, Any]) -> list[Batch]:
    """Return batches that are run together, which watch what any of them reads, and are told how to write."""
    watched = checks.watched
    if watched:
        pieces = [piece for batch in bundle for piece in batch.pieces]
        packs = {(id(each.row), each.low, each.high): each for each in pieces if isinstance(each, Pack)}
        paths = [each.row.paths(each.low, each.high) for each in packs.values()]
        others = (each.paths() for each in pieces if not isinstance(each, Pack))
        watched = watched.intersection(chain(*paths, chain.from_iterable(others)))
    return [replace(batch, watched=watched, **how) for batch in bundle]


def _together(
    files: Iterable[tuple[Path, FilePlan]], most: int, large: int, checks: Checks, together: int
) -> Iterator[list[Batch]]:
    """Yield the batches of files that are run together: those that read together, of `together` bytes."""
    bundle: list[Batch] = []
    sharing: list[tuple[str, str, list[Pack]]] = []
    nbytes = 0
    for path, one in files:
        place = str(path), one.file.name
        for batch in _batches(*place, one, most, large, checks):
            yield [batch]
        cuts = (piece for fill in one.fills if fill.cut is not None for piece in _cut_pieces(fill.hole, fill.cut, most))
        for some in batched(cuts, _held, together):
            bundle.append(Batch(*place, some, bool(one.file.checksums)))
            nbytes += sum(map(_held, some))
            if nbytes >= together or len(bundle) == BATCH_ITEMS:
                yield bundle
                bundle, nbytes = [], 0
        fine = [pack for pack in one.file.packs if pack.row.is_fine]
        if sharing and [pack.row for pack in fine] != [pack.row for pack in sharing[0][2]]:
            yield from _shared(sharing, most, together)
            sharing = []
        if fine:
            sharing.append((*place, fine))
    if bundle:
        yield bundle
    if sharing:
        yield from _shared(sharing, most, together)


def _cut_pieces(hole: Hole, cut: Cut, most: int) -> Iterator[CutPiece]:
    """Yield pieces of at most `most` bytes on both sides for a hole that a rule cuts finely."""
    size = itemsize(hole.dtype)
    step = max(most // max(size, itemsize(cut.spans.files.dtype)), 1)
    for at in range(0, cut.numel, step):
        some = Cut(cut.spans, cut.start + at, min(step, cut.numel - at), 0)
        yield CutPiece(hole.offset + at * size, hole.label, some, hole.dtype)


def _held(piece: CutPiece) -> int:
    """Return the bytes that a piece takes as it is read and as it is written."""
    return piece.cut.end - piece.cut.position + piece.nbytes


def _shared(sharing: Sequence[tuple[str, str, list[Pack]]], most: int, together: int) -> Iterator[list[Batch]]:
    """Yield the batches of files that have shares of the same rows: of some parameters at a time, what all have."""
    for number, row in enumerate(pack.row for pack in sharing[0][2]):
        for low, high, fits in row.blocks(together):
            shares = [(path, name, replace(packs[number], low=low, high=high)) for path, name, packs in sharing]
            if fits:
                yield [Batch(path, name, (share,), True) for path, name, share in shares]
                continue
            for path, name, share in shares:
                yield from ([Batch(path, name, (piece,), True)] for piece in share.pieces(most))


def _batches(path: str, name: str, one: FilePlan, most: int, large: int, checks: Checks) -> Iterator[Batch]:
    """Yield the batches of what is read by itself."""
    checksummed = bool(one.file.checksums)
    for literal in one.file.literals:
        data = memoryview(literal.data)
        for at in range(0, len(data) if len(data) >= large else 0, BATCH_NBYTES):
            yield Batch(path, name, (Literal(literal.offset + at, data[at : at + BATCH_NBYTES]),), checksummed)
    alone = (fill for fill in one.fills if fill.cut is None)
    found = (piece for fill in alone for piece in checks.cut(pieces(fill, most, BATCH_NBYTES)))
    for batch in batched(found, lambda piece: piece.nbytes):
        yield Batch(path, name, batch, checksummed)
    for piece in (piece for pack in one.file.packs if not pack.row.is_fine for piece in pack.pieces(most)):
        yield Batch(path, name, (piece,), True)


def write_batch(batch: Batch) -> Ranges:
    """Write the pieces of a batch in order; return what was written and what was read. May run in another process."""
    descriptor = os.open(batch.path, os.O_WRONLY)
    buffer = memoryview(bytearray(batch.buffer_nbytes))
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        sources = stack.enter_context(WatchedSources(batch.watched, len(buffer) if batch.direct else 0))
        target: Target = BufferedTarget(descriptor)
        if batch.direct:
            from zckpt.storage.direct import DirectTarget

            target = stack.enter_context(closing(DirectTarget(descriptor, batch.path, len(buffer))))
        stack.enter_context(ahead(ranges_read(piece for piece in batch.pieces if isinstance(piece, Piece))))
        is_summed = batch.checksummed or batch.recorded
        mover = Mover(batch.path, target, sources, buffer, is_summed, batch.checksummed)
        seen = mover.write(batch.pieces)  # type: ignore[arg-type]  # what is read together is literals by now
        first = min(one.offset for one in seen)
        start_writeback(descriptor, first, max(one.offset + one.nbytes for one in seen) - first)
        return seen, sources.seen
