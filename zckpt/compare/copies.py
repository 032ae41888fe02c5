"""Copies that ranks keep of one parameter, by a bounded sample: where they have drifted apart, which one is written.

Stages of a pipeline train their own copy of a tied layer, tensor-parallel ranks their own of a norm. DeepSpeed gives
each rank its own back, so a training does not see that they differ; in a whole model there is one of them.
`verify --deep` compares all elements.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.read import read_all
from zckpt.engine.targets import Hole
from zckpt.errors import listed
from zckpt.state import MASTER, WEIGHT, Checkpoint, Slot

SAMPLED_NUMEL = 256
"""Elements that follow each other."""

MOST_EXTENTS = 64
"""Of one copy, spread evenly over it; a smaller one is compared whole."""

MOST_TOGETHER = 4096
"""Extents of all copies together: of each its two ends at least, and of the copies evenly some where there are more."""


def drifted(checkpoint: Checkpoint) -> list[str]:
    """Return a note on what ranks have otherwise than the rank that it is read from.

    Only values of parameters are compared: masters, or weights where there are none; and weights under several names.
    """
    masters = {name for name, one in checkpoint.parameters.items() if one.master}
    copies = [
        one
        for one in checkpoint.duplicates
        if one.kind != "buffer"
        and one.slot.numel
        and (one.slot.shape, one.slot.dtype) == (one.original.shape, one.original.dtype)
        and one.slot.name == (MASTER if one.kind != "tied" and one.of in masters else WEIGHT)
    ]
    looked_at = min(len(copies), MOST_TOGETHER // 2)
    chosen = [copies[number * len(copies) // looked_at] for number in range(looked_at)]
    most = min(MOST_EXTENTS, MOST_TOGETHER // max(looked_at, 1))
    reads: list[tuple[Hole, memoryview]] = []  # all at once, for stores' sake
    pairs = [(one, sampled(one.slot, most, reads), sampled(one.original, most, reads)) for one in chosen]
    read_all(reads)
    found = [one for one, mine, its in pairs if mine.tobytes() != its.tobytes()]
    if not found:
        return []
    names = list(dict.fromkeys(one.of for one in found))
    files = list(dict.fromkeys(Path(span.path).name for one in found for span in list(one.original.spans)[:1]))
    return [
        f"ranks' copies of {listed(names)} differ: the one in {listed(files)} is written; `zckpt verify --deep` "
        "says in how many elements they differ"
    ]


def sampled(slot: Slot, most: int, reads: list[tuple[Hole, memoryview]]) -> Array:
    """Return room for a sample of a slot; add the reads that fill it."""
    count = min(SAMPLED_NUMEL, slot.numel)
    last = slot.numel - count
    pieces = min(most, -(-slot.numel // count))
    starts = sorted({round(i * last / max(pieces - 1, 1)) for i in range(pieces)})
    found: Array = np.empty(len(starts) * count, numpy_dtype(slot.dtype))
    for number, start in enumerate(starts):
        into = memoryview(found[number * count : (number + 1) * count].view(np.uint8).data)
        reads.append((Hole(0, slot.name, slot, slot.flat(start, count), slot.dtype), into))
    return found
