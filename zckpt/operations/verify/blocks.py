"""The blocks that the elements of a checkpoint are read in: every byte that has a checksum or an element, once. Pure.

file      | record .............................. | record ...
block   [ piece | piece | padding | piece ][ piece ...  ]           one read, one CRC-32, each piece looked at
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zckpt.operations.verify.inventory import NO_SUM, Inventory, Piece, Scattered, SumIndex
from zckpt.state.dtypes import itemsize
from zckpt.state.ranges import merge, without


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are read at once, `size` of them from `offset` on, and the pieces in them."""

    path: str
    offset: int
    size: int
    checksum: int
    pieces: tuple[Piece, ...] = ()

    @property
    def _partners(self) -> Iterator[Piece]:
        return (piece.partner for piece in self.pieces if piece.partner is not None)

    @property
    def nbytes(self) -> int:
        """Bytes that are read, those of partners too."""
        return self.size + sum(one.nbytes for one in self._partners)

    @property
    def paths(self) -> Iterator[str]:
        """The files that are read."""
        yield self.path
        yield from (one.path for one in self._partners)

    @property
    def subjects(self) -> list[int]:
        """What they are about."""
        return [one.subject for one in (*self.pieces, *self._partners)]


Work = Block | Scattered


def blocks(inventory: Inventory, sums: SumIndex, paths: Sequence[str], most: int) -> Iterator[Block]:
    """Yield the blocks, of at most so many bytes, of all files: every byte that has a checksum or an element, once."""
    for path in paths:
        pieces: list[Piece] = []
        overlapping: list[Piece] = []
        end = 0
        for piece in sorted(inventory.pieces.get(path, ()), key=lambda piece: piece.offset):
            (overlapping if piece.offset < end else pieces).append(piece)
            end = max(end, piece.end)
        claimed = merge(inventory.claimed.get(path, []))
        intervals = [(*rest, number) for low, high, number in sums.of(path) for rest in without([(low, high)], claimed)]
        summed = [(low, high) for low, high, _ in intervals]
        others = merge((piece.offset, piece.end) for piece in pieces)
        intervals += [(*rest, NO_SUM) for rest in without(others, summed)]
        yield from _cut(path, sorted(intervals), pieces, most)
        for piece in overlapping:
            yield from _cut(path, [(piece.offset, piece.end, NO_SUM)], [piece], most)


def _cut(path: str, intervals: Sequence[tuple[int, int, int]], pieces: Sequence[Piece], most: int) -> Iterator[Block]:
    at = 0
    for low, high, number in intervals:
        begin = low
        while begin < high:
            end = min(begin + most, high)
            while at < len(pieces) and pieces[at].end <= begin:
                at += 1
            inside, here = [], at
            while here < len(pieces) and pieces[here].offset < end:
                piece = pieces[here]
                if piece.end > end:  # begin and end with an element
                    size = itemsize(piece.dtype)
                    end = piece.offset + (end - piece.offset) // size * size
                if piece.offset < end:
                    inside.append(piece.within(begin, end))
                here += 1
            yield Block(path, begin, end - begin, number, tuple(inside))
            begin = end
