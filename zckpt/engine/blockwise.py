"""The function that makes floats of codes: value = map[code] x scale of its block, in float32, rounded once.

A block is so many elements that follow each other, from the first one of what the codes are of; the last one may be
shorter. Codes are a byte each, or two in a byte, the first in its upper half; without a map they are 8-bit floats
themselves. A tensor may lie in what several ranks hold, each a portion, whose blocks begin anywhere in the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from zckpt.engine.computed import Input, Inputs
from zckpt.state import Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array


@dataclass(frozen=True, slots=True)
class Portion:
    """Elements of a tensor whose codes lie in those of something larger, as a rank's partition; blocks are that one's.

    Parameters
    ----------
    start, numel : int, elements
        Of the tensor.
    position : int, elements
        Of the first one, in what the codes are of.
    codes : Slot
        Of uint8, or of an 8-bit float type where there is no map.
    scale : Slot
        One float32 for each block.
    block : int, elements
    qmap : Slot or None
        The value of each code, float32.
    is_packed : bool
        Two codes in a byte.
    """

    start: int
    numel: int
    position: int
    codes: Slot
    scale: Slot
    block: int
    qmap: Slot | None = None
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class Blockwise:
    """The values of quantised state. `portions`: in order; together they are all of the tensor."""

    portions: tuple[Portion, ...]

    step: ClassVar[None] = None
    """Any elements can be computed by themselves."""

    width: ClassVar[int] = 4
    """Bytes of a float32."""

    def _within(self, start: int, numel: int) -> Iterator[tuple[Portion, int, int]]:
        """Yield portions with some elements, and which these are of what the codes are of: first, and one after."""
        for one in self.portions:
            low, high = max(start, one.start), min(start + numel, one.start + one.numel)
            if low < high:
                yield one, one.position + low - one.start, one.position + high - one.start

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return of each portion that has some of the elements their codes, the scales of their blocks, and the map."""
        found: list[Input] = []
        for one, low, high in self._within(start, numel):
            for slot, per, dtype in (
                (one.codes, 2 if one.is_packed else 1, one.codes.dtype),
                (one.scale, one.block, "float32"),
            ):
                first = low // per
                found.append(Input(slot, slot.flat(first, -(-high // per) - first), dtype))
            if one.qmap is not None:
                found.append(Input(one.qmap, one.qmap.whole, "float32"))
        return found

    def compute(self, inputs: Inputs, start: int, numel: int) -> Array:
        """Return the values of elements."""
        read, found = iter(inputs), np.empty(numel, np.float32)
        at = 0
        for one, low, high in self._within(start, numel):
            codes, scale = next(read)(), next(read)()
            if one.is_packed:
                codes = np.stack([codes >> 4, codes & 0xF], axis=-1).reshape(-1)[low % 2 :][: high - low]
            values = codes.astype(np.float32) if one.qmap is None else next(read)()[codes]
            scales = np.repeat(scale, one.block)[low % one.block :][: high - low]
            np.multiply(values, scales, out=found[at : at + high - low])
            at += high - low
        return found
