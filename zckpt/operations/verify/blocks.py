"""The blocks that the elements of a checkpoint are read in: every byte that has a checksum or an element, once. Pure.

file      | record .............................. | record ...
block   [ piece | piece | padding | piece ][ piece ...  ]           one read, one CRC-32, each piece looked at
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zckpt.operations.verify.inventory import NO_SUM, Inventory, Piece, Scattered, Subject, SumIndex
from zckpt.state.dtypes import itemsize
from zckpt.state.ranges import merge, without

Subjects = dict[int, Subject]
"""Those that some work is about, by index."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are read at once, and the pieces in them."""

    path: str
    offset: int
    nbytes: int
    checksum: int
    pieces: tuple[Piece, ...] = ()

    @property
    def read_nbytes(self) -> int:
        """Bytes read, those of partners too."""
        return self.nbytes + sum(r.numel * itemsize(r.partner.dtype) for r in self.pieces if r.partner is not None)


Work = Block | Scattered


def subjects_of(inventory: Inventory, some: Iterable[Work]) -> Subjects:
    """Return the subjects that some work is about: another process is sent no others."""
    numbers: list[int] = []
    for work in some:
        if isinstance(work, Scattered):
            numbers.append(work.subject)
            continue
        numbers += (piece.subject for piece in work.pieces)
        numbers += (piece.partner.subject for piece in work.pieces if piece.partner is not None)
    return {number: inventory.subjects[number] for number in numbers}


def paths_of(work: Work) -> Iterator[str]:
    """Yield the files that some work reads."""
    if isinstance(work, Block):
        yield work.path
        yield from (piece.partner.path for piece in work.pieces if piece.partner is not None)
        return
    for slot in (work.slot, work.other):
        if slot is not None:
            yield from (span.path for spans in (slot.spans, *slot.replicas) for span in spans)


def blocks(inventory: Inventory, sums: SumIndex, paths: Sequence[str], most: int) -> Iterator[Block]:
    """Yield the blocks of all files: every byte that has a checksum or an element, once.

    Parameters
    ----------
    inventory : Inventory
    sums : SumIndex
    paths : sequence of str
        All files.
    most : int, bytes
        Of a block.
    """
    for path in paths:
        pieces, overlapping = _apart(sorted(inventory.pieces.get(path, ()), key=lambda piece: piece.offset))
        claimed = merge(inventory.claimed.get(path, []))
        intervals = [(*rest, number) for low, high, number in sums.of(path) for rest in without([(low, high)], claimed)]
        intervals += _uncovered(pieces, intervals)
        yield from _cut(path, sorted(intervals), pieces, most)
        for piece in overlapping:
            yield from _cut(path, [(piece.offset, piece.end, NO_SUM)], [piece], most)


def _apart(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Return pieces of which no two share a byte, and the others."""
    alone: list[Piece] = []
    others: list[Piece] = []
    end = 0
    for piece in pieces:
        (others if piece.offset < end else alone).append(piece)
        end = max(end, piece.end)
    return alone, others


Interval = tuple[int, int, int]
"""Begin, end and checksum."""


def _uncovered(pieces: Sequence[Piece], intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals for the pieces that none has, neighbours as one."""
    found: list[Interval] = []
    begins = [low for low, _, _ in intervals]
    for piece in pieces:
        at = bisect_right(begins, piece.offset) - 1
        if at >= 0 and piece.offset < intervals[at][1]:
            continue
        if found and found[-1][1] == piece.offset:
            found[-1] = (found[-1][0], piece.end, NO_SUM)
        else:
            found.append((piece.offset, piece.end, NO_SUM))
    return found


def _cut(path: str, intervals: Sequence[Interval], pieces: Sequence[Piece], most: int) -> Iterator[Block]:
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
