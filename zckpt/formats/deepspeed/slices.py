"""Slices of a tensor along one dimension, and where spans of the one lie in the other. Pure.

    whole:    | q q q q | k k | v v |        runs of rank 0's slice: q, k, v
    rank 0:   | q q | k | v |                each `Run` is where it is here, where there, and how long

Moving spans from slices to the whole puts tensor-parallel ranks together; from the whole to a slice, it cuts anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zckpt.engine.boxes import boxes_of, row_major
from zckpt.state import Extent, Span
from zckpt.state.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Indices along the sliced dimension: [source, source + size) of one tensor are [target, target + size) there."""

    source: int
    target: int
    size: int


def moved(spans: Iterable[Span], dim: int, runs: Sequence[Run]) -> tuple[Span, ...]:
    """Return the spans of a tensor as spans of another one that has the same elements in some runs.

    Elements that no run has are left out. A span whose box is within one run stays one span.

    Parameters
    ----------
    spans : iterable of Span
    dim : int
        The dimension along which the runs are; the tensors agree in all others.
    runs : sequence of Run
        In order, apart from each other.
    """
    return tuple(found for span in spans if span.extent.numel for found in _moved(span, dim, runs))


def _moved(span: Span, dim: int, runs: Sequence[Run]) -> Iterator[Span]:
    extent = span.extent
    low, high = extent.offsets[dim], extent.offsets[dim] + extent.sizes[dim]
    for run in runs:
        if run.source <= low and high <= run.source + run.size:
            offsets = _with(extent.offsets, dim, low - run.source + run.target)
            yield replace(span, extent=Extent(offsets, extent.sizes, extent.start, extent.numel))
            return
    steps = span.strides or row_major(extent.sizes)
    begin = 0 if span.strides else extent.start
    size = itemsize(span.dtype)
    for offsets, sizes in boxes_of(extent):
        for run in runs:
            low = max(offsets[dim], run.source)
            high = min(offsets[dim] + sizes[dim], run.source + run.size)
            if low >= high:
                continue
            box = _with(sizes, dim, high - low)
            at = _with(offsets, dim, low)
            first = sum((o - e) * s for o, e, s in zip(at, extent.offsets, steps, strict=True)) - begin
            place = Extent(_with(offsets, dim, low - run.source + run.target), box, 0, math.prod(box))
            yield replace(span, extent=place, offset=span.offset + first * size, strides=steps)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
