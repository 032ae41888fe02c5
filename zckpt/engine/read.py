"""Elements of slots in memory, hole by hole. The same plan as for a file, with memory for a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import TypeVar

import numpy as np

from zckpt.engine.cast import cast, numpy_dtype
from zckpt.engine.checking import Checks, Seen, WatchedSources, watched_by
from zckpt.engine.copy import overflowed, pieces_of, ranges_read, read_piece
from zckpt.engine.plan import Piece, fill
from zckpt.engine.targets import Hole
from zckpt.engine.tasks import Portions
from zckpt.engine.workers import THREADS, Workers, batched
from zckpt.errors import about
from zckpt.state import ZEROS, itemsize
from zckpt.state.boxes import SpanIndexes
from zckpt.state.spans import reach_of
from zckpt.storage.distant import ahead
from zckpt.storage.files import opened, too_short

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
    run_watched(partial(_read_batch, checks.watched), batches, checks, threads=threads)


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


def _read_batch(watched: frozenset[str], batch: Sequence[tuple[Piece, memoryview]]) -> list[Seen]:
    with WatchedSources(watched) as sources, ahead(ranges_read(piece for piece, _ in batch)):
        found: list[Seen] = []
        for piece, into in batch:
            found += overflowed(piece, read_piece(piece, into, sources), sources)
        return [*sources.seen, *found]
