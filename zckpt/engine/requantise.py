"""The function that makes codes and scales of floats that others compute: state that was quantised, cut otherwise.

    values    |slot a, from element 7 |zeros|slot b ...            what a rank's partition will hold, end to end
    blocks    |block |block |block |block ...                      from the partition's first element on

bitsandbytes (0.50, as `quantize_blockwise` has it for any device; its own kernels for some take shortcuts in it)
    scale     the largest magnitude of a block
    code      of the map's values the nearest to value / scale; of two that are as near, the lower
torchao (0.18, `optim/quant_utils.py` and `quantize_fp8`), of whole blocks
    scale     the largest magnitude of a block, at least 1e-12; of 8-bit floats a 448th of it
    code      of the map's values the nearest to value / scale; of two that are as near, the upper
    4 bits    two codes in a byte, the first in its upper half; fp8: value / scale itself, without a map

The arithmetic is float32. bitsandbytes multiplies whole blocks by the reciprocal of their scale, and divides a last,
shorter one. What was a block before is rounded, too, where its largest magnitude is negative: its map goes to 1, and
not to -1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.engine.cast import cast
from zckpt.engine.computed import Computed, Input, Inputs
from zckpt.state import Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

LARGEST_FP8 = np.float32(448)
"""torchao's 8-bit floats have no infinity."""


TOGETHER_NUMEL = 1 << 16
"""Elements, about, that are quantised at once: no more floats than these are in memory."""


class Portion(NamedTuple):
    """Elements of a slot from `start` on, from element `at` of a partition.

    If the slot is computed, any of its elements can be by themselves.
    """

    at: int
    numel: int
    start: int
    slot: Slot

    def inputs(self) -> Sequence[Input]:
        """Return what its elements are computed from."""
        if isinstance(self.slot, Computed):
            return self.slot.function.inputs(self.start, self.numel)
        return [Input(self.slot, self.slot.flat(self.start, self.numel), "float32")]

    def compute(self, inputs: Inputs) -> Array:
        """Return its elements."""
        if isinstance(self.slot, Computed):
            return self.slot.function.compute(inputs, self.start, self.numel)
        return inputs[0]()


@dataclass(frozen=True, slots=True)
class Requantised:
    """Codes of a partition's blocks, or their scales.

    Parameters
    ----------
    portions : tuple of Portion
        In their order; elements of none are zero.
    numel : int, elements
        Of the partition.
    block : int, elements
    qmap : Slot or None
        The value of each code, float32, ascending; None for 8-bit floats.
    gives_scales : bool
        Else codes.
    quantise : callable
        `by_bitsandbytes` or `by_torchao`.
    is_packed : bool
        Two codes in a byte.
    """

    portions: tuple[Portion, ...]
    numel: int
    block: int
    qmap: Slot | None
    gives_scales: bool
    quantise: Callable[[Array, int, Array | None, bool], Array]
    is_packed: bool = False

    @property
    def unit(self) -> int:
        """Elements that one value of it is of."""
        return self.block if self.gives_scales else 2 if self.is_packed else 1

    @property
    def step(self) -> int:
        """Values of whole blocks."""
        return max(TOGETHER_NUMEL // self.block, 1) * self.block // self.unit

    @property
    def width(self) -> int:
        """Bytes of a float32 for each element."""
        return 4 * self.unit

    def _portions(self, low: int, high: int) -> list[Portion]:
        """Return what of the portions is within elements [low, high)."""
        first = max(bisect_right(self.portions, low, key=lambda one: one.at) - 1, 0)
        found = []
        for at, numel, start, slot in self.portions[first : bisect_left(self.portions, high, key=lambda one: one.at)]:
            begin, end = max(at, low), min(at + numel, high)
            if begin < end:
                found.append(Portion(begin, end - begin, start + begin - at, slot))
        return found

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return what the floats are computed from, and the map."""
        portions = self._portions(start * self.unit, (start + numel) * self.unit)
        found = [each for one in portions for each in one.inputs()]
        return found if self.qmap is None else [*found, Input(self.qmap, self.qmap.whole, "float32")]

    def compute(self, inputs: Inputs, start: int, numel: int) -> Array:
        """Return the codes, or the scales."""
        low, high = start * self.unit, min((start + numel) * self.unit, self.numel)
        values: Array = np.zeros(high - low, np.float32)
        taken = 0
        for one in self._portions(low, high):
            count = len(one.inputs())
            values[one.at - low : one.at - low + one.numel] = one.compute(inputs[taken : taken + count])
            taken += count
        qmap = None if self.qmap is None else inputs[taken]()
        found = self.quantise(values, self.block, qmap, self.gives_scales)
        return found[::2] << 4 | found[1::2] if self.is_packed and not self.gives_scales else found


def by_bitsandbytes(values: Array, block: int, qmap: Array | None, gives_scales: bool) -> Array:
    """Return the code of each value, uint8, or the scale of each block."""
    smallest = np.float32(1e-38)  # what a block of zeros is divided by
    whole = len(values) - len(values) % block
    scales: Array = np.abs(values[:whole].reshape(-1, block)).max(axis=1)
    if whole < len(values):
        scales = np.append(scales, np.maximum(np.abs(values[whole:]).max(), smallest))
    if gives_scales or qmap is None:
        return scales
    scaled: Array = np.empty_like(values)
    reciprocals = np.float32(1) / np.maximum(scales[: whole // block], smallest)
    scaled[:whole].reshape(-1, block)[...] = values[:whole].reshape(-1, block) * reciprocals[:, None]
    scaled[whole:] = values[whole:] / scales[whole // block :]
    bounds = (qmap[:-1] + qmap[1:]) / np.float32(2)
    codes: Array = np.searchsorted(bounds, np.clip(scaled, -1, 1), side="left").astype(np.uint8)
    return codes


def by_torchao(values: Array, block: int, qmap: Array | None, gives_scales: bool) -> Array:
    """Return the code of each value, or the scale of each block; without a map, codes are 8-bit floats."""
    blocks = values.reshape(-1, block)
    scales: Array = np.maximum(np.abs(blocks).max(axis=1), np.float32(1e-12))
    if qmap is None:
        scales = scales / LARGEST_FP8
    if gives_scales:
        return scales
    scaled: Array = (blocks / scales[:, None]).reshape(-1)
    return cast(scaled, "float8_e4m3fn") if qmap is None else nearest(scaled, qmap)


def nearest(values: Array, qmap: Array) -> Array:
    """Return for each value the code of the map's nearest, of two the upper; of NaN the first."""
    last = len(qmap) - 1
    lower = np.clip(np.searchsorted(qmap, values, side="right") - 1, 0, last)
    lower[np.isnan(values)] = 0
    upper = np.minimum(lower + 1, last)
    below, above = qmap[lower], qmap[upper]
    found: Array = np.where(values - below >= (above - below) * np.float32(0.5), upper, lower).astype(np.uint8)
    return found
