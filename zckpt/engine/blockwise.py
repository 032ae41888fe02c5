"""The function that makes floats of codes: value = map[code] x scale of its block, in float32, rounded once.

A block is so many elements that follow each other, from the tensor's first one on; the last one may be shorter. Codes
are a byte each, or two in a byte, the first in its upper half; without a map they are 8-bit floats themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from zckpt.engine.computed import Input
from zckpt.state import Extent, Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

TOGETHER_NUMEL = 1 << 16
"""Elements, about: few enough that a rank reads little beyond its share, many enough that blocks cost little."""


@dataclass(frozen=True, slots=True)
class Blockwise:
    """The values of quantised state.

    Parameters
    ----------
    codes : Slot
        Of uint8, or of an 8-bit float type where there is no map.
    scale : Slot
        One float32 for each block, flat.
    block : int, elements
    numel : int, elements
        Of the tensor.
    qmap : Slot or None
        The value of each code, float32.
    is_packed : bool
        Two codes in a byte; then `block` is even.
    """

    codes: Slot
    scale: Slot
    block: int
    numel: int
    qmap: Slot | None = None
    is_packed: bool = False

    @property
    def step(self) -> int:
        """Whole blocks."""
        return self.block * max(TOGETHER_NUMEL // self.block, 1)

    @property
    def width(self) -> int:
        """Bytes of a float32."""
        return 4

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return codes, the scales of their blocks, and the map."""
        first, end = start // self.block, -(-(start + numel) // self.block)
        per = 2 if self.is_packed else 1
        low, high = start // per, -(-(start + numel) // per)
        found = [
            Input(self.codes, Extent.flat(self.codes.shape, low, high - low), self.codes.dtype),
            Input(self.scale, Extent.flat(self.scale.shape, first, end - first), "float32"),
        ]
        if self.qmap is not None:
            found.append(Input(self.qmap, Extent.whole(self.qmap.shape), "float32"))
        return found

    def compute(self, inputs: Sequence[Callable[[], Array]]) -> Array:
        """Return the values of whole blocks, and of what there is of the last one."""
        codes, scale = inputs[0](), inputs[1]()
        if self.is_packed:
            codes = np.stack([codes >> 4, codes & 0xF], axis=-1).reshape(-1)
        values: Array = codes.astype(np.float32) if self.qmap is None else inputs[2]()[codes]
        whole = len(values) - len(values) % self.block
        values[:whole].reshape(-1, self.block)[...] *= scale[: whole // self.block, None]
        values[whole:] *= scale[whole // self.block :]
        return values


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
        Flat, of uint8, or of an 8-bit float type where there is no map.
    scales : Slot
        (blocks, elements of a block), float32: each row says one scale again and again.
    qmap : Slot or None
        Of all portions of a tensor or of none.
    is_packed : bool
        Two codes in a byte, in all portions or in none; there is a map then.
    """

    start: int
    numel: int
    position: int
    codes: Slot
    scales: Slot
    qmap: Slot | None
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class InPortions:
    """The values of quantised state that ranks have portions of, in blocks that begin anywhere in the tensor.

    `portions`: in order; together they are all of the tensor.
    """

    portions: tuple[Portion, ...]

    step: ClassVar[None] = None
    """Any elements can be computed by themselves."""

    width: ClassVar[int] = 4
    """Bytes of a float32."""

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return of each portion that has some of the elements their codes, the scale of each, and the map."""
        found: list[Input] = []
        for one in self.portions:
            low, high = max(start, one.start), min(start + numel, one.start + one.numel)
            if low < high:
                at, count = one.position + low - one.start, high - low
                first, per = (at // 2, 2) if one.is_packed else (at, 1)
                last = -(-(at + count) // per)
                found.append(Input(one.codes, Extent.flat(one.codes.shape, first, last - first), one.codes.dtype))
                if one.is_packed:  # how many these are more than the next tells whether the first code is skipped
                    found.append(
                        Input(one.scales, Extent.flat(one.scales.shape, at - at % 2, count + at % 2), "float32")
                    )
                found.append(Input(one.scales, Extent.flat(one.scales.shape, at, count), "float32"))
                if one.qmap is not None:
                    found.append(Input(one.qmap, Extent.whole(one.qmap.shape), "float32"))
        return found

    def compute(self, inputs: Sequence[Callable[[], Array]]) -> Array:
        """Return the values of a block."""
        read = iter(inputs)
        values: list[Array]
        if self.portions[0].qmap is None:
            values = [codes().astype(np.float32) * scale() for codes, scale in zip(read, read, strict=True)]
        elif self.portions[0].is_packed:
            groups = zip(read, read, read, read, strict=True)
            values = [qmap()[_halves(pairs(), more(), s := scale())] * s for pairs, more, scale, qmap in groups]
        else:
            values = [qmap()[codes()] * scale() for codes, scale, qmap in zip(read, read, read, strict=True)]
        return values[0] if len(values) == 1 else np.concatenate(values)


def _halves(pairs: Array, scales: Array, own: Array) -> Array:
    """Return the codes that have scales of their own, of pairs that may begin with one that has not."""
    codes: Array = np.stack([pairs >> 4, pairs & 0xF], axis=-1).reshape(-1)
    skipped = len(scales) - len(own)
    return codes[skipped : skipped + len(own)]
