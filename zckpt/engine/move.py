"""The pieces of a batch into an open file: cloned, copied through a buffer, or put together in memory.

    long, as they are     through a buffer that stays in the cache, or cloned where the file system can
    small, end to end     many at once: read in the order of the source files, over small gaps, written at once
    all others            elements are gathered, cast or computed, and written

What is summed is read in any case: cloned bytes are, too, where a checksum depends on them, and are not written then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from zckpt.engine.checking import Seen, WatchedSources
from zckpt.engine.copy import converted, elements, is_endless, overflowed
from zckpt.engine.plan import Piece
from zckpt.engine.targets import Literal, end_of
from zckpt.engine.together import GAP_NBYTES
from zckpt.engine.workers import batched
from zckpt.immutable import immutable
from zckpt.storage.crc32 import crc32
from zckpt.storage.disk import OpenTarget, clone
from zckpt.storage.files import PAGE_NBYTES, read_into, write_all
from zckpt.storage.stand_ins import found

SMALL_NBYTES = 1 << 15
"""A piece of at most this goes together with others: a call to the system costs as much as its bytes."""

VIEWS_AT_ONCE = 1 << 10
"""Most buffers of one write (IOV_MAX of Linux)."""


@immutable
class Mover:
    """Writes pieces of one file."""

    path: str  # the target's
    target: OpenTarget
    sources: WatchedSources  # note what was read of the files that they watch
    buffer: memoryview
    checksummed: bool  # sum what is written
    sums_clones: bool  # also what is cloned, which is read for that

    def write(self, pieces: Iterable[Piece | Literal]) -> list[Seen]:
        """Write pieces; return what was written, with its CRC-32 where that is asked for."""
        seen: list[Seen] = []
        for is_small, some in groupby(pieces, _is_small):
            if not is_small:
                seen += map(self._write_one, some)
                continue
            small = (one for one in some if isinstance(one, Piece))
            for group in batched(small, lambda one: one.copies[0].source_nbytes, len(self.buffer)):
                seen += self._write_small(group) if len(group) > 1 else [self._write_one(group[0])]
        return seen

    def _write_one(self, piece: Piece | Literal) -> Seen:
        crc: int | None = 0 if self.checksummed else None
        if isinstance(piece, Literal):  # each step of it while it is in the cache of the core that sums it
            data, step = memoryview(piece.data), len(self.buffer)
            for at in range(0, len(data), step):
                view = data[at : at + step]
                crc = None if crc is None else crc32(view, crc)
                self.target.write(view, piece.offset + at)
        elif piece.is_bytewise:
            crc = self._move(piece)
        else:
            data = elements(piece, self.sources)
            self.sources.seen += overflowed(piece, data, self.sources)
            self.target.write(data, piece.offset)
            crc = crc32(data) if self.checksummed else None
        return Seen(self.path, piece.offset, piece.nbytes, crc)

    def _move(self, piece: Piece) -> int | None:
        """Clone or copy contiguous bytes; return their CRC-32 where it is asked for, or the source is watched."""
        copy = piece.copies[0]
        source, low, high = copy.sources[0], 0, 0
        watched = source.path in self.sources.watched
        if found(source.path) is None:
            descriptors = self.sources.descriptor(source.path), self.target.descriptor
            low, high = clone(descriptors[0], source.offset, descriptors[1], copy.offset, copy.nbytes)
        summed, crc = watched or (self.checksummed if low == high else self.sums_clones), 0
        for start, end, is_cloned in ((0, low, False), (low, high, True), (high, copy.nbytes, False)):
            at = start if summed or not is_cloned else end
            while at < end:
                most = len(self.buffer) - (copy.offset + at) % PAGE_NBYTES  # the next begins at a page
                into = self.buffer[: min(most, end - at)]
                view, phase = self.sources.window(source.path, source.offset + at, into)
                crc = crc32(view, crc) if summed else 0
                if not is_cloned:
                    self.target.write(view, copy.offset + at, phase)
                at += len(into)
        if watched:
            self.sources.seen.append(Seen(source.path, source.offset, piece.nbytes, crc))
        return crc if summed else None

    def _write_small(self, group: Sequence[Piece]) -> list[Seen]:
        """Write small pieces whose elements lie end to end on both sides, and fit the buffer together."""
        placed = self._read_small(group)
        placed.sort(key=lambda one: one[0].offset)
        seen: list[Seen] = []
        views: list[memoryview] = []
        first = end = 0
        for some in _alike(placed):
            (piece, at), (last, last_at) = some[0], some[-1]
            data = self.buffer[at : last_at + last.copies[0].source_nbytes]
            if not piece.is_bytewise:
                data = converted(data, piece.copies[0])
                endless = is_endless(piece, data)
            if views and (piece.offset != end or len(views) == VIEWS_AT_ONCE):
                self._write_views(views, first)
                views = []
            first = first if views else piece.offset
            end = end_of(last)
            views.append(data)
            for one, _ in some:
                view = data[one.offset - piece.offset :][: one.nbytes]
                if not piece.is_bytewise and endless:
                    self.sources.seen += overflowed(one, view, self.sources)
                seen.append(Seen(self.path, one.offset, one.nbytes, crc32(view) if self.checksummed else None))
        self._write_views(views, first)
        return seen

    def _read_small(self, group: Sequence[Piece]) -> list[tuple[Piece, int]]:
        """Read what pieces need, by file and offset, over small gaps as far as there is room; return where each is."""
        needed = [(piece.copies[0].sources[0], piece.copies[0].source_nbytes, piece) for piece in group]
        needed.sort(key=lambda one: (one[0].path, one[0].offset))
        spare, at, begin = len(self.buffer) - sum(nbytes for _, nbytes, _ in needed), 0, 0
        placed = []
        while begin < len(needed):
            source, nbytes, _ = needed[begin]
            low, high, end = source.offset, source.offset + nbytes, begin + 1
            while end < len(needed) and needed[end][0].path == source.path:
                gap = needed[end][0].offset - high
                if gap > min(GAP_NBYTES, spare):
                    break
                high, spare = max(high, needed[end][0].offset + needed[end][1]), spare - max(gap, 0)
                end += 1
            window = self.buffer[at : at + high - low]
            read_into(self.sources.descriptor(source.path), low, window, path=source.path)
            for one, nbytes, piece in needed[begin:end]:
                start = one.offset - low
                placed.append((piece, at + start))
                if source.path in self.sources.watched:
                    crc = crc32(window[start : start + nbytes])
                    self.sources.seen.append(Seen(source.path, one.offset, nbytes, crc))
            at, begin = at + high - low, end
        return placed

    def _write_views(self, views: Sequence[memoryview], offset: int) -> None:
        """Write buffers end to end."""
        done = os.pwritev(self.target.descriptor, views, offset)
        if done < sum(map(len, views)):  # a signal came, or the disk is full, which the next call says
            write_all(self.target.descriptor, memoryview(b"".join(views))[done:], offset + done)


def _is_small(piece: Piece | Literal) -> bool:
    return (
        type(piece) is Piece
        and len(piece.copies) == 1
        and piece.nbytes <= SMALL_NBYTES
        and piece.copies[0].is_linear
        and piece.copies[0].source_nbytes <= SMALL_NBYTES
    )


def _alike(placed: list[tuple[Piece, int]]) -> Iterator[list[tuple[Piece, int]]]:
    """Yield together pieces that are neighbours in the buffer and in the target, and alike in their types."""
    some: list[tuple[Piece, int]] = []
    for piece, at in placed:
        copy = piece.copies[0]
        if some:
            before, before_at = some[-1]
            other = before.copies[0]
            if before_at + other.source_nbytes != at or end_of(before) != piece.offset or copy.change != other.change:
                yield some
                some = []
        some.append((piece, at))
    yield some
