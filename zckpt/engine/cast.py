"""Changes of element type on the way from source to target, bit-equal to torch's; without torch.

What NaN a NaN becomes is not defined: torch itself gives different ones on different processors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from zckpt.errors import UnsupportedError
from zckpt.state.dtypes import is_complex, is_floating, is_negatable, itemsize

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]
else:
    Array = np.ndarray  # numpy.typing takes as long to load as half of numpy

_EXTENDED = {
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}
_EXTENDED_TYPES = frozenset(np.dtype(getattr(ml_dtypes, one)) for one in _EXTENDED)
_BFLOAT_AND_FLOAT = {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)}

_WIDENED = {np.dtype(ml_dtypes.float8_e4m3fn): (20, 120), np.dtype(ml_dtypes.float8_e5m2): (21, 112)}
"""How far the bits of a number are from those of a float32, and how far its exponent is."""

_SMALLEST = np.float32(1e-45)
"""Zero, times something, where a program has told the processor to take small numbers for zeros."""

FEW_NUMEL = 1 << 8
"""So many elements are cast one by one; more are looked up, where their types are small."""

_OPAQUE = {"complex32", "bcomplex32", "float4_e2m1fn_x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"}


@lru_cache(maxsize=64)
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy element type of a torch one; untyped bytes of the same size where numpy has none."""
    if dtype in _OPAQUE:
        return np.dtype(f"V{itemsize(dtype)}")
    if dtype in _EXTENDED:
        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
        return extended
    return np.dtype(dtype)


def swapped(array: Array, dtype: str) -> Array:
    """Return the elements with their bytes in the other order; a complex number is two numbers."""
    size = itemsize(dtype)
    number = size // 2 if is_complex(dtype) else size
    if number == 1:
        return array
    numbers: Array = np.ascontiguousarray(array).view(f"u{number}").byteswap()
    return numbers.view(array.dtype).reshape(array.shape)


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


def resolved(array: Array, dtype: str, unresolved: Iterable[str]) -> Array:
    """Return the elements after what torch's lazy views leave to be done, bit for bit as torch does it.

    `array`: in the machine's byte order. Raises UnsupportedError: elements of the type are not negated.

    Source: `Tensor.resolve_conj`, `Tensor.resolve_neg` (torch 2.13): signs are turned, of zeros and NaN too.
    """
    if not is_negatable(dtype):
        raise UnsupportedError(f"elements of type {dtype} cannot be negated", expected="signed numbers")
    size = itemsize(dtype) // (2 if is_complex(dtype) else 1)
    words: Array = _flat(array).view(f"u{size}").copy()
    for bit in unresolved:
        if bit == "conj" and not is_complex(dtype):
            continue
        chosen = words[1::2] if bit == "conj" else words
        if is_floating(dtype) or is_complex(dtype):
            chosen ^= chosen.dtype.type(1 << (8 * size - 1))
        else:
            np.negative(chosen, out=chosen)
    return words.view(array.dtype).reshape(array.shape)


def cast(array: Array, target: str) -> Array:
    """Return `array` as `target`, rounded to nearest, ties to even, as torch rounds.

    float64 goes to the 16-bit types by way of float32, because torch converts it so. Raises UnsupportedError: one of
    the types is not a real floating-point number.
    """
    result = numpy_dtype(target)
    if array.dtype == result:
        return array
    into: Array = np.empty(array.shape, result)
    cast_into(into, array, target)
    return into


def cast_into(into: Array, array: Array, target: str | None = None) -> None:
    """Fill memory that lies end to end with as many elements, cast to its type; errors are those of `cast`.

    `target`: the type by torch's name.
    """
    types = {array.dtype, into.dtype}
    if len(types) > 1 and not {one for one in types if one.kind != "f"} <= _EXTENDED_TYPES:
        raise UnsupportedError(f"elements of {array.dtype} cannot be cast to {target or into.dtype}")
    if len(types) > 1 and array.size > FEW_NUMEL:
        if array.dtype in _WIDENED and into.dtype == np.float32 and is_finite(array) and _SMALLEST * 2 > 0:
            shift, exponent = _WIDENED[array.dtype]  # their bits are moved, and then their exponents
            words = into.reshape(-1).view(np.int32)
            np.copyto(words, _flat(array).view(np.int8))
            words <<= shift
            words &= (0x7F << shift) - (1 << 31)
            into *= np.float32(2.0**exponent)
            return
        if array.itemsize == 1 or (array.itemsize == 2 and types != _BFLOAT_AND_FLOAT):
            _look_up(into, array)
            return
        if array.dtype == np.float32 and into.itemsize == 1:
            # The upper halves of floats as bfloat16, of which the last bit says that something follows it: what is
            # rounded from there is rounded as from the float, to types of which bfloat16 has two bits more.
            bits: Array = np.ascontiguousarray(array).view(np.uint32)
            odd = bits & 0xFFFF
            odd += 0xFFFF
            odd |= bits
            odd >>= 16
            _look_up(into, odd.astype(np.uint16).view(numpy_dtype("bfloat16")))
            return
    with np.errstate(over="ignore", invalid="ignore"):
        if len(types) > 1 and array.dtype != np.float32 and into.dtype != np.float64:
            array = array.astype(np.float32)
        np.copyto(into.reshape(array.shape), array, casting="unsafe")


def _look_up(into: Array, array: Array) -> None:
    """Cast many elements of one or two bytes, in a fraction of the time that each takes by itself."""
    table, flat, found = _every(array.dtype, into.dtype), _flat(array), into.reshape(-1)
    together = flat.size if array.itemsize == 2 else flat.size & ~1
    np.take(table, flat[:together].view(np.uint16), out=found[:together].view(table.dtype), mode="wrap")
    if together < flat.size:
        cast_into(found[together:], flat[together:])


@lru_cache(maxsize=16)
def _every(dtype: np.dtype[Any], target: np.dtype[Any]) -> Array:
    """Return the casts of all elements of a type of two bytes, or of all pairs of elements of one byte, as words."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = every.astype(np.float32).astype(target)
    nbytes = found.nbytes >> 16
    return found.view("c16" if nbytes == 16 else f"u{nbytes}")


CACHED_NUMEL = 1 << 18
"""Elements that stay in a cache, and are so many that a dozen calls of numpy for them cost little."""

_INFINITY = {
    numpy_dtype("float8_e4m3fn"): 0x7F, numpy_dtype("float8_e5m2"): 0x7C, numpy_dtype("float16"): 0x7C00,
    numpy_dtype("bfloat16"): 0x7F80, numpy_dtype("float32"): 0x7F80_0000, numpy_dtype("float64"): 0x7FF0 << 48,
}  # fmt: skip
"""The least word that is no number; e4m3fn has no infinity, and one NaN of each sign."""


def is_finite(array: Array) -> bool:
    """Tell whether no element is infinite or no number; of words, in a fraction of the time that a cast takes."""
    infinity, size = _INFINITY.get(array.dtype), array.itemsize
    if infinity is None:
        return bool(np.isfinite(array).all())
    words, sign = _flat(array).view(f"u{size}"), 1 << (8 * size - 1)
    blocks = (words[at : at + CACHED_NUMEL] for at in range(0, len(words), CACHED_NUMEL))  # each is looked at twice
    return all(one.view(f"i{size}").max() < infinity and one.max() < infinity | sign for one in blocks)


def mean(arrays: Iterable[Array], dtype: str) -> Array:
    """Return the element-wise mean of several arrays, summed in float32 in their order and rounded to `dtype`.

    They are taken one after the other, so that two of them are in memory at once. Source: averaged tensor-parallel
    parameters, `sum(slices) / len(slices)` (DeepSpeed 0.19, universal checkpoint).
    """
    count, remaining = 1, iter(arrays)
    total = cast(next(remaining), "float32").copy()
    for array in remaining:
        total += cast(array, "float32")
        count += 1
        del array  # before the next is read
    total /= np.float32(count)
    return cast(total, dtype)
