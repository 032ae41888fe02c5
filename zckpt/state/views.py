"""Views: slots whose elements are those of others, narrowed, concatenated, split, transposed, padded, reshaped. Pure.

    one rank's slice             rows of the whole
    reshape   (heads two half) in    ->  heads two half in         boxes of a finer shape
    narrow    some of the heads
    transpose heads two half in      ->  heads half two in
    reshape   heads half two in      ->  (heads half two) in       the same boxes, seen as a matrix
    concat    the slices of all ranks

No element is moved: a span of a view says where its elements lie. Each operation is a `Move` of every slot that it
takes, so that spans which are a rule stay one, and an operation on thousands of them costs as much as one on a few.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise, product
from operator import add, mul, sub

from zckpt.errors import LayoutError
from zckpt.immutable import immutable
from zckpt.state.boxes import (
    Box,
    SpanIndex,
    boxes_of,
    factored,
    factors_by_axis,
    intersection,
    is_row_major,
    locate,
    row_major,
)
from zckpt.state.dtypes import itemsize
from zckpt.state.mappings import differ
from zckpt.state.spans import ZEROS, CutSpans, Extent, Shape, Slot, Span, Spans, position, reach_of


@immutable
class Move:
    """Where elements of one slot are in another. Both are seen as boxes of the finer shapes that their spans are of."""

    split: tuple[Shape, ...]  # the factors of each dimension of the source
    low: Shape  # the box of these factors that is seen
    sizes: Shape
    order: tuple[int | None, ...]
    """Which factor each dimension of the target is; None: a dimension of one. Factors of one may be left out."""
    to: Shape  # where in the target the box begins

    @property
    def there(self) -> Shape:
        """The sizes of the box in the target."""
        return tuple(1 if n is None else self.sizes[n] for n in self.order)

    def spans(self, span: Span) -> Iterator[Span]:
        """Yield what a span of the source is in the target."""
        own = span.extent
        is_same = self.order == tuple(range(len(self.split))) and all(len(axis) == 1 for axis in self.split)
        if is_same and intersection((own.offsets, own.sizes), (self.low, self.sizes)) == (own.offsets, own.sizes):
            offsets = tuple(o - low + to for o, low, to in zip(own.offsets, self.low, self.to, strict=True))
            yield replace(span, extent=replace(own, offsets=offsets))
            return
        whole = (0,) * len(self.split), tuple(map(math.prod, self.split))
        for one in filter(None, (intersection(part, whole) for part in boxes_of(own))):  # it may reach over the end
            for box, first, steps in factored(one, *locate(own, one, span.strides), self.split):
                both = intersection(box, (self.low, self.sizes))
                if both is None:
                    continue
                at = first + position(map(sub, both[0], box[0]), steps)
                offsets = tuple(
                    to if n is None else both[0][n] - self.low[n] + to
                    for n, to in zip(self.order, self.to, strict=True)
                )
                sizes = tuple(1 if n is None else both[1][n] for n in self.order)
                strides = tuple(0 if n is None else steps[n] for n in self.order)
                yield _strided(span, offsets, sizes, at, strides)

    def reach(self, box: Box) -> tuple[int, int] | None:
        """Return a range of the flattened source that has all its elements of a box of the target, or None."""
        both = intersection(box, (self.to, self.there))
        if both is None:
            return None
        low, sizes = list(self.low), list(self.sizes)
        for n, offset, size, to in zip(self.order, *both, self.to, strict=True):
            if n is not None:
                low[n], sizes[n] = self.low[n] + offset - to, size
        steps = row_major(_joined(self.split))
        first = position(low, steps)
        return first, first + reach_of(sizes, steps)


def _strided(span: Span, offsets: Shape, sizes: Shape, first: int, strides: Shape) -> Span:
    """Return elements of a span, from one on, as a box."""
    extent, offset = Extent(offsets, sizes, 0, math.prod(sizes)), span.offset + first * itemsize(span.dtype)
    is_dense = is_row_major(sizes, strides) and span.path != ZEROS
    return replace(span, extent=extent, offset=offset, strides=None if is_dense else strides)


@immutable(eq=False)
class ViewSpans(Spans):
    """The spans of a view of slots, some of whose spans are a rule."""

    shape: Shape  # of which the spans are boxes
    parts: tuple[tuple[Move, Sequence[Span]], ...]

    def __iter__(self) -> Iterator[Span]:
        """Yield all of them."""
        return (made for move, spans in self.parts for span in spans for made in move.spans(span))

    def __len__(self) -> int:
        """Return how many there are, which takes a walk."""
        return sum(1 for _ in self)

    def numbered(self, index: int) -> Span:
        """Return one of them, which takes a walk."""
        return next(islice(self, index, None))

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that may have some of elements [low, high) of the flattened tensor."""
        low, high = max(low, 0), min(high, math.prod(self.shape))
        boxes = boxes_of(Extent.flat(self.shape, low, high - low)) if low < high else []
        found: list[Span] = []
        for move, spans in self.parts:
            reach = [one for one in map(move.reach, boxes) if one is not None]
            if reach:
                first, end = min(one[0] for one in reach), max(one[1] for one in reach)
                some = spans.reaching(first, end) if isinstance(spans, Spans) else spans
                found += (made for span in some for made in move.spans(span))
        return tuple(found)

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        return tuple(
            made
            for move, spans in self.parts
            for span in (spans.within(paths) if isinstance(spans, Spans) else spans)
            if span.path in paths
            for made in move.spans(span)
        )


def _moved(shape: Shape, grain: Shape, parts: Sequence[tuple[Move, Slot]]) -> Slot:
    """Return the slot that parts make up, whose spans are boxes of `grain`."""
    first = parts[0][1]

    def spans(number: int) -> Sequence[Span]:
        sets = tuple((move, slot.sets[number]) for move, slot in parts)
        made = ViewSpans(grain, sets)
        # An iterator: of the spans themselves `tuple` asks how many there are first, which takes a walk of its own.
        return made if any(isinstance(own, Spans) for _, own in sets) else tuple(iter(made))

    every = [spans(number) for number in range(1 + len(first.replicas))] if math.prod(shape) else [()]
    return Slot(first.name, first.dtype, shape, every[0], tuple(every[1:]), None if grain == shape else grain)


def _grain(slot: Slot) -> list[Shape]:
    """Return the factors of each dimension of which a slot's spans are boxes."""
    return factors_by_axis(slot.shape, slot.factors) if slot.factors else [(size,) for size in slot.shape]


def _joined(groups: Sequence[Shape]) -> Shape:
    return tuple(factor for axis in groups for factor in axis)


def _window(slot: Slot, low: Shape, sizes: Shape, order: Sequence[int | None], to: Shape) -> Move:
    return Move(tuple((size,) for size in _joined(_grain(slot))), low, sizes, tuple(order), to)


def _with(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def narrow(slot: Slot, axis: int, start: int, size: int) -> Slot:
    """Return `size` indexes of a dimension, from `start` on."""
    if (start, size) == (0, slot.shape[axis]):
        return slot
    if not 0 <= start <= start + size <= slot.shape[axis]:
        raise LayoutError(f"{slot.name} has no indexes {start} to {start + size}", expected=f"below {slot.shape[axis]}")
    groups = _grain(slot)
    inner = math.prod(groups[axis][1:])
    if start % inner or size % inner:
        return narrow(plain(slot), axis, start, size)
    at = len(_joined(groups[:axis]))
    grain = _joined(groups)
    zero = (0,) * len(grain)
    low, sizes = _with(zero, at, start // inner), _with(grain, at, size // inner)
    window = _window(slot, low, sizes, range(len(grain)), zero)
    return _moved(_with(slot.shape, axis, size), sizes, [(window, slot)])


def transpose(slot: Slot, order: Sequence[int]) -> Slot:
    """Return a slot with its dimensions in another order: dimension n is the one that `order[n]` was."""
    if list(order) == sorted(order):
        return slot
    groups = _grain(slot)
    ends = list(accumulate(map(len, groups), initial=0))
    grain, zero = _joined(groups), (0,) * ends[-1]
    moved = [n for axis in order for n in range(ends[axis], ends[axis + 1])]
    shape = tuple(slot.shape[axis] for axis in order)
    return _moved(shape, tuple(grain[n] for n in moved), [(_window(slot, zero, grain, moved, zero), slot)])


def unstacked(slot: Slot, axes: int = 1) -> dict[Shape, Slot]:
    """Return what a slot has for each index along its first dimensions."""
    slot = plain(slot)
    index, lead, rest = SpanIndex(slot), slot.shape[:axes], slot.shape[axes:]
    order = range(axes, len(slot.shape))
    found = {}
    for at in product(*map(range, lead)):
        low, sizes = (*at, *(0 for _ in rest)), (*(1 for _ in lead), *rest)
        own = index.reaching(Extent(low, sizes, 0, math.prod(rest)))
        found[at] = _moved(rest, rest, [(_window(own, low, sizes, order, (0,) * len(rest)), own)])
    return found


def reshape(slot: Slot, shape: Shape) -> Slot:
    """Return the same flattened elements in another shape."""
    if shape == slot.shape:
        return slot
    if math.prod(shape) != slot.numel:
        raise LayoutError(f"{slot.name} does not have that many elements", expected=shape, found=slot.shape)
    if not slot.numel:
        return replace(slot, shape=shape, spans=(), replicas=tuple(() for _ in slot.replicas), factors=None)
    flat = [_flat(slot, its, shape) for its in slot.sets]
    every = [its for its in flat if its is not None]
    if len(every) == len(flat):
        return replace(slot, shape=shape, spans=every[0], replicas=tuple(every[1:]))
    grain = _joined(_grain(slot))
    steps = sorted({*accumulate(reversed(grain), mul, initial=1), *accumulate(reversed(shape), mul, initial=1)})
    if any(after % before for before, after in pairwise(steps)):
        return reshape(plain(reshape(slot, (slot.numel,))), shape)
    fine = tuple(after // before for before, after in reversed(list(pairwise(steps))))  # both shapes are products of it
    numbers = iter(range(len(fine)))
    order: list[int | None] = []
    for axis in factors_by_axis(shape, fine):
        order += [next(numbers) for _ in axis] or [None]
    split, zero = tuple(factors_by_axis(grain, fine)), (0,) * len(fine)
    move = Move(split, zero, fine, tuple(order), (0,) * len(order))
    return _moved(shape, move.there, [(move, slot)])


def _flat(slot: Slot, spans: Sequence[Span], shape: Shape) -> Sequence[Span] | None:
    """Return spans as those of another shape, if all are flat ranges of the slot; they may reach over its end."""
    if slot.factors is not None or (isinstance(spans, Spans) and not isinstance(spans, CutSpans)):
        return None
    if isinstance(spans, CutSpans):
        return replace(spans, shape=shape)
    steps, found = row_major(slot.shape), []
    for span in spans:
        own = span.extent
        if span.strides is not None or own.sizes[1:] != slot.shape[1:]:
            return None
        start = own.start + position(own.offsets, steps)
        numel = min(own.numel, slot.numel - start)
        if numel > 0:
            found.append(replace(span, extent=Extent.flat(shape, start, numel)))
    return tuple(found)


def plain(slot: Slot) -> Slot:
    """Return a slot whose spans are boxes of its own shape, of no finer one: the outer factors of each axis apart."""
    if slot.factors is None:
        return slot
    groups = _grain(slot)

    def spans(span: Span) -> Iterator[Span]:
        own = span.extent
        ends = list(accumulate(map(len, groups), initial=0))
        last = [end - 1 for end in ends[1:]]
        for box in boxes_of(own):
            first, steps = locate(own, box, span.strides)
            ranges = [range(1) if n in last else range(size) for n, size in enumerate(box[1])]
            for index in product(*ranges):
                at = [a + b for a, b in zip(box[0], index, strict=True)]
                offsets = tuple(
                    position(at[low:high], row_major(axis))
                    for axis, (low, high) in zip(groups, pairwise(ends), strict=True)
                )
                begin = first + position(index, steps)
                yield _strided(span, offsets, tuple(box[1][n] for n in last), begin, tuple(steps[n] for n in last))

    every = [tuple(made for span in its for made in spans(span)) for its in slot.sets]
    return replace(slot, spans=every[0], replicas=tuple(every[1:]), factors=None)


def placed(parts: Sequence[tuple[Shape, Slot]]) -> Slot:
    """Return a slot of others, each a box of it that begins at an index; boxes do not meet and leave nothing out."""
    if len(parts) == 1:
        return parts[0][1]
    shape = tuple(max(ends) for ends in zip(*(map(add, at, slot.shape) for at, slot in parts), strict=True))
    shapes = [[axis[1:] for axis in _grain(slot)] for _, slot in parts]
    inner = [math.prod(axis) for axis in shapes[0]]
    fits = all(
        not at % n for offsets in (shape, *(at for at, _ in parts)) for at, n in zip(offsets, inner, strict=True)
    )
    if not fits or differ(shapes):
        shapes, inner = [[()] * len(shape)], [1] * len(shape)
        parts = [(at, plain(slot)) for at, slot in parts]

    def grain(leads: Sequence[int], *, is_place: bool = False) -> Shape:
        every = zip(leads, inner, shapes[0], strict=True)
        return _joined([(lead // n, *((0,) * len(rest) if is_place else rest)) for lead, n, rest in every])

    moves = []
    for at, slot in parts:
        own = grain(slot.shape)
        moves.append((_window(slot, (0,) * len(own), own, range(len(own)), grain(at, is_place=True)), slot))
    return _moved(shape, grain(shape), [one for one in moves if one[1].numel] or moves[:1])


def concat(slots: Sequence[Slot], axis: int) -> Slot:
    """Return slots one after the other along a dimension."""
    begins = accumulate((slot.shape[axis] for slot in slots), initial=0)
    zero = (0,) * len(slots[0].shape)
    return placed([(_with(zero, axis, at), slot) for at, slot in zip(begins, slots, strict=False)])


def zeros(like: Slot, shape: Shape) -> Slot:
    """Return a slot of another shape whose elements are zero and lie in no file."""
    spans = (Span(Extent.whole(shape), ZEROS, 0, like.dtype, (0,) * len(shape)),) if math.prod(shape) else ()
    return replace(like, shape=shape, spans=spans, replicas=(spans,) * len(like.replicas), factors=None)


def pad(slot: Slot, axis: int, before: int, after: int) -> Slot:
    """Return a slot with zeros before and behind the indexes of a dimension."""
    ends = [zeros(slot, _with(slot.shape, axis, size)) for size in (before, after)]
    return concat([ends[0], slot, ends[1]], axis) if before or after else slot
