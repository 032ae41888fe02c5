"""The pieces of a batch into an open file: cloned, copied through a buffer, or put together in memory.

    long, as they are     through a buffer that stays in the cache, or cloned where the file system can
    small, end to end     many at once: read in the order of the source files, over small gaps, written at once
    all others            elements are gathered, cast or computed, and written

What is summed is read in any case: cloned bytes are, too, where a checksum depends on them, and are not written then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from zckpt.engine.checking import Seen, WatchedSources, seen_of
from zckpt.engine.copy import Piece, converted, elements, is_endless, overflowed
from zckpt.engine.plan import Copy
from zckpt.engine.targets import Literal
from zckpt.engine.together import GAP_NBYTES
from zckpt.storage.clone import clone
from zckpt.storage.crc32 import crc32
from zckpt.storage.distant import found
from zckpt.storage.files import PAGE_NBYTES, read_into, write_all

SMALL_NBYTES = 1 << 15
"""A piece of at most this goes together with others: a call to the system costs as much as its bytes."""

VIEWS_AT_ONCE = 1 << 10
"""Most buffers of one write (IOV_MAX of Linux)."""


class Target(Protocol):
    """A file that is open for writing."""

    @property
    def descriptor(self) -> int:
        """Through which it is written, or cloned to."""

    def write(self, data: memoryview, offset: int, phase: int | None = None) -> None:
        """Write bytes at an offset; `phase` is how far behind a page of memory they begin, where that is known."""


@dataclass(frozen=True, slots=True)
class BufferedTarget:
    """A file that is written through the page cache."""

    descriptor: int

    def write(self, data: memoryview, offset: int, phase: int | None = None) -> None:  # noqa: ARG002
        """Write bytes at an offset; what the system raises, this raises."""
        write_all(self.descriptor, data, offset)


def write_pieces(
    pieces: Iterable[Piece | Literal],
    target: Target,
    sources: WatchedSources,
    buffer: memoryview,
    *,
    path: str,
    checksummed: bool,
    recorded: bool = False,
) -> list[Seen]:
    """Write pieces of one file; return what was written, with its CRC-32 where that is asked for.

    Parameters
    ----------
    pieces : iterable of Piece or Literal
    target : Target
    sources : WatchedSources
        Note what was read of the files that they watch.
    buffer : memoryview of bytes
    path : str
        The target's.
    checksummed : bool
        Sum all of it.
    recorded : bool
        Sum all of it but for what is cloned, which is not read for that.
    """
    seen: list[Seen] = []
    cloned = checksummed
    checksummed = checksummed or recorded
    for small, some in groupby(pieces, _is_small):
        if small:
            for group in _groups((piece for piece in some if isinstance(piece, Piece)), len(buffer)):
                seen += _write_small(group, target, sources, buffer, path=path, checksummed=checksummed)
            continue
        for piece in some:
            crc = _write_piece(piece, target, sources, buffer, checksummed, cloned)
            seen.append(Seen(path, piece.offset, piece.nbytes, crc))
    return seen


def _is_small(piece: Piece | Literal) -> bool:
    return (
        isinstance(piece, Piece)
        and len(piece.copies) == 1
        and piece.nbytes <= SMALL_NBYTES
        and piece.copies[0].is_linear
        and piece.copies[0].source_nbytes <= SMALL_NBYTES
        and type(piece) is Piece
    )


def _groups(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Yield pieces in groups that are read into a buffer of `most` bytes; one that is too large is a group."""
    group: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        size = piece.copies[0].source_nbytes
        if group and nbytes + size > most:
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += size
    if group:
        yield group


def _write_small(
    group: list[Piece], target: Target, sources: WatchedSources, buffer: memoryview, *, path: str, checksummed: bool
) -> list[Seen]:
    """Write small pieces whose elements lie end to end on both sides, and fit the buffer together."""
    if len(group) == 1:
        (piece,) = group
        return [
            Seen(
                path, piece.offset, piece.nbytes, _write_piece(piece, target, sources, buffer, checksummed, checksummed)
            )
        ]
    placed = _read_small(group, sources, buffer)
    placed.sort(key=lambda one: one[0].offset)
    seen: list[Seen] = []
    views: list[memoryview] = []
    first = end = 0
    for some in _alike(placed):
        (piece, at), (last, last_at) = some[0], some[-1]
        data = buffer[at : last_at + last.copies[0].source_nbytes]
        if not piece.is_bytewise:
            data = converted(data, piece.copies[0])
            if is_endless(piece, data):
                for one, _ in some:
                    start = one.offset - piece.offset
                    sources.seen += overflowed(one, data[start : start + one.nbytes], sources)
        if views and (piece.offset != end or len(views) == VIEWS_AT_ONCE):
            _write_views(target, views, first)
            views = []
        first = first if views else piece.offset
        end = last.offset + last.nbytes
        views.append(data)
        for one, _ in some:
            start = one.offset - piece.offset
            crc = crc32(data[start : start + one.nbytes]) if checksummed else None
            seen.append(Seen(path, one.offset, one.nbytes, crc))
    _write_views(target, views, first)
    return seen


def _read_small(group: list[Piece], sources: WatchedSources, buffer: memoryview) -> list[tuple[Piece, int]]:
    """Read what pieces need, by file and offset, over small gaps as far as there is room; return where each is."""
    needed = [(piece.copies[0].sources[0], piece.copies[0].source_nbytes, piece) for piece in group]
    needed.sort(key=lambda one: (one[0].path, one[0].offset))
    spare, at, begin = len(buffer) - sum(nbytes for _, nbytes, _ in needed), 0, 0
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
        window = buffer[at : at + high - low]
        read_into(sources.descriptor(source.path), low, window, path=source.path)
        for one, nbytes, piece in needed[begin:end]:
            start = one.offset - low
            placed.append((piece, at + start))
            if source.path in sources.watched:
                crc = crc32(window[start : start + nbytes])
                sources.seen.append(Seen(source.path, one.offset, nbytes, crc))
        at, begin = at + high - low, end
    return placed


def _alike(placed: list[tuple[Piece, int]]) -> Iterator[list[tuple[Piece, int]]]:
    """Yield together pieces that are neighbours in the buffer and in the target, and alike in their types."""
    some: list[tuple[Piece, int]] = []
    for piece, at in placed:
        copy = piece.copies[0]
        if some:
            before, before_at = some[-1]
            other = before.copies[0]
            if (
                before_at + other.source_nbytes != at
                or before.offset + before.nbytes != piece.offset
                or (copy.source_dtype, copy.target_dtype, copy.byteorder, copy.unresolved)
                != (other.source_dtype, other.target_dtype, other.byteorder, other.unresolved)
            ):
                yield some
                some = []
        some.append((piece, at))
    yield some


def _write_piece(
    piece: Piece | Literal,
    target: Target,
    sources: WatchedSources,
    buffer: memoryview,
    checksummed: bool,
    cloned: bool,
) -> int | None:
    """Write a piece; return its CRC-32 where it is asked for, of a piece that is cloned or of any other."""
    if isinstance(piece, Literal):
        return _write_memory(piece, target, len(buffer), checksummed=checksummed)
    if piece.is_bytewise:
        return _copy_bytes(piece, target, sources, buffer, checksummed=checksummed, cloned=cloned)
    data = elements(piece, sources)
    sources.seen += overflowed(piece, data, sources)
    target.write(data, piece.offset)
    return crc32(data) if checksummed else None


def _copy_bytes(
    piece: Piece, target: Target, sources: WatchedSources, buffer: memoryview, *, checksummed: bool, cloned: bool
) -> int | None:
    """Clone or copy contiguous bytes; return their CRC-32 where it is asked for, or the source is watched."""
    copy = piece.copies[0]
    source = copy.sources[0]
    watched = source.path in sources.watched
    low, high = 0, 0
    if found(source.path) is None:
        low, high = clone(sources.descriptor(source.path), source.offset, target.descriptor, copy.offset, copy.nbytes)
    summed = watched or (checksummed if low == high else cloned)
    crc = _copy_range(copy, 0, low, 0, target, sources, buffer, summed=summed)
    if summed:
        crc = _copy_range(copy, low, high, crc, None, sources, buffer, summed=True)
    crc = _copy_range(copy, high, copy.nbytes, crc, target, sources, buffer, summed=summed)
    if watched:
        sources.seen.append(seen_of(piece, crc))
    return crc if summed else None


def _copy_range(
    copy: Copy,
    start: int,
    end: int,
    crc: int,
    target: Target | None,
    sources: WatchedSources,
    buffer: memoryview,
    *,
    summed: bool,
) -> int:
    """Read bytes [start, end) of a copy, and write them unless there is no target; return the CRC-32 carried on."""
    source = copy.sources[0]
    at = start
    while at < end:
        into = buffer[: min(len(buffer) - (copy.offset + at) % PAGE_NBYTES, end - at)]  # the next begins at a page
        view, phase = sources.window(source.path, source.offset + at, into)
        if summed:
            crc = crc32(view, crc)
        if target is not None:
            target.write(view, copy.offset + at, phase)
        at += len(into)
    return crc


def _write_memory(literal: Literal, target: Target, step: int, *, checksummed: bool) -> int | None:
    """Write what is in memory, each step of it while it is in the cache of the core that sums it; return its CRC-32."""
    data = memoryview(literal.data)
    crc = 0
    for at in range(0, len(data), step):
        view = data[at : at + step]
        if checksummed:
            crc = crc32(view, crc)
        target.write(view, literal.offset + at)
    return crc if checksummed else None


def _write_views(target: Target, views: Sequence[memoryview], offset: int) -> None:
    """Write buffers end to end."""
    done = os.pwritev(target.descriptor, views, offset)
    if done < sum(map(len, views)):  # a signal came, or the disk is full, which the next call says
        write_all(target.descriptor, memoryview(b"".join(views))[done:], offset + done)
