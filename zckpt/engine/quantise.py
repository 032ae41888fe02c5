"""The functions that make codes and scales of numbers: state that was quantised, cut otherwise; weights in block FP8.

    values    |slot a, from element 7 |zeros|slot b ...            what a rank's partition will hold, end to end
    blocks    |block |block |block |block ...                      from the partition's first element on

bitsandbytes (0.50, as `quantize_blockwise` has it for any device; its own kernels for some take shortcuts in it)
    scale     the largest magnitude of a block
    code      of the map's values the nearest to value / scale; of two that are as near, the lower
torchao (0.18, `optim/quant_utils.py` and `quantize_fp8`), of whole blocks
    scale     the largest magnitude of a block, at least 1e-12; of 8-bit floats a 448th of it
    code      of the map's values the nearest to value / scale; of two that are as near, the upper
    4 bits    two codes in a byte, the first in its upper half; fp8: value / scale itself, without a map
transformers (5.23, `Fp8Quantize`), of blocks of rows and columns
    scale     1 / (1 / largest magnitude x 448), of zeros 1; DeepGEMM has the largest magnitude / 448
    code      value x (1 / largest magnitude x 448), as an 8-bit float

The arithmetic is float32. bitsandbytes multiplies whole blocks by the reciprocal of their scale, and divides a last,
shorter one. What was a block before is rounded, too, where its largest magnitude is negative: its map goes to 1, and
not to -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np

from zckpt.engine.cast import CACHED_NUMEL, Array, cast, cast_into, numpy_dtype
from zckpt.engine.computed import BLOCK_NBYTES, Computed, Input, Inputs
from zckpt.engine.scaled import Part, Portion, Scaled, alone, as_they_are, by_grid, whole
from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable
from zckpt.state import Slot, itemsize
from zckpt.storage.recent import Recent

LARGEST_FP8 = np.float32(448)
"""8-bit floats have no infinity."""

TOGETHER_NUMEL = 1 << 16
"""Elements, about, that are quantised at once: no more floats than these are in memory."""

Rule = Callable[[Array, int, Array | None, bool], Array]
"""`by_bitsandbytes` or `by_torchao`."""


def end_to_end(contents: Iterable[tuple[int, int, int, Slot]], numel: int) -> Slot:
    """Return a partition; of each content: where it begins, its elements, the first of these in its slot, and that."""
    portions = tuple(Portion(at, count, first, (Part(slot),), as_they_are) for at, count, first, slot in contents)
    return Computed("values", "float32", (numel,), (), function=Scaled(portions))


def quantised(values: Slot, block: int, qmap: Slot | None, rule: Rule, *, scales: bool, halves: bool) -> Scaled:
    """Return codes of values in blocks, or their scales.

    `qmap`: the value of each code, ascending; None for 8-bit floats. `halves`: two codes in a byte.
    """
    unit = block if scales else 2 if halves else 1
    parts = (Part(values, width=unit), *(() if qmap is None else (whole(qmap),)))
    rounded = partial(_quantised, block=block, rule=rule, scales=scales, halves=halves)
    together = max(TOGETHER_NUMEL // block, 1) * block // unit
    return alone(-(-values.numel // unit), parts, rounded, together)


def _quantised(
    arrays: list[Array], _first: int, _end: int, into: Array, *, block: int, rule: Rule, scales: bool, halves: bool
) -> None:
    values, *qmap = arrays
    found = rule(values, block, qmap[0] if qmap else None, scales)
    cast_into(into, found[::2] << 4 | found[1::2] if halves and not scales else found)


@immutable
class InBlocks:
    """The codes of matrices, or their scales, in blocks of rows and columns; several matrices are of whole blocks."""

    slot: Slot
    block: tuple[int, int]
    what: str  # for errors
    scales: bool
    kept: Recent[tuple[str, int], Array] = field(repr=False)
    """Scales that were found on the way to codes: of what, and of which rows that are read at once."""
    width = BLOCK_NBYTES

    @property
    def _read(self) -> int:
        """Elements of rows that are read at once, of whole blocks."""
        size = self.block[0] * self.slot.shape[-1]
        return max(BLOCK_NBYTES // itemsize("float32") // size, 1) * size

    @property
    def step(self) -> int:
        """Their codes, or their scales."""
        columns = self.slot.shape[-1]
        return self._read // (self.block[0] * columns) * -(-columns // self.block[1]) if self.scales else self._read

    def inputs(self, start: int, numel: int) -> list[Input]:  # noqa: ARG002
        """Return some rows: as they are stored, unless that is more than a float32, or something else in places."""
        first, slot = start // self.step * self._read, self.slot
        is_plain = {one.dtype for one in slot.spans} == {slot.dtype} and itemsize(slot.dtype) <= itemsize("float32")
        rows = slot.flat(first, min(self._read, slot.numel - first))
        return [Input(slot, rows, slot.dtype if is_plain else "float32")]

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002
        """Return codes or scales; UnsupportedError: there are no scales."""
        key = self.what, start // self.step
        if self.scales and (found := self.kept.get(key)) is not None:
            self.kept.pop(key)
            return found
        matrix = inputs[0]().reshape(-1, self.slot.shape[-1])
        words: Array = matrix.view(f"u{matrix.itemsize}")
        sign = 8 * words.itemsize - 1
        sizes = words & (1 << sign) - 1  # without signs, words have the order of the numbers that they stand for
        factors = self._factors(sizes, matrix.dtype)
        scales: Array = (np.float32(1) / factors).reshape(-1)
        if self.scales:
            return scales
        self.kept.put(key, scales, scales.nbytes)
        codes, rows = np.empty(words.shape, np.uint8), self.block[0]
        count = max(CACHED_NUMEL // words.shape[1], 1)
        for at in range(0, len(words), count):
            some, into = cast(sizes[at : at + count].view(matrix.dtype), "float32"), codes[at : at + count]
            by_grid(some, np.multiply, factors[at // rows : -(-(at + count) // rows)], self.block, at % rows)
            _rounded(some, into)
            into |= (words[at : at + count] >> sign - 7).astype(np.uint8) & 0x80
        return codes.reshape(-1).view(numpy_dtype("float8_e4m3fn"))

    def _factors(self, sizes: Array, dtype: np.dtype[Any]) -> Array:
        """Return what the numbers of each block are multiplied by; `sizes`: their words, without signs."""
        rows, columns = self.block
        short = (0, -len(sizes) % rows), (0, -sizes.shape[1] % columns)
        most = np.pad(sizes, short) if any(map(any, short)) else sizes
        most = most.reshape(-1, rows, most.shape[1]).max(axis=1)
        most = most.reshape(len(most), -1, columns).max(axis=2)
        largest = cast(most.view(dtype), "float32")
        if not np.isfinite(largest).all():
            raise UnsupportedError(
                f"{self.what} has NaN or infinite values, so its blocks have no scale",
                expected="numbers",
                advice="omit --quantize, or repair the model",
            )
        factors: Array = np.float32(1) / largest * LARGEST_FP8  # as torch divides a number by a tensor
        factors[~np.isfinite(factors)] = 1  # of zeros, and of what is next to them, which become zeros
        return factors


def _rounded(values: Array, into: Array) -> None:
    """Give float32 from 0 to 448, or a bit more, as words of float8_e4m3fn.

    A product with 2 ^ 20 + 1, less what it has too much, is the value in four bits, to nearest and ties to even: it is
    for each of the 2 ^ 23 values between two powers of two. Below the least normal number there are fewer bits.
    """
    small = np.flatnonzero(values < np.float32(2**-6))
    if len(small) > values.size >> 3:
        into[...] = cast(values, "float8_e4m3fn").view(np.uint8)
        return
    whole = values * np.float32((1 << 20) + 1)
    whole -= whole - values
    words = whole.view(np.uint32)
    words >>= 20
    np.copyto(into, words, casting="unsafe")
    into -= (127 - 7 << 3) & 0xFF
    into.reshape(-1)[small] = cast(values.reshape(-1)[small], "float8_e4m3fn").view(np.uint8)


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
