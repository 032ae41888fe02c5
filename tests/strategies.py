"""Hypothesis strategies for layouts: shapes, param groups, world sizes, alignments, orders, tensor-parallel cuts.

A layout is drawn as data that says nothing of files: numbers, boxes and flattened ranges. The tests put bytes to it.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

from hypothesis import strategies as st

from zckpt.state import Extent
from zckpt.state.boxes import row_major

PRIMES = (2, 3, 5, 7, 11, 13)
MOST_RANKS = 17

world_sizes = st.integers(1, MOST_RANKS)
alignments = st.sampled_from([None, 1, 2, 4, 8, 16])
"""Elements that each parameter of a flat group starts on a multiple of; None where parameters are not aligned."""


byte_strings = st.binary(max_size=300)


def shapes(*, empty: bool = True, most_dimensions: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of a few hundred elements: 0-d, one-element, prime-sized, and with `empty` some without elements."""
    sizes = st.sampled_from([*((0,) if empty else ()), 1, 1, 2, 3, 4, 5, 6, 7, 11])
    many = st.lists(sizes, max_size=most_dimensions).map(tuple)
    return st.one_of(st.just(()), st.just((1,)), st.sampled_from(PRIMES).map(lambda n: (n,)), many).filter(
        lambda shape: math.prod(shape) <= 600
    )


def groups(*, most: int = 8) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """The shapes of one param group's parameters, in order; a group may be empty."""
    return st.lists(shapes(), max_size=most)


@st.composite
def cuts(draw: st.DrawFn, total: int, *, most: int = 6, empty: bool = True) -> list[tuple[int, int]]:
    """Draw (start, size) of runs that tile [0, total); with `empty` some may have size zero."""
    points = sorted(draw(st.lists(st.integers(0, total), max_size=most)))
    if not empty:
        points = sorted(set(points) - {0, total})
    return [(low, high - low) for low, high in pairwise([0, *points, total])]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Draw (offsets, sizes) of boxes that tile a tensor: a grid that cuts some of its dimensions."""
    sides = [draw(cuts(size, most=2, empty=False)) if size else [(0, 0)] for size in shape]
    return [(tuple(o for o, _ in cell), tuple(s for _, s in cell)) for cell in product(*sides)]


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Extent]:
    """Draw extents that hold every element of a tensor exactly once: boxes, each cut in flattened ranges, in any order.

    One box that is the whole tensor gives a ZeRO layout, boxes with one range each a tensor-parallel one.
    """
    found = [
        Extent(offsets, sizes, start, numel)
        for offsets, sizes in draw(boxes(shape))
        for start, numel in draw(cuts(math.prod(sizes), most=3))
    ]
    return draw(st.permutations(found))


@st.composite
def storages(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Draw strides for a box of `sizes`, and how many elements its storage has: permuted dimensions, with gaps."""
    order = draw(st.permutations(range(len(sizes))))
    gaps = [draw(st.sampled_from([0, 0, 1, 3])) for _ in sizes]
    padded = [sizes[dimension] + gap for dimension, gap in zip(order, gaps, strict=True)]
    strides = dict(zip(order, row_major(padded), strict=True))
    return tuple(strides[dimension] for dimension in range(len(sizes))), math.prod(padded)


@st.composite
def extents(draw: st.DrawFn, shape: tuple[int, ...]) -> Extent:
    """Draw one extent of a tensor: a box, and a range within it."""
    offsets, sizes = draw(st.sampled_from(draw(boxes(shape))))
    start, numel = draw(st.sampled_from(draw(cuts(math.prod(sizes)))))
    return Extent(offsets, sizes, start, numel)
