"""The spans of a tensor that is put together from others: boxes of its factors, where they lie in the others' files.

    source      (heads two half) in         target      (heads half two) in
    span        rows 5 to 12 of the source  ->  boxes of (heads, two, half, in), each with strides in the file
                                            ->  the same boxes in the order (heads, half, two, in), with these strides

No element is moved: a span of the target says where its elements lie now. Spans that are a rule stay one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.naming.document import Template
from zckpt.naming.sizes import Sizes
from zckpt.state import ZEROS, Extent, ListedSpans, Slot, Span, Spans
from zckpt.state.boxes import Box, boxes_of, factored, intersection, locate, row_major
from zckpt.state.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A tensor as a box of all letters of a rule.

    Parameters
    ----------
    letters : tuple of str
        In one order for all tensors of the rule.
    low, sizes : tuple of int
        The box, by letter.
    axes : tuple of tuple of int
        The letters of each dimension, by number.
    """

    letters: tuple[str, ...]
    low: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, letters: tuple[str, ...], template: Template, indices: Mapping[str, int], sizes: Sizes) -> Arrangement:
        """Return the arrangement of one tensor of a rule."""
        bounds = {letter: (indices[letter], indices[letter] + 1) for letter in letters if letter in indices}
        bounds |= {factor.name: sizes.bounds(factor) for axis in template.axes or () for factor in axis}
        number = {letter: index for index, letter in enumerate(letters)}
        return cls(
            letters,
            tuple(bounds[letter][0] for letter in letters),
            tuple(bounds[letter][1] - bounds[letter][0] for letter in letters),
            tuple(tuple(number[factor.name] for factor in axis) for axis in template.axes or ()),
        )

    @property
    def box(self) -> Box:
        """The box of letters."""
        return self.low, self.sizes

    @property
    def by_axis(self) -> list[tuple[int, ...]]:
        """The sizes of the factors of each dimension."""
        return [tuple(self.sizes[letter] for letter in axis) for axis in self.axes]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(math.prod(axis) for axis in self.by_axis)

    @property
    def order(self) -> list[int | None]:
        """The letters whose factors the tensor's view has, those of one value left out; None: a dimension of them."""
        found: list[int | None] = []
        for axis in self.axes:
            found += [letter for letter in axis if self.sizes[letter] != 1] or [None]
        return found

    @property
    def factors(self) -> tuple[int, ...]:
        """The finer shape of which the spans are boxes."""
        return tuple(1 if letter is None else self.sizes[letter] for letter in self.order)


Source = tuple[Arrangement, Sequence[Span]]
"""A tensor that is there, and its spans."""


def arranged(slot: Slot, target: Arrangement, sources: Sequence[tuple[Arrangement, Slot]]) -> Slot:
    """Return a slot whose elements are those of others; where none has them, zeros.

    Parameters
    ----------
    slot : Slot
        Its name, type, and how many replicas there are: those of any of the others.
    target : Arrangement
    sources : sequence of (Arrangement, Slot)
        All of one type, whose boxes do not meet.
    """
    zeros = tuple(_zeros(target, [one for one, _ in sources], slot.dtype))

    def spans(number: int) -> Sequence[Span]:
        sets = [(one, (its.spans, *its.replicas)[number]) for one, its in sources]
        made = ArrangedSpans(target, tuple(sets), zeros)
        return made if any(isinstance(one, Spans) for _, one in sets) else tuple(made)

    if not math.prod(target.shape):
        return Slot(slot.name, slot.dtype, target.shape, ())
    every = [spans(number) for number in range(1 + len(slot.replicas))]
    factors = None if target.factors == target.shape else target.factors
    return Slot(slot.name, slot.dtype, target.shape, every[0], tuple(every[1:]), factors)


def _zeros(target: Arrangement, sources: Sequence[Arrangement], dtype: str) -> Iterator[Span]:
    """Yield spans of zeros for what no source has, which is so of the first or last values of one letter only."""
    covered = [
        (min(one.low[i] for one in sources), max(one.low[i] + one.sizes[i] for one in sources))
        for i in range(len(target.letters))
    ]
    for i, (low, high) in enumerate(covered):
        begin, end = target.low[i], target.low[i] + target.sizes[i]
        for first, last in ((begin, min(low, end)), (max(high, begin), end)):
            if first < last:
                lows, sizes = list(target.low), list(target.sizes)
                lows[i], sizes[i] = first, last - first
                yield _span(target, (tuple(lows), tuple(sizes)), {}, Span(Extent.whole(()), ZEROS, 0, dtype), 0)


def _span(target: Arrangement, box: Box, strides: Mapping[int, int], span: Span, offset: int) -> Span:
    """Return the span of a box of letters, in the target's view."""
    order = target.order
    offsets = tuple(0 if letter is None else box[0][letter] - target.low[letter] for letter in order)
    sizes = tuple(1 if letter is None else box[1][letter] for letter in order)
    steps = tuple(0 if letter is None else strides.get(letter, 0) for letter in order)
    extent = Extent(offsets, sizes, 0, math.prod(sizes))
    return Span(extent, span.path, offset, span.dtype, steps, span.byteorder, span.unresolved)


def _moved(target: Arrangement, source: Arrangement, span: Span) -> Iterator[Span]:
    """Yield the spans of the target whose elements one of a source's has."""
    letters = [letter for axis in source.axes for letter in axis]
    for plain in boxes_of(span.extent):
        for box, first, steps in factored(plain, *locate(span.extent, plain, span.strides), source.by_axis):
            lows, sizes = list(source.low), list(source.sizes)
            for letter, offset, size in zip(letters, *box, strict=True):
                lows[letter], sizes[letter] = source.low[letter] + offset, size
            both = intersection((tuple(lows), tuple(sizes)), target.box)
            if both is not None:
                strides = dict(zip(letters, steps, strict=True))
                at = first + sum((both[0][letter] - lows[letter]) * step for letter, step in strides.items())
                yield _span(target, both, strides, span, span.offset + at * itemsize(span.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class ArrangedSpans(ListedSpans):
    """The spans of a tensor that is put together from others, some of whose spans are a rule.

    Parameters
    ----------
    target : Arrangement
    sources : tuple of Source
    zeros : tuple of Span
        Of the target: what no source has.
    """

    target: Arrangement
    sources: tuple[Source, ...]
    zeros: tuple[Span, ...] = ()

    def __iter__(self) -> Iterator[Span]:
        """Yield all of them."""
        for source, spans in self.sources:
            for span in spans:
                yield from _moved(self.target, source, span)
        yield from self.zeros

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that may have some of elements [low, high) of the flattened tensor."""
        low, high = max(low, 0), min(high, math.prod(self.target.shape))
        if low >= high:
            return ()
        boxes = [self._letters(box) for box in boxes_of(Extent.flat(self.target.factors, low, high - low))]
        found: list[Span] = []
        for source, spans in self.sources:
            reach = [one for box in boxes if (one := _reach(source, box)) is not None]
            if not reach:
                continue
            first, end = min(one[0] for one in reach), max(one[1] for one in reach)
            some = spans.reaching(first, end) if isinstance(spans, Spans) else spans
            found += (moved for span in some for moved in _moved(self.target, source, span))
        return (*found, *self.zeros)

    def _letters(self, box: Box) -> Box:
        """Return a box of the target's view as one of letters."""
        lows, sizes = list(self.target.low), list(self.target.sizes)
        for letter, offset, size in zip(self.target.order, *box, strict=True):
            if letter is not None:
                lows[letter], sizes[letter] = self.target.low[letter] + offset, size
        return tuple(lows), tuple(sizes)

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        found: list[Span] = []
        for source, spans in self.sources:
            some = spans.within(paths) if isinstance(spans, Spans) else [one for one in spans if one.path in paths]
            found += (moved for span in some for moved in _moved(self.target, source, span))
        return tuple(found)


def _reach(source: Arrangement, box: Box) -> tuple[int, int] | None:
    """Return a range of the flattened source that has all its elements of a box of letters."""
    both = intersection(source.box, box)
    if both is None:
        return None
    first = last = 0
    for axis, step in zip(source.axes, row_major(source.shape), strict=True):
        for letter, inner in zip(axis, row_major([source.sizes[one] for one in axis]), strict=True):
            offset = both[0][letter] - source.low[letter]
            first += offset * inner * step
            last += (offset + both[1][letter] - 1) * inner * step
    return first, last + 1
