"""Every byte of a checkpoint's files, once, in stretches of bounded size. Pure: no I/O.

    file      | record .............................. | record ...
    stretch   [ run | run | padding | run ][ run ...  ]           one read, one CRC-32, each run looked at
                            `-- partner: the weight of a master, in another file, which is read with it

The bytes of a partner count for the checksum of its own record, and are left out of the stretches of its own file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zckpt.operations.verify.inventory import NO_SUM, Inventory, Run, SumIndex
from zckpt.state.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes that are read at once, and the runs in them."""

    path: str
    offset: int
    nbytes: int
    checksum: int
    runs: tuple[Run, ...] = ()

    @property
    def read_nbytes(self) -> int:
        """Bytes read, those of partners too."""
        return self.nbytes + sum(r.numel * itemsize(r.partner.dtype) for r in self.runs if r.partner is not None)


def stretches(inventory: Inventory, sums: SumIndex, paths: Sequence[str], most: int) -> Iterator[Stretch]:
    """Yield the stretches of all files: every byte that has a checksum or an element, once.

    Parameters
    ----------
    inventory : Inventory
    sums : SumIndex
    paths : sequence of str
        All files.
    most : int, bytes
        Of a stretch.
    """
    for path in paths:
        runs, overlapping = _apart(sorted(inventory.runs.get(path, ()), key=lambda run: run.offset))
        intervals = list(_without(sums.of(path), inventory.claimed.get(path, [])))
        intervals += _beside(runs, intervals)
        yield from _cut(path, sorted(intervals), runs, most)
        for run in overlapping:
            yield from _cut(path, [(run.offset, run.end, NO_SUM)], [run], most)


def _apart(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return runs of which no two share a byte, and the others."""
    alone: list[Run] = []
    others: list[Run] = []
    end = 0
    for run in runs:
        (others if run.offset < end else alone).append(run)
        end = max(end, run.end)
    return alone, others


Interval = tuple[int, int, int]
"""Begin, end and checksum."""


def _without(places: Sequence[Interval], claimed: Sequence[tuple[int, int]]) -> Iterator[Interval]:
    """Yield what of records is not read elsewhere."""
    at = 0
    for low, high, number in places:
        begin = low
        while at < len(claimed) and claimed[at][1] <= low:
            at += 1
        here = at
        while here < len(claimed) and claimed[here][0] < high:
            if begin < claimed[here][0]:
                yield begin, claimed[here][0], number
            begin = max(begin, claimed[here][1])
            here += 1
        if begin < high:
            yield begin, high, number


def _beside(runs: Sequence[Run], intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals for the runs that none has, neighbours as one."""
    found: list[Interval] = []
    begins = [low for low, _, _ in intervals]
    for run in runs:
        at = bisect_right(begins, run.offset) - 1
        if at >= 0 and run.offset < intervals[at][1]:
            continue
        if found and found[-1][1] == run.offset:
            found[-1] = (found[-1][0], run.end, NO_SUM)
        else:
            found.append((run.offset, run.end, NO_SUM))
    return found


def _cut(path: str, intervals: Sequence[Interval], runs: Sequence[Run], most: int) -> Iterator[Stretch]:
    at = 0
    for low, high, number in intervals:
        begin = low
        while begin < high:
            end = min(begin + most, high)
            while at < len(runs) and runs[at].end <= begin:
                at += 1
            inside, here = [], at
            while here < len(runs) and runs[here].offset < end:
                run = runs[here]
                if run.end > end:  # begin and end with an element
                    size = itemsize(run.dtype)
                    end = run.offset + (end - run.offset) // size * size
                if run.offset < end:
                    inside.append(run.part(begin, end))
                here += 1
            yield Stretch(path, begin, end - begin, number, tuple(inside))
            begin = end
