"""What there is to know of rounding, as fast as elements are read: which masters do not round to their weights; NaN."""

from __future__ import annotations

import threading

import numpy as np

from zckpt.engine.cast import Array, cast, numpy_dtype
from zckpt.state.dtypes import is_floating

_HALF = 1 << 15
"""Half of what the last bit of a bfloat16 is worth, in bits of the float32 that it is the upper half of."""


_INFINITY = 0x7F80
"""Bits of the bfloat16 beyond which there are only NaN, the sign aside."""

_BFLOAT16 = numpy_dtype("bfloat16")

_NATIVE = tuple(np.dtype(name) for name in ("float32", "float16", "float64"))
"""Types whose largest element numpy finds as fast as it reads them, and which is NaN if any is."""

_CHUNK = 1 << 18
"""Elements looked at together: what a cache holds beside them."""

_local = threading.local()


def scratch(numel: int) -> Array:
    """Return memory for words that this thread uses again: new pages cost more than what is computed in them."""
    if len(getattr(_local, "words", ())) < numel:
        _local.words = np.empty(numel, np.uint32)
    words: Array = _local.words[:numel]
    return words


def not_rounded(master: Array, weight: Array) -> Array:
    """Return the indices of masters that do not round to their weights, bit for bit.

    Any two NaN are alike, of which rounding defines none.

    Parameters
    ----------
    master, weight : array, flat
        Of floating-point types, of one length.

    Notes
    -----
    A float32 less than half a step from a bfloat16 rounds to it, which a subtraction of their bits tells. Only what
    lies further away or halfway between two is rounded, and all where there is a NaN.
    """
    if weight.dtype != _BFLOAT16 or master.dtype != np.float32 or not len(master) or np.isnan(master.max()):
        return np.flatnonzero(_unequal(master, weight))
    words, halves = master.view(np.uint32), weight.view(np.uint16)
    gap = scratch(min(len(master), _CHUNK))
    doubtful = []
    for start in range(0, len(master), _CHUNK):
        part = gap[: len(master) - start]
        np.copyto(part, halves[start : start + _CHUNK])
        np.left_shift(part, 16, out=part)
        np.subtract(words[start : start + _CHUNK], part, out=part)
        np.add(part, _HALF - 1, out=part)
        if part.max() >= 2 * _HALF - 1:
            doubtful.append(start + np.flatnonzero(part >= 2 * _HALF - 1))
    if not doubtful:
        return np.empty(0, np.intp)
    where = np.concatenate(doubtful)
    return where[_unequal(master[where], weight[where])]


def _unequal(master: Array, weight: Array) -> Array:
    bits = f"u{weight.dtype.itemsize}"
    rounded = cast(master, weight.dtype.name)
    unequal: Array = rounded.view(bits) != weight.view(bits)
    if unequal.any():
        with np.errstate(invalid="ignore"):  # a signalling NaN
            unequal &= ~(np.isnan(rounded) & np.isnan(weight))
    return unequal


def one_nan(array: Array) -> Array:
    """Return elements of which each NaN is the same one, whatever its bits were; the array itself if it has none.

    Parameters
    ----------
    array : array, flat
        Of any type; of a complex one, each part is a number.
    """
    if array.dtype.kind == "c":
        parts: Array = one_nan(array.view(f"f{array.dtype.itemsize // 2}"))
        return parts.view(array.dtype)
    dtype = array.dtype
    if dtype == _BFLOAT16:
        magnitudes = scratch(len(array)).view(np.uint16)[: len(array)]
        if not len(array) or np.bitwise_and(array.view(np.uint16), 0x7FFF, out=magnitudes).max() <= _INFINITY:
            return array
        where = magnitudes > _INFINITY
    elif dtype in _NATIVE:
        if not len(array) or not np.isnan(array.max()):
            return array
        where = np.isnan(array)
    elif not is_floating(dtype.name):
        return array
    else:
        where = np.isnan(array.astype(np.float32))
    if not where.any():
        return array
    found: Array = array.copy()
    found[where] = np.nan
    return found
