"""The function that makes codes and scales of floats that others compute: state that was quantised, cut otherwise.

    values    |slot a, from element 7 |zeros|slot b ...            what a rank's partition will hold, end to end
    blocks    |block |block |block |block ...                      from the partition's first element on
    scale     the largest magnitude of a block
    code      of the map's values the nearest to value / scale; of two that are as near, the lower

The arithmetic is that of `quantize_blockwise` as bitsandbytes has it for any device (0.50; its own kernels for some
take shortcuts in it): float32, whole blocks times the reciprocal of their scale, a last, shorter one divided by it.
What was a block before is rounded, too, where its largest magnitude is negative: the map goes to 1, and not to -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from zckpt.engine.computed import Computed, Input
from zckpt.state import Extent, Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

SMALLEST = np.float32(1e-38)
"""What a block of zeros is divided by."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Elements of a partition that follow each other: of a slot from `start` on, or zeros.

    Parameters
    ----------
    numel, start : int, elements
    slot : Computed or None
        Of which any elements can be computed by themselves.
    """

    numel: int
    start: int = 0
    slot: Computed | None = None

    def inputs(self) -> Sequence[Input]:
        """Return what its elements are computed from."""
        return () if self.slot is None else self.slot.function.inputs(self.start, self.numel)


@dataclass(frozen=True, slots=True)
class Floats:
    """The values of a slot that is in float32 already."""

    slot: Slot

    step: ClassVar[None] = None
    """Any elements can be read by themselves."""

    width: ClassVar[int] = 4
    """Bytes of a float32."""

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return the elements themselves."""
        return [Input(self.slot, Extent.flat(self.slot.shape, start, numel), "float32")]

    def compute(self, inputs: Sequence[Callable[[], Array]]) -> Array:
        """Return them as they are."""
        return inputs[0]()


@dataclass(frozen=True, slots=True)
class Requantised:
    """Codes of whole blocks, or their scales.

    Parameters
    ----------
    portions : tuple of Portion
    block : int, elements
    qmap : Slot
        The value of each code, float32, ascending.
    gives_scales : bool
        Else codes.
    """

    portions: tuple[Portion, ...]
    block: int
    qmap: Slot
    gives_scales: bool

    @property
    def numel(self) -> int:
        """Elements that it quantises."""
        return sum(one.numel for one in self.portions)

    @property
    def step(self) -> int:
        """All are computed together."""
        return -(-self.numel // self.block) if self.gives_scales else self.numel

    @property
    def width(self) -> int:
        """Bytes of a float32 for each element, of which a scale has a block."""
        return 4 * self.block if self.gives_scales else 4

    def inputs(self, start: int, numel: int) -> list[Input]:  # noqa: ARG002  # always all of it
        """Return what the floats are computed from, and the map."""
        found = [each for one in self.portions for each in one.inputs()]
        return [*found, Input(self.qmap, Extent.whole(self.qmap.shape), "float32")]

    def compute(self, inputs: Sequence[Callable[[], Array]]) -> Array:
        """Return the codes, or the scales."""
        values, taken = values_of(self.portions, inputs)
        scales = scales_of(values, self.block)
        return scales if self.gives_scales else codes_of(values, scales, self.block, inputs[taken]())


def values_of(portions: Sequence[Portion], inputs: Sequence[Callable[[], Array]]) -> tuple[Array, int]:
    """Return the floats of portions, end to end, and how many inputs these take."""
    values: Array = np.zeros(sum(one.numel for one in portions), np.float32)
    at = taken = 0
    for one in portions:
        count = len(one.inputs())
        if one.slot is not None:
            values[at : at + one.numel] = one.slot.function.compute(inputs[taken : taken + count])
        at, taken = at + one.numel, taken + count
    return values, taken


def scales_of(values: Array, block: int) -> Array:
    """Return the scale of each block, float32; a short one's is not zero."""
    whole = len(values) - len(values) % block
    scales: Array = np.abs(values[:whole].reshape(-1, block)).max(axis=1)
    if whole < len(values):
        scales = np.append(scales, np.maximum(np.abs(values[whole:]).max(), SMALLEST))
    return scales


def codes_of(values: Array, scales: Array, block: int, qmap: Array) -> Array:
    """Return the code of each value, uint8."""
    whole = len(values) - len(values) % block
    scaled: Array = np.empty_like(values)
    reciprocals = np.float32(1) / np.maximum(scales[: whole // block], SMALLEST)
    scaled[:whole].reshape(-1, block)[...] = values[:whole].reshape(-1, block) * reciprocals[:, None]
    scaled[whole:] = values[whole:] / scales[whole // block :]
    bounds = (qmap[:-1] + qmap[1:]) / np.float32(2)
    codes: Array = np.searchsorted(bounds, np.clip(scaled, -1, 1), side="left").astype(np.uint8)
    return codes
