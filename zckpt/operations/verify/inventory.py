"""What a checkpoint holds, by where it lies: pieces of elements in files. Pure.

    file      | record .............................. | record ...
                piece | piece | padding | piece                         each piece is looked at
                            `-- partner: the weight of a master, in another file, which is read with it

A weight that its masters cover is the partner of their pieces and read with them only: its bytes count for the checksum
of its own record, and are left out of the blocks of its own file. Every byte that has a checksum or an element is in
one block:

    block     [ piece | piece | padding | piece ][ piece ...  ]           one read, one CRC-32, each piece looked at
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zckpt.compare.weights import comparable, steps_weights
from zckpt.engine.checking import Checks, Sum
from zckpt.engine.scan import stored_once
from zckpt.immutable import immutable, mutable
from zckpt.state import (
    MASTER,
    WEIGHT,
    ZEROS,
    Checkpoint,
    CutFiles,
    CutSpans,
    Extent,
    Parameter,
    Slot,
    Span,
    Spans,
    by_key,
    itemsize,
    nbytes_of,
)
from zckpt.state.boxes import Box, Range, merge, row_major, without
from zckpt.state.cuts import Cuts

PARAMETER, BUFFER, PADDED = "parameter", "buffer", "padding"


class Subject(NamedTuple):
    """What elements belong to: a slot of a parameter or buffer, or padding of a slot (then `name` is empty)."""

    number: int
    kind: str
    name: str
    slot: str


@immutable
class Many:
    """Subjects of one kind and slot that are cut alike: a file has them as one piece."""

    subjects: tuple[Subject, ...]
    cuts: Cuts
    file: int

    def within(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Return what elements [low, high) of the file's tensor are: rows of index, begin, end, which of its own."""
        return self.cuts.within(self.file, low, high)


@immutable
class Piece:
    """Elements that lie end to end; `first` is the index of the first in the flattened box.

    They are of one subject; or of `many`, of which this is one, and `first` is that in the tensor of the file. Of
    masters, `partner` is their weights, in the same order, with the checksum that covers these.
    """

    subject: Subject
    path: str
    offset: int
    numel: int
    dtype: str
    byteorder: str
    first: int
    partner: Piece | None = None
    many: Many | None = None
    checksum: Sum | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * itemsize(self.dtype)

    @property
    def end(self) -> int:
        """Byte after the last."""
        return self.offset + self.nbytes

    def part(self, skipped: int, numel: int) -> Piece:
        """Return some of its elements."""
        return replace(
            self,
            offset=self.offset + skipped * itemsize(self.dtype),
            numel=numel,
            first=self.first + skipped,
            partner=None if self.partner is None else self.partner.part(skipped, numel),
        )

    def within(self, low: int, high: int) -> Piece:
        """Return what of the piece lies in bytes [low, high), which begin and end with an element."""
        size = itemsize(self.dtype)
        skipped = (max(low, self.offset) - self.offset) // size
        return self.part(skipped, (min(high, self.end) - self.offset) // size - skipped)


@immutable
class Scattered:
    """Elements that do not lie end to end, or are held against others in another order: read through the planner."""

    subject: Subject
    slots: tuple[Slot, ...]
    """One, whose elements are only looked at; or two, of which the second is held against the first."""
    extent: Extent  # all of them
    duplicate: int | None = None  # index of the duplicate that they are; None: of two, they are a master and its weight

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.extent.numel * sum(itemsize(slot.dtype) for slot in self.slots)

    @property
    def paths(self) -> Iterator[str]:
        """The files that are read."""
        return (span.path for slot in self.slots for spans in slot.sets for span in spans)


@mutable
class Inventory:
    """All that is to be looked at."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)  # by file
    claimed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Bytes of each file that are read with others, sorted."""
    apart: list[Scattered] = field(default_factory=list)


def take_inventory(checkpoint: Checkpoint, checks: Checks) -> Inventory:
    """Return all elements of a checkpoint: pieces that lie end to end, and what does not."""
    found, numbers = Inventory(), count()
    kinds = [(PARAMETER, p) for p in checkpoint.all_parameters]
    kinds += [(BUFFER, p) for p in checkpoint.buffers.values()]
    rounded = not steps_weights(checkpoint)
    free = _free_weights([p for _, p in kinds]) if rounded else {}
    rules = _Rules()
    seen: set[tuple[str, int, int, str, tuple[str, ...]]] = set()
    for kind, parameter in kinds:
        held = rounded and _is_compared(parameter)
        partners = _partners(parameter, free) if held else None
        for key in sorted(parameter.slots, key=lambda key: (key != WEIGHT, key != MASTER)):  # a partner comes first
            slot, subject = parameter.slots[key], Subject(next(numbers), kind, parameter.name, key)
            if key == MASTER and partners is None and held:
                both = stored_once([slot, parameter.slots[WEIGHT]])
                found.apart.append(Scattered(subject, both, both[0].whole))
            if not (partners and key in (WEIGHT, MASTER)) and rules.take(subject, slot):
                continue
            (slot,) = stored_once([slot])
            for span in [_dense(span) for spans in slot.sets for span in spans]:
                stored = (span.path, span.offset, span.extent.numel, span.dtype, span.unresolved)
                if stored in seen or not span.extent.numel or span.path == ZEROS:
                    continue
                seen.add(stored)
                if not span.is_contiguous:
                    found.apart.append(Scattered(subject, (replace(slot, spans=(span,), replicas=()),), span.extent))
                    continue
                piece = _piece(span, subject)
                if key == WEIGHT and partners is not None:
                    found.claimed.setdefault(span.path, []).append((piece.offset, piece.end))
                    continue
                if key == MASTER and partners:
                    weights = _piece(partners[span.extent.offsets, span.extent.sizes], subject._replace(slot=WEIGHT))
                    checksum = checks.at(weights.path, weights.offset)
                    weights = replace(weights.part(span.extent.start, span.extent.numel), checksum=checksum)
                    piece = replace(piece, partner=weights)
                found.pieces.setdefault(span.path, []).append(piece)
    rules.put(found.pieces)
    for one in (one for padding in checkpoint.padding for one in padding.zeros):
        subject = Subject(next(numbers), PADDED, "", one.slot)
        piece = Piece(subject, one.path, one.offset, one.nbytes, "uint8", "little", 0)
        found.pieces.setdefault(one.path, []).append(piece)
    for number, duplicate in enumerate(checkpoint.duplicates):
        subject = Subject(next(numbers), PARAMETER, duplicate.name, duplicate.slot.name)
        both = stored_once([duplicate.slot, duplicate.original])
        found.apart.append(Scattered(subject, both, both[0].whole, number))
    return found


def _piece(span: Span, subject: Subject) -> Piece:
    return Piece(subject, span.path, span.offset, span.extent.numel, span.dtype, span.byteorder, span.extent.start)


class _Rules:
    """Slots that rules cut: those of one kind, name and files together."""

    def __init__(self) -> None:
        self._numbers: dict[CutFiles, int] = {}
        self._files: dict[int, tuple[CutFiles, int]] = {}  # to compare each of them once
        self._placed: set[tuple[int, ...]] = set()
        self._found: dict[tuple[int, str, str], list[tuple[Subject, CutSpans]]] = {}

    def take(self, subject: Subject, slot: Slot) -> bool:
        """Tell whether a rule cuts a slot, and take it then, unless another has the same elements."""
        rule = slot.spans
        if not isinstance(rule, CutSpans) or slot.replicas:
            return False
        if id(rule.files) not in self._files:
            self._files[id(rule.files)] = rule.files, self._numbers.setdefault(rule.files, len(self._numbers))
        _, number = self._files[id(rule.files)]
        place = number, rule.origin, rule.width, rule.at, rule.numel
        if rule.numel and place not in self._placed:
            self._placed.add(place)
            self._found.setdefault((number, subject.kind, slot.name), []).append((subject, rule))
        return True

    def put(self, pieces: dict[str, list[Piece]]) -> None:
        """Add what each file has of them: one piece, if only those of one kind and name lie there."""
        numbers = [number for number, _, _ in self._found]
        for (number, _, _), some in self._found.items():
            first, files = some[0][0], some[0][1].files
            cuts, subjects = Cuts([rule for _, rule in some]), tuple(subject for subject, _ in some)
            for file, (path, offset) in enumerate(zip(files.paths, files.offsets, strict=True)):
                many = Many(subjects, cuts, file)
                ranges = cuts.of(file).tolist()
                for low, high in [(ranges[0][0], ranges[-1][1])] if ranges and numbers.count(number) == 1 else ranges:
                    at = offset + low * itemsize(files.dtype)
                    piece = Piece(first, path, at, high - low, files.dtype, files.byteorder, low, None, many)
                    pieces.setdefault(path, []).append(piece)


def _dense(span: Span) -> Span:
    """Return a span without strides where its elements lie end to end all the same."""
    if span.strides is None:
        return span
    steps = row_major(span.extent.sizes)
    same = all(own == step or size == 1 for own, step, size in zip(span.strides, steps, span.extent.sizes, strict=True))
    return replace(span, strides=None) if same else span


def _is_compared(parameter: Parameter) -> bool:
    return comparable(parameter) and parameter.slots[MASTER].spans != parameter.slots[WEIGHT].spans


Free = dict[str, list[tuple[int, int]]]
"""By file, the bytes that slots use, sorted."""


def _free_weights(parameters: Sequence[Parameter]) -> Free:
    """Return all bytes that spans use, where weights are: one that shares some is not read with its master only."""
    paths = {span.path for p in parameters if _is_compared(p) for span in p.slots[WEIGHT].spans}
    used = by_key(
        (span.path, span.reach)
        for parameter in parameters
        for slot in parameter.slots.values()
        for span in map(_dense, slot.spans.within(paths) if isinstance(slot.spans, Spans) else slot.spans)
        if span.extent.numel and span.is_contiguous
    )
    for ranges in used.values():
        ranges.sort()
    return used


def _partners(parameter: Parameter, used: Free) -> dict[Box, Span] | None:
    """Return the spans of a weight by their box, if each is one piece that masters of the same box cover in order."""
    weight, master = parameter.slots[WEIGHT], parameter.slots[MASTER]
    boxes: dict[Box, Span] = {}
    covered: dict[Box, int] = {}
    for span in map(_dense, weight.spans):
        whole = Extent(span.extent.offsets, span.extent.sizes, 0, math.prod(span.extent.sizes))
        box = (span.extent.offsets, span.extent.sizes)
        if not span.is_contiguous or span.extent != whole or box in boxes:
            return None
        ranges = used[span.path]
        at = bisect_right(ranges, span.reach)
        before, after = ranges[max(at - 2, 0) : at - 1], ranges[at : at + 1]
        if any(high > span.offset for _, high in before) or any(low < span.reach[1] for low, _ in after):
            return None
        boxes[box], covered[box] = span, 0
    for span in map(_dense, master.spans):
        box = (span.extent.offsets, span.extent.sizes)
        if not span.is_contiguous or (span.extent.numel and box not in boxes):
            return None
        covered[box] = covered.get(box, 0) + span.extent.numel
    exact = all(covered[box] == span.extent.numel for box, span in boxes.items())
    return boxes if exact and not weight.replicas else None


# --- the blocks in which it is read


@immutable
class Block:
    """Bytes that are read at once, `size` of them from `offset` on, and the pieces in them."""

    path: str
    offset: int
    size: int
    checksum: Sum | None
    pieces: tuple[Piece, ...] = ()

    @property
    def _partners(self) -> Iterator[Piece]:
        return (piece.partner for piece in self.pieces if piece.partner is not None)

    @property
    def nbytes(self) -> int:
        """Bytes that are read, those of partners too."""
        return self.size + nbytes_of(self._partners)

    @property
    def paths(self) -> Iterator[str]:
        """The files that are read."""
        yield self.path
        yield from (one.path for one in self._partners)


Work = Block | Scattered


def blocks(inventory: Inventory, checks: Checks, paths: Sequence[str], most: int) -> Iterator[Block]:
    """Yield the blocks, of at most so many bytes, of all files."""
    for path in paths:
        pieces: list[Piece] = []
        overlapping: list[Piece] = []
        end = 0
        for piece in sorted(inventory.pieces.get(path, ()), key=lambda piece: piece.offset):
            (overlapping if piece.offset < end else pieces).append(piece)
            end = max(end, piece.end)
        claimed = merge(inventory.claimed.get(path, []))
        summed = [
            rest
            for one in checks.sums.get(path, ())
            for rest in without([(one.offset, one.offset + one.nbytes)], claimed)
        ]
        others = without(merge((piece.offset, piece.end) for piece in pieces), summed)
        yield from _cut(path, sorted(summed + others), pieces, most, checks)
        for piece in overlapping:
            yield from _cut(path, [(piece.offset, piece.end)], [piece], most)


def _cut(
    path: str, ranges: Iterable[Range], pieces: Sequence[Piece], most: int, checks: Checks | None = None
) -> Iterator[Block]:
    at = 0
    for low, high in ranges:
        checksum = None if checks is None else checks.at(path, low)
        begin = low
        while begin < high:
            end = min(begin + most, high)
            while at < len(pieces) and pieces[at].end <= begin:
                at += 1
            inside, here = [], at
            while here < len(pieces) and pieces[here].offset < end:
                piece = pieces[here]
                if piece.end > end:  # begin and end with an element
                    size = itemsize(piece.dtype)
                    end = piece.offset + (end - piece.offset) // size * size
                if piece.offset < end:
                    inside.append(piece.within(begin, end))
                here += 1
            yield Block(path, begin, end - begin, checksum, tuple(inside))
            begin = end
