"""The spans of one layer, or expert, of a tensor that holds all of them, and of one that was flattened when it was cut.

A tensor on disk has an axis for layers, one for experts, or both, before those of the parameter. A chunk is a box of
it: what it has of one parameter is a box of that, a few bytes further on in the same item. Nothing is copied.

`fully_sharded_model_space` (megatron-core up to 0.13) stores a parameter [X, Y], of which tensor-parallel ranks have
[x, y] each, as [X/x, Y/y, x*y]: by which block, and where in the flattened block. Data-parallel ranks cut the last axis
at any element. Such a chunk is a range of a box, as every extent is. Pure: no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.state import Extent, Span
from zckpt.state.boxes import row_major
from zckpt.state.dtypes import itemsize

Index = tuple[int, ...]
Shape = tuple[int, ...]


def split(spans: Iterable[Span], axes: int) -> dict[Index, list[Span]]:
    """Return the spans of each parameter that a tensor holds, by its index along the first `axes` axes."""
    found: dict[Index, list[Span]] = {}
    for span in spans:
        offsets, sizes = span.extent.offsets, span.extent.sizes
        strides = span.strides or row_major(sizes)
        inner = Extent(offsets[axes:], sizes[axes:], 0, math.prod(sizes[axes:]))
        kept = strides[axes:] if strides[axes:] != row_major(sizes[axes:]) else None
        for index in product(*(range(o, o + n) for o, n in zip(offsets[:axes], sizes[:axes], strict=True))):
            steps = sum((i - o) * s for i, o, s in zip(index, offsets, strides, strict=False))
            at = span.offset + steps * itemsize(span.dtype)
            found.setdefault(index, []).append(replace(span, extent=inner, offset=at, strides=kept))
    return found


def is_flattened(shape: Shape, of: Shape) -> bool:
    """Tell whether a tensor of this shape is a parameter [X, Y, ...] as [X/x, Y/y, ..., x*y*...]."""
    if len(shape) != len(of) + 1 or not all(shape) or any(whole % n for whole, n in zip(of, shape, strict=False)):
        return False
    return math.prod(shape) == math.prod(of)


def unflattened(spans: Iterable[Span], shape: Shape, of: Shape, key: str, path: str) -> list[Span]:
    """Return the spans of a parameter of which the tensor on disk is flattened blocks.

    Parameters
    ----------
    spans : iterable of Span
        Boxes of the tensor on disk.
    shape, of : tuple of int
        Of that tensor, and of the parameter.
    key, path : str
        For messages.

    Raises
    ------
    UnsupportedError
        A chunk is not stored end to end.
    """
    block = tuple(whole // n for whole, n in zip(of, shape, strict=False))
    found = []
    for index, its in split(spans, len(of)).items():
        offsets = tuple(at * n for at, n in zip(index, block, strict=True))
        for span in its:
            if not span.is_contiguous:
                raise UnsupportedError(f"holds {key}, flattened, but not end to end", path=path, found=span.strides)
            ((start,), (numel,)) = span.extent.offsets, span.extent.sizes
            found.append(replace(span, extent=Extent(offsets, block, start, numel)))
    return found


def joined(parts: Sequence[tuple[Shape, Sequence[Span]]], key: str, path: str) -> tuple[Shape, tuple[Span, ...]]:
    """Return the shape and the spans of a parameter that is written as several, one after the other in the first axis.

    Raises LayoutError: they do not fit together.
    """
    shape, spans = parts[0][0], list(parts[0][1])
    for other, its in parts[1:]:
        if not shape or other[1:] != shape[1:]:
            raise LayoutError(f"the tensors of {key} do not fit together", path=path, expected=shape, found=other)
        for span in its:
            box = span.extent
            moved = (box.offsets[0] + shape[0], *box.offsets[1:])
            spans.append(replace(span, extent=replace(box, offsets=moved)))
        shape = (shape[0] + other[0], *shape[1:])
    return shape, tuple(spans)
