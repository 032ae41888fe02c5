"""Which masters do not round to the weights beside them, in every element, as fast as both are read."""

from __future__ import annotations

import numpy as np

from zckpt.cast import Array, cast

_HALF = 1 << 15
"""Half of what the last bit of a bfloat16 is worth, in bits of the float32 that it is the upper half of."""


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
    if weight.dtype.name == "bfloat16" and master.dtype == np.float32 and len(master) and not np.isnan(master.max()):
        gap = weight.view(np.uint16).astype(np.uint32)
        gap <<= 16
        np.subtract(master.view(np.uint32), gap, out=gap)
        gap += _HALF - 1
        if gap.max() < 2 * _HALF - 1:
            return np.empty(0, np.intp)
        where = np.flatnonzero(gap >= 2 * _HALF - 1)
        return where[_unequal(master[where], weight[where])]
    return np.flatnonzero(_unequal(master, weight))


def _unequal(master: Array, weight: Array) -> Array:
    bits = f"u{weight.dtype.itemsize}"
    rounded = cast(master, weight.dtype.name)
    unequal: Array = rounded.view(bits) != weight.view(bits)
    if unequal.any():
        with np.errstate(invalid="ignore"):  # a signalling NaN
            unequal &= ~(np.isnan(rounded) & np.isnan(weight))
    return unequal
