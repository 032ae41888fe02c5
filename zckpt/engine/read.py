"""Elements of slots in memory, extent by extent. The same plan as for a file, with memory for a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from zckpt.engine.cast import Array, cast, numpy_dtype
from zckpt.engine.checking import Checks, Seen, WatchedSources, watched_by
from zckpt.engine.copy import Piece, elements, overflowed, pieces, ranges_read
from zckpt.engine.plan import Copy, Fill, fill
from zckpt.engine.targets import Hole
from zckpt.engine.tasks import Portions
from zckpt.engine.workers import BATCH_NBYTES, READERS, Workers, batched
from zckpt.errors import UnsupportedError
from zckpt.state import ZEROS, Extent, Slot
from zckpt.state.boxes import SpanIndexes
from zckpt.state.dtypes import itemsize
from zckpt.storage.distant import ahead
from zckpt.storage.files import Sources, check_nbytes

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Read:
    """Elements that are to be read into memory.

    Parameters
    ----------
    slot : Slot
    extent : Extent
    dtype : str
        Element type in memory.
    into : memoryview
        As many bytes as these elements have, in the order of the extent.
    name : str
        Of what they are, for messages; by default the slot's.
    """

    slot: Slot
    extent: Extent
    dtype: str
    into: memoryview
    name: str = ""


def read_all(reads: Sequence[Read], *, checks: Checks | None = None, threads: bool = True) -> None:
    """Read the elements of many extents, several at a time.

    Parameters
    ----------
    reads : sequence of Read
    checks : Checks, optional
        Gets what is read; the caller finishes them after the last read. By default those of the context.
    threads : bool
        Else all is read by the calling one.

    Raises
    ------
    LayoutError
        The spans of a slot do not cover an extent exactly once; nothing has been read then.
    DamagedFileError
        A file ends too early.
    SourceError
        A file cannot be read.
    """
    batches = list(batched(_all_pieces(reads), lambda one: one[0].nbytes))
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
    with Workers(READERS, here=True) as workers, closing(workers.run(look, batches, Portions())) as results:
        for _, seen in results:
            checks.add(seen)


def check_reads(reads: Iterable[Read]) -> None:
    """Check all that can be known before elements are read; nothing is read.

    Spans cover every extent once, elements can be cast to the type in memory, files open and are long enough, and their
    checksums are known, if what is read in this context is held against them. Raises SourceError: as `read_all`;
    UnsupportedError for types that are not cast.
    """
    needed: dict[str, int] = {}
    casts: dict[tuple[str, str], str] = {}
    indexes = SpanIndexes()
    for read in reads:
        reaching = indexes.reaching(read.slot, read.extent)
        for copy in fill(Hole(0, read.slot.name, reaching, read.extent, read.dtype)):
            casts.setdefault((copy.source_dtype, copy.target_dtype), copy.sources[0].path)
            for path, end in _ends(copy):
                needed[path] = max(needed.get(path, 0), end)
    for (before, after), path in casts.items():
        try:
            if before != after:
                cast(np.empty(0, numpy_dtype(before)), after)
        except UnsupportedError as error:
            raise UnsupportedError(error.message, path=path) from error
    for path, nbytes in needed.items():
        check_nbytes(path, nbytes)
    watched_by().expect(needed)


def _ends(copy: Copy) -> Iterator[tuple[str, int]]:
    """Yield which files a copy reads from, and the byte behind the last one that it reads."""
    for source in copy.sources if copy.sources[0].path != ZEROS else ():
        steps = zip(copy.shape, source.strides, strict=True)
        yield source.path, source.offset + sum((n - 1) * step for n, step in steps) + itemsize(copy.source_dtype)


def read_extent(slot: Slot, extent: Extent, sources: Sources, *, dtype: str | None = None) -> Array:
    """Return the elements of an extent of a slot, flat.

    `dtype`: element type of the result; by default the slot's own. Raises LayoutError: the slot's spans do not cover
    the extent exactly once; DamagedFileError: a file ends too early.
    """
    dtype = dtype or slot.dtype
    result = np.empty(extent.numel, numpy_dtype(dtype))
    view = memoryview(result.view(np.uint8).data) if extent.numel else memoryview(b"")
    for piece in _pieces(Hole(0, slot.name, slot, extent, dtype)):
        read_piece(piece, view, sources)
    return result


def _pieces(hole: Hole) -> Iterator[Piece]:
    return pieces(Fill(hole, tuple(fill(hole))), BATCH_NBYTES, BATCH_NBYTES)


def _all_pieces(reads: Iterable[Read]) -> Iterator[tuple[Piece, memoryview]]:
    """Yield pieces and the memory that each goes to."""
    indexes = SpanIndexes()
    for read in reads:
        reaching = indexes.reaching(read.slot, read.extent)
        for piece in _pieces(Hole(0, read.name or read.slot.name, reaching, read.extent, read.dtype)):
            yield piece, read.into


def _read_batch(watched: frozenset[str], batch: Sequence[tuple[Piece, memoryview]]) -> list[Seen]:
    with WatchedSources(watched) as sources, ahead(ranges_read([piece for piece, _ in batch])):
        found: list[Seen] = []
        for piece, into in batch:
            found += overflowed(piece, read_piece(piece, into, sources), sources)
        return [*sources.seen, *found]


def read_piece(piece: Piece, into: memoryview, sources: Sources) -> memoryview:
    """Read a piece into a buffer, at its offset, and return it; what is moved as it is is not copied on the way."""
    view = into[piece.offset : piece.offset + piece.nbytes]
    if piece.is_bytewise:
        source = piece.copies[0].sources[0]
        sources.read(source.path, source.offset, view)
    else:
        view[:] = elements(piece, sources)
    return view
