"""The order of the rows of query, key and value in files of before Megatron-Core, as one of today's. Pure.

checkpoint_version 0      [3, heads, d]     each rank for itself
                   1.0    [heads, d, 3]
                   2.0    [heads, 3, d]     and every later one

`key_value` of cross attention has 2 where these have 3.

Source: Megatron-LM's `fix_query_key_value_ordering`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zckpt.errors import LayoutError
from zckpt.formats.megatron.cut import contiguous
from zckpt.state import Extent, Slot, Span

SPLITS = {"query_key_value": 3, "key_value": 2}

CURRENT = 2.0
"""From this version on rows are in today's order."""


def splits_of(name: str) -> int | None:
    """Return how many kinds of rows a parameter has; None for another."""
    steps = name.split(".")
    return SPLITS.get(steps[-2]) if len(steps) > 1 else None


def reordered(name: str, slots: Sequence[Slot], splits: int, heads: int, version: float, path: str) -> Slot:
    """Return a parameter in today's order of rows, of which each rank has a slice in that of an old version.

    Parameters
    ----------
    name : str
    slots : sequence of Slot
        By tensor-parallel rank, each of one span or none.
    splits, heads : int
        Kinds of rows, and heads of all ranks.
    version : float
        0 or 1.
    path : str

    Raises
    ------
    LayoutError
        The rows are not those of as many heads.
    """
    shape, ranks = slots[0].shape, len(slots)
    if not shape or heads % ranks or shape[0] % (splits * (heads // ranks)):
        raise LayoutError(f"{name} does not have the rows of {heads} heads", path=path, found=f"{ranks} of {shape}")
    own = heads // ranks
    width = shape[0] // (splits * own)
    rest = shape[1:]
    factors = (heads, splits, width, *rest)
    spans = []
    for rank, one in enumerate(slots):
        for span in one.spans:
            row = (span.strides or contiguous(shape))[0]
            tail = (span.strides or contiguous(shape))[1:]
            steps = (width, own * width, 1) if version < 1 else (width * splits, 1, splits)
            strides = (*(step * row for step in steps), *tail)
            sizes = (own, splits, width, *rest)
            extent = Extent((rank * own, *(0 for _ in sizes[1:])), sizes, 0, prod(sizes))
            spans.append(Span(extent, span.path, span.offset, span.dtype, strides, span.byteorder, span.unresolved))
    whole = (shape[0] * ranks, *rest)
    return Slot(slots[0].name, slots[0].dtype, whole, tuple(spans), factors=factors)
