"""Copies that ranks keep of one parameter, by a bounded sample: where they have drifted apart, which one is written.

Stages of a pipeline train their own copy of a tied layer, tensor-parallel ranks their own of a norm. DeepSpeed gives
each rank its own back, so a training does not see that they differ; in a whole model there is one of them.
`verify --deep` compares all elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zckpt.engine.read import read_extent
from zckpt.errors import listed
from zckpt.state import MASTER, WEIGHT, Checkpoint, Duplicate, Extent, Slot
from zckpt.storage.files import Sources

SAMPLED_NUMEL = 256
"""Elements that follow each other."""

MOST_EXTENTS = 64
"""Of one copy, spread evenly over it; a smaller one is compared whole."""

MOST_READS = 4096
"""Of all copies together, unless each has two: its ends."""


def drifted(checkpoint: Checkpoint) -> list[str]:
    """Return a note on what ranks have otherwise than the rank that it is read from.

    Only values of parameters are compared: masters, or weights where there are none; and weights under several names.
    """
    masters = {name for name, one in checkpoint.parameters.items() if MASTER in one.slots}
    copies = [
        one
        for one in checkpoint.duplicates
        if one.kind != "buffer"
        and one.slot.numel
        and (one.slot.shape, one.slot.dtype) == (one.original.shape, one.original.dtype)
        and one.slot.name == (MASTER if one.kind == "parameter" and one.of in masters else WEIGHT)
    ]
    most = max(2, min(MOST_EXTENTS, MOST_READS // max(len(copies), 1)))
    with Sources() as sources:
        found = [one for one in copies if _differ(one, most, sources)]
    if not found:
        return []
    names = list(dict.fromkeys(one.of for one in found))
    files = list(dict.fromkeys(Path(span.path).name for one in found for span in list(one.original.spans)[:1]))
    return [
        f"copies of {listed(names)} that ranks keep differ: where one is written, it is that of {listed(files)}; "
        f"`zckpt verify --deep` says in how many elements"
    ]


def _differ(one: Duplicate, most: int, sources: Sources) -> bool:
    return any(
        read_extent(one.slot, extent, sources).tobytes() != read_extent(one.original, extent, sources).tobytes()
        for extent in _sampled(one.slot, most)
    )


def _sampled(slot: Slot, most: int) -> Sequence[Extent]:
    count = min(SAMPLED_NUMEL, slot.numel)
    last = slot.numel - count
    pieces = min(most, -(-slot.numel // count))
    starts = sorted({round(i * last / max(pieces - 1, 1)) for i in range(pieces)})
    return [Extent.flat(slot.shape, start, count) for start in starts]
