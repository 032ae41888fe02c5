"""Masters of which the files have the lower 16 bits: the others are the weight's, as Transformer Engine rounds it.

Of a float32 it keeps the lower half as int16 (`store_param_remainders`). The weight is the upper half, plus one where
the lower one, as a number, is below zero: half of the last bit and more.

Source: `multi_tensor_adam.cu` of Transformer Engine 2.1; `DistributedOptimizer` of megatron-core 0.12 to 0.16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zckpt.engine.computed import Computed, Input, Inputs
from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable
from zckpt.state import Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

REMAINDER = "int16"


@immutable
class _Halves:
    """Computes masters from both of their halves."""

    weight: Slot
    remainder: Slot
    step: int | None = None
    width: int = 4

    def inputs(self, start: int, numel: int) -> Sequence[Input]:
        return [Input(one, one.flat(start, numel), one.dtype) for one in (self.weight, self.remainder)]

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002
        upper, lower = (read() for read in inputs)
        words = upper.view(np.uint16).astype(np.uint32) - (lower < 0)
        found: Array = ((words << 16) | lower.view(np.uint16)).view(np.float32)
        return found


def whole(master: Slot, weight: Slot) -> Slot:
    """Return the master of a weight, computed. Raises UnsupportedError: the weight cannot be its upper half."""
    if (master.dtype, weight.dtype) != (REMAINDER, "bfloat16"):
        raise UnsupportedError("masters of 16 bits are the rest of bfloat16 weights", found=weight.dtype)
    return Computed(master.name, "float32", weight.shape, (), function=_Halves(weight, master))
