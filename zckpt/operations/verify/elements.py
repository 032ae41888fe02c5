"""What is wrong with elements in memory: NaN, Inf, sign, and what they are held against. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zckpt.compare import weights
from zckpt.compare.slots import unequal_bits
from zckpt.engine.cast import Array, cast, numpy_dtype, swapped
from zckpt.operations.verify.inventory import BUFFER, PADDING, Subject
from zckpt.state.dtypes import is_floating

NOT_NEGATIVE = frozenset({"square_avg", "acc_delta", "sum", "exp_inf", "row_var", "col_var", "variance"})
"""Sums and means of squares or of magnitudes, besides `exp_avg_sq` and what begins or ends with it: of RMSprop,
Adadelta, Adagrad, Adamax and Adafactor (torch 2.13)."""

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in NaN and Inf."""

_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class Tally:
    """What is wrong with some elements of one subject.

    Parameters
    ----------
    nan, inf, negative, nonzero : int, elements
        `nonzero` of padding, in bytes.
    first : int
        Index of the first one.
    """

    nan: int = 0
    inf: int = 0
    negative: int = 0
    nonzero: int = 0
    first: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf or self.negative or self.nonzero)

    def plus(self, other: Tally) -> Tally:
        """Return the tally of both."""
        if not self or not other:
            return self or other
        return Tally(
            self.nan + other.nan,
            self.inf + other.inf,
            self.negative + other.negative,
            self.nonzero + other.nonzero,
            min(self.first, other.first),
        )


def tally(values: Array, dtype: str, subject: Subject, first: int) -> Tally:
    """Return what is wrong with elements: flat, in the machine's byte order, the first of them with index `first`."""
    if subject.kind == PADDING:
        wrong = values.view(np.uint8) != 0
        return Tally(nonzero=int(np.count_nonzero(wrong)), first=first + int(np.argmax(wrong)))
    odd = not_finite(values, dtype)
    found = Tally()
    if odd is not None and odd.any():
        nan = np.isnan(_real(values, dtype)[odd].astype(np.float64))
        infinite = 0 if subject.kind == BUFFER else int(len(nan) - np.count_nonzero(nan))  # a mask of -inf is one
        at = int(np.argmax(odd)) // (2 if dtype in _REAL else 1)
        found = Tally(nan=int(np.count_nonzero(nan)), inf=infinite, first=first + at)
    is_second_moment = "exp_avg_sq" in subject.slot or subject.slot in NOT_NEGATIVE
    if subject.kind != BUFFER and is_floating(dtype) and is_second_moment:
        below = values < 0
        if odd is not None and below.any():
            below &= ~odd
        found = found.plus(Tally(negative=int(np.count_nonzero(below)), first=first + int(np.argmax(below))))
    return found


def not_finite(values: Array, dtype: str) -> Array | None:
    """Return which elements are NaN or Inf; None for a type that has neither. A complex number counts as two."""
    if dtype in _EXPONENT:
        mask = _EXPONENT[dtype]
        found: Array = (values.view(np.uint16) & mask) == mask
        return found
    if dtype in _REAL:
        return not_finite(_real(values, dtype), _REAL[dtype])
    if not is_floating(dtype):
        return None
    wide = values if values.dtype.kind == "f" else values.astype(np.float32)
    finite: Array = ~np.isfinite(wide)
    return finite


def _real(values: Array, dtype: str) -> Array:
    return values.view(numpy_dtype(_REAL[dtype])) if dtype in _REAL else values


def typed(data: Array, dtype: str, byteorder: str) -> Array:
    """Return bytes as elements, in the machine's byte order."""
    values: Array = data.view(numpy_dtype(dtype))
    return values if byteorder == "little" else swapped(values, dtype)


@dataclass(frozen=True, slots=True)
class Unequal:
    """Of elements that were compared, how many differ, and the first of them."""

    numel: int
    count: int = 0
    first: int = 0
    detail: str = ""

    def plus(self, other: Unequal) -> Unequal:
        """Return the comparison of both."""
        first = min((one for one in (self, other) if one.count), key=lambda one: one.first, default=self)
        return Unequal(self.numel + other.numel, self.count + other.count, first.first, first.detail)


def not_rounded(master: Array, weight: Array, dtype: str, first: int) -> Unequal:
    """Compare weights with their masters, rounded; NaN and Inf are other findings."""
    where = weights.not_rounded(master, weight)
    kept = np.isfinite(master[where].astype(np.float32))
    odd = not_finite(weight[where], dtype)
    where = where[kept if odd is None else kept & ~odd]
    if not len(where):
        return Unequal(len(master))
    at = int(where[0])
    rounded = float(cast(master[at : at + 1], dtype)[0])
    detail = f"{float(weight[at])!r} where the master rounds to {rounded!r}, at element {first + at}"
    return Unequal(len(master), len(where), first + at, detail)


def not_copied(copy: Array, original: Array, first: int) -> Unequal:
    """Compare a copy with what it was made of: bit for bit, after rounding where it has another type."""
    if copy.dtype == original.dtype:
        where = np.flatnonzero(unequal_bits(copy, original))
    else:
        where = weights.not_rounded(original.astype(copy.dtype) if original.dtype.kind in "biu" else original, copy)
    return Unequal(len(copy), len(where), first + int(where[0])) if len(where) else Unequal(len(copy))
