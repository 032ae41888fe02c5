"""Functions of codes with scales: numbers of them, or codes and scales of numbers, rounded as their programs round.

A slot is made of units: elements, rows, or a row's scales. Units that follow each other are computed together, from
what they need of each part: codes, scales, a map. What several ranks hold of it are portions, each with its own parts,
and so are the matrices of a stack. What numbers are made of codes is here; what makes codes is in `quantise`.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from zckpt.engine.cast import CACHED_NUMEL, Array, cast, cast_into, numpy_dtype
from zckpt.engine.computed import BLOCK_NBYTES, Input, Inputs
from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable
from zckpt.state import Shape, Slot

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of e2m1."""

Values = Callable[[list[Array], int, int, Array], None]
"""Gets what some units need of each part, flat, and which units of these parts they are: the first, and one after; and
memory for their elements, flat, of the type that these are to be cast to at last.
"""


@immutable
class Part:
    """A slot that units are computed from: `width` elements of it, flat, for each `per` units.

    `start`, `end`: the first of its elements, and the one after the last. `dtype`: as which they are read.
    """

    slot: Slot
    per: int = 1
    width: int = 1
    dtype: str = "float32"
    start: int = 0
    end: int = sys.maxsize


def whole(slot: Slot, dtype: str = "float32") -> Part:
    """Return a part of which each unit needs everything."""
    return Part(slot, sys.maxsize, slot.numel, dtype)


@immutable
class Portion:
    """Units [start, start + count) of a slot, which are those from `position` on of what its parts are of."""

    start: int
    count: int
    position: int
    parts: tuple[Part, ...]
    values: Values


@immutable
class Scaled:
    """The elements of a slot."""

    portions: tuple[Portion, ...]  # in their order; elements of none are zero
    unit: int = 1  # elements
    together: int | None = None  # a block has a multiple of so many units, and begins at one; None: any number of them
    width: int = 4
    """Bytes; an element takes so much in a buffer: by default a float32; `BLOCK_NBYTES`, if no more units may be
    together.
    """

    @property
    def step(self) -> int | None:
        """Elements of the units that are computed together."""
        return None if self.together is None else self.together * self.unit

    def _within(self, start: int, numel: int) -> Iterator[tuple[Portion, int, int, int]]:
        """Yield portions with some of the elements, at which of these, and which units of its parts: first, and end."""
        first, end = start // self.unit, -(-(start + numel) // self.unit)
        begin = max(bisect_right(self.portions, first, key=lambda one: one.start) - 1, 0)
        for one in self.portions[begin : bisect_left(self.portions, end, key=lambda one: one.start)]:
            low, high = max(first, one.start), min(end, one.start + one.count)
            if low < high:
                moved = one.position - one.start
                yield one, (low - first) * self.unit, low + moved, high + moved

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return what the units need of each part."""
        found = []
        for one, _, first, end in self._within(start, numel):
            for part in one.parts:
                low = part.start + first // part.per * part.width
                high = min(part.start + -(-end // part.per) * part.width, part.end, part.slot.numel)
                found.append(Input(part.slot, part.slot.flat(low, high - low), part.dtype))
        return found

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:
        """Return the elements of whole units."""
        read, every = iter(inputs), list(self._within(start, numel))
        is_whole = sum(end - begin for _, _, begin, end in every) * self.unit == numel
        into: Array = (np.empty if is_whole else np.zeros)(numel, numpy_dtype(dtype))
        for one, at, begin, end in every:
            arrays = [next(read)() for _ in one.parts]
            one.values(arrays, begin, end, into[at : at + (end - begin) * self.unit])
        return into


def alone(count: int, parts: tuple[Part, ...], values: Values, together: int | None = None) -> Scaled:
    """Return so many elements that are each of all parts."""
    portions = (Portion(0, count, 0, parts, values),)
    return Scaled(portions, together=together, width=BLOCK_NBYTES) if together else Scaled(portions)


def matrices(
    shape: Shape, parts: Sequence[Part], values: Values, *, shared: tuple[Part, ...] = (), least: int = 1
) -> Scaled:
    """Return the rows of a matrix, or of several in a stack, whose parts lie end to end, or are `shared` by all.

    `least`: rows that are read at once, at least.
    """
    rows, columns = shape[-2], max(shape[-1], 1)
    portions = []
    for number in range(math.prod(shape[:-2])):
        own = (replace(one, start=number * -(-rows // one.per) * one.width) for one in parts)
        portions.append(Portion(number * rows, rows, 0, (*own, *shared), values))
    return Scaled(tuple(portions), columns, least)


def turned(matrix: Slot) -> Scaled:
    """Return the elements of a matrix in the order of its columns, of which a block has all."""
    values = partial(_by_columns, columns=matrix.shape[1])
    return alone(matrix.numel, (whole(matrix),), values, together=matrix.numel)


def _by_columns(arrays: list[Array], first: int, end: int, into: Array, *, columns: int) -> None:  # noqa: ARG001
    cast_into(into, np.ascontiguousarray(arrays[0].reshape(-1, columns).T).reshape(-1))


def as_they_are(arrays: list[Array], first: int, end: int, into: Array) -> None:  # noqa: ARG001
    """Give elements that are numbers."""
    cast_into(into, arrays[0])


def coded(
    codes: Slot, scale: Slot | None, block: int, qmap: Slot | None = None, *,
    halves: bool = False, dtype: str = "float32", offset: float = 0,
) -> tuple[tuple[Part, ...], Values]:  # fmt: skip
    """Return parts and values of elements that are codes in blocks, see `mapped`; or without a scale numbers."""
    if scale is None:
        return (Part(codes),), as_they_are
    parts = Part(codes, 1 + halves, dtype=codes.dtype), Part(scale, block), *(() if qmap is None else (whole(qmap),))
    return parts, partial(mapped, block=block, halves=halves, dtype=dtype, offset=offset)


def mapped(
    arrays: list[Array], first: int, end: int, into: Array, *, block: int, halves: bool, dtype: str, offset: float
) -> None:
    """Give map[code] x scale of its block, in float32, plus a number; without a map codes are floats themselves.

    `halves`: two codes in a byte, the first in its upper half.
    """
    codes, scale, *qmap = arrays
    if halves:
        values = in_pairs(codes, qmap[0], upper_first=True)[first % 2 :][: end - first]
    else:
        values = qmap[0][codes] if qmap else cast(codes, "float32")
    values *= np.repeat(scale, block)[first % block :][: end - first]
    if offset:
        values += np.float32(offset)
    rounded(values, dtype, into)


def rounded(values: Array, dtype: str, into: Array) -> None:
    """Give numbers as a type has them, cast to another."""
    cast_into(into, values if into.dtype == numpy_dtype(dtype) else cast(values, dtype))


def in_pairs(codes: Array, values: Array, *, upper_first: bool = False) -> Array:
    """Return the values of bytes of two codes each, flat."""
    table = _pairs(values.tobytes(), values.dtype, upper_first)
    found: Array = np.take(table, codes.reshape(-1), mode="wrap").view(values.dtype)
    return found


@lru_cache(maxsize=8)
def _pairs(values: bytes, dtype: np.dtype[Any], upper_first: bool) -> Array:
    every, of_one = np.arange(256), np.frombuffer(values, dtype)
    halves = (of_one[every >> 4], of_one[every & 15])
    table = np.stack(halves if upper_first else halves[::-1], axis=-1)
    return table.reshape(-1).view(f"c{table.itemsize * 2}" if table.itemsize > 4 else f"u{table.itemsize * 2}")


def by_grid(values: Array, change: np.ufunc, grid: Array, block: tuple[int, int], first: int) -> None:
    """Change rows, from `first` of them on, by what a grid has for each block of rows and columns.

    Buffers of ufuncs are made so small that none is used: what is needed in several rows would be copied into them.
    """
    columns = values.shape[1]
    grid = grid.reshape(-1, -(-columns // block[1]))
    if grid.shape[1] > 1 and block[1] > 1:
        grid = np.repeat(grid, block[1], axis=1)[:, :columns]
    before = np.setbufsize(16)
    try:
        if block[0] == 1 or len(grid) == 1:
            change(values, grid, out=values)
            return
        at = 0
        for row in grid:
            end = at + block[0] - (first + at) % block[0]
            change(values[at:end], row, out=values[at:end])
            at = end
    finally:
        np.setbufsize(before)


def multiplied(
    arrays: list[Array], first: int, end: int, into: Array, *, columns: int, block: tuple[int, int], dtype: str
) -> None:
    """Give code x scale of its block, rounded to a type; of codes less a zero, where there is one for each scale."""
    codes, scale, *zeros = arrays
    values = codes.astype(np.float32) if codes.dtype == np.int8 else cast(codes, "float32")
    values = values.reshape(end - first, columns)
    for zero in zeros:
        by_grid(values, np.subtract, zero, block, first)
    by_grid(values, np.multiply, power_of_two(scale) if scale.dtype == np.uint8 else scale, block, first)
    rounded(values, dtype, into)


def power_of_two(codes: Array) -> Array:
    """Return 2 ^ (code - 127), float32: scales of e8m0."""
    found: Array = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    return found


@lru_cache(maxsize=8)
def _pairs_of_fp4(scale_type: str, once: bytes, dtype: str, wanted: str, divides: bool | None) -> Array:
    """Return two numbers, as a word, for each scale of a byte and byte of two codes: see `of_fp4`."""
    every = np.arange(256, dtype=np.uint8)
    if scale_type != "float8_e4m3fn":
        scale = cast(power_of_two(every), dtype)
    else:
        scale = cast(every.view(numpy_dtype(scale_type)), "float32")
        whole = np.frombuffer(once, np.float32) if once else np.float32(1)
        scale = scale / whole if divides else scale * whole
    numbers = cast(cast(cast(scale, "float32")[:, None] * in_pairs(every, FP4), dtype), wanted)
    return numbers.view(f"{'u' if numbers.itemsize < 4 else 'c'}{2 * numbers.itemsize}").reshape(-1)


def _index(codes: Array, scale: Array) -> Array:
    index: Array = scale.view(np.uint8).astype(np.uint16)
    index <<= 8
    found: Array = index | codes
    return found


def of_fp4(
    arrays: list[Array], _first: int, _end: int, into: Array, *, block: int, dtype: str, divides: bool | None
) -> None:
    """Give the numbers of FP4 with a scale for each `block` columns; of NVFP4 with another for the whole tensor.

    `divides`: the scales are divided by that, in float32 (compressed-tensors); False: multiplied (modelopt).
    """
    codes, scale, *whole = arrays
    table = _pairs_of_fp4(scale.dtype.name, whole[0].tobytes() if whole else b"", dtype, into.dtype.name, divides)
    index = _index(codes.view(np.uint8).reshape(-1, block // 2), scale.reshape(-1, 1)).reshape(-1)
    np.take(table, index, out=into.view(table.dtype), mode="wrap")


def of_groups(
    arrays: list[Array], first: int, end: int, into: Array, *, bits: int, dtype: str, is_rounded_once: bool
) -> None:
    """Give code x scale + bias of packed integers, which lie along rows; each rounded to a type, or the sum alone."""
    words, scale, bias = arrays
    values = unpacked(words.reshape(end - first, -1), bits).reshape(len(scale), -1).astype(np.float32)
    values *= scale[:, None]
    if not is_rounded_once:
        values = cast(cast(values, dtype), "float32")
    values += bias[:, None]
    rounded(values.reshape(-1), dtype, into)


def of_experts(arrays: list[Array], first: int, end: int, into: Array, *, columns: int) -> None:
    """Give rows of gpt-oss's experts, (in, out), of blocks that lie as (in / 32, out, 16); all are bfloat16's."""
    codes, scale = arrays
    turned = np.ascontiguousarray(codes.reshape(-1, columns, 16).transpose(0, 2, 1))
    index = _index(turned, scale.reshape(-1, 1, columns))
    pairs = np.take(_pairs_of_fp4("uint8", b"", "bfloat16", "bfloat16", None), index, mode="wrap")
    rows: Array = np.empty((index.size // columns, 2, columns), np.uint16)
    for one in (0, 1) if sys.byteorder == "little" else (1, 0):
        rows[:, one] = pairs.reshape(-1, columns)
        pairs >>= 16
    cast_into(into, rows.view(numpy_dtype("bfloat16")).reshape(-1, columns)[first % 32 :][: end - first])


def unpacked(words: Array, bits: int) -> Array:
    """Return codes, uint8, that lie end to end along rows of words, lowest bits first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        pairs = data.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return pairs.view(np.uint8)
    if not 8 % bits:
        table = (np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1).astype(np.uint8)
        found: Array = table[data].reshape(len(data), -1)
        return found
    flat = np.unpackbits(data, axis=-1, bitorder="little")
    flat = flat[:, : flat.shape[1] // bits * bits].reshape(len(flat), -1, bits)
    codes: Array = flat.astype(np.float32) @ (1 << np.arange(bits)).astype(np.float32)
    return codes.astype(np.uint8)


LARGEST_FP16 = 65504

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which of the eight codes in a word of AWQ each row is."""


def of_integers(
    arrays: list[Array], first: int, end: int, into: Array, *, columns: int, bits: int, dtype: str, groups: Array | int,
    layout: str = "", offset: int = 0, what: str = "",
) -> None:  # fmt: skip
    """Give (code - zero) x scale of packed integers; without zeros, these are the middle of the codes.

    Codes lie along rows, and zeros across them, or in AWQ both. `groups`: which scale each column has, or how many
    columns have one. `offset`: added to zeros; one that would then be no code is read differently by programs.
    """
    words, scale, *zeros = arrays
    count = end - first

    def across(some: Array, width: int) -> Array:
        rows: Array = unpacked(some.reshape(-1, width).T, bits).T
        if layout == "awq":
            rows = rows.reshape(-1, len(AWQ_ORDER), width)[:, AWQ_ORDER].reshape(-1, width)
        return rows[first % 32 :][:count]

    scale = scale.reshape(count, -1)
    codes = across(words, columns) if layout == "awq" else unpacked(words.reshape(count, -1), bits)[:, :columns]
    zero = across(zeros[0], scale.shape[1]) + np.float32(offset) if zeros else np.full_like(scale, 1 << bits - 1)
    if offset and zero.max() >= 1 << bits:
        raise UnsupportedError(
            f"{what}: zeros that are not codes, which programs interpret differently",
            expected=f"at most {(1 << bits) - 1 - offset}, to which {offset} is added",
            advice="dequantise it with the program that made it",
        )
    is_even = isinstance(groups, int) and not columns % groups and into.dtype != np.float16
    at_once = np.abs(scale).max() * (1 << bits) < LARGEST_FP16 and into.dtype == numpy_dtype("bfloat16")
    if is_even and (at_once or dtype != "float16"):  # else what is rounded are the products of each code, once
        kind = np.int8 if bits < 8 else np.int16
        whole = codes.astype(kind, order="C").reshape(*scale.shape, -1)
        whole -= zero.astype(kind)[..., None]
        step = max(CACHED_NUMEL // columns, 1)
        for at in range(0, count, step):
            values = whole[at : at + step].astype(np.float32)
            values *= scale[at : at + step, :, None]
            some = into[at * columns :][: values.size]
            if dtype == "float16":
                _by_float16(values.reshape(-1), some)
            else:
                rounded(values.reshape(-1), dtype, some)
        return
    products = (np.arange(1 << bits, dtype=np.float32) - zero[..., None]) * scale[..., None]
    table = cast(cast(products, dtype), into.dtype.name).reshape(-1)
    which = groups if isinstance(groups, int) else groups.tobytes()
    index = _first_codes(which, columns, count, scale.shape[1] << bits, bits, len(table) > 1 << 16) + codes
    np.take(table, index.reshape(-1), out=into, mode="wrap")


def _by_float16(values: Array, into: Array) -> None:
    """Give numbers rounded to float16 and then to bfloat16, in one step: integers x float16's, none too large for it.

    Rounded first, what is half of bfloat16's last bit (0x8000), give or take half of float16's (0x1000), is a tie. So
    all from 0x7000 on is rounded up where the last bit is 1, and only what is above 0x9000 where it is 0. Numbers below
    the least normal float16 are no different: their last bits are not less than its own.
    """
    up_if_odd, up_if_even = 0x10000 - 0x7000, 0xFFFF - 0x9000
    bits = values.view(np.uint32)
    words: Array = bits >> 16
    words &= 1
    words *= up_if_odd - up_if_even
    words += up_if_even
    words += bits
    words >>= 16
    np.copyto(into.view(np.uint16), words, casting="unsafe")


@lru_cache(maxsize=4)
def _first_codes(groups: bytes | int, columns: int, count: int, row: int, bits: int, is_large: bool) -> Array:
    """Return which of all products of some rows, `row` for each, is that of the first code of each element."""
    which = np.arange(columns) // groups if isinstance(groups, int) else np.frombuffer(groups, np.intp)
    return ((which << bits) + np.arange(count)[:, None] * row).astype(np.intp if is_large else np.uint16)


def of_int8(arrays: list[Array], first: int, end: int, into: Array) -> None:
    """Give the numbers of bitsandbytes' int8: code x scale of the row, over 127."""
    codes, scale = arrays
    found = codes.reshape(end - first, -1) * scale.reshape(-1, 1)
    found *= np.float32(7.874015718698502e-3)
    cast_into(into, found)
