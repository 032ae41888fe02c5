"""Boxes of tensors, and ranges of bytes or elements: what they share, which overlap, what is in no others. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from operator import sub
from typing import Generic, TypeVar

from zckpt.state.spans import Extent, Shape, Slot, Spans, position, reach_of

Range = tuple[int, int]
"""The first, and the one after the last."""


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return sorted ranges that do not touch and cover the same; given ones are in any order, and may overlap."""
    found: list[Range] = []
    for low, high in sorted(one for one in ranges if one[0] < one[1]):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def without(ranges: Iterable[Range], others: Sequence[Range]) -> list[Range]:
    """Return what of ranges is in none of others; these are sorted, none over another."""
    found: list[Range] = []
    for low, high in ranges:
        begin = low
        at = max(bisect_right(others, (low, low)) - 1, 0)
        while begin < high and at < len(others):
            start, end = others[at]
            if start >= high:
                break
            if start > begin:
                found.append((begin, start))
            begin = max(begin, end)
            at += 1
        if begin < high:
            found.append((begin, high))
    return found


def total(ranges: Iterable[Range]) -> int:
    """Return how much is in ranges."""
    return sum(high - low for low, high in ranges)


Item = TypeVar("Item")

Box = tuple[Shape, Shape]
"""Offsets and sizes of a box of a tensor, in elements."""

FEWEST_INDEXED = 4
"""Spans of a slot that are as fast looked through as looked up."""


def row_major(shape: Sequence[int]) -> Shape:
    """Return the strides, in elements, of a tensor of `shape` that is stored in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def torch_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a tensor that torch has made so: where one has no elements, too, none of them is 0."""
    return row_major([max(size, 1) for size in shape])


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """Tell whether a tensor's elements follow each other; the stride of a dimension of one does not matter."""
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, row_major(shape), strict=True))


def boxes_of(extent: Extent) -> list[Box]:
    """Cut an extent into boxes of the tensor: a flattened range is at most 2 x dimensions - 1 of them."""
    if extent.numel == 0:
        return []
    return [
        (tuple(o + e for o, e in zip(offsets, extent.offsets, strict=True)), sizes)
        for offsets, sizes in _range_boxes(extent.sizes, extent.start, extent.start + extent.numel)
    ]


def _range_boxes(sizes: Shape, low: int, high: int) -> list[Box]:
    """Cut elements [low, high) of a row-major box of `sizes` into boxes."""
    if not sizes:
        return [((), ())]
    if len(sizes) == 1:
        return [((low,), (high - low,))]
    row = math.prod(sizes[1:])
    first, last = -(-low // row), high // row
    found: list[Box] = []
    if first > last:  # within one row
        return [((low // row, *o), (1, *s)) for o, s in _range_boxes(sizes[1:], low % row, low % row + high - low)]
    if low < first * row:
        found += [((first - 1, *o), (1, *s)) for o, s in _range_boxes(sizes[1:], low % row, row)]
    if first < last:
        found.append(((first,) + (0,) * (len(sizes) - 1), (last - first, *sizes[1:])))
    if last * row < high:
        found += [((last, *o), (1, *s)) for o, s in _range_boxes(sizes[1:], 0, high % row)]
    return found


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, or None."""
    low = tuple(map(max, a[0], b[0]))
    sizes = tuple(min(oa + sa, ob + sb) - o for oa, sa, ob, sb, o in zip(*a, *b, low, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


def is_within(box: Box, shape: Shape) -> bool:
    """Tell whether a box lies within a tensor of a shape."""
    ends = zip(*box, shape, strict=False)
    return len(box[0]) == len(box[1]) == len(shape) and all(o >= 0 and o + n <= whole for o, n, whole in ends)


def locate(extent: Extent, box: Box, strides: Shape | None) -> tuple[int, Shape]:
    """Return where the box's first element lies after the extent's first one, and its strides, in elements."""
    steps = row_major(extent.sizes) if strides is None else strides
    first = position(map(sub, box[0], extent.offsets), steps)
    return first - (extent.start if strides is None else 0), steps


def factors_by_axis(shape: Sequence[int], factors: Sequence[int]) -> list[Shape]:
    """Return which factors each size of a shape is the product of, in their order; a size of one has one or none."""
    found, at = [], 0
    for size in shape:
        first, product = at, 1
        while product != size or (at == first and at < len(factors) and factors[at] == 1):
            product *= factors[at]
            at += 1
        found.append(tuple(factors[first:at]))
    return found


Located = tuple[Box, int, Shape]
"""A box of factors, where its first element lies in something that is strided, and the stride of each factor."""


def factored(box: Box, first: int, strides: Sequence[int], by_axis: Sequence[Shape]) -> Iterator[Located]:
    """Cut a box of a tensor into boxes of its factors: a range of one axis is at most 2 x its factors - 1 of them.

    `box`: of a tensor; `first` (elements): where its first element lies; `strides` (elements): by axis of the tensor;
    `by_axis`: of `factors_by_axis`.
    """
    ranges = [_range_boxes(sizes, o, o + n) for sizes, o, n in zip(by_axis, *box, strict=True)]
    inner = [row_major(sizes) for sizes in by_axis]
    steps = tuple(stride * one for stride, ones in zip(strides, inner, strict=True) for one in ones)
    for some in product(*ranges):
        offsets = [position(one[0], ones) for one, ones in zip(some, inner, strict=True)]
        at = first + position(map(sub, offsets, box[0]), strides)
        yield (tuple(o for one in some for o in one[0]), tuple(n for one in some for n in one[1])), at, steps


def overlap(boxes: list[Box]) -> bool:
    """Tell whether any two boxes share an element, by a sweep along the dimension in which they begin most apart."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    axis = max(range(len(boxes[0][0])), key=lambda n: len({offsets[n] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda one: one[0][axis]):
        active = [a for a in active if a[0][axis] + a[1][axis] > box[0][axis]]
        if any(intersection(a, box) for a in active):
            return True
        active.append(box)
    return False


def bounds(extent: Extent, shape: Shape) -> tuple[int, int]:
    """Return a range of the flattened tensor that holds an extent, and no more where its box is whole rows."""
    steps = row_major(shape)
    first = position(extent.offsets, steps)
    if extent.sizes[1:] == shape[1:]:
        return first + extent.start, first + extent.start + extent.numel
    return first, first + reach_of(extent.sizes, steps)


class ByPlace(Generic[Item]):
    """What is known of extents of a tensor, by where they lie in the flattened one."""

    def __init__(self, shape: Shape, items: Iterable[tuple[Item, Extent]]) -> None:
        placed = sorted(((*bounds(extent, shape), item) for item, extent in items), key=lambda one: one[:2])
        self._items, self._lows = [item for _, _, item in placed], [low for low, _, _ in placed]
        self._highs = list(accumulate((high for _, high, _ in placed), max))  # of this one and all before

    def reaching(self, low: int, high: int) -> tuple[Item, ...]:
        """Return what is known of those that may have some of elements [low, high)."""
        return tuple(self._items[bisect_right(self._highs, low) : bisect_left(self._lows, high)])


class SpanIndex:
    """The spans of a slot by where they lie in the flattened tensor.

    Thousands of holes in a slot of thousands of spans (ZeRO-3, at as many ranks) are so not each held against all.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        shape = slot.factors or slot.shape
        self._sets = [
            spans if isinstance(spans, Spans) else ByPlace(shape, [(span, span.extent) for span in spans])
            for spans in slot.sets
        ]

    def reaching(self, extent: Extent) -> Slot:
        """Return the slot with only those spans that may reach into an extent."""
        low, high = bounds(extent, self.slot.shape)
        spans, *replicas = (spans.reaching(low, high) for spans in self._sets)
        return replace(self.slot, spans=spans, replicas=tuple(replicas))


class SpanIndexes:
    """The spans of many slots that reach into extents; a slot is indexed when it is first asked for."""

    def __init__(self) -> None:
        self._indexes: dict[int, SpanIndex] = {}  # by the identity of slots, which these keep

    def reaching(self, slot: Slot, extent: Extent) -> Slot:
        """Return a slot with at least those of its spans that reach into an extent."""
        if not isinstance(slot.spans, Spans) and len(slot.spans) < FEWEST_INDEXED and not slot.replicas:
            return slot
        if id(slot) not in self._indexes:
            self._indexes[id(slot)] = SpanIndex(slot)
        return self._indexes[id(slot)].reaching(extent)
