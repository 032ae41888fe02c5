"""Elements of slots in memory, hole by hole, and files that are never written. The same plan as for a file.

Of a virtual file a plan is run range by range, when a range is asked for and into the reader's own memory. So a loader
of files, such as `torch.load`, gets a file of another layout at the cost of reading what is in it: nothing is held
here, or written. Checksums are not filled in: that of a zip record would need its bytes before they are asked for.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from zckpt.engine.cast import cast, numpy_dtype
from zckpt.engine.checking import Checks, Seen, WatchedSources, watched_by
from zckpt.engine.copy import overflowed, pieces_of, ranges_read, read_piece
from zckpt.engine.plan import Piece, fill
from zckpt.engine.targets import Hole, Literal, TargetFile, end_of, start_of
from zckpt.engine.together import Pack
from zckpt.engine.workers import THREADS, Portions, Workers, batched
from zckpt.errors import about
from zckpt.state import ZEROS, itemsize
from zckpt.state.boxes import SpanIndexes
from zckpt.state.spans import reach_of
from zckpt.storage.files import opened, too_short
from zckpt.storage.stand_ins import ahead

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Batch = TypeVar("Batch")


def read_all(reads: Sequence[tuple[Hole, memoryview]], *, checks: Checks | None = None, threads: bool = True) -> None:
    """Read the elements of many holes, several at a time.

    Parameters
    ----------
    reads : sequence of (Hole, memoryview)
        Holes at offset 0, each with its memory: as many bytes as it has.
    checks : Checks, optional
        Gets what is read; the caller finishes them after the last read. By default those of the context.
    threads : bool
        Else all is read by the calling one.

    Raises
    ------
    LayoutError
        The spans of a slot do not cover a hole exactly once; nothing has been read then.
    DamagedFileError
        A file ends too early.
    SourceError
        A file cannot be read.
    """
    indexes = SpanIndexes()
    every = ((piece, into) for hole, into in reads for piece in pieces_of(hole, indexes=indexes))
    batches = list(batched(every, lambda one: one[0].nbytes))
    checks = checks or watched_by()
    some = (copy for batch in batches for piece, _ in batch for copy in piece.copies)
    checks.expect(source.path for copy in some for source in copy.sources if source.path != ZEROS)

    def read(batch: Sequence[tuple[Piece, memoryview]]) -> list[Seen]:
        with WatchedSources(checks.watched) as sources, ahead(ranges_read(piece for piece, _ in batch)):
            found: list[Seen] = []
            for piece, into in batch:
                found += overflowed(piece, read_piece(piece, into, sources), sources)
            return [*sources.seen, *found]

    threads = threads and len(batches) > 1  # to make workers takes longer than to read what is small
    run_watched(read, batches, checks, threads=threads)


def run_watched(
    look: Callable[[Batch], list[Seen]], batches: Iterable[Batch], checks: Checks, *, threads: bool
) -> None:
    """Read batches, several at a time unless the calling thread is to read all, and let checks get what was seen."""
    if not threads:
        for batch in batches:
            checks.add(look(batch))
        return
    with Workers(THREADS, here=True) as workers, closing(workers.run(look, batches, Portions())) as results:
        for _, seen in results:
            checks.add(seen)


def check_reads(holes: Iterable[Hole]) -> None:
    """Check all that can be known before elements are read; nothing is read.

    Spans cover every hole once, elements can be cast to the type in memory, files open and are long enough, and their
    checksums are known, if what is read in this context is held against them. Raises SourceError: as `read_all`;
    UnsupportedError for types that are not cast.
    """
    needed: dict[str, int] = {}
    casts: dict[tuple[str, str], str] = {}
    indexes = SpanIndexes()
    for hole in holes:
        for copy in fill(hole, indexes):
            casts.setdefault((copy.source_dtype, copy.target_dtype), copy.sources[0].path)
            for source in copy.sources if copy.sources[0].path != ZEROS else ():
                end = source.offset + reach_of(copy.shape, source.strides, itemsize(copy.source_dtype))
                needed[source.path] = max(needed.get(source.path, 0), end)
    for (before, after), path in casts.items():
        with about(path):
            if before != after:
                cast(np.empty(0, numpy_dtype(before)), after)
    for path, nbytes in needed.items():
        with opened(path) as file:
            if file.nbytes < nbytes:
                raise too_short(path, nbytes, file.nbytes)
    watched_by().expect(needed)


PACKED_NBYTES = 8 << 20
"""Of a pack that are read at once."""


class VirtualFile(io.RawIOBase):
    """A target file for reading. Bytes that nothing fills are zero, as in a file that was made at its size.

    `threads`: whether large ranges are read by several. `read_nbytes`: of tensors, so far.
    """

    def __init__(self, file: TargetFile, *, threads: bool = True) -> None:
        super().__init__()
        self._threads = threads
        self._nbytes = file.nbytes
        parts: list[Literal | Hole | Pack] = [*file.literals, *file.holes, *file.packs]
        self._parts = sorted((part for part in parts if part.nbytes), key=start_of)
        self._at = 0
        self.read_nbytes = 0

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that any range of it can be read."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte, and return which it is."""
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence] + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill a buffer with what is next; return how many bytes there were.

        Raises DamagedFileError: a file ends too early; SourceError: a file cannot be read.
        """
        into = memoryview(buffer).cast("B")
        start = self._at
        end = max(min(start + len(into), self._nbytes), start)
        into = into[: end - start]
        reads: list[tuple[Hole, memoryview]] = []
        packed: list[tuple[Pack, int, memoryview]] = []
        late: list[tuple[memoryview, memoryview]] = []
        done = start
        for part in self._parts[max(bisect_right(self._parts, start, key=start_of) - 1, 0) :]:
            if part.offset >= end:
                break
            if end_of(part) <= start:
                continue
            low, high = max(part.offset, start), min(end_of(part), end)
            _clear(into[done - start : low - start])
            view = into[low - start : high - start]
            done = max(done, high)
            start_in, end_in = low - part.offset, high - part.offset
            if isinstance(part, Literal):
                view[:] = memoryview(part.data)[start_in:end_in]
            elif isinstance(part, Pack):
                packed += _of_pack(part, view, start_in, end_in)
            else:
                size = itemsize(part.dtype)
                first, last = start_in // size, -(-end_in // size)
                found = view
                if first * size != start_in or last * size != end_in:  # an element is asked for in part
                    found = memoryview(bytearray((last - first) * size))
                    late.append((view, found[start_in - first * size :][: view.nbytes]))
                extent = replace(part.extent, start=part.extent.start + first, numel=last - first)
                reads.append((replace(part, offset=0, extent=extent), found))
        _clear(into[done - start :])
        self.read_nbytes += sum(into.nbytes for _, into in reads) + sum(one.moved_nbytes for one, _, _ in packed)
        if reads:
            read_all(reads, threads=self._threads)
        if packed:
            checks = watched_by()
            checks.expect(path for piece, _, _ in packed for path in piece.paths())
            batches = batched(packed, lambda one: one[0].nbytes)
            run_watched(partial(_unpack, checks), batches, checks, threads=self._threads)
        for view, whole in late:
            view[:] = whole
        self._at = end
        return end - start


def _clear(view: memoryview) -> None:
    if len(view):
        view[:] = bytes(len(view))


def _of_pack(pack: Pack, view: memoryview, start: int, end: int) -> Sequence[tuple[Pack, int, memoryview]]:
    """Return pieces for bytes [start, end) of a pack: each with how many of its bytes come before, and its memory."""
    size = pack.row.itemsize
    whole = replace(pack, low=pack.low + start // size, high=pack.low - (-end // size))
    found = []
    for piece in whole.pieces(PACKED_NBYTES):
        at = piece.offset - pack.offset
        low, high = max(at, start), min(at + piece.nbytes, end)
        found.append((piece, low - at, view[low - start : high - start]))
    return found


def _unpack(checks: Checks, batch: Sequence[tuple[Pack, int, memoryview]]) -> list[Seen]:
    with WatchedSources(checks.watched) as sources:
        for piece, skipped, view in batch:
            view[:] = piece.read(sources)[skipped : skipped + view.nbytes]
        return sources.seen
