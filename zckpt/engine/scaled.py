"""Functions that make numbers of a weight's codes: code x scale, rounded as the program rounds that made them.

A weight is a matrix, or several in a stack. Rows of it are computed together, from what they need of each part: its
codes, scales. A part has the rows along one of its dimensions, several in each index where that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zckpt.engine.cast import cast
from zckpt.engine.computed import BLOCK_NBYTES, Function, Input, Inputs
from zckpt.state import Extent, Shape, Slot

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of e2m1."""

ROWS = 128
"""Rows that are computed together where each of them is all over its codes: as few are read several times."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that rows are computed from: `per` of them in each index of `axis`, counted from its end.

    `axis`: None for what every row needs all of. `dtype`: as which it is read.
    """

    slot: Slot
    axis: int | None
    per: int = 1
    dtype: str = "float32"

    def extent(self, stack: Shape, first: int, end: int) -> Extent:
        """Return what rows [first, end) of one matrix need."""
        if self.axis is None:
            return self.slot.whole
        offsets, sizes = [0] * len(self.slot.shape), list(self.slot.shape)
        offsets[: len(stack)], sizes[: len(stack)] = stack, [1] * len(stack)
        offsets[self.axis] = first // self.per
        sizes[self.axis] = -(-end // self.per) - first // self.per
        return Extent(tuple(offsets), tuple(sizes), 0, math.prod(sizes))


@dataclass(frozen=True, slots=True)
class Scaled:
    """The numbers of a weight.

    Parameters
    ----------
    shape : tuple of int
        (..., rows, columns)
    parts : tuple of Part
    values : callable
        Gets the parts' elements for some rows, the first and the one after the last of these, and the columns.
    """

    shape: Shape
    parts: tuple[Part, ...]
    values: Callable[[list[Array], int, int, int], Array]

    @property
    def step(self) -> int:
        """Elements of whole rows."""
        columns = max(self.shape[-1], 1)
        rows = max(BLOCK_NBYTES // 4 // columns, 1)
        scattered = any(part.axis == -1 or part.per > 1 for part in self.parts if part.slot.numel > self.shape[-2])
        return columns * (max(rows, ROWS) if scattered else rows)

    @property
    def width(self) -> int:
        """Bytes of a float32."""
        return 4

    def _within(self, start: int, numel: int) -> Iterator[tuple[Shape, int, int]]:
        """Yield the matrices that have some of the elements, and the rows of each."""
        rows, columns = self.shape[-2:]
        first, end = start // columns, -(-(start + numel) // columns)
        for matrix in range(first // rows, -(-end // rows)):
            stack = tuple(int(n) for n in np.unravel_index(matrix, self.shape[:-2] or (1,)))
            low, high = max(first - matrix * rows, 0), min(end - matrix * rows, rows)
            yield stack[: len(self.shape) - 2], low, high

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return what rows need of each part."""
        return [
            Input(part.slot, part.extent(*rows), part.dtype)
            for rows in self._within(start, numel)
            for part in self.parts
        ]

    def compute(self, inputs: Inputs, start: int, numel: int) -> Array:
        """Return the numbers of whole rows."""
        read, found = iter(inputs), []
        for stack, low, high in self._within(start, numel):
            arrays = []
            for part in self.parts:
                sizes = part.extent(stack, low, high).sizes
                inner = sizes if part.axis is None else sizes[len(stack) :]
                arrays.append(next(read)().reshape(inner))
            found.append(self.values(arrays, low, high, self.shape[-1]).reshape(-1))
        return found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True, slots=True)
class Rounded:
    """What a function computes, plus a number, in another type."""

    function: Function
    dtype: str
    offset: float = 0.0

    @property
    def step(self) -> int | None:
        """As of the function."""
        return self.function.step

    @property
    def width(self) -> int:
        """As of the function."""
        return self.function.width

    def inputs(self, start: int, numel: int) -> Sequence[Input]:
        """As of the function."""
        return self.function.inputs(start, numel)

    def compute(self, inputs: Inputs, start: int, numel: int) -> Array:
        """Return the elements, rounded."""
        found = self.function.compute(inputs, start, numel)
        return cast(found + np.float32(self.offset) if self.offset else found, self.dtype)


def in_grid(scale: Array, block: tuple[int, int], first: int, end: int, columns: int) -> Array:
    """Return the scale of each element of rows, or of each row where there is one for all of its columns.

    `scale`: of the blocks that have some of the rows.
    """
    scale = scale.reshape(-1, scale.shape[-1]) if scale.ndim > 1 else scale.reshape(-1, 1)
    if scale.shape[1] > 1:
        scale = np.repeat(scale, block[1], axis=1)[:, :columns]
    if len(scale) == 1:
        return scale
    return scale[np.arange(first, end) // block[0] - first // block[0]]


def multiplied(arrays: list[Array], first: int, end: int, columns: int, *, block: tuple[int, int], dtype: str) -> Array:
    """Return code x scale of its block, rounded to a type."""
    codes, scale = arrays
    codes = codes.astype(np.float32) if codes.dtype == np.int8 else codes
    values = codes.reshape(end - first, columns)
    values *= in_grid(scale, block, first, end, columns)
    return cast(values, dtype)


def nibbles(codes: Array) -> Array:
    """Return the values of e2m1 that bytes hold, the first in the lower half."""
    pairs = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], axis=1)
    found: Array = pairs[codes].reshape(*codes.shape[:-1], -1)
    return found


def power_of_two(codes: Array) -> Array:
    """Return 2 ^ (code - 127), float32: scales of e8m0."""
    found: Array = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    return found


def of_fp4(
    arrays: list[Array],
    first: int,  # noqa: ARG001
    end: int,  # noqa: ARG001
    columns: int,
    *,
    block: int,
    dtype: str,
    divides: bool | None,
) -> Array:
    """Return the numbers of FP4 with a scale for each `block` columns; of NVFP4 with another for the whole tensor.

    `divides`: the scales are divided by that, in float32 (compressed-tensors); False: multiplied (modelopt).
    """
    codes, scale, *whole = arrays
    if divides is None:
        scale = cast(power_of_two(scale), dtype)
    elif divides:
        scale = cast(scale, "float32") / whole[0].reshape(())
    else:
        scale = cast(scale, "float32") * whole[0].reshape(())
    grid = np.repeat(cast(scale, "float32"), block, axis=-1)[..., :columns]
    return cast(nibbles(codes)[..., :columns] * grid, dtype)


def of_experts(arrays: list[Array], first: int, end: int, columns: int) -> Array:
    """Return rows of gpt-oss's experts, (in, out), of blocks that lie as (out, in / 32, 16)."""
    codes, scale = arrays
    values = nibbles(codes) * power_of_two(scale)[..., None]
    low = first % 32
    found: Array = values.reshape(columns, -1).T[low : low + end - first]
    return found


def unpacked(words: Array, bits: int) -> Array:
    """Return codes, of which 32 lie in `bits` words of 32 bits along rows, lowest bits first."""
    flat = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    flat = flat[:, : flat.shape[1] // bits * bits].reshape(len(flat), -1, bits)
    found: Array = (flat @ (1 << np.arange(bits))).astype(np.float32)
    return found


def of_words(arrays: list[Array], first: int, end: int, columns: int, *, bits: int, group: int, dtype: str) -> Array:  # noqa: ARG001  # alike everywhere
    """Return the numbers of compressed-tensors' packed integers, which lie end to end along rows, without zeros."""
    words, scale = arrays
    codes = unpacked(words, bits)[:, :columns] - np.float32(1 << bits - 1)
    return cast(codes * np.repeat(scale, group, axis=1)[:, :columns], dtype)


def of_int8(arrays: list[Array], first: int, end: int, columns: int) -> Array:  # noqa: ARG001
    """Return the numbers of bitsandbytes' int8: code x scale of the row, over 127."""
    codes, scale = arrays
    found: Array = codes.reshape(-1, columns) * scale.reshape(-1, 1) * np.float32(7.874015718698502e-3)
    return found
