"""How two arrays differ, in numbers that add up: of blocks, and from them of whole tensors. Pure; no I/O.

    num_different  elements whose bits differ, or that are not close where a tolerance is given
    max_abs        largest |a - b|
    max_rel        largest |a - b| / max(|a|, |b|), which is at most 2 and needs no first or second
    rel_l2         ||a - b|| / ||a||
    cosine         a . b / (||a|| ||b||)
    max_ulp        most representable numbers from a to b, for floats of one type

All but the first are of pairs of finite numbers; those that are not are counted instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from zckpt.engine.cast import Array, cast
from zckpt.state.dtypes import is_floating

DECADES = range(-9, 1)
"""Relative differences, of at most 2, are counted by power of ten; the first counts what is smaller, too."""

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is close enough to be no difference: |a - b| <= atol + rtol * |b|, as numpy and torch say it."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_none(self) -> bool:
        """Whether bits must be equal."""
        return self.rtol == 0.0 and self.atol == 0.0


@dataclass(slots=True)
class Figures:
    """Numbers of what was seen so far; see the module.

    Parameters
    ----------
    numel, num_different : int, elements
    first : int or None
        Flat index of the first element that differs.
    nan_a, nan_b, inf_a, inf_b : int, elements
    max_abs, max_rel : float or None
        None where no pair of finite numbers differs.
    max_ulp : int or None
        None also where it has no meaning.
    squares_a, squares_b, squares, products : float
        Sums of a*a, b*b, (a-b)*(a-b), a*b.
    decades : list of int
        Elements by decade of relative difference, of those that differ.
    """

    numel: int = 0
    num_different: int = 0
    first: int | None = None
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    squares_a: float = 0.0
    squares_b: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    decades: list[int] = field(default_factory=lambda: [0] * len(DECADES))

    @property
    def norm_a(self) -> float:
        """L2 norm of the finite elements of the first tensor."""
        return math.sqrt(self.squares_a)

    @property
    def norm_b(self) -> float:
        """L2 norm of the finite elements of the second tensor."""
        return math.sqrt(self.squares_b)

    @property
    def rel_l2(self) -> float | None:
        """Norm of the difference relative to that of the first tensor; Inf if only the latter is zero."""
        if self.squares_a > 0:
            return math.sqrt(self.squares) / self.norm_a
        return math.inf if self.squares > 0 else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both tensors; None if one of them is zero."""
        scale = self.norm_a * self.norm_b
        return self.products / scale if scale > 0 else None

    def add(self, other: Figures) -> None:
        """Take in the figures of other elements of the same tensors."""
        self.numel += other.numel
        self.num_different += other.num_different
        self.first = _extreme(min, self.first, other.first)
        self.nan_a, self.nan_b = self.nan_a + other.nan_a, self.nan_b + other.nan_b
        self.inf_a, self.inf_b = self.inf_a + other.inf_a, self.inf_b + other.inf_b
        self.max_abs = _extreme(max, self.max_abs, other.max_abs)
        self.max_rel = _extreme(max, self.max_rel, other.max_rel)
        self.max_ulp = _extreme(max, self.max_ulp, other.max_ulp)
        self.squares_a, self.squares_b = self.squares_a + other.squares_a, self.squares_b + other.squares_b
        self.squares, self.products = self.squares + other.squares, self.products + other.products
        self.decades = [x + y for x, y in zip(self.decades, other.decades, strict=True)]


def _extreme(choose: Callable[[Number, Number], Number], a: Number | None, b: Number | None) -> Number | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def figures(a: Array, b: Array, start: int, dtypes: tuple[str, str], tolerance: Tolerance) -> Figures:
    """Return the figures of a block of two tensors.

    Parameters
    ----------
    a, b : array, flat
    start : int
        Flat index of their first element.
    dtypes : (str, str)
        Their torch types.
    tolerance : Tolerance
    """
    same = dtypes[0] == dtypes[1]
    if np.void in (a.dtype.type, b.dtype.type):
        return _without_numbers(a, b, start, same=same)
    with np.errstate(all="ignore"):
        x, y = _wide(a, dtypes[0]), _wide(b, dtypes[1])
        unequal = _unequal_bits(a, b) if same else ~((x == y) | (np.isnan(x) & np.isnan(y)))
        found = _sums(x, y)
        gap = np.abs(x - y)
        finite = np.isfinite(x) & np.isfinite(y)
        if not tolerance.is_none:
            close = (finite & (gap <= tolerance.atol + tolerance.rtol * np.abs(y))) | (x == y)
            unequal &= ~(close | (np.isnan(x) & np.isnan(y)))
        found.num_different = int(np.count_nonzero(unequal))
        if not found.num_different:
            return found
        found.first = start + int(np.argmax(unequal))
        chosen = unequal & finite
        if chosen.any():
            _add_largest(found, gap[chosen], np.maximum(np.abs(x[chosen]), np.abs(y[chosen])))
        if same and is_floating(dtypes[0]):
            chosen = unequal & ~(np.isnan(x) | np.isnan(y))
            found.max_ulp = int(_ulps(a[chosen], b[chosen]).max()) if chosen.any() else None
    return found


def _sums(x: Array, y: Array) -> Figures:
    """Return norms and products of what is finite on both sides, and counts of what is not."""
    found = Figures(numel=x.size)
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.all():
        found.nan_a, found.nan_b = int(np.isnan(x).sum()), int(np.isnan(y).sum())
        found.inf_a, found.inf_b = int(np.isinf(x).sum()), int(np.isinf(y).sum())
        x, y = x[finite], y[finite]
    gap = x - y
    found.squares_a, found.squares_b = float(np.vdot(x, x).real), float(np.vdot(y, y).real)
    found.squares, found.products = float(np.vdot(gap, gap).real), float(np.vdot(x, y).real)
    return found


def _add_largest(found: Figures, gap: Array, size: Array) -> None:
    """Note the largest differences and their decades; `size` is the larger magnitude of each pair."""
    relative = np.divide(gap, size, out=np.zeros_like(gap), where=size > 0)
    found.max_abs, found.max_rel = float(gap.max()), float(relative.max())
    powers = np.floor(np.log10(np.maximum(relative, 10.0 ** DECADES[0])))
    counts = np.bincount(np.clip(powers, DECADES[0], DECADES[-1]).astype(int) - DECADES[0], minlength=len(DECADES))
    found.decades = [int(count) for count in counts]


def _without_numbers(a: Array, b: Array, start: int, *, same: bool) -> Figures:
    """Return the figures of elements that numpy has no type for: only whether their bytes are equal."""
    unequal = _unequal_bits(a, b) if same else np.ones(a.size, bool)
    count = int(np.count_nonzero(unequal))
    return Figures(numel=a.size, num_different=count, first=start + int(np.argmax(unequal)) if count else None)


def _wide(array: Array, dtype: str) -> Array:
    """Return elements as float64, or complex128."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return cast(array, "float64") if is_floating(dtype) else array.astype(np.float64)


def _unequal_bits(a: Array, b: Array) -> Array:
    word = f"u{min(a.dtype.itemsize, 8)}"
    unequal: Array = (a.view(word) != b.view(word)).reshape(a.size, -1).any(axis=1)
    return unequal


def _ulps(a: Array, b: Array) -> Array:
    """Return how many representable numbers lie from each of a to its b, as unsigned words; both zeros are one."""
    signed = _SIGNED[a.dtype.itemsize]
    low = np.array(np.iinfo(signed).min, signed)
    x, y = (np.where(v < 0, low - v, v) for v in (np.ascontiguousarray(one).view(signed) for one in (a, b)))
    high, less = np.maximum(x, y), np.minimum(x, y)
    word = f"u{a.dtype.itemsize}"
    distance: Array = high.view(word) - less.view(word)
    return distance
