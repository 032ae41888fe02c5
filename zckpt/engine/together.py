"""Parameters that a rule cuts over many files, a few elements in each: read together, or copied as one.

    file 0   | a a | b | c c c |      file 1   | a a | b | c . . |      what lies end to end is read at once
    memory   | a a . . a a . . | b . b | c c c . . . c |                a parameter is a column of what was read

One parameter by itself would take as many reads as it has files, and thousands of them as many times as many.

Where shares of thousands of parameters lie end to end in the target's files, too, they are copied as one. ZeRO-3 cuts
every parameter by itself, so that another number of ranks needs parameters x ranks copies, of a few elements each
where ranks are many. Here a row has the numbers of all parameters as columns, once for all ranks of the target, and a
pack is the row and a rank.

    source file   | a a | b b b | c c |     `Cuts`: where each begins on its line, how wide that is cut, where it is
    target        | a | b b . | c |         the row: where each share begins, and how large; all others are zero
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.plan import MOST_NBYTES, Cut
from zckpt.engine.workers import batched
from zckpt.errors import LayoutError
from zckpt.immutable import immutable
from zckpt.state import CutFiles, CutSpans, itemsize
from zckpt.state.cuts import Column, Cuts
from zckpt.storage.files import Sources
from zckpt.storage.stand_ins import Range, ahead

PIECE_NBYTES = 1 << 19
"""Of a pack at once, where nobody says otherwise."""


class PackedSlot:
    """One slot of parameters, whose shares of all ranks of a target have the same sizes: a row of packs.

    Parameters
    ----------
    label : str
    files : CutFiles
    cuts : Cuts
    position, share : sequence of int, elements
        For each parameter, where its share is in a rank's hole, and how large it is; that of rank r is its r-th.

    Raises
    ------
    LayoutError
        A share is over another.
    """

    def __init__(self, label: str, files: CutFiles, cuts: Cuts, position: Sequence[int], share: Sequence[int]) -> None:
        self.files, self.cuts = files, cuts
        self.position, self.share = np.array(position, np.int64), np.array(share, np.int64)
        ends = self.position + self.share
        if (self.position < 0).any() or (self.share < 0).any() or (self.position[1:] < ends[:-1]).any():
            raise LayoutError(f"{label}: shares overlap, or lie outside their hole")
        self.numel = int(ends.max(initial=0))
        self.itemsize = itemsize(files.dtype)

    @property
    def is_fine(self) -> bool:
        """Whether shares are so small that those of many ranks are to be read at once."""
        dense = np.array_equal(self.position[1:], (self.position + self.share)[:-1])
        return dense and len(self.share) > 0 and int(self.share.mean()) * self.itemsize <= MOST_NBYTES

    def pack(self, rank: int) -> Pack:
        """Return all that a rank has."""
        return Pack(self, rank, 0, 0, self.numel)

    def blocks(self, most: int) -> Iterator[tuple[int, int, bool]]:
        """Yield elements [low, high) of a hole, of parameters that have at most `most` bytes, and whether it is so."""
        ends = np.cumsum(self.cuts.numel) * self.itemsize
        low = done = 0
        while low < len(ends):
            high = max(int(np.searchsorted(ends, done + most, "right")), low + 1)
            last = int(self.position[high - 1] + self.share[high - 1])
            yield int(self.position[low]), last, bool(ends[high - 1] - done <= most)
            low, done = high, int(ends[high - 1])

    def found(self, rank: int, low: int, high: int) -> tuple[Column, Column, Column, Column]:
        """Return what elements [low, high) of a rank's hole are: parameters, first element, how many, and where."""
        start = rank * self.share
        end = np.minimum(self.position + np.clip(self.cuts.numel - start, 0, self.share), high)
        begin = np.maximum(self.position, low)
        some = np.flatnonzero(begin < end)
        return some, (start + begin - self.position)[some], (end - begin)[some], begin[some]

    def paths(self, low: int, high: int) -> set[str]:
        """Return the files of the parameters of elements [low, high), and perhaps some between them."""
        some = (self.position < high) & (self.position + self.share > low)
        return self.between(self.cuts.origin[some], self.cuts.numel[some], self.cuts.width[some])

    def between(self, line: Column, numel: Column, width: Column) -> set[str]:
        """Return the files of ranges of lines, and perhaps some between them."""
        if not len(line):
            return set()
        return set(self.files.paths[int((line // width).min()) : int((-(-(line + numel) // width)).max())])

    def cut(self, number: int, start: int, numel: int, position: int) -> Cut:
        """Return elements of a parameter by their rule."""
        cuts = self.cuts
        origin, width, at = int(cuts.origin[number]), int(cuts.width[number]), int(cuts.at[number])
        return Cut(CutSpans(self.files, (int(cuts.numel[number]),), origin, width, at), start, numel, position)

    def shares(self, low: int, high: int, ranks: Sequence[int], sources: Sources, most: int) -> npt.NDArray[np.uint8]:
        """Return elements [low, high), shares of whole parameters, of some ranks: a row for each."""
        numbers = range(*np.searchsorted(self.position, (low, high)).tolist())
        whole = (self.cut(number, 0, int(self.cuts.numel[number]), 0) for number in numbers)
        first, last, kind = min(ranks), max(ranks), element(self.itemsize)
        found = np.zeros((last + 1 - first, high - low), kind)
        for number, array in zip(numbers, arrays_of(whole, sources, most), strict=True):
            begin, width = int(self.position[number]) - low, int(self.share[number])
            values = array.view(kind)[first * width : (last + 1) * width]
            rows = len(values) // width
            found[:rows, begin : begin + width] = values[: rows * width].reshape(rows, width)
            found[rows : rows + 1, begin : begin + len(values) % width] = values[rows * width :]
        return found.view(np.uint8)[[rank - first for rank in ranks]]


@immutable
class Pack:
    """Elements [low, high) of what one rank has of a row, which begins at byte `start` of a target.

    A hole, or a piece of one; elements of no parameter are zero.
    """

    row: PackedSlot
    rank: int
    start: int
    low: int
    high: int

    @property
    def offset(self) -> int:
        """Where it is in the target, in bytes."""
        return self.start + self.low * self.row.itemsize

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.high - self.low) * self.row.itemsize

    @property
    def moved_nbytes(self) -> int:
        """Bytes of its elements: those that are some parameter's, which are read and written as they are."""
        return int(self.row.found(self.rank, self.low, self.high)[2].sum()) * self.row.itemsize

    def paths(self) -> set[str]:
        """Return the files that it comes from, and perhaps some between them."""
        numbers, start, count, _ = self.row.found(self.rank, self.low, self.high)
        cuts = self.row.cuts
        return self.row.between(cuts.origin[numbers] + start, count, cuts.width[numbers])

    def pieces(self, most: int = PIECE_NBYTES) -> Iterator[Pack]:
        """Yield it in pieces of at most `most` bytes."""
        step = max(most // self.row.itemsize, 1)
        for low in range(self.low, self.high, step):
            yield replace(self, low=low, high=min(low + step, self.high))

    def read(self, sources: Sources) -> memoryview:
        """Return its bytes. Raises DamagedFileError: a file ends too early; SourceError: it cannot be read."""
        memory = memoryview(bytearray(self.nbytes))
        read_together(list(self._cuts()), memory, sources, max(len(memory), PIECE_NBYTES))
        return memory

    def ranges(self) -> Iterator[Range]:
        """Yield what is read: of what many ranks have read together, that of all, for the first."""
        if not self.row.is_fine:
            yield from ranges_of(self._cuts(), PIECE_NBYTES)
        elif self.rank == 0:
            numels = self.row.cuts.numel.tolist()
            yield from ranges_of(
                [self.row.cut(number, 0, numel, 0) for number, numel in enumerate(numels)], PIECE_NBYTES
            )

    def _cuts(self) -> Iterator[Cut]:
        columns = (column.tolist() for column in self.row.found(self.rank, self.low, self.high))
        for number, start, count, at in zip(*columns, strict=True):
            yield self.row.cut(number, start, count, (at - self.low) * self.row.itemsize)


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
