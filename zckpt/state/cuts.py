"""Many parameters that are cut alike, file by file: what each file has of them, worked out for all at once. Pure.

A rule says where the elements of one parameter lie. Here the rules of thousands, one after the other in the same files,
are columns of numbers, so that what a file has of them takes a few operations on arrays and no object for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zckpt.state.dtypes import itemsize
from zckpt.state.spans import Chosen, CutSpans

Column = npt.NDArray[np.int64]
"""A number for each parameter."""

Ranges = npt.NDArray[np.int64]
"""A row for each range, [low, high)."""


_COLUMNS = ("origin", "width", "at", "numel")


class Cuts:
    """Rules of parameters in the same files, as columns.

    Parameters
    ----------
    spans : sequence of CutSpans
    """

    def __init__(self, spans: Sequence[CutSpans]) -> None:
        some = [one for one in spans if one.numel]
        columns = np.array([[getattr(one, name) for one in some] for name in _COLUMNS], np.int64)
        self.origin, self.width, self.at, self.numel = columns
        self._first = self.origin // self.width
        self._end = -(-(self.origin + self.numel) // self.width)
        starts, ends = -(-self.origin // self.width), (self.origin + self.numel) // self.width
        self.full = range(int(starts.max(initial=0)), int(ends.min(initial=1 << 62)))
        """Files of which each parameter fills its place: they have the same of all."""
        self._is_sorted = bool((np.diff(self._first) >= 0).all() and (np.diff(self._end) >= 0).all())

    def __eq__(self, other: object) -> bool:
        """Tell whether the same elements lie at the same offsets of other files."""
        if not isinstance(other, Cuts):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _COLUMNS)

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up

    def of(self, file: int) -> Ranges:
        """Return which elements of a file's tensor are some parameter's: sorted, none touching another."""
        if file in self.full:
            return self._in_full
        _, low, high, _ = self.shares(file)
        return merged_ranges(low, high)

    @cached_property
    def _in_full(self) -> Ranges:
        """What files have of which each parameter fills its place."""
        return merged_ranges(self.at, self.at + self.width)

    def within(self, file: int, low: int, high: int) -> npt.NDArray[np.int64]:
        """Return what elements [low, high) of a file's tensor are: rows of parameter, begin, end, and its element."""
        number, begin, end, origin = self.shares(file)
        begin, end = np.maximum(begin, low), np.minimum(end, high)
        return np.stack((number, begin, end, begin - origin), axis=1)[begin < end]

    def shares(self, file: int) -> tuple[Column, Column, Column, Column]:
        """Return parameters, which elements of a file's tensor they are, and where there their first would be."""
        begin, end = 0, len(self.origin)
        if self._is_sorted:
            begin = int(np.searchsorted(self._end, file, "right"))
            end = int(np.searchsorted(self._first, file, "right"))
        width, line = self.width[begin:end], self.origin[begin:end]
        start = file * width
        low = np.maximum(line, start)
        high = np.minimum(line + self.numel[begin:end], start + width)
        shift = self.at[begin:end] - start
        return np.arange(begin, end), low + shift, high + shift, line + shift


class CutsApart:
    """Rules of parameters in the same files, of which each has tensors of its own there.

    Parameters
    ----------
    spans : sequence of CutSpans
        Of one element type; the offsets are `Chosen` for all of them alike, or not for all.
    """

    def __init__(self, spans: Sequence[CutSpans]) -> None:
        some = [one for one in spans if one.numel]
        self._cuts, self._offsets = Cuts(some), [one.files.offsets for one in some]
        self._size = itemsize(some[0].files.dtype) if some else 0
        first = self._offsets[0] if some else ()
        self._which = first.which if isinstance(first, Chosen) else None
        if all(isinstance(one, Chosen) and one.which is self._which for one in self._offsets):
            self._values = np.array([one.values for one in self._offsets if isinstance(one, Chosen)], np.int64)
        else:
            self._which = None
        self.full = self._cuts.full

    def which(self, file: int) -> int:
        """Return which of the files has the same offsets, by number."""
        return file if self._which is None else self._which[file]

    def nbytes_of(self, file: int) -> Ranges:
        """Return which bytes of a file are some parameter's: sorted, none touching another."""
        number, low, high, _ = self._cuts.shares(file)
        if self._which is None:
            offsets = np.array([one[file] for one in self._offsets], np.int64)
        else:
            offsets = self._values[:, self._which[file]]
        return merged_ranges(*(offsets[number] + at * self._size for at in (low, high)))


def merged_ranges(lows: Column, highs: Column) -> Ranges:
    """Return ranges sorted and none touching another, that cover the same numbers; those that end early are empty."""
    some = lows < highs
    lows, highs = lows[some], highs[some]
    if not len(lows):
        return np.empty((0, 2), np.int64)
    if (np.diff(lows) < 0).any():
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], highs[order]
    if (lows[1:] > highs[:-1]).all():
        return np.stack((lows, highs), axis=1)
    ends = np.maximum.accumulate(highs)
    first = np.concatenate(([True], lows[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((lows[first], ends[last]), axis=1)
