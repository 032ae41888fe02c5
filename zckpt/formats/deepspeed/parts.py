"""Runs of a parameter's elements as parts of a storage that is to be written."""

from __future__ import annotations

from collections.abc import Iterator

from zckpt.formats.torch_files.writer import SlotPart
from zckpt.state import Extent, Slot


def slot_parts(slot: Slot, label: str, start: int, position: int, numel: int) -> Iterator[SlotPart]:
    """Yield what of a run of a parameter's elements a slot has: all, or none of a vocabulary's padding rows.

    Parameters
    ----------
    slot : Slot
        Of the parameter's shape, or with fewer rows: what it does not have stays zero.
    label : str
    start : int, elements
        Of the run, in the parameter.
    position : int, elements
        Of the run, in the storage.
    numel : int, elements
    """
    count = min(numel, slot.numel - start)
    if count > 0:
        yield SlotPart(position, slot, label, Extent.flat(slot.shape, start, count))
