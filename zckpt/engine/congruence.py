"""Where bytes of a target would best begin, so that blocks of them are blocks of the sources, and can be cloned.

A format that may pad what comes before its tensors asks for the residue, modulo a block, of an offset. Only where the
sources lie on a file system that clones is there one: elsewhere files are padded as their own programs pad them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zckpt.engine.computed import Computed
from zckpt.engine.plan import fill
from zckpt.engine.targets import Hole
from zckpt.state import ZEROS
from zckpt.state.boxes import SpanIndexes
from zckpt.storage.disk import BLOCK_NBYTES, may_clone

LEAST_NBYTES = 1 << 20
"""Of a hole that padding is spent on: at most a block, and with it the sources are looked up once more."""


def residue(holes: Iterable[Hole], step: int, indexes: SpanIndexes | None = None) -> int | None:
    """Return what an offset has to be, modulo a block, for most bytes to be clones; None: for none.

    Parameters
    ----------
    holes : iterable of Hole
        Their offsets count from the one in question.
    step : int, bytes
        The offset must be a multiple of it; it divides a block.
    indexes : SpanIndexes, optional
        Of many holes that are asked for one after the other.
    """
    nbytes: Counter[int] = Counter()
    indexes = indexes or SpanIndexes()
    for hole in holes:
        first = next(iter(hole.slot.spans), None)
        if first is None or hole.nbytes < LEAST_NBYTES or isinstance(hole.slot, Computed):
            continue
        if first.path == ZEROS or not may_clone(first.path):
            continue
        for copy in fill(hole, indexes):
            found = (copy.sources[0].offset - copy.offset) % BLOCK_NBYTES
            if copy.is_bytewise and copy.nbytes >= LEAST_NBYTES and found % step == 0:
                nbytes[found] += copy.nbytes
    return min(nbytes, key=lambda one: (-nbytes[one], one)) if nbytes else None
