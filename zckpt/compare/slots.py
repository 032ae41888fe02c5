"""Two layouts of the same slots, compared element by element, bit for bit: in parallel, in bounded memory.

First bytes are compared, which is as fast as they are read, and no further in a slot than to its first difference.
Then those slots alone that differ are read again, for figures that add up, of blocks and from them of whole tensors:

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np

from zckpt.compare.weights import scratch
from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.cast import Array, cast
from zckpt.engine.scan import SlotSet, scan
from zckpt.errors import LayoutError
from zckpt.immutable import immutable, mutable
from zckpt.state import Slot, is_floating

FIGURES_MEMORY = 2
"""Figures are of float64, of which a block needs about as many times more than its bytes."""

DECADES = range(-9, 1)
"""Relative differences, of at most 2, are counted by power of ten; the first counts what is smaller, too."""

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@immutable
class Tolerance:
    """What is close enough to be no difference: |a - b| <= atol + rtol * |b|, as numpy and torch say it."""

    rtol: float = 0.0
    atol: float = 0.0


EXACT = Tolerance()
"""Bits must be equal."""


@mutable
class Figures:
    """Numbers of what was seen so far; see the module."""

    numel: int = 0
    num_different: int = 0  # elements
    first: int | None = None  # flat index of the first element that differs
    nan_a: int = 0  # elements
    nan_b: int = 0  # elements
    inf_a: int = 0  # elements
    inf_b: int = 0  # elements
    max_abs: float | None = None  # None where no pair of finite numbers differs
    max_rel: float | None = None
    max_ulp: int | None = None  # None also where it has no meaning
    squares_a: float = 0.0  # sums of a*a, b*b, (a-b)*(a-b), a*b
    squares_b: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    decades: list[int] = field(default_factory=lambda: [0] * len(DECADES))
    """Elements by decade of relative difference, of those that differ."""

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
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, choose in _EXTREMES.items():
            known = [value for one in (self, other) if (value := getattr(one, name)) is not None]
            setattr(self, name, choose(known, default=None))
        self.decades = [x + y for x, y in zip(self.decades, other.decades, strict=True)]


_SUMMED = (
    "numel", "num_different", "nan_a", "nan_b", "inf_a", "inf_b", "squares_a", "squares_b", "squares", "products",
)  # fmt: skip
_EXTREMES: dict[str, Callable[..., Any]] = {"first": min, "max_abs": max, "max_rel": max, "max_ulp": max}


def figures(a: Array, b: Array, start: int, dtypes: Sequence[str], tolerance: Tolerance) -> Figures:
    """Return the figures of a block of two tensors.

    `start`: flat index of their first element; `dtypes`: their torch types.
    """
    same = dtypes[0] == dtypes[1]
    if np.void in (a.dtype.type, b.dtype.type):  # numpy has no numbers of it: only whether bytes are equal
        unequal = unequal_bits(a, b) if same else np.ones(a.size, bool)
        count = int(np.count_nonzero(unequal))
        return Figures(numel=a.size, num_different=count, first=start + int(np.argmax(unequal)) if count else None)
    with np.errstate(all="ignore"):
        x, y = _wide(a, dtypes[0]), _wide(b, dtypes[1])
        unequal = unequal_bits(a, b) if same else ~((x == y) | (np.isnan(x) & np.isnan(y)))
        found, finite = Figures(numel=x.size), np.isfinite(x) & np.isfinite(y)
        one, other = x, y  # norms and products are of what is finite on both sides
        if not finite.all():
            found.nan_a, found.nan_b = int(np.isnan(x).sum()), int(np.isnan(y).sum())
            found.inf_a, found.inf_b = int(np.isinf(x).sum()), int(np.isinf(y).sum())
            one, other = x[finite], y[finite]
        gap = one - other
        found.squares_a, found.squares_b = float(np.vdot(one, one).real), float(np.vdot(other, other).real)
        found.squares, found.products = float(np.vdot(gap, gap).real), float(np.vdot(one, other).real)
        gap = np.abs(x - y)
        if tolerance != EXACT:
            close = (finite & (gap <= tolerance.atol + tolerance.rtol * np.abs(y))) | (x == y)
            unequal &= ~(close | (np.isnan(x) & np.isnan(y)))
        found.num_different = int(np.count_nonzero(unequal))
        if not found.num_different:
            return found
        found.first = start + int(np.argmax(unequal))
        chosen = unequal & finite
        if chosen.any():
            gap, larger = gap[chosen], np.maximum(np.abs(x[chosen]), np.abs(y[chosen]))
            relative = np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0)
            found.max_abs, found.max_rel = float(gap.max()), float(relative.max())
            powers = np.floor(np.log10(np.maximum(relative, 10.0 ** DECADES[0])))
            places = np.clip(powers, DECADES[0], DECADES[-1]).astype(int) - DECADES[0]
            found.decades = np.bincount(places, minlength=len(DECADES)).tolist()
        if same and is_floating(dtypes[0]):
            chosen = unequal & ~(np.isnan(x) | np.isnan(y))
            found.max_ulp = int(_ulps(a[chosen], b[chosen]).max()) if chosen.any() else None
    return found


def _wide(array: Array, dtype: str) -> Array:
    """Return elements as float64, or complex128."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return cast(array, "float64") if is_floating(dtype) else array.astype(np.float64)


def unequal_bits(a: Array, b: Array) -> Array:
    """Return which elements of two flat arrays of one type have different bits."""
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


def pair(label: str, a: Slot, b: Slot, dtype: str | None = None) -> SlotSet:
    """Return a set of two slots of one shape, to be compared.

    `label`: `exp_avg/wte.weight`, for messages; `dtype`: element type that both are read as, cast as the copier casts;
    by default each is read as it is, and two of different types differ.
    """
    return SlotSet(label, (a, b), (dtype or a.dtype, dtype or b.dtype))


@immutable
class Difference:
    """What differs in one slot. `index`: of the pair."""

    index: int
    label: str
    figures: Figures


def differences(
    pairs: Iterable[SlotSet],
    *,
    tolerance: Tolerance = EXACT,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    direct: bool = False,
) -> list[Difference]:
    """Return what differs in each of the slots that are not equal, bit for bit, in the order of the pairs.

    Parameters
    ----------
    pairs : iterable of SlotSet
        As `pair` returns them.
    tolerance : Tolerance, optional
        What is close enough to be no difference; of two element types, values count then.
    memory : int, bytes
        Upper bound of what buffers take together.
    reporter : Reporter, optional
        Counts bytes of one side.
    direct : bool
        Read past the page cache, where the file systems can.

    Raises
    ------
    LayoutError
        The two sides of a pair have different shapes, or one of them does not cover every element once.
    UnsupportedError
        They have element types of which one is not cast to the other.
    SourceError
        A file cannot be read.
    """
    sets = list(pairs)
    for one in sets:
        a, b = one.slots
        if a.shape != b.shape:
            raise LayoutError(f"{one.label} has two shapes", expected=a.shape, found=b.shape)
    unequal = {index for index, one in enumerate(sets) if one.dtypes[0] != one.dtypes[1]}
    goes_on = lambda index: index not in unequal  # noqa: E731
    for index, _ in scan(sets, _first_difference, memory=memory, reporter=reporter, goes_on=goes_on, direct=direct):
        unequal.add(index)
    chosen = sorted(unequal)
    found = measure([sets[index] for index in chosen], tolerance, memory=memory, direct=direct)
    return [
        Difference(index, sets[index].label, figures)
        for index, figures in zip(chosen, found, strict=True)
        if figures.num_different or (tolerance == EXACT and sets[index].dtypes[0] != sets[index].dtypes[1])
    ]


def measure(
    sets: Sequence[SlotSet], tolerance: Tolerance, *, memory: int = DEFAULT_MEMORY_NBYTES, direct: bool = False
) -> list[Figures]:
    """Return the figures of sets of two slots; arguments and errors are those of `differences`."""
    found = [Figures() for _ in sets]
    look = partial(_measure_block, [one.dtypes for one in sets], tolerance)
    for index, one in scan(sets, look, memory=memory // FIGURES_MEMORY, direct=direct):
        found[index].add(one)
    return found


def _measure_block(
    dtypes: Sequence[tuple[str, ...]], tolerance: Tolerance, index: int, start: int, arrays: Sequence[Array]
) -> Figures:
    a, b = arrays
    return figures(a, b, start, dtypes[index], tolerance)


def _first_difference(_index: int, start: int, arrays: Sequence[Array]) -> int | None:
    """Return the index of the first element of a block whose bits are not those of the other side."""
    a, b = arrays
    word = f"u{min(a.dtype.itemsize, 8)}"
    x, y = a.view(word), b.view(word)
    unequal = np.not_equal(x, y, out=scratch(len(x)).view(np.bool_)[: len(x)])
    return start + int(np.argmax(unequal)) * x.dtype.itemsize // a.dtype.itemsize if unequal.any() else None
