"""The function that makes torchao's codes and scales of floats that others compute: as `requantise`, by its rules.

    scale     the largest magnitude of a block, at least 1e-12; of 8-bit floats a 448th of it
    code      of the map's values the nearest to value / scale; of two that are as near, the upper
    8 bits    a code in a byte; 4 bits: two, the first in its upper half; fp8: value / scale itself, without a map

Blocks are whole ones. Source: torchao 0.18, `optim/quant_utils.py` and `quantize_fp8`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.engine.cast import cast
from zckpt.engine.computed import Input
from zckpt.engine.requantise import Portion, values_of
from zckpt.state import Extent, Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

SMALLEST = np.float32(1e-12)
"""A block of zeros has it for a scale."""

LARGEST = np.float32(448)
"""Of the 8-bit floats, which have no infinity."""


@dataclass(frozen=True, slots=True)
class RequantisedAsTorchao:
    """Codes of whole blocks, or their scales.

    Parameters
    ----------
    portions : tuple of Portion
        Whole blocks together.
    block : int, elements
    qmap : Slot or None
        The value of each code, float32, ascending; None for 8-bit floats.
    gives_scales : bool
        Else codes.
    is_packed : bool
        Two codes in a byte.
    """

    portions: tuple[Portion, ...]
    block: int
    qmap: Slot | None
    gives_scales: bool
    is_packed: bool = False

    @property
    def numel(self) -> int:
        """Elements that it quantises."""
        return sum(one.numel for one in self.portions)

    @property
    def unit(self) -> int:
        """Elements that one value of it is of."""
        return self.block if self.gives_scales else 2 if self.is_packed else 1

    @property
    def step(self) -> int:
        """All are computed together."""
        return self.numel // self.unit

    @property
    def width(self) -> int:
        """Bytes of a float32 for each element."""
        return 4 * self.unit

    def inputs(self, start: int, numel: int) -> list[Input]:  # noqa: ARG002  # always all of it
        """Return what the floats are computed from, and the map."""
        found = [each for one in self.portions for each in one.inputs()]
        return found if self.qmap is None else [*found, Input(self.qmap, Extent.whole(self.qmap.shape), "float32")]

    def compute(self, inputs: Sequence[Callable[[], Array]]) -> Array:
        """Return the codes, or the scales."""
        values, taken = values_of(self.portions, inputs)
        blocks = values.reshape(-1, self.block)
        scales: Array = np.maximum(np.abs(blocks).max(axis=1), SMALLEST)
        if self.qmap is None:
            scales = scales / LARGEST
        if self.gives_scales:
            return scales
        scaled: Array = (blocks / scales[:, None]).reshape(-1)
        if self.qmap is None:
            return cast(scaled, "float8_e4m3fn")
        codes = nearest(scaled, inputs[taken]())
        return codes[::2] << 4 | codes[1::2] if self.is_packed else codes


def nearest(values: Array, qmap: Array) -> Array:
    """Return for each value the code of the map's nearest, of two the upper; of NaN the first."""
    last = len(qmap) - 1
    lower = np.clip(np.searchsorted(qmap, values, side="right") - 1, 0, last)
    lower[np.isnan(values)] = 0
    upper = np.minimum(lower + 1, last)
    below, above = qmap[lower], qmap[upper]
    found: Array = np.where(values - below >= (above - below) * np.float32(0.5), upper, lower).astype(np.uint8)
    return found
