"""The model once more, as transformers 5 saves it: under other names, and arranged otherwise than in memory.

    in memory, and so in files of DeepSpeed          model.safetensors beside them
    layers.0.mlp.experts.gate_up_proj (4, 16, 8)     layers.0.mlp.experts.0.gate_proj.weight (8, 8), ... 8 tensors
    layers.0.attention.q_proj.weight                 encoder.layer.0.attention.attention.query.weight
    layers.0.mlp.gate_proj.weight, up_proj.weight    encoder.layer.0.mlp.weights_in.weight: one after the other

What becomes what changes with its versions, so no table says it, and values do: a tensor is a copy of a parameter, or
of a range of it, or has it as a range, if it has its elements. Of a long one some in its middle are looked at, and are
to differ; `verify --deep` compares all. What is arranged by other rules (rotary halves, rows that take turns) is not
found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zckpt.engine.read import read_all
from zckpt.engine.targets import Hole
from zckpt.state import WEIGHT, Extent, Shape, Slot, Span, by_key
from zckpt.state.dtypes import itemsize
from zckpt.state.views import transpose

WHOLE_NUMEL = 1 << 13
"""Elements up to which all of a tensor are compared, vectors as a rule: many of them are ones or zeros at first."""

SAMPLED_NUMEL = 64
"""Elements of a longer one."""

MOST_PLACES = 16
"""Places that are looked at for each tensor of a size, in shorter ones first. Stacked experts have one for each."""


def rearranged(copies: Mapping[str, Slot], originals: Mapping[str, Slot]) -> Iterator[tuple[str, Slot]]:
    """Yield the names of originals, and their copies: what a file's tensors are when they are put together.

    The file's tensors are of one type, at least one, and none is called as an original. Raises SourceError: a file
    cannot be read.
    """
    dtype = next(iter(copies.values())).dtype
    left = {n: one for n, one in copies.items() if one.numel and len(one.spans) == 1 and one.spans[0].is_contiguous}
    free = {name: one for name, one in originals.items() if one.numel}
    for turned in (False, True):
        way = dict(left)
        if turned:  # the last two dimensions in the other order
            dims = {name: range(len(one.shape)) for name, one in left.items() if len(one.shape) > 1}
            way = {name: transpose(left[name], [*of[:-2], of[-1], of[-2]]) for name, of in dims.items()}
        for name, (original, _) in _places(way, free, dtype, parts=False).items():
            shape, span = originals[original].shape, way[name].spans[0]
            if not turned or span.extent.sizes == shape:
                yield original, _copy(dtype, shape, [replace(span, extent=Extent.whole(shape))])
                left.pop(name)
                free.pop(original, None)  # which may have two copies, under names of tied parameters
    for vectors in (False, True):  # after matrices, of which each row could be one
        for original, parts in _by_whole(left, free, dtype, vectors=vectors):
            shape = free.pop(original).shape
            extents = [(n, Extent.flat(shape, start, numel)) for start, numel, n in parts]
            yield original, _copy(dtype, shape, [replace(left.pop(n).spans[0], extent=one) for n, one in extents])
        for name, parts in _by_whole(free, left, dtype, vectors=vectors):
            span = left.pop(name).spans[0]
            for start, _, original in parts:
                shape, offset = free.pop(original).shape, span.offset + start * itemsize(span.dtype)
                yield original, _copy(dtype, shape, [replace(span, extent=Extent.whole(shape), offset=offset)])


def _copy(dtype: str, shape: Shape, spans: Sequence[Span]) -> Slot:
    return Slot(WEIGHT, dtype, shape, tuple(spans))


def _places(
    pieces: Mapping[str, Slot], wholes: Mapping[str, Slot], dtype: str, *, parts: bool
) -> dict[str, tuple[str, int]]:
    """Return in which tensor each piece is found, and at which element: in one of its size, or of `parts` a longer one.

    Of several that have the same elements each gets one, in their order; the last is there for all others.
    """
    counts = Counter(one.numel for one in pieces.values())
    places: list[tuple[int, str, int]] = []
    for numel, count in counts.items():
        long = {n: one.numel for n, one in wholes.items() if (one.numel > numel if parts else one.numel == numel)}
        most = MOST_PLACES * count
        for name in sorted(long, key=lambda n: long[n]):
            most -= long[name] // numel
            if most >= 0:
                places += [(numel, name, start) for start in range(0, long[name] - numel + 1, numel)]
    known = {numel for numel, _, _ in places}
    sought = [(one.numel, name, 0) for name, one in pieces.items() if one.numel in known]
    there = by_key(
        ((numel, seen), (name, start))
        for (numel, name, start), seen in zip(places, _seen(wholes, places, dtype), strict=True)
        if numel <= WHOLE_NUMEL or seen != seen[: itemsize(dtype)] * SAMPLED_NUMEL
    )
    found = {}
    for (numel, name, _), seen in zip(sought, _seen(pieces, sought, dtype), strict=True):
        fitting = there.get((numel, seen))
        if fitting:
            found[name] = fitting.pop(0) if len(fitting) > 1 else fitting[0]
    return found


def _seen(slots: Mapping[str, Slot], places: Sequence[tuple[int, str, int]], dtype: str) -> list[bytes]:
    """Return the elements of each place, or some in its middle, as those of a type."""
    found, reads = [], []
    for numel, name, start in places:
        count = numel if numel <= WHOLE_NUMEL else SAMPLED_NUMEL
        extent = slots[name].flat(start + (numel - count) // 2, count)
        found.append(bytearray(count * itemsize(dtype)))
        reads.append((Hole(0, name, slots[name], extent, dtype), memoryview(found[-1])))
    read_all(reads)
    return [bytes(one) for one in found]


def _by_whole(
    pieces: Mapping[str, Slot], wholes: Mapping[str, Slot], dtype: str, *, vectors: bool
) -> Iterator[tuple[str, list[tuple[int, int, str]]]]:
    """Yield the tensors that pieces cover end to end, and their pieces: first element, elements and name.

    `vectors`: whether pieces are those of one dimension or none, or all others.
    """
    some = {name: one for name, one in pieces.items() if (len(one.shape) < 2) is vectors}
    places = _places(some, wholes, dtype, parts=True)
    parts = by_key((whole, (start, some[name].numel, name)) for name, (whole, start) in places.items())
    for whole, its in parts.items():
        its.sort()
        ends = [0, *accumulate(numel for _, numel, _ in its)]
        if [start for start, _, _ in its] == ends[:-1] and ends[-1] == wholes[whole].numel:
            yield whole, its
