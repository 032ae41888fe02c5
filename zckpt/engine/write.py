"""A plan run into files: byte ranges are copied in parallel and in bounded memory. Knows no format, and no names.

Each file is made at its full size, its literals written, its copies cut into pieces of bounded size and the pieces run
in batches. As soon as a batch is written, its way to the disk begins, so that the final sync finds most of the work
done. Whose files these are, and under which names they appear, is the caller's.

A batch has a key: a digest of which bytes come from where, and what is done to them. Two batches with the same key
write the same bytes to the same place, as long as the source files are what they were. So what another run recorded
under a key is done, whatever else is different about that run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter, reporting
from zckpt.engine.cast import cast, is_finite
from zckpt.engine.checking import Checked, Checks, Overflowed, Seen, WatchedSources, crc_of, patch_checksums
from zckpt.engine.copy import ComputedPiece, pieces, ranges_read
from zckpt.engine.move import Mover
from zckpt.engine.plan import Cut, FilePlan, Piece, Plan
from zckpt.engine.targets import Checksum, Hole, Literal, end_of
from zckpt.engine.together import CutPiece, Pack, PackedSlot, arrays_of
from zckpt.engine.workers import BATCH_ITEMS, BATCH_NBYTES, Portions, Workers, batched, budget, threads_for
from zckpt.errors import SourceError, TargetError, shown
from zckpt.immutable import immutable
from zckpt.state import CutFiles, Slot, by_key, is_floating, itemsize, nbytes_of
from zckpt.storage.crc32 import crc32
from zckpt.storage.disk import OpenTarget, start_writeback
from zckpt.storage.files import Sources
from zckpt.storage.journal import Journal, Work
from zckpt.storage.stand_ins import ahead

KEY_NBYTES = 16
"""Of a digest: no two of the batches of any number of runs share one."""

PLAIN = (str, int, float, type(None))

AnyPiece = Piece | Pack | CutPiece | Literal

Ranges = tuple[list[Seen], list[Seen]]
"""What was written, and read."""


@immutable
class How:
    """How all batches are written: the size of a buffer, and what is read together for several of them, in bytes.

    What is not cloned is summed if it is `recorded`; bytes are moved past the page cache if it is `direct`.
    """

    buffer_nbytes: int
    most: int
    recorded: bool
    direct: bool


@immutable
class Batch:
    """Pieces of one file, of this name within the target, that one worker writes in order.

    What it writes is summed if it is `checksummed`, and what it reads of the source files in `watched`. Of a journal:
    its key there, and what an earlier run wrote and read of it.
    """

    path: str
    name: str
    checksummed: bool
    how: How
    pieces: tuple[AnyPiece, ...]
    watched: frozenset[str] = frozenset()
    key: str | None = None
    done: Ranges | None = None


def key_of(batch: Batch) -> str | None:
    """Return the key of a batch; None if what computes its bytes cannot be told from something else."""
    digest = blake2b(repr((batch.name, batch.checksummed, bool(batch.watched))).encode("utf-8", "surrogatepass"),
                     digest_size=KEY_NBYTES)  # fmt: skip
    try:
        for one in chain.from_iterable(map(_of, batch.pieces)):
            data = one if isinstance(one, (bytes, memoryview)) else repr(one).encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    except _UnknownError:
        return None
    return digest.hexdigest()


class _UnknownError(Exception):
    """A function has a value of which nobody knows what it means."""


def _of(piece: AnyPiece) -> Iterator[object]:
    if isinstance(piece, Literal):
        yield "literal", piece.offset
        yield memoryview(piece.data)
    elif isinstance(piece, Pack):
        yield "pack", piece.rank, piece.start, piece.low, piece.high
        yield _of_row(piece.row)
    elif isinstance(piece, CutPiece):
        rule = piece.spans
        yield "cut", piece.offset, piece.dtype, piece.start, piece.numel
        yield rule.shape, rule.origin, rule.width, rule.at
        yield _of_files(rule.files)
    elif isinstance(piece, ComputedPiece):
        block = piece.block
        yield "computed", piece.offset, piece.nbytes, piece.dtype, block.start, block.numel, block.skipped, block.kept
        yield _of_value(piece.function)
        for each in block.inputs:
            slot, spans = each.slot, each.slot.sets
            yield each.extent, each.dtype, slot.shape, slot.dtype, slot.factors
            yield [[replace(one, path=whole(one.path)) for one in some] for some in spans]
    else:
        for copy in piece.copies:
            yield replace(copy, sources=tuple(replace(one, path=whole(one.path)) for one in copy.sources))


def _of_value(value: object) -> object:
    """Return what a function is made of, but for slots, which are the inputs of its blocks, and what it only keeps."""
    if isinstance(value, Slot):
        return None
    if isinstance(value, tuple):
        return list(map(_of_value, value))
    if isinstance(value, PLAIN):
        return value
    if not is_dataclass(value):
        raise _UnknownError
    kind = type(value)
    return (
        kind.__module__,
        kind.__qualname__,
        [_of_value(getattr(value, one.name)) for one in fields(value) if one.repr],
    )


@lru_cache(maxsize=16)
def _of_row(row: PackedSlot) -> bytes:
    """Return a digest of a row, whose pieces come one after the other."""
    cuts = row.cuts
    digest = blake2b(_of_files(row.files), digest_size=KEY_NBYTES)
    for column in (row.position, row.share, cuts.origin, cuts.width, cuts.at, cuts.numel):
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(column.tobytes())
    return digest.digest()


@lru_cache(maxsize=16)
def _of_files(files: CutFiles) -> bytes:
    numbers = [whole(path) for path in files.paths], tuple(files.offsets), files.dtype, files.byteorder
    return blake2b(repr(numbers).encode("utf-8", "surrogatepass"), digest_size=KEY_NBYTES).digest()


@lru_cache(maxsize=1 << 14)
def whole(path: str) -> str:
    """Return a path that means the same wherever a run is started, or the URL that it stands for."""
    return path and shown(os.path.abspath(path))  # noqa: PTH100  # links stay; no path: zeros


def names_of(paths: frozenset[str]) -> Mapping[str, str]:
    """Return the paths of a plan's sources by what they are called in a journal; none, if two would be called alike."""
    found = {whole(path): path for path in paths}
    return found if len(found) == len(paths) else {}


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
    checks = checks or Checks()
    if journal is not None and not journal.is_worth_it:
        journal = None
    with reporting(reporter, plan.copy_nbytes) as progress:
        held = BUFFERS_PER_WORKER + BUFFERS_OF_DIRECT * direct
        threads = threads_for(plan.sources, direct=direct)
        share = budget(memory, threads, buffers=held, most=BATCH_NBYTES)
        with Workers(threads, at_once=share.at_once) as workers:
            large = LARGE_LITERAL_NBYTES if workers.are_here else sys.maxsize  # memory is not sent to processes
            files = _Files(zip(paths, plan.files, strict=True), large, resumes=journal is not None and journal.resumes)
            buffer = min(share.nbytes, DIRECT_NBYTES if direct else BUFFER_NBYTES)
            how = How(buffer, memory // share.at_once // held, recorded=journal is not None, direct=direct)
            journaled = None if journal is None else _Journaled(journal, names_of(plan.sources))
            found = _together(files, share.nbytes, large, checks, how)
            tasks = (_readied(bundle, checks, journaled) for bundle in found)
            portions = Portions(plan.copy_nbytes, _task_nbytes, _reads, lambda task: (one.path for one in task))
            run: Callable[[Sequence[Batch]], list[Ranges]] = partial(run_task, write_batch)
            if journaled is not None and workers.are_here:  # as soon as it is done, whatever comes before it
                run = partial(journaled.run, run)
            for task, done in workers.run(run, tasks, portions):
                if journaled is not None and not workers.are_here:
                    journaled.record(task, done)
                for batch, (written, read) in zip(task, done, strict=True):
                    checks.add(read)
                    files.note(batch, written)
                progress.advance(_task_nbytes(task))
            files.finish()
            return checks.finish(workers.map)


@immutable
class _Journaled:
    """A journal, and the paths of the sources by what they are called there."""

    journal: Journal
    names: Mapping[str, str]

    def known(self, batch: Batch) -> Batch:
        """Return a batch with its key, and what an earlier run wrote and read of it."""
        key = key_of(batch)
        work = None if key is None else self.journal.found.get(key)
        if work is None or not work.read.keys() <= self.names.keys():
            return replace(batch, key=key)
        written = [Seen(batch.path, *one) for one in work.written]
        read = [Seen(self.names[path], *one) for path, some in work.read.items() for one in some]
        return replace(batch, key=key, done=(written, read))

    def run(self, run: Callable[[Sequence[Batch]], list[Ranges]], task: Sequence[Batch]) -> list[Ranges]:
        """Run a task, and record it."""
        done = run(task)
        self.record(task, done)
        return done

    def record(self, task: Sequence[Batch], done: Sequence[Ranges]) -> None:
        """Record what no earlier run has."""
        if any(isinstance(each, Overflowed) for _, read in done for each in read):
            return  # it is done again, and counted again
        for batch, (written, seen) in zip(task, done, strict=True):
            if batch.key is not None and batch.done is None:
                read = by_key((whole(each.path), each) for each in seen)
                work = Work(_summed(written), {path: _summed(some) for path, some in read.items()})
                self.journal.record(batch.key, work)


def _summed(seen: Iterable[Seen]) -> tuple[tuple[int, int, int | None], ...]:
    return tuple((one.offset, one.nbytes, one.crc32) for one in seen)


def run_task(work: Callable[[Batch], Ranges], task: Sequence[Batch]) -> list[Ranges]:
    """Write batches with `work`, but for what an earlier run wrote and is there. May run in another process."""
    kept = [_kept(one) for one in task]
    left, read = _gathered([one for one, done in zip(task, kept, strict=True) if done is None])
    made = [work(batch) for batch in left]
    if made:
        made[0][1].extend(read)
    remaining = iter(made)
    return [done or next(remaining) for done in kept]


def _kept(one: Batch) -> Ranges | None:
    """Return what an earlier run wrote and read of a batch, if it is there."""
    with suppress(SourceError), Sources() as sources:
        if one.done and all(
            each.crc32 == crc_of(one.path, each.offset, end_of(each), (), sources) for each in one.done[0]
        ):
            return one.done
    return None


def _of_rows(pieces: Iterable[AnyPiece]) -> list[list[Pack]]:
    """Return the packs among pieces: those of the same parameters together, which are read at once."""
    packs = (piece for piece in pieces if isinstance(piece, Pack))
    return list(by_key(((id(one.row), one.low, one.high), one) for one in packs).values())


def _gathered(batches: Sequence[Batch]) -> tuple[list[Batch], list[Seen]]:
    """Return batches with the bytes of what is read together, and what was read for that."""
    pieces = [piece for batch in batches for piece in batch.pieces]
    cuts, packs = [piece for piece in pieces if isinstance(piece, CutPiece)], _of_rows(pieces)
    if not cuts and not packs:
        return list(batches), []
    data: dict[int, memoryview] = {}
    watched, how = frozenset().union(*(batch.watched for batch in batches)), batches[0].how
    with WatchedSources(watched, how.buffer_nbytes if how.direct else 0) as sources:
        for piece, given in zip(cuts, arrays_of(cuts, sources, how.most), strict=True):
            made = cast(given, piece.dtype)
            if made is not given and is_floating(piece.dtype) and not is_finite(made):
                count = int((~np.isfinite(made) & np.isfinite(given)).sum())
                if count:
                    sources.seen.append(Overflowed(piece.label, piece.offset, 0, None, count, piece.dtype))
            data[id(piece)] = made.view(np.uint8).data
        for some in packs:
            if len(some) == 1:
                data[id(some[0])] = some[0].read(sources)
                continue
            shares = some[0].row.shares(some[0].low, some[0].high, [one.rank for one in some], sources, how.most)
            data |= {id(one): each.data for one, each in zip(some, shares, strict=True)}
        filled = [
            replace(batch, pieces=tuple(Literal(p.offset, data[id(p)]) if id(p) in data else p for p in batch.pieces))
            for batch in batches
        ]
        return filled, sources.seen


class _Files:
    """Makes the files as they are come to, and states the checksums of each once all of it is written."""

    def __init__(self, files: Iterable[tuple[Path, FilePlan]], large: int, *, resumes: bool) -> None:
        self._files = files
        self._large = large
        self._resumes = resumes
        self._known: set[tuple[int, int]] = set()
        self._open: dict[str, tuple[list[Checksum], list[Seen]]] = {}
        self._left: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[Path, FilePlan]]:
        for path, one in self._files:
            small = [literal for literal in one.file.literals if literal.nbytes < self._large]
            with path.open("r+b" if self._resumes and path.exists() else "wb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) in self._known:
                    raise TargetError(
                        "the file system treats two names as the same",
                        path=path,
                        advice="use a file system that distinguishes upper and lower case",
                    )
                self._known.add((found.st_dev, found.st_ino))
                os.ftruncate(file.fileno(), one.file.nbytes)  # which goes on after a signal
                for literal in small:
                    file.seek(literal.offset)
                    file.write(literal.data)
            if one.file.checksums:
                seen = [Seen(str(path), literal.offset, literal.nbytes, crc32(literal.data)) for literal in small]
                self._open[str(path)] = one.file.checksums, seen
                filled: list[Hole | Pack | Literal] = [*one.file.holes, *one.file.packs, *one.file.literals]
                self._left[str(path)] = nbytes_of(filled) - nbytes_of(small)
            yield path, one

    def note(self, batch: Batch, seen: Sequence[Seen]) -> None:
        """Note what was written."""
        if batch.path in self._open:
            self._open[batch.path][1].extend(seen)
            self._left[batch.path] -= nbytes_of(seen)
            if not self._left[batch.path]:
                patch_checksums(Path(batch.path), *self._open.pop(batch.path))

    def finish(self) -> None:
        """State the checksums of what is left."""
        for path in list(self._open):
            patch_checksums(Path(path), *self._open.pop(path))


def _task_nbytes(task: Sequence[Batch]) -> int:
    return sum(piece.moved_nbytes for batch in task for piece in batch.pieces)


def _reads(task: Sequence[Batch]) -> Iterator[str]:
    """Yield the files that a task reads; of a pack, those that the format lists from the first to the last."""
    pieces = [piece for batch in task for piece in batch.pieces]
    yield from chain.from_iterable(piece.paths() for piece in pieces if not isinstance(piece, Pack))
    for some in _of_rows(pieces):
        yield from some[0].row.paths(some[0].low, some[0].high) if len(some) > 1 else some[0].paths()


def _readied(bundle: Sequence[Batch], checks: Checks, journaled: _Journaled | None) -> tuple[Batch, ...]:
    """Return batches that are run together, which watch what any of them reads."""
    watched = checks.watched and checks.watched.intersection(_reads(bundle))
    batches = (replace(batch, watched=watched) for batch in bundle)
    return tuple(batches if journaled is None else map(journaled.known, batches))


MakeBatch = Callable[[tuple[AnyPiece, ...]], Batch]


def _together(
    files: Iterable[tuple[Path, FilePlan]], most: int, large: int, checks: Checks, how: How
) -> Iterator[Sequence[Batch]]:
    """Yield the batches of files that are run together: those that read together."""
    bundle: list[Batch] = []
    sharing: list[tuple[MakeBatch, list[Pack]]] = []
    nbytes = 0
    for path, one in files:
        make = partial(Batch, str(path), one.file.name, bool(one.file.checksums), how)
        yield from ([make(some)] for some in _alone(one, most, large, checks))
        cuts = (piece for fill in one.fills if fill.cut is not None for piece in _cut_pieces(fill.hole, fill.cut, most))
        for some in batched(cuts, _held, how.most):
            bundle.append(make(some))
            nbytes += sum(map(_held, some))
            if nbytes >= how.most or len(bundle) == BATCH_ITEMS:
                yield bundle
                bundle, nbytes = [], 0
        fine = [pack for pack in one.file.packs if pack.row.is_fine]
        if sharing and [pack.row for pack in fine] != [pack.row for pack in sharing[0][1]]:
            yield from _shared(sharing, most, how.most)
            sharing = []
        if fine:
            sharing.append((make, fine))
    if bundle:
        yield bundle
    if sharing:
        yield from _shared(sharing, most, how.most)


def _alone(one: FilePlan, most: int, large: int, checks: Checks) -> Iterator[tuple[AnyPiece, ...]]:
    """Yield what is read by itself, in batches."""
    for literal in one.file.literals:
        data = memoryview(literal.data)
        for at in range(0, len(data) if len(data) >= large else 0, BATCH_NBYTES):
            yield (Literal(literal.offset + at, data[at : at + BATCH_NBYTES]),)
    alone = (fill for fill in one.fills if fill.cut is None)
    found = (piece for fill in alone for piece in checks.cut(pieces(fill, most, BATCH_NBYTES)))
    yield from batched(found, lambda piece: piece.nbytes)
    yield from ((piece,) for pack in one.file.packs if not pack.row.is_fine for piece in pack.pieces(most))


def _cut_pieces(hole: Hole, cut: Cut, most: int) -> Iterator[CutPiece]:
    """Yield pieces of at most `most` bytes on both sides for a hole that a rule cuts finely."""
    size = itemsize(hole.dtype)
    step = max(most // max(size, itemsize(cut.spans.files.dtype)), 1)
    for at in range(0, cut.numel, step):
        start, numel, offset = cut.start + at, min(step, cut.numel - at), hole.offset + at * size
        yield CutPiece(cut.spans, start, numel, offset=offset, label=hole.label, dtype=hole.dtype)


def _held(piece: CutPiece) -> int:
    """Return the bytes that a piece takes as it is read and as it is written."""
    return piece.end + piece.nbytes


def _shared(sharing: Sequence[tuple[MakeBatch, list[Pack]]], most: int, together: int) -> Iterator[list[Batch]]:
    """Yield the batches of files that have shares of the same rows: of some parameters at a time, what all have."""
    for number, row in enumerate(pack.row for pack in sharing[0][1]):
        for low, high, fits in row.blocks(together):
            shares = [(make, replace(packs[number], low=low, high=high)) for make, packs in sharing]
            if fits:
                yield [make((share,)) for make, share in shares]
                continue
            yield from ([make((piece,))] for make, share in shares for piece in share.pieces(most))


def write_batch(batch: Batch) -> Ranges:
    """Write the pieces of a batch in order; return what was written and what was read. May run in another process."""
    descriptor = os.open(batch.path, os.O_WRONLY)
    how = batch.how
    buffer = memoryview(bytearray(how.buffer_nbytes))
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        sources = stack.enter_context(WatchedSources(batch.watched, len(buffer) if how.direct else 0))
        target = OpenTarget(descriptor, batch.path, len(buffer), is_direct=how.direct)
        stack.enter_context(closing(target))
        stack.enter_context(ahead(ranges_read(piece for piece in batch.pieces if isinstance(piece, Piece))))
        is_summed = batch.checksummed or how.recorded
        mover = Mover(batch.path, target, sources, buffer, is_summed, batch.checksummed)
        seen = mover.write(batch.pieces)  # type: ignore[arg-type]  # what is read together is literals by now
        first = min(one.offset for one in seen)
        start_writeback(descriptor, first, max(end_of(one) for one in seen) - first)
        return seen, sources.seen
