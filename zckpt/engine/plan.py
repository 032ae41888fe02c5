"""What is to be written, and the copies that write it. Pure: no I/O, no format.

    TargetFile = literals (headers, pickles, JSON) + holes (an extent of a slot, and their type)
    plan       = for each hole, the copies that fill it, every element exactly once

A copy moves an n-dimensional box of elements between two strided byte layouts; adjacent dimensions are
merged wherever both sides allow, so that what is contiguous on both sides is one dimension.

A `Cut` is what a rule cuts finely: a few elements in each of many files, which is worth reading with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import field, replace
from itertools import pairwise
from operator import sub

from zckpt.engine.computed import Computed, range_of
from zckpt.engine.targets import Hole, Lazily, TargetFile
from zckpt.errors import LayoutError
from zckpt.immutable import immutable
from zckpt.state import ZEROS, CutSpans, Extent, Shape, Slot, Span, differ, itemsize, nbytes_of
from zckpt.state.boxes import (
    Box,
    Located,
    SpanIndexes,
    boxes_of,
    factored,
    factors_by_axis,
    intersection,
    locate,
    overlap,
)
from zckpt.state.spans import LOST, position

FEWEST_FILES = 4
"""What is in fewer files is read by itself."""

MOST_NBYTES = 1 << 14
"""Of what a file has: more is read by itself, too."""


@immutable
class Cut:
    """Elements [start, start + numel) of a flattened tensor, and at which byte of some memory they are to be."""

    spans: CutSpans
    start: int
    numel: int
    position: int = 0

    @property
    def end(self) -> int:
        """The byte of that memory behind them."""
        return self.position + self.numel * itemsize(self.spans.files.dtype)

    def paths(self) -> tuple[str, ...]:
        """Return the files that have them."""
        first, end = self.spans.files_of(self.start, self.start + self.numel)
        return self.spans.files.paths[first:end]


def fine_cut(slot: Slot, extent: Extent) -> CutSpans | None:
    """Return the rule by which an extent of a slot is cut, if that is so and nothing else is to be done to it."""
    rule = slot.spans
    if (
        isinstance(rule, CutSpans)
        and type(slot) is Slot
        and not slot.replicas
        and rule.shape == slot.shape == extent.sizes
        and rule.files.byteorder == "little"
        and rule.width * itemsize(rule.files.dtype) <= MOST_NBYTES
    ):
        first, end = rule.files_of(extent.start, extent.start + extent.numel)
        return rule if end - first >= FEWEST_FILES else None
    return None


WIDENED = frozenset(
    {(a, b) for a in ("bfloat16", "float16") for b in ("float32", "float64")} | {("float32", "float64")}
)
"""Casts that change no value, and need no rule."""

KEPT_NBYTES = 1 << 21
"""Of plans that are kept, where all of a target are within it: what comes again is computed again."""

COPY_NBYTES = 1 << 9
"""What a copy takes, about."""


@immutable
class Strided:
    """Where a box of elements lies in a file: byte offset of its first one, bytes to the next one by dimension."""

    path: str
    offset: int
    strides: Shape


@immutable
class Copy:
    """Move a box of `shape` elements from `sources` to byte `offset` of a target file."""

    shape: Shape  # elements
    sources: tuple[Strided, ...]  # one; or several whose values are averaged
    source_dtype: str
    target_dtype: str
    byteorder: str
    """{"little", "big"}; of the source. Targets are little-endian."""
    offset: int  # bytes
    strides: Shape  # bytes; in the target
    unresolved: tuple[str, ...] = ()  # {"conj", "neg"}; what is to be done to the elements on the way

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes written."""
        return self.numel * itemsize(self.target_dtype)

    @property
    def source_nbytes(self) -> int:
        """Number of bytes that its elements are in each source."""
        return self.numel * itemsize(self.source_dtype)

    @property
    def change(self) -> tuple[object, ...]:
        """What is done to each element."""
        return self.source_dtype, self.target_dtype, self.byteorder, self.unresolved

    @property
    def is_linear(self) -> bool:
        """Whether the elements lie end to end on both sides, and come from one file."""
        return (
            len(self.sources) == 1
            and self.strides == (itemsize(self.target_dtype),)
            and self.sources[0].strides == (itemsize(self.source_dtype),)
            and self.sources[0].path != ZEROS
        )

    @property
    def is_plain(self) -> bool:
        """Whether both sides lie end to end, and each element becomes the same number of a wider type."""
        return (
            self.is_linear
            and not self.unresolved
            and self.byteorder == "little"
            and (self.source_dtype, self.target_dtype) in WIDENED
        )

    @property
    def is_bytewise(self) -> bool:
        """Whether both sides are the same bytes, end to end."""
        return (
            self.source_dtype == self.target_dtype
            and not self.unresolved
            and (self.byteorder == "little" or itemsize(self.source_dtype) == 1)
            and self.is_linear
        )


@immutable
class Piece:
    """Contiguous bytes of a target file, and the copies that fill them.

    `copies`: one; several where they are interleaved; `label`: what is to be written here, for messages.
    """

    offset: int
    nbytes: int
    copies: tuple[Copy, ...]
    label: str = field(default="", kw_only=True)

    @property
    def moved_nbytes(self) -> int:
        """Bytes of tensors in it: all of it."""
        return self.nbytes

    @property
    def is_bytewise(self) -> bool:
        """Whether the bytes are moved as they are."""
        return len(self.copies) == 1 and self.copies[0].is_bytewise

    def paths(self) -> list[str]:
        """Return the files that it comes from."""
        return [source.path for copy in self.copies for source in copy.sources if source.path != ZEROS]


@immutable
class Fill:
    """A hole and the copies that fill it, every element exactly once; or those that what computes it needs.

    Those of what a rule cuts finely are listed again whenever they are asked for; whoever can, reads by the rule.
    """

    hole: Hole
    copies: tuple[Copy, ...] | Lazily[Copy]

    @property
    def cut(self) -> Cut | None:
        """The elements by their rule, if that cuts them finely."""
        if isinstance(self.copies, tuple) or not isinstance(self.hole.slot.spans, CutSpans):
            return None
        return Cut(self.hole.slot.spans, self.hole.extent.start, self.hole.extent.numel)


@immutable
class FilePlan:
    """A target file and how its holes are filled."""

    file: TargetFile
    fills: tuple[Fill, ...]


@immutable
class Plan:
    """All copies of an operation, complete and without overlap."""

    files: Collection[FilePlan]
    """Those of thousands of ranks are not kept: each is planned in every iteration. Those of a few are, until they are
    written and there is a proof to come, which gets their memory.
    """
    names: tuple[str, ...]  # of the files
    sources: frozenset[str]  # files that are read
    read_nbytes: int  # bytes of tensors that will be read, and written
    copy_nbytes: int
    write_nbytes: int  # bytes of all target files
    computed_nbytes: int  # bytes that functions compute


def plan(files: Iterable[TargetFile], note: Callable[[FilePlan], object] | None = None) -> Plan:
    """Meet every hole with the spans that cover it.

    `files`: of files that come `Lazily`, so do the plans, unless all of them together are within `KEPT_NBYTES`;
    `note`: is shown each plan once, for who would make them all again. Raises LayoutError: some element of a hole is
    covered by no span, or by more than one.
    """
    if not isinstance(files, Lazily):
        return _summed(list(_planned(files)), note)
    few: list[FilePlan] = []
    room = KEPT_NBYTES

    def noted() -> Iterator[FilePlan]:
        nonlocal room
        for one in _planned(files):
            room -= COPY_NBYTES * sum(len(each.copies) for each in one.fills)
            room -= nbytes_of(one.file.literals)
            few.append(one)
            if room < 0 or one.file.packs:
                few.clear()
                room = -1
            yield one

    found = _summed(Lazily(noted, len(files)), note)
    again = tuple(few) if len(few) == len(files) else Lazily(lambda: _planned(files), len(files))
    return replace(found, files=again)


def _planned(files: Iterable[TargetFile]) -> Iterator[FilePlan]:
    indexes = SpanIndexes()
    for file in files:
        yield FilePlan(file, tuple(_fill(hole, indexes) for hole in file.holes))


def _fill(hole: Hole, indexes: SpanIndexes) -> Fill:
    rule = fine_cut(hole.slot, hole.extent)
    if rule is None:
        return Fill(hole, tuple(fill(hole, indexes)))
    first, end = rule.files_of(hole.extent.start, hole.extent.start + hole.extent.numel)
    return Fill(hole, Lazily(lambda: iter(fill(hole, indexes)), end - first))


def _summed(files: Collection[FilePlan], note: Callable[[FilePlan], object] | None) -> Plan:
    names, sources, read, copied, written, computed = [], set[str](), 0, 0, 0, 0
    for one in files:
        if note is not None:
            note(one)
        names.append(one.file.name)
        written += one.file.nbytes
        for each in one.fills:
            copied += each.hole.nbytes
            if isinstance(each.hole.slot, Computed):
                computed += each.hole.nbytes
            cut = each.cut
            if cut is not None:
                read += cut.end
                sources.update(cut.paths())
                continue
            for copy in each.copies:
                if copy.sources[0].path != ZEROS:
                    read += copy.source_nbytes * len(copy.sources)
                    sources.update(source.path for source in copy.sources)
        for pack in one.file.packs:
            read, copied = read + pack.moved_nbytes, copied + pack.moved_nbytes
            sources |= pack.paths()
    for lost in (path for path in sources if path.startswith(LOST)):
        raise LayoutError("it is lost, but some of its elements are needed", path=lost[len(LOST) :])
    return Plan(files, tuple(names), frozenset(sources), read, copied, written, computed)


def check_covered(slot: Slot, label: str = "") -> None:
    """Raise LayoutError unless each element of a slot is there once; spans of a rule are by construction."""
    if slot.replicas or not isinstance(slot.spans, CutSpans) or slot.spans.shape != slot.shape:
        fill(Hole(0, label or slot.name, slot, slot.whole, slot.dtype))


def fill(hole: Hole, indexes: SpanIndexes | None = None) -> list[Copy]:
    """Return the copies that fill one hole, each element exactly once; `indexes`: of many that are asked for.

    Raises LayoutError: some element is covered by no span, or by more than one.
    """
    if indexes is not None:
        hole = replace(hole, slot=indexes.reaching(hole.slot, hole.extent))
    if isinstance(hole.slot, Computed):
        inputs = hole.slot.function.inputs(*range_of(hole.slot, hole.extent))
        return [copy for one in inputs for copy in fill(Hole(0, hole.label, one.slot, one.extent, one.dtype))]
    copies = _fill_from(hole, hole.slot.spans)
    if not hole.slot.replicas:
        return copies
    sets = [copies] + [_fill_from(hole, spans) for spans in hole.slot.replicas]
    cut = [[(c.offset, c.shape, c.strides, c.change) for c in one] for one in sets]
    if differ(cut):
        raise LayoutError(f"{hole.label}: the tensors to be averaged are stored differently")
    return [replace(same[0], sources=tuple(c.sources[0] for c in same)) for same in zip(*sets, strict=True)]


def _fill_from(hole: Hole, spans: Sequence[Span]) -> list[Copy]:
    copies: list[Copy] = []
    boxes: list[Box] = []
    ranges: list[tuple[int, int]] = []
    want, factors, wanted = hole.extent, hole.slot.factors, list[Located]()
    for span in spans:
        have = span.extent
        if have.numel == 0:
            continue
        if span.strides is None and factors is None and have.offsets == want.offsets and have.sizes == want.sizes:
            low, high = max(have.start, want.start), min(have.start + have.numel, want.start + want.numel)
            if low < high:
                ranges.append((low, high))
                copies.append(_copy(hole, span, (high - low,), (low - have.start, low - want.start), ((1,), (1,))))
            continue
        wanted = wanted or list(_located(hole))
        for one in boxes_of(have):
            for box, first, steps in wanted:
                both = intersection(one, box)
                if both is not None:
                    boxes.append(both)
                    at, strides = locate(have, both, span.strides)
                    to = first + position(map(sub, both[0], box[0]), steps)
                    shape, *merged = _merge(both[1], strides, steps) if both[1] else ((1,), (1,), (1,))
                    copies.append(_copy(hole, span, shape, (at, to), (merged[0], merged[1])))
    _check_coverage(hole, copies, ranges, boxes)
    return copies


def _located(hole: Hole) -> Iterator[Located]:
    """Yield a hole as boxes of the shape of which the spans are, and where each lies in it."""
    by_axis = None if hole.slot.factors is None else factors_by_axis(hole.slot.shape, hole.slot.factors)
    for box in boxes_of(hole.extent):
        place = locate(hole.extent, box, None)
        if by_axis is None:
            yield box, *place
        else:
            yield from factored(box, *place, by_axis)


def _copy(hole: Hole, span: Span, shape: Shape, first: tuple[int, int], steps: tuple[Shape, Shape]) -> Copy:
    """Return a copy, given where its first element is in the span and in the hole, and strides there: in elements."""
    sizes = itemsize(span.dtype), itemsize(hole.dtype)
    strides = [tuple(step * size for step in some) for some, size in zip(steps, sizes, strict=True)]
    source = Strided(span.path, span.offset + first[0] * sizes[0], strides[0])
    offset = hole.offset + first[1] * sizes[1]
    return Copy(
        shape, (source,), span.dtype, hole.dtype, span.byteorder, offset, strides[1], unresolved=span.unresolved
    )


def _merge(shape: Shape, source: Shape, target: Shape) -> tuple[Shape, Shape, Shape]:
    """Drop dimensions of size one and join neighbours that are contiguous on both sides."""
    dims: list[tuple[int, int, int]] = []
    for size, s, t in zip(shape, source, target, strict=True):
        if size == 1 and len(shape) > 1:
            continue
        if dims and dims[-1][1] == s * size and dims[-1][2] == t * size:
            dims[-1] = (dims[-1][0] * size, s, t)
        else:
            dims.append((size, s, t))
    if not dims:
        dims = [(1, source[-1], target[-1])]
    sizes, sources, targets = zip(*dims, strict=True)
    return tuple(sizes), tuple(sources), tuple(targets)


def _check_coverage(hole: Hole, copies: list[Copy], ranges: list[tuple[int, int]], boxes: list[Box]) -> None:
    """Raise unless the copies cover the hole exactly once: their elements add up, and no two overlap."""
    if boxes:
        flat = [b for low, high in ranges for b in boxes_of(replace(hole.extent, start=low, numel=high - low))]
        twice = overlap(flat + boxes)
    else:
        ranges = sorted(ranges)
        twice = any(a[1] > b[0] for a, b in pairwise(ranges))
    covered = sum(copy.numel for copy in copies)
    if twice:
        raise LayoutError(
            f"{hole.label}: some elements appear more than once",
            found=f"{covered} elements",
            expected=f"{hole.extent.numel} elements, each exactly once",
        )
    if covered != hole.extent.numel:
        raise LayoutError(
            f"{hole.label}: some elements are missing",
            expected=f"{hole.extent.numel} elements",
            found=covered,
            advice="a rank's file is missing, or belongs to another run",
        )
