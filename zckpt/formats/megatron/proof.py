"""Whether masters, rounded, are weights: of every element, block by block. For state that has no names."""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.compare.weights import not_rounded
from zckpt.engine.copy import read_extent
from zckpt.state import Extent, Slot
from zckpt.storage.files import Sources

BLOCK_NUMEL = 1 << 20
"""Elements that are held against each other at a time."""


def unproven(masters: Mapping[str, Slot], weights: Mapping[str, Slot]) -> str | None:
    """Return what is wrong with the first master that does not round to its weight in every element; None if all do.

    Parameters
    ----------
    masters, weights : mapping of str to Slot
        By name, the same names.

    Raises
    ------
    SourceError
        A file cannot be read.
    """
    with Sources() as sources:
        for name, master in masters.items():
            weight = weights[name]
            for start in range(0, master.numel, BLOCK_NUMEL):
                extent = Extent.flat(master.shape, start, min(BLOCK_NUMEL, master.numel - start))
                wrong = not_rounded(read_extent(master, extent, sources), read_extent(weight, extent, sources))
                if len(wrong):
                    return f"that of {name} does not round to its weight at element {start + int(wrong[0])}"
    return None
