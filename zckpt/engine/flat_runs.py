"""Slots whose elements lie in files as they are wanted, in runs of the flattened tensor: read without a plan. Pure.

So lie most: whole tensors, and what ZeRO cuts. For all others - slices, strides, other types - a plan is made.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from zckpt.state import Slot
from zckpt.state.dtypes import itemsize

Stretch = tuple[str, int, int]
"""Path, offset and number of bytes."""


@dataclass(frozen=True, slots=True)
class FlatRuns:
    """The runs of a slot, in order and without a gap.

    Parameters
    ----------
    starts : list of int, elements
        Where each begins.
    places : list of (str, int)
        Path and byte offset of each.
    numel : int, elements
    size : int, bytes
        Of an element.
    """

    starts: list[int]
    places: list[tuple[str, int]]
    numel: int
    size: int

    def stretches(self, start: int, numel: int) -> tuple[Stretch, ...]:
        """Return where elements [start, start + numel) lie."""
        found = []
        index = bisect_right(self.starts, start) - 1
        end = start + numel
        while start < end:
            last = self.starts[index + 1] if index + 1 < len(self.starts) else self.numel
            count = min(last, end) - start
            path, offset = self.places[index]
            found.append((path, offset + (start - self.starts[index]) * self.size, count * self.size))
            start, index = start + count, index + 1
        return tuple(found)


def flat_runs(slot: Slot, dtype: str) -> FlatRuns | None:
    """Return the runs of a slot; None unless its elements lie in them once, of type `dtype` and little-endian."""
    if slot.replicas:
        return None
    for span in slot.spans:
        if (
            span.dtype != dtype
            or not span.is_run
            or span.extent.sizes != slot.shape
            or (span.byteorder != "little" and itemsize(dtype) > 1)
        ):
            return None
    spans = sorted((span for span in slot.spans if span.extent.numel), key=lambda span: span.extent.start)
    at = 0
    for span in spans:
        if span.extent.start != at:
            return None
        at += span.extent.numel
    if at != slot.numel:
        return None
    starts = [span.extent.start for span in spans]
    return FlatRuns(starts, [(span.path, span.offset) for span in spans], at, itemsize(dtype))
