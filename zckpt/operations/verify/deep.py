"""The blocks of a checkpoint, read in parallel and in bounded memory, and what is found in their elements.

Blocks are of bytes in files, whatever lies in them, for each byte counts for a checksum; `engine.scan` knows elements
of slots only. A block that cannot be read is an error among what was found, and the rest is looked at all the same.

Weights that are not their masters, rounded, are single damage, or a file of another step or run. A damaged record
explains whatever else is wrong with the elements in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from zckpt.codes import (
    BUFFER_NAN,
    BUFFERS_DIFFER,
    CHECKSUM,
    NEGATIVE,
    NOT_FINITE,
    OTHER_RUN,
    PADDING,
    REPLICAS_DIFFER,
    STAGES_DIFFER,
    TIED_DIFFER,
    WEIGHT_MISMATCH,
)
from zckpt.compare import weights
from zckpt.compare.slots import unequal_bits
from zckpt.compare.weights import Comparison
from zckpt.engine import Reporter, reporting
from zckpt.engine.cast import Array, cast, numpy_dtype, swapped
from zckpt.engine.checking import Checks, Seen, Sum
from zckpt.engine.copy import read_extent
from zckpt.engine.workers import Portions, Workers, batched, budget, threads_for
from zckpt.errors import LayoutError, SourceError, UnsupportedError, listed
from zckpt.immutable import immutable, mutable
from zckpt.operations.verify.inventory import BUFFER, PADDED, Block, Inventory, Piece, Scattered, Subject, Work, blocks
from zckpt.operations.verify.structure import Finding
from zckpt.state import Checkpoint, Duplicate, Extent, Slot, Span, Spans, by_key, is_floating, itemsize, nbytes_of
from zckpt.state.boxes import SpanIndex
from zckpt.storage.crc32 import crc32
from zckpt.storage.files import Sources

BLOCK_NBYTES = 1 << 20
"""Of a block at most: what is done with it finds it in the cache."""

BUFFERS_PER_WORKER = 8
"""What a block may need at once: itself, weights, masters as they round, and which elements are wrong."""

BUFFERS_OF_DIRECT = 1
"""And what is read into past the page cache, of what lies scattered."""

ALIGNMENT = 64

NOT_NEGATIVE = frozenset({"square_avg", "acc_delta", "sum", "exp_inf", "row_var", "col_var", "variance"})
"""Sums and means of squares or of magnitudes, besides `exp_avg_sq` and what begins or ends with it: of RMSprop,
Adadelta, Adagrad, Adamax and Adafactor (torch 2.13)."""

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in NaN and Inf."""

_REAL = {"complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128": "float64"}


class Tally(NamedTuple):
    """What is wrong with some elements of one subject."""

    nan: int = 0  # elements; `nonzero` of padding, in bytes
    inf: int = 0
    negative: int = 0
    nonzero: int = 0
    first: int = 0  # index of the first one

    def __bool__(self) -> bool:
        return any(self[:-1])

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        """Return the tally of both."""
        if not self or not other:
            return self or other
        both = Tally(*map(sum, zip(self, other, strict=True)))
        return both._replace(first=min(self.first, other.first))


def tally(values: Array, dtype: str, subject: Subject, first: int) -> Tally:
    """Return what is wrong with elements: flat, in the machine's byte order, the first of them with index `first`."""
    if subject.kind == PADDED:
        wrong = values.view(np.uint8) != 0
        return Tally(nonzero=int(np.count_nonzero(wrong)), first=first + int(np.argmax(wrong)))
    odd = not_finite(values, dtype)
    found = Tally()
    if odd is not None and odd.any():
        nan = np.isnan(_real(values, dtype)[odd].astype(np.float64))
        infinite = 0 if subject.kind == BUFFER else int(len(nan) - np.count_nonzero(nan))  # a mask of -inf is one
        at = int(np.argmax(odd)) // (2 if dtype in _REAL else 1)
        found = Tally(nan=int(np.count_nonzero(nan)), inf=infinite, first=first + at)
    is_second_moment = "exp_avg_sq" in subject.slot or subject.slot in NOT_NEGATIVE
    if subject.kind != BUFFER and is_floating(dtype) and is_second_moment:
        below = values < 0
        if odd is not None and below.any():
            below &= ~odd
        found += Tally(negative=int(np.count_nonzero(below)), first=first + int(np.argmax(below)))
    return found


def not_finite(values: Array, dtype: str) -> Array | None:
    """Return which elements are NaN or Inf; None for a type that has neither. A complex number counts as two."""
    if dtype in _EXPONENT:
        mask = _EXPONENT[dtype]
        found: Array = (values.view(np.uint16) & mask) == mask
        return found
    if dtype in _REAL:
        return not_finite(_real(values, dtype), _REAL[dtype])
    if not is_floating(dtype):
        return None
    wide = values if values.dtype.kind == "f" else values.astype(np.float32)
    finite: Array = ~np.isfinite(wide)
    return finite


def _real(values: Array, dtype: str) -> Array:
    return values.view(numpy_dtype(_REAL[dtype])) if dtype in _REAL else values


def typed(data: Array, dtype: str, byteorder: str) -> Array:
    """Return bytes as elements, in the machine's byte order."""
    values: Array = data.view(numpy_dtype(dtype))
    return values if byteorder == "little" else swapped(values, dtype)


@immutable
class Unequal:
    """Of elements that were compared, how many differ, and the first of them.

    `apart`, `size`: sums of squares of what copies differ by and of what they should be, where any differ.
    """

    numel: int = 0
    count: int = 0
    first: int = 0
    detail: str = ""
    apart: float = 0.0
    size: float = 0.0

    def __add__(self, other: Unequal) -> Unequal:
        """Return the comparison of both."""
        first = min((one for one in (self, other) if one.count), key=lambda one: one.first, default=self)
        sums = self.apart + other.apart, self.size + other.size
        return Unequal(self.numel + other.numel, self.count + other.count, first.first, first.detail, *sums)


def not_rounded(master: Array, weight: Array, dtype: str, first: int) -> Unequal:
    """Compare weights with their masters, rounded; NaN and Inf are other findings."""
    where = weights.not_rounded(master, weight)
    kept = np.isfinite(master[where].astype(np.float32))
    odd = not_finite(weight[where], dtype)
    where = where[kept if odd is None else kept & ~odd]
    if not len(where):
        return Unequal(len(master))
    at = int(where[0])
    rounded = float(cast(master[at : at + 1], dtype)[0])
    detail = f"{float(weight[at])!r}, but the master rounds to {rounded!r}, at element {first + at}"
    return Unequal(len(master), len(where), first + at, detail)


def not_copied(copy: Array, original: Array, first: int) -> Unequal:
    """Compare a copy with what it was made of: bit for bit, after rounding where it has another type."""
    if copy.dtype == original.dtype:
        where = np.flatnonzero(unequal_bits(copy, original))
    else:
        where = weights.not_rounded(original.astype(copy.dtype) if original.dtype.kind in "biu" else original, copy)
    if not len(where):
        return Unequal(len(copy))
    apart = size = 0.0
    if copy.dtype.kind != "c":
        with np.errstate(all="ignore"):
            mine, its = (one.astype(np.float64) for one in (copy, original))
            apart, size = float(np.square(mine - its).sum()), float(np.square(its).sum())
    return Unequal(len(copy), len(where), first + int(where[0]), apart=apart, size=size)


Batch = tuple[Work, ...]

Pair = tuple[Subject, str, str, Sum | None, Sum | None]
"""Of a comparison: the subject, the file of the masters and that of the weights, and their checksums."""


@mutable
class Outcome:
    """What was found."""

    nbytes: int = 0  # read for that, of all together
    tallies: dict[tuple[Subject, Sum | None], Tally] = field(default_factory=lambda: defaultdict(Tally))
    compared: dict[Pair, Unequal] = field(default_factory=lambda: defaultdict(Unequal))  # masters with their weights
    duplicates: dict[int, Unequal] = field(default_factory=lambda: defaultdict(Unequal))
    seen: list[Seen] = field(default_factory=list)  # bytes that have a checksum; not yet put together
    errors: list[SourceError] = field(default_factory=list)
    elements: int = 0  # looked at
    checksums: int = 0  # compared

    def add(self, other: Outcome) -> None:
        """Add what a task has found."""
        for what in ("tallies", "compared", "duplicates"):
            mine = getattr(self, what)
            for key, one in getattr(other, what).items():
                mine[key] += one
        self.errors += other.errors
        self.elements += other.elements

    def look(self, piece: Piece, checksum: Sum | None, values: Array) -> None:
        """Add what is wrong with the elements of a piece."""
        wrong = tally(values, piece.dtype, piece.subject, piece.first)
        if piece.many is None:
            self.elements += piece.numel
            if wrong:
                self.tallies[piece.subject, checksum] += wrong
            return
        shares = piece.many.within(piece.first, piece.first + piece.numel)
        self.elements += int((shares[:, 2] - shares[:, 1]).sum())
        for index, begin, end, first in shares.tolist() if wrong else ():
            some = values[begin - piece.first : end - piece.first]
            if its := tally(some, piece.dtype, piece.subject, first):
                self.tallies[piece.many.subjects[index], checksum] += its


def run(
    inventory: Inventory, checks: Checks, paths: Sequence[str], *, memory: int, reporter: Reporter | None, direct: bool
) -> tuple[Outcome, dict[Sum, int]]:
    """Read files and return what was found, and the CRC-32 of each record whose bytes are not those written.

    `direct`: past the page cache.
    """
    threads = threads_for(paths, direct=direct)
    share = budget(memory, threads, buffers=BUFFERS_PER_WORKER + BUFFERS_OF_DIRECT * direct, most=BLOCK_NBYTES)
    work: list[Work] = [*blocks(inventory, checks, paths, share.nbytes), *inventory.apart]
    outcome = Outcome(nbytes_of(work))
    portions: Portions[Batch] = Portions(
        outcome.nbytes, nbytes_of, lambda batch: (path for one in batch for path in one.paths)
    )
    look = partial(_run_batch, share.nbytes, [], share.nbytes if direct else 0)
    with (
        reporting(reporter, outcome.nbytes) as progress,
        Workers(threads, at_once=share.at_once) as workers,
        closing(workers.run(look, batched(work, attrgetter("nbytes")), portions)) as results,
    ):
        for batch, found in results:
            outcome.add(found)
            checks.add(found.seen)
            progress.advance(nbytes_of(batch))
    empty = [(one, crc32(b"")) for some in checks.sums.values() for one in some if not one.nbytes]
    outcome.checksums = checks.count + len(empty)
    return outcome, {one: crc for one, crc in [*checks.wrong, *empty] if crc != one.crc32}


Rooms = tuple[memoryview, memoryview]
"""Memory for a block and for its partners."""


def _run_batch(most: int, spare: list[Rooms], direct: int, batch: Batch) -> Outcome:
    """Look at some work. `spare` has what no batch uses at the moment; `direct` is as for `Sources`."""
    found = Outcome()
    with Sources(direct) as sources:
        try:
            rooms = spare.pop()
        except IndexError:
            rooms = sources.room(most), sources.room(2 * most)
        for work in batch:
            try:
                if isinstance(work, Block):
                    _look_at_block(found, work, rooms, sources)
                else:
                    _look_at_scattered(found, work, most, sources)
            except LayoutError:
                continue  # elements are missing, which is a finding of the structure
            except SourceError as error:
                if not isinstance(error, UnsupportedError):  # types that cannot be compared
                    found.errors.append(error)
    spare.append(rooms)
    return found


def _look_at_block(found: Outcome, block: Block, rooms: Rooms, sources: Sources) -> None:
    """Look at bytes of a file, and read, look at, and hold against them, the weights of masters among them."""

    def read(path: str, offset: int, nbytes: int, checksum: Sum | None, room: memoryview, base: int) -> Array:
        """Return bytes, read behind `base` bytes of memory, or as far behind a page as they are in the file."""
        view, _ = sources.window(path, offset, room[base : base + nbytes], room)
        data = np.frombuffer(view, np.uint8)
        if checksum is not None:
            found.seen.append(Seen(path, offset, nbytes, crc32(data.data)))
        return data

    before = (block.pieces[0].offset - block.offset) % ALIGNMENT if block.pieces else 0
    base = (ALIGNMENT - before) % ALIGNMENT  # so that the first piece begins where elements may
    data = read(block.path, block.offset, block.size, block.checksum, rooms[0], base)
    for piece in block.pieces:
        low = piece.offset - block.offset
        values = typed(data[low : low + piece.nbytes], piece.dtype, piece.byteorder)
        found.look(piece, block.checksum, values)
        its = piece.partner
        if its is None:
            continue
        weights = typed(read(its.path, its.offset, its.nbytes, its.checksum, rooms[1], 0), its.dtype, its.byteorder)
        found.look(its, its.checksum, weights)
        pair = (piece.subject, block.path, its.path, block.checksum, its.checksum)
        found.compared[pair] += not_rounded(values, weights, its.dtype, piece.first)


def _look_at_scattered(found: Outcome, work: Scattered, most: int, sources: Sources) -> None:
    whole = work.extent
    indexes = [SpanIndex(slot) for slot in work.slots]
    step = max(most // max(itemsize(slot.dtype) for slot in work.slots), 1)
    for start in range(0, whole.numel, step):
        extent = Extent(whole.offsets, whole.sizes, whole.start + start, min(step, whole.numel - start))
        slots = [index.reaching(extent) for index in indexes]
        values, *others = (read_extent(slot, extent, sources) for slot in slots)
        if not others:
            found.elements += extent.numel
            if wrong := tally(values, slots[0].dtype, work.subject, extent.start):
                found.tallies[work.subject, None] += wrong
        elif work.duplicate is not None:
            found.duplicates[work.duplicate] += not_copied(values, others[0], extent.start)
        else:
            pair = (work.subject, slots[0].spans[0].path, slots[1].spans[0].path, None, None)
            found.compared[pair] += not_rounded(values, others[0], slots[1].dtype, extent.start)


MOST = 0.75
"""Share of a file's parameters that differ in a file of another step or run: all but those that were not trained."""

FEWEST = 3
"""Compared parameters of a file below which nothing is concluded from how many differ."""


COUNTED = {PADDING: ("nonzero",), NEGATIVE: ("negative",), BUFFER_NAN: ("nan",), NOT_FINITE: ("nan", "inf")}
"""What of a tally a finding counts."""

_OF_KINDS = {PADDED: PADDING, BUFFER: BUFFER_NAN}


def weight_findings(compared: Iterable[Comparison]) -> Iterator[Finding]:
    """Yield a finding for each file in which masters do not round to their weights."""
    by_file = by_key((one.path, one) for one in compared)
    counts = {path: len({one.parameter for one in some}) for path, some in by_file.items()}
    wrong = {path: [one for one in some if one.num_different] for path, some in by_file.items()}
    names = {path: tuple(dict.fromkeys(one.parameter for one in found)) for path, found in wrong.items()}
    foreign = [path for path, count in counts.items() if count >= FEWEST and len(names[path]) >= MOST * count]
    if foreign and len(foreign) == len(by_file):
        every = tuple(dict.fromkeys(name for path in foreign for name in names[path]))
        first = wrong[foreign[0]][0]
        yield Finding(
            OTHER_RUN,
            f"the weights of this file are not the masters of the optimizer's {len(foreign)} files, rounded: "
            f"{len(every)} parameters differ",
            first.weight_path,
            every,
            "a model and an optimizer of one step",
            first.detail,
            ranks=(),
        )
        return
    for path, found in wrong.items():
        if not found:
            continue
        first, its = found[0], names[path]
        if path in foreign:
            what = f"masters of {len(its)} of {counts[path]} parameters do not round to their weights"
            yield Finding(OTHER_RUN, what, path, its, "a file of this step and run", first.detail)
            continue
        count, total = sum(one.num_different for one in found), sum(one.numel for one in found)
        what = f"{listed(its)}: {count} of {total} elements of the weight are not the master, rounded"
        advice = f"one of the two is damaged, here or in {first.weight_path}"
        yield Finding(WEIGHT_MISMATCH, what, path, its, None, first.detail, advice)


def damage_findings(
    outcome: Outcome, inventory: Inventory, wrong: Mapping[Sum, int], checkpoint: Checkpoint | None
) -> Iterator[Finding]:
    """Yield findings about checksums, elements, weights and copies.

    `wrong`: damaged records, each with the CRC-32 of what is there; no checkpoint: it could not be opened.
    """
    suspects: dict[Sum | None, set[str]] = {}  # by damaged record, in whose elements something is wrong
    for subject, checksum in outcome.tallies:
        if checksum in wrong:
            suspects.setdefault(checksum, set()).add(subject.name)
    compared = []
    for (subject, path, weight_path, *checksums), unequal in outcome.compared.items():
        damaged = [one for one in checksums if one in wrong]
        for checksum in damaged if unequal.count else ():
            suspects.setdefault(checksum, set()).add(subject.name)
        if not damaged:
            compared.append(Comparison(subject.name, path, weight_path, unequal.numel, unequal.count, unequal.detail))
    of_span = records_of(wrong)
    yield from _damaged(wrong, suspects, checkpoint, of_span)
    yield from _elements(outcome, inventory, wrong)
    yield from weight_findings(compared)
    yield from _copies(outcome, [] if checkpoint is None else checkpoint.duplicates, of_span)


Records = Callable[[Span], Iterator[Sum]]
"""Yields those of some records that a span has bytes in."""


def records_of(some: Iterable[Sum]) -> Records:
    """Return what yields those of some records that a span has bytes in, without looking at each of them."""
    by_path = by_key((one.path, one) for one in sorted(some, key=attrgetter("offset")))
    ends = {path: [*accumulate((one.offset + one.nbytes for one in its), max)] for path, its in by_path.items()}

    def of_span(span: Span) -> Iterator[Sum]:
        begin, end = span.reach
        its = by_path.get(span.path, [])
        for at in range(bisect_right(ends.get(span.path, ()), begin), len(its)):
            one = its[at]
            if one.offset >= end:
                return
            if one.offset + one.nbytes > begin:
                yield one

    return of_span


def _damaged(
    wrong: Mapping[Sum, int],
    suspects: Mapping[Sum | None, set[str]],
    checkpoint: Checkpoint | None,
    of_span: Records,
) -> Iterator[Finding]:
    """Yield a finding for each damaged record, with the parameters and buffers that have elements in it."""
    paths = {one.path for one in wrong}
    held = by_key(
        (one, (parameter.name, key))
        for parameter in (checkpoint.holders() if checkpoint is not None and wrong else ())
        for key, slot in parameter.slots.items()
        for span in _spans(slot, paths)
        for one in of_span(span)
    )
    for one, crc in sorted(wrong.items(), key=lambda item: (item[0].path, item[0].offset)):
        inside: dict[str, str] = {}
        for name, key in held.get(one, ()):
            inside.setdefault(name, key)
        names = [name for name in inside if name in suspects.get(one, ())] or list(inside)
        what = f": {', '.join(dict.fromkeys(inside[name] for name in names))} of {listed(names)}" if names else ""
        yield Finding(
            CHECKSUM,
            f"{one.name} is damaged{what}",
            one.path,
            tuple(names),
            f"CRC-32 {one.crc32:08x}",
            f"{crc:08x}",
        )


def _spans(slot: Slot, paths: Collection[str] | None = None) -> list[Span]:
    """Return the spans of a slot that hold any elements: all, or those in some files."""
    return [
        span
        for spans in slot.sets
        for span in (spans.within(paths) if paths is not None and isinstance(spans, Spans) else spans)
        if span.extent.numel and (paths is None or span.path in paths)
    ]


def _elements(outcome: Outcome, inventory: Inventory, wrong: Collection[Sum | None]) -> Iterator[Finding]:
    """Yield a finding for each file and slot in which elements are not what they can be."""
    unsummed = {subject for subject, checksum in outcome.tallies if checksum is None}
    files: dict[Subject, str] = {}
    for where in sorted(inventory.pieces) if unsummed else ():
        for one in inventory.pieces[where]:
            many = one.many
            if many is None or unsummed.isdisjoint(many.subjects):
                files.setdefault(one.subject, where)
                continue
            for index, *_ in many.within(one.first, one.first + one.numel).tolist():
                files.setdefault(many.subjects[index], where)
    groups = by_key(
        ((code, subject.slot, files.get(subject) if checksum is None else checksum.path), (subject.name, tally))
        for (subject, checksum), tally in sorted(outcome.tallies.items(), key=lambda item: item[0][0])
        if checksum not in wrong
        for code in (_OF_KINDS.get(subject.kind, NOT_FINITE), NEGATIVE)
        if any(getattr(tally, one) for one in COUNTED[code])
    )
    for (code, slot, path), found in groups.items():
        names = tuple(dict.fromkeys(name for name, _ in found if name))
        tallies = [tally for _, tally in found]
        counts = [sum(getattr(tally, one) for one in COUNTED[code]) for tally in tallies]
        total, of = sum(counts), f"{slot} of {listed(names)}"
        unit, expected = "element", "none"
        if code == PADDING:
            unit, expected, what = "byte", "zeros", f"padding of {slot}: {total} bytes are not zero"
        elif code == NEGATIVE:
            what = f"{of}: {total} negative {'element' if total == 1 else 'elements'}"
        else:
            kinds = ((sum(getattr(tally, kind.lower()) for tally in tallies), kind) for kind in ("NaN", "Inf"))
            what = f"{of}: {' and '.join(f'{n} {kind}' for n, kind in kinds if n)}"
        if len(names) > 1:
            each = [f"{name} {count}" for (name, _), count in zip(found, counts, strict=True)]
            said = "; ".join(each[:8]) + (" ..." if len(each) > 8 else "")
        else:
            said = f"{total}, first at {unit} {tallies[0].first}"
        yield Finding(code, what, path, names, expected, said)


def _copies(outcome: Outcome, duplicates: Sequence[Duplicate], of_span: Records) -> Iterator[Finding]:
    codes = {
        "tied": TIED_DIFFER,
        "parameter": REPLICAS_DIFFER,
        "layer": STAGES_DIFFER,
        "buffer": BUFFERS_DIFFER,
    }
    for number, unequal in sorted(outcome.duplicates.items()):
        one = duplicates[number]
        spans = [*_spans(one.slot), *_spans(one.original)]
        if not unequal.count or any(True for span in spans for _ in of_span(span)):
            continue
        path, original = one.slot.spans[0].path, one.original.spans[0].path
        is_rounding = unequal.apart <= unequal.size / 4  # of many steps, too; two others differ by double their size
        names = (one.name,) if one.name == one.of else (one.of, one.name)
        of = f" and {one.of}" if one.name != one.of else f" here and in {original}" if original != path else ""
        yield Finding(
            codes[one.kind if one.kind != "layer" or is_rounding else "parameter"],
            f"{one.slot.name} of {one.name}{of}: {unequal.count} of {one.slot.numel} elements differ",
            path,
            names,
            "equal bytes" if one.slot.dtype == one.original.dtype else f"its {one.original.name} as {one.slot.dtype}",
            f"first at element {unequal.first}",
            ranks=() if one.rank is None else (one.rank,),
        )
