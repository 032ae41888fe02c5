"""Shares of thousands of parameters that lie end to end, in the source's files and in the target's, copied as one.

ZeRO-3 cuts every parameter by itself, so that another number of ranks needs parameters x ranks copies, of a few
elements each where ranks are many. Here a row has the numbers of all parameters as columns, once for all ranks of the
target, and a pack is the row and a rank.

    source file   | a a | b b b | c c |     `Cuts`: where each begins on its line, how wide that is cut, where it is
    target        | a | b b . | c |         the row: where each share begins, and how large; all others are zero
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zckpt.engine.fine import MOST_NBYTES, Cut
from zckpt.engine.together import arrays_of, element, ranges_of, read_together
from zckpt.errors import LayoutError
from zckpt.immutable import immutable
from zckpt.state import CutFiles, CutSpans, itemsize
from zckpt.state.cuts import Column, Cuts
from zckpt.storage.distant import Range
from zckpt.storage.files import Sources

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
