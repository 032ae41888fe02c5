"""Shares of thousands of parameters that lie end to end, in the source's files and in the target's, copied as one.

ZeRO-3 cuts every parameter by itself, so that another number of ranks needs parameters x ranks copies, of a few
elements each where ranks are many. A pack has the numbers of all of them as columns. It is checked, counted and filled
by operations on arrays: what is needed of a source file is read at once, and put in order in memory.

    source file   | a a | b b b | c c |     columns: where each begins on its line, how wide that is cut, where it is
    target        | a | b b . | c |         and: from which element, how many, and where here; all others are zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zckpt.engine.fine import MOST_NBYTES, Cut
from zckpt.engine.together import GAP_NBYTES, read_together
from zckpt.errors import LayoutError
from zckpt.state import CutFiles, CutSpans
from zckpt.state.cuts import Column, Cuts
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import Sources

PIECE_NUMEL = 1 << 17
"""Elements of a target that are filled at once: the columns take some times as much memory as they."""

ELEMENT_NBYTES = 64
"""Memory for an element: what is read, the element itself, and the columns that say where it is and goes."""

LEAST_NUMEL = 1 << 8
"""Of a piece, where memory is bounded by next to nothing."""

LONG_NUMEL = 1 << 9
"""Elements from which on they are moved one share after the other: there are few enough."""

FEW_NUMEL = 1 << 13
"""From here on, for each copy, pieces can be larger: at most a sixteenth of their elements is moved by columns."""

DIRECT_NUMEL = 1 << 14
"""From here on each is read by itself, straight to where it goes."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A hole in a target for shares of many parameters, all of the source's type; elements of none of them are zero.

    Parameters
    ----------
    offset : int, bytes
        In the target.
    label : str
    files : CutFiles
        Where the parameters lie.
    cuts : Cuts
        By which rules: columns.
    start, count, position : column, elements
        Of each parameter, the first element and how many, and where they are in the hole.
    numel : int, elements
        Of the hole.
    share : (PackedSlot, int), optional
        Of which it is the share of which rank, at any offset: all that another process is sent, once for all ranks.
    """

    offset: int
    label: str
    files: CutFiles
    cuts: Cuts
    start: Column
    count: Column
    position: Column
    numel: int
    share: tuple[PackedSlot, int] | None = None

    def __reduce__(self) -> tuple[Callable[..., Pack], tuple[object, ...]]:
        if self.share is not None:
            return _share_at, (*self.share, self.offset)
        return Pack, tuple(getattr(self, one.name) for one in fields(self))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize(self.files.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the hole."""
        return self.numel * self.itemsize

    @property
    def moved_nbytes(self) -> int:
        """Bytes of the elements, which are read and written as they are."""
        return int(self.count.sum()) * self.itemsize

    def check(self) -> None:
        """Raise LayoutError unless every share is within its parameter, and none is over another in the target.

        That a parameter's elements are in one file each, the rule itself makes sure.
        """
        begin, end = self.position, self.position + self.count
        inside = (self.start >= 0) & (self.count >= 0) & (self.start + self.count <= self.cuts.numel)
        if not inside.all():
            raise LayoutError(f"{self.label}: not every element is there")
        some = self.count > 0
        begin, end = begin[some], end[some]
        if len(begin) and (begin[0] < 0 or end[-1] > self.numel or (begin[1:] < end[:-1]).any()):
            raise LayoutError(f"{self.label}: shares lie over each other, or outside of their hole")

    def paths(self, low: int = 0, high: int | None = None) -> set[str]:
        """Return the files that elements [low, high) of the hole come from, and perhaps some between them."""
        high = self.numel if high is None else high
        some = (self.position < high) & (self.position + self.count > low) & (self.count > 0)
        if not some.any():
            return set()
        line, width = (self.cuts.origin + self.start)[some], self.cuts.width[some]
        first, last = (line // width).min(), ((line + self.count[some] - 1) // width).max()
        return set(self.files.paths[int(first) : int(last) + 1])

    def pieces(
        self, most: int = PIECE_NUMEL * ELEMENT_NBYTES, low: int = 0, high: int | None = None, *, long: bool = False
    ) -> Iterator[PackPiece]:
        """Yield the hole in pieces, each of which takes about `most` bytes of memory, or less.

        Parameters
        ----------
        most : int, bytes
        low, high : int, elements
            Which of the hole; by default all.
        long : bool
            Whether pieces of long shares may be larger than others: they need no columns for each element.
        """
        step = min(max(most // ELEMENT_NBYTES, LEAST_NUMEL), PIECE_NUMEL)
        longest = max(most // (3 * self.itemsize), step) if long else step  # itself, what is read, some columns
        end = self.numel if high is None else high
        while low < end:
            far = min(low + longest, end)
            high = far if far - low > step and self._is_long(low, far) else min(low + step, end)
            yield PackPiece(self, low, high)
            low = high

    def _is_long(self, low: int, high: int) -> bool:
        """Tell whether elements [low, high) are so few copies that those of short shares are a small part of them."""
        some = (self.position < high) & (self.position + self.count > low) & (self.count > 0)
        line, width = (self.cuts.origin + self.start)[some], self.cuts.width[some]
        copies = (line + self.count[some] - 1) // width - line // width + 1
        return int(copies.sum()) * FEW_NUMEL <= high - low

    def _copies(self, low: int, high: int) -> _Copies:
        """Return the copies that fill elements [low, high) of the hole."""
        some = np.flatnonzero((self.position < high) & (self.position + self.count > low) & (self.count > 0))
        skipped = np.maximum(low - self.position[some], 0)
        count = np.minimum(self.position[some] + self.count[some], high) - self.position[some] - skipped
        target = self.position[some] + skipped - low
        line = self.cuts.origin[some] + self.start[some] + skipped
        width = self.cuts.width[some]
        first = line // width
        files = (line + count - 1) // width - first + 1
        of = np.repeat(np.arange(len(some)), files)
        file = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(files) - files, files)
        begin = file * width[of]
        from_, to = np.maximum(line[of], begin), np.minimum((line + count)[of], begin + width[of])
        return _Copies(file, self.cuts.at[some][of] + from_ - begin, target[of] + from_ - line[of], to - from_)


class PackedSlot:
    """One slot of parameters, whose shares of all ranks of a target have the same sizes.

    Parameters
    ----------
    label : str
    files : CutFiles
    cuts : Cuts
    position, share : sequence of int, elements
        For each parameter, where its share is in a rank's hole, and how large it is.
    """

    def __init__(self, label: str, files: CutFiles, cuts: Cuts, position: Sequence[int], share: Sequence[int]) -> None:
        self._label, self._files, self._cuts = label, files, cuts
        self._position, self._share = np.array(position, np.int64), np.array(share, np.int64)

    def share(self, rank: int) -> Pack:
        """Return the pack of one rank: of each parameter, the share of its number."""
        start = np.minimum(rank * self._share, self._cuts.numel)
        count = np.minimum(self._share, self._cuts.numel - start)
        numel = int((self._position + self._share).max(initial=0))
        return Pack(0, self._label, self._files, self._cuts, start, count, self._position, numel, (self, rank))

    @property
    def is_fine(self) -> bool:
        """Whether shares are so small that those of many ranks are to be read at once."""
        dense = np.array_equal(self._position[1:], (self._position + self._share)[:-1])
        return dense and len(self._share) > 0 and int(self._share.mean()) * self.itemsize <= MOST_NBYTES

    def blocks(self, most: int) -> Iterator[tuple[int, int, bool]]:
        """Yield parameters [low, high) that have at most `most` bytes, and whether it is so: one may have more."""
        ends = np.cumsum(self._cuts.numel) * self.itemsize
        low = done = 0
        while low < len(ends):
            high = max(int(np.searchsorted(ends, done + most, "right")), low + 1)
            yield low, high, bool(ends[high - 1] - done <= most)
            low, done = high, int(ends[high - 1])

    def shares(self, low: int, high: int, ranks: Sequence[int], sources: Sources, most: int) -> npt.NDArray[np.uint8]:
        """Return what some ranks have of parameters [low, high): a row for each; what no share fills is zero."""
        size, cuts = self.itemsize, self._cuts
        numels = cuts.numel[low:high].tolist()
        read: list[Cut] = []
        for i, n in enumerate(numels, low):
            spans = CutSpans(self._files, (n,), int(cuts.origin[i]), int(cuts.width[i]), int(cuts.at[i]))
            read.append(Cut(spans, 0, n, read[-1].end if read else 0))
        kind = np.dtype(f"V{size}" if size not in (1, 2, 4, 8) else f"u{size}")
        memory = np.empty(sum(numels), kind)
        read_together(read, memory.view(np.uint8).data, sources, most)
        first, last = min(ranks), max(ranks)
        begin, widths = 0, self._share[low:high].tolist()
        found = np.zeros((last + 1 - first, sum(widths)), kind)
        for one, width in zip(read, widths, strict=True):
            at = one.position // size
            values = memory[at + min(first * width, one.numel) : at + min((last + 1) * width, one.numel)]
            rows = len(values) // width
            found[:rows, begin : begin + width] = values[: rows * width].reshape(rows, width)
            found[rows : rows + 1, begin : begin + len(values) % width] = values[rows * width :]
            begin += width
        return found.view(np.uint8)[[rank - first for rank in ranks]]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize(self._files.dtype)

    def place(self, number: int) -> int:
        """Return where in the hole of each rank a parameter begins, or where the last one ends, in elements."""
        return int(self._position[number] if number < len(self._share) else self._position[-1] + self._share[-1])

    def count(self, rank: int, low: int, high: int) -> int:
        """Return how many elements one rank has of parameters [low, high)."""
        share, numel = self._share[low:high], self._cuts.numel[low:high]
        return int(np.clip(numel - rank * share, 0, share).sum())

    @lru_cache(maxsize=4)  # noqa: B019  # a few, of one target
    def paths(self, low: int, high: int) -> set[str]:
        """Return the files of parameters [low, high), and perhaps some between them."""
        origin, width, numel = (one[low:high] for one in (self._cuts.origin, self._cuts.width, self._cuts.numel))
        return set(self._files.paths[int((origin // width).min()) : int((-(-(origin + numel) // width)).max())])


@dataclass(frozen=True, slots=True)
class SharePiece:
    """What one rank has of parameters [low, high) of a row: made together with what others have of them.

    Parameters
    ----------
    row : PackedSlot
    rank : int
    start : int, bytes
        Where its pack begins in the target.
    low, high : int
    """

    row: PackedSlot
    rank: int
    start: int
    low: int
    high: int

    @property
    def offset(self) -> int:
        """Where it is in the target, in bytes."""
        return self.start + self.row.place(self.low) * self.row.itemsize

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.row.place(self.high) - self.row.place(self.low)) * self.row.itemsize

    @property
    def moved_nbytes(self) -> int:
        """Bytes of its elements: those that are some parameter's."""
        return self.row.count(self.rank, self.low, self.high) * self.row.itemsize

    def paths(self) -> set[str]:
        """Return the files that it comes from, and perhaps some between them."""
        return self.row.paths(self.low, self.high)


def _share_at(slot: PackedSlot, rank: int, offset: int) -> Pack:
    return replace(slot.share(rank), offset=offset)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies from one file each, as columns: which file, first element in its tensor, first in the target, how many."""

    file: Column
    source: Column
    target: Column
    numel: Column


@dataclass(frozen=True, slots=True)
class PackPiece:
    """Elements [low, high) of a pack's hole."""

    pack: Pack
    low: int
    high: int

    @property
    def offset(self) -> int:
        """Where it is in the target, in bytes."""
        return self.pack.offset + self.low * self.pack.itemsize

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.high - self.low) * self.pack.itemsize

    @property
    def moved_nbytes(self) -> int:
        """Bytes of its elements: those of the hole that are some parameter's."""
        pack = self.pack
        low, high = np.maximum(pack.position, self.low), np.minimum(pack.position + pack.count, self.high)
        return int(np.maximum(high - low, 0).sum()) * pack.itemsize

    def read(self, sources: Sources) -> memoryview:
        """Return its bytes; errors are those of `read_into`."""
        found = memoryview(bytearray(self.nbytes))
        self.read_into(found, sources)
        return found

    def read_into(self, into: memoryview, sources: Sources) -> None:
        """Fill memory with its bytes.

        Raises
        ------
        DamagedFileError
            A file ends too early.
        SourceError
            A file cannot be read.
        """
        size = self.pack.itemsize
        kind = np.dtype(f"V{size}") if size not in (1, 2, 4, 8) else np.dtype(f"u{size}")
        self._clear(np.frombuffer(into, np.uint8))
        for copies, (path, offset, nbytes) in self._windows():
            source = copies.source - copies.source[0]
            if int(copies.numel.sum()) >= len(source) * DIRECT_NUMEL:
                for a, b, n in zip(source.tolist(), copies.target.tolist(), copies.numel.tolist(), strict=True):
                    sources.read(path, offset + a * size, into[b * size : (b + n) * size])
                continue
            window = np.empty(nbytes // size, kind)
            sources.read(path, offset, window.view(np.uint8).data)
            _scatter(window, source, np.frombuffer(into, kind), copies.target, copies.numel)

    def _clear(self, memory: npt.NDArray[np.uint8]) -> None:
        """Set what no share fills to zero: each gap by itself where they are few, else all."""
        pack = self.pack
        low, high = np.maximum(pack.position, self.low), np.minimum(pack.position + pack.count, self.high)
        some = low < high  # shares do not overlap, so their ends are in the order of their beginnings
        begin = np.append(self.low, np.sort(high[some])) - self.low
        end = np.append(np.sort(low[some]), self.high) - self.low
        gaps = np.flatnonzero(begin < end)
        if len(gaps) * GAP_NBYTES > len(memory):
            memory[:] = 0
            return
        size = pack.itemsize
        for a, b in zip((begin[gaps] * size).tolist(), (end[gaps] * size).tolist(), strict=True):
            memory[a:b] = 0

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield what is read: file, byte offset, bytes."""
        for _, window in self._windows():
            yield window

    def _windows(self) -> Iterator[tuple[_Copies, tuple[str, int, int]]]:
        """Yield copies from one file, with small gaps between them, and the byte range that has them all."""
        pack, found = self.pack, self.pack._copies(self.low, self.high)
        order = np.lexsort((found.source, found.file))
        file, source, target, numel = (one[order] for one in (found.file, found.source, found.target, found.numel))
        gaps = (source[1:] - (source + numel)[:-1]) * pack.itemsize
        ends = np.flatnonzero((file[1:] != file[:-1]) | (gaps > GAP_NBYTES)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(file)] if len(file) else []):
            low, high, number = int(source[begin]), int(source[end - 1] + numel[end - 1]), int(file[begin])
            some = _Copies(file[begin:end], source[begin:end], target[begin:end], numel[begin:end])
            offset = pack.files.offsets[number] + low * pack.itemsize
            yield some, (pack.files.paths[number], offset, (high - low) * pack.itemsize)


def _scatter(
    window: npt.NDArray[np.generic], source: Column, found: npt.NDArray[np.generic], target: Column, numel: Column
) -> None:
    """Copy elements from where they are in a window to where they are in the target."""
    total = int(numel.sum())
    if total >= len(numel) * LONG_NUMEL:
        for a, b, n in zip(source.tolist(), target.tolist(), numel.tolist(), strict=True):
            found[b : b + n] = window[a : a + n]
        return
    step = np.arange(total) - np.repeat(np.cumsum(numel) - numel, numel)
    found[np.repeat(target, numel) + step] = window[np.repeat(source, numel) + step]
