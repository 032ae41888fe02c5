"""Elements that lie far apart, or in another order, moved at the speed of memory. Knows arrays and strides only.

Of what lies far apart only the pages it is on are read, through mappings of the file: windows of bounded size, for
which there is room in an address space that is limited, however far the elements reach.

Rows of a few elements are moved as one wide element each, and what is transposed in tiles that stay in the cache:
element by element, either takes as long as reading from a disk.
"""

from __future__ import annotations

import numpy as np

from zckpt.engine.cast import Array
from zckpt.state.spans import reach_of
from zckpt.storage.files import Sources

WINDOW_NBYTES = 1 << 24
"""Mapped at once by a worker, for one array."""

WIDE_NBYTES = 1 << 12
"""A row of at most this is one wide element; longer ones take care of themselves."""

TILE = 1 << 5
"""Elements that lie end to end in the target and are moved at once where they do not in the source: two cache lines."""

TILE_ROWS = 1 << 8
"""Times as many that lie end to end in the source, so that a tile is in the first cache on both sides."""


def gather_mapped(into: Array, sources: Sources, path: str, offset: int, strides: tuple[int, ...]) -> None:
    """Fill an array of any strides with elements of a file.

    Parameters
    ----------
    into : ndarray
    sources : Sources
    path : str
        Of the file.
    offset : int, bytes
        Of the first element.
    strides : tuple of int, bytes
        In the file, by dimension; not negative.

    Raises
    ------
    DamagedFileError
        The file ends before the last of them.
    """
    reach = reach_of(into.shape, strides, into.itemsize)
    if reach <= WINDOW_NBYTES:
        mapped, start = sources.mapped(path, offset, reach)
        place(into, np.ndarray(into.shape, into.dtype, mapped, start, strides))
        return
    axis = max(range(into.ndim), key=lambda one: strides[one] if into.shape[one] > 1 else -1)
    inner = reach - (into.shape[axis] - 1) * strides[axis]
    rows = max((WINDOW_NBYTES - inner) // strides[axis] + 1, 1)
    for first in range(0, into.shape[axis], rows):
        part = into[(slice(None),) * axis + (slice(first, first + rows),)]
        gather_mapped(part, sources, path, offset + first * strides[axis], strides)


def place(target: Array, values: Array) -> None:
    """Set elements of an array to those of another, of the same shape and type, both of any strides."""
    size = values.itemsize
    if values.ndim == 0 or values.size < TILE:
        target[...] = values
        return
    last = values.shape[-1]
    if last > 1 and values.strides[-1] == target.strides[-1] == size:
        if last * size <= WIDE_NBYTES:
            kind = np.dtype(f"V{last * size}")
            target, values = target.view(kind)[..., 0], values.view(kind)[..., 0]
        target[...] = values
        return
    inner = min(range(values.ndim), key=lambda one: values.strides[one] or 1 << 62)
    if inner == values.ndim - 1 or last < TILE or values.shape[inner] < 2:
        target[...] = values
        return
    for low in range(0, values.shape[inner], TILE_ROWS):
        rows = (slice(None),) * inner + (slice(low, low + TILE_ROWS),)
        to, from_ = target[rows], values[rows]
        for at in range(0, last, TILE):
            to[..., at : at + TILE] = from_[..., at : at + TILE].copy(order="K")  # steps of it would share cache lines


def in_order(values: Array) -> Array:
    """Return an array of the same elements that lie end to end."""
    if values.flags.c_contiguous:
        return values
    found: Array = np.empty(values.shape, values.dtype)
    place(found, values)
    return found
