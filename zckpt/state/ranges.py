"""Ranges of bytes or elements, [low, high): which there are together, and what of some is in no others. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""The first, and the one after the last."""


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return sorted ranges that do not touch and cover the same; given ones are in any order, and may overlap."""
    found: list[Range] = []
    for low, high in sorted(one for one in ranges if one[0] < one[1]):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def without(ranges: Iterable[Range], others: Sequence[Range]) -> list[Range]:
    """Return what of ranges is in none of others; these are sorted, none over another."""
    found: list[Range] = []
    for low, high in ranges:
        begin = low
        at = max(bisect_right(others, (low, low)) - 1, 0)
        while begin < high and at < len(others):
            start, end = others[at]
            if start >= high:
                break
            if start > begin:
                found.append((begin, start))
            begin = max(begin, end)
            at += 1
        if begin < high:
            found.append((begin, high))
    return found


def total(ranges: Iterable[Range]) -> int:
    """Return how much is in ranges."""
    return sum(high - low for low, high in ranges)
