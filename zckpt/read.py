"""Elements of slots in memory: a whole slot or a part. The same plan as for a file, with memory for a target."""

from __future__ import annotations

import numpy as np

from zckpt.cast import Array, numpy_dtype
from zckpt.pieces import elements, pieces
from zckpt.plan import Fill, Hole, fill
from zckpt.state import Extent, Slot
from zckpt.storage import Sources

READ_PIECE_NBYTES = 8 << 20
"""Read in pieces of this size, so that a gather needs little memory beside its result."""


def read_extent(slot: Slot, extent: Extent, sources: Sources, *, dtype: str | None = None) -> Array:
    """Return the elements of an extent of a slot, flat.

    Parameters
    ----------
    slot : Slot
    extent : Extent
    sources : Sources
    dtype : str, optional
        Element type wanted; by default the slot's own.

    Raises
    ------
    LayoutError
        The slot's spans do not cover the extent exactly once.
    DamagedFileError
        A file ends too early.
    """
    wanted = dtype or slot.dtype
    result = np.empty(extent.numel, numpy_dtype(wanted))
    view = memoryview(result.view(np.uint8).data) if extent.numel else memoryview(b"")
    hole = Hole(0, slot.name, slot, extent, wanted)
    for piece in pieces(Fill(hole, tuple(fill(hole))), READ_PIECE_NBYTES, READ_PIECE_NBYTES):
        view[piece.offset : piece.offset + piece.nbytes] = elements(piece, sources.descriptor)
    return result


def read_slot(slot: Slot, *, dtype: str | None = None) -> Array:
    """Return all elements of a slot, in its shape; errors are those of `read_extent`."""
    with Sources() as sources:
        return read_extent(slot, Extent.whole(slot.shape), sources, dtype=dtype).reshape(slot.shape)
