"""Functions that compute a slot as a sum or mean of several: weighted, or exponential. Steps are rounded, as torch's.

Sum      w0*x0 + w1*x1 + ...                            a bias, and what an adapter adds to it
Mean     w0*x0 + w1*x1 + ...                            a model soup, or the last checkpoints of a run; of equal
         (x0 + x1 + ...) / n                            weights, which together are 1 in any case
Decayed  m = x0;  m = d*m + (1-d)*x1; ...               what an average that is kept during training does
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.computed import Input, Inputs
from zckpt.immutable import immutable
from zckpt.state import Slot, itemsize


@immutable
class _OfSeveral:
    """A function of the same elements of several slots of one shape; `dtype`, float32 or float64, computes it."""

    slots: tuple[Slot, ...]
    dtype: str

    step: ClassVar[None] = None
    """Any elements can be computed by themselves."""

    @property
    def width(self) -> int:
        """Bytes of an element, as it is computed or as the widest of the slots has it."""
        return max(itemsize(dtype) for dtype in (self.dtype, *(slot.dtype for slot in self.slots)))

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return the same elements of each slot."""
        return [Input(slot, slot.flat(start, numel), self.dtype) for slot in self.slots]


@immutable
class Sum(_OfSeveral):
    """The sum of slots, in their order, each times its weight."""

    weights: tuple[float, ...]

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002  # alike everywhere
        """Return the sum of a block."""
        number = numpy_dtype(self.dtype).type
        total = _weighted(self.weights[0], inputs[0], number)
        for weight, read in zip(self.weights[1:], inputs[1:], strict=True):
            total += _weighted(weight, read, number)
        return total


@immutable
class Mean(Sum):
    """The mean of slots, whose weights together are 1; of equal weights, the sum is divided by their number."""

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:
        """Return the mean of a block."""
        count = len(self.weights)
        if len(set(self.weights)) > 1:
            return Sum.compute(self, inputs, start, numel, dtype)
        total = Sum(self.slots, self.dtype, (1.0,) * count).compute(inputs, start, numel, dtype)
        total /= numpy_dtype(self.dtype).type(count)
        return total


def _weighted(weight: float, read: Callable[[], Array], number: Callable[[float], float]) -> Array:
    values = read()
    if weight != 1.0:
        values *= number(weight)
    return values


@immutable
class Decayed(_OfSeveral):
    """The exponential mean of slots: of what was there, `decay` stays, and 1 - `decay` of the next slot is added."""

    decay: float

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002  # alike everywhere
        """Return the mean of a block."""
        number = numpy_dtype(self.dtype).type
        first, *others = inputs
        total = first()
        for read in others:
            values = read()
            total *= number(self.decay)
            values *= number(1 - self.decay)
            total += values
        return total
