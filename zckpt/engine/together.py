"""Parameters that a rule cuts over many files, a few elements in each: read together, each file with one read.

    file 0   | a a | b | c c c |      file 1   | a a | b | c . . |      what lies end to end is read at once
    memory   | a a . . a a . . | b . b | c c c . . . c |                a parameter is a column of what was read

One parameter by itself would take as many reads as it has files, and thousands of them as many times as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.fine import MOST_NBYTES, Cut
from zckpt.engine.workers import batched
from zckpt.immutable import immutable
from zckpt.state import CutFiles, itemsize
from zckpt.storage.distant import Range, ahead
from zckpt.storage.files import Sources

GAP_NBYTES = 1 << 14
"""Bytes between two spans of a file below which one read is cheaper than two."""

CELLS, NOWHERE = 1 << 14, 1 << 62
"""Lines by ranges of files that are looked at together; where what no line has begins."""


@immutable(kw_only=True)
class CutPiece(Cut):
    """Bytes of a target that a rule cuts finely: read together with others, of other targets too.

    `offset`, `dtype`: in the target.
    """

    offset: int = 0
    label: str
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * itemsize(self.dtype)

    moved_nbytes = nbytes


def element(nbytes: int) -> np.dtype[np.generic]:
    """Return a type of elements that are moved as they are."""
    return np.dtype(f"V{nbytes}" if nbytes not in (1, 2, 4, 8) else f"u{nbytes}")


def read_together(cuts: Sequence[Cut], into: memoryview, sources: Sources, most: int) -> None:
    """Read elements of many parameters, of which a file has its own end to end.

    Parameters
    ----------
    cuts : sequence of Cut
    into : memoryview
    sources : Sources
    most : int, bytes
        Held at once besides; of a parameter that is larger, as much as it takes.

    Raises
    ------
    DamagedFileError
        A file ends too early.
    SourceError
        A file cannot be read.
    """
    long, fine = _by_width(cuts, most)
    joined = _joined(long)
    with ahead(window for window, _ in joined):
        for (path, offset, nbytes), position in joined:
            sources.read(path, offset, into[position : position + nbytes])
    for tables in batched(fine, lambda table: table.nbytes, most):  # of all, what is in one file before another
        windows = sorted((*window, number) for number, table in enumerate(tables) for window in table.windows())
        with ahead(window for window, _, _ in windows):
            for window, file, number in windows:
                tables[number].read(sources, window, file)
        for table in tables:
            table.put(into)


def arrays_of(cuts: Iterable[Cut], sources: Sources, most: int) -> list[Array]:
    """Return the elements of each, wherever it is to be, as they are stored; else as `read_together`."""
    placed: list[Cut] = []
    for one in cuts:
        placed.append(replace(one, position=placed[-1].end if placed else 0))
    memory = np.empty(placed[-1].end if placed else 0, np.uint8)
    read_together(placed, memory.data, sources, most)
    return [memory[one.position : one.end].view(numpy_dtype(one.spans.files.dtype)) for one in placed]


def ranges_of(cuts: Iterable[Cut], most: int) -> Iterator[Range]:
    """Yield what `read_together` reads."""
    long, fine = _by_width(cuts, most)
    yield from (window for window, _ in _joined(long))
    yield from (window for table in fine for window, _ in table.windows())


def _by_width(cuts: Iterable[Cut], most: int) -> tuple[list[Cut], Iterator[_Table]]:
    """Return what is in files as large pieces, and tables of all other."""
    by_files: dict[int, list[Cut]] = {}
    long: list[Cut] = []
    for one in cuts:
        fine = one.spans.width * itemsize(one.spans.files.dtype) <= MOST_NBYTES
        (by_files.setdefault(id(one.spans.files), []) if fine else long).append(one)
    ordered = (sorted(some, key=lambda one: (one.spans.at, _line(one))) for some in by_files.values())
    return long, (_Table(near) for some in ordered for near in _near(some, most))


def _joined(cuts: Sequence[Cut]) -> list[tuple[Range, int]]:
    """Return what is read straight to where it is to be, neighbours on both sides at once: each range, and where."""
    found: list[tuple[str, int, int, int]] = []
    for one in cuts:
        size = itemsize(one.spans.files.dtype)
        for span in one.spans.reaching(one.start, one.start + one.numel):
            have = span.extent
            low, high = max(have.start, one.start), min(have.start + have.numel, one.start + one.numel)
            offset = span.offset + (low - span.extent.start) * size
            found.append((span.path, offset, one.position + (low - one.start) * size, (high - low) * size))
    found.sort()
    joined: list[tuple[Range, int]] = []
    for path, offset, position, nbytes in found:
        if joined:
            (before, begin, length), at = joined[-1]
            if (before, begin + length, at + length) == (path, offset, position):
                joined[-1] = (before, begin, length + nbytes), at
                continue
        joined.append(((path, offset, nbytes), position))
    return joined


def _line(one: Cut) -> int:
    """Return where on its line it begins."""
    return one.spans.origin + one.start


def _near(cuts: Sequence[Cut], most: int) -> Iterator[list[list[Cut]]]:
    """Yield lines that lie near each other in each file, in tables of at most `most` bytes if of several."""
    near: list[list[Cut]] = []
    first = end = columns = reach = 0
    for one in cuts:
        low, high = one.spans.files_of(one.start, one.start + one.numel)
        size, width = itemsize(one.spans.files.dtype), one.spans.width
        last = near[-1][-1] if near else one
        goes_on = (last.spans.at, last.spans.width, _line(last) + last.numel) == (one.spans.at, width, _line(one))
        more, gap = (0, 0) if goes_on else (width, one.spans.at - reach)
        rows = max(high, end) - min(low, first)
        if near and (not 0 <= gap * size <= GAP_NBYTES or rows * (columns + more) * size > most):
            yield near
            near, goes_on, more = [], False, width
        if not near:
            first, end, columns = low, high, 0
        if goes_on:
            near[-1].append(one)
        else:
            near.append([one])
        first, end, columns, reach = min(low, first), max(high, end), columns + more, one.spans.at + width
    yield near


class _Table:
    """What files have of some lines: a row for each file, columns for each line."""

    def __init__(self, cuts: Sequence[Sequence[Cut]]) -> None:
        self._cuts = cuts
        self._files: CutFiles = cuts[0][0].spans.files
        self._size = itemsize(self._files.dtype)
        self._at, self._width, low, numel = np.array(
            [(one[0].spans.at, one[0].spans.width, _line(one[0]), sum(each.numel for each in one)) for one in cuts],
            np.int64,
        ).T
        self._low, self._high = low, low + numel
        self._first, self._end = low // self._width, -(-self._high // self._width)
        self._ends = np.cumsum(self._width)
        self._begin, self._top = int(self._at.min()), int(self._first.min())
        self._columns = np.arange(self._ends[-1]) + np.repeat(self._at - self._ends + self._width, self._width)
        self._columns -= self._begin
        self._row = np.empty((int(self._columns.max()) + 1) * self._size, np.uint8)
        self._is_dense = bool((np.diff(self._columns) == 1).all())
        self._rows = np.empty((int(self._end.max()) - self._top, len(self._columns) * self._size), np.uint8)
        self._kind = element(self._size)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._rows.nbytes

    def windows(self) -> Iterator[tuple[Range, int]]:
        """Yield what is read, of which file: between two where a parameter begins or ends, of each file the same."""
        ends = np.unique(np.concatenate((self._first, self._first + 1, self._end - 1, self._end)))
        for one in np.array_split(ends[:-1], -(-len(ends) * len(self._low) // CELLS)):
            some = (self._first <= one[:, None]) & (one[:, None] < self._end)
            line = one[:, None] * self._width
            begins = (np.maximum(self._low - line, 0) + self._at).min(axis=1, where=some, initial=NOWHERE)
            stops = (np.minimum(self._high - line, self._width) + self._at).max(axis=1, where=some, initial=0)
            after = ends[np.searchsorted(ends, one) + 1]
            for top, bottom, begin, end in zip(*map(np.ndarray.tolist, (one, after, begins, stops)), strict=True):
                nbytes = (end - begin) * self._size
                for file in range(top, bottom) if begin < end else ():
                    yield (self._files.paths[file], self._files.offsets[file] + begin * self._size, nbytes), file

    def read(self, sources: Sources, window: Range, file: int) -> None:
        """Read one of the windows."""
        path, offset, nbytes = window
        row = self._rows[file - self._top]
        at = offset - self._files.offsets[file] - self._begin * self._size
        sources.read(path, offset, (row if self._is_dense else self._row)[at : at + nbytes].data)
        if not self._is_dense:
            row.view(self._kind)[:] = self._row.view(self._kind)[self._columns]

    def put(self, into: memoryview) -> None:
        """Put each parameter where it is to be."""
        rows = self._rows.view(self._kind)
        begins, ends = (self._ends - self._width).tolist(), self._ends.tolist()
        for cuts, begin, end, top, bottom in zip(
            self._cuts, begins, ends, self._first.tolist(), self._end.tolist(), strict=True
        ):
            line = rows[top - self._top : bottom - self._top, begin:end].reshape(-1)
            for one in cuts:
                at = _line(one) - top * one.spans.width
                np.frombuffer(into, self._kind, one.numel, one.position)[:] = line[at : at + one.numel]
