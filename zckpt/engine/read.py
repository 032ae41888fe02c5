"""Elements of slots in memory: whole slots or parts. The same plan as for a file, with memory for a target."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from zckpt.engine.cast import Array, cast, numpy_dtype
from zckpt.engine.checking import Checks, Part, WatchedSources
from zckpt.engine.pieces import Piece, elements, pieces
from zckpt.engine.plan import Copy, Fill, Hole, fill
from zckpt.engine.span_index import SpanIndex
from zckpt.errors import UnsupportedError
from zckpt.state import Extent, Slot
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import Sources, check_nbytes

READ_PIECE_NBYTES = 8 << 20
"""Read in pieces of this size, so that a gather needs little memory beside its result."""

BATCH_NBYTES = 8 << 20
"""What a thread reads before it takes the next batch."""

THREADS = range(2, 9)
"""Fewest and most threads that read."""


@dataclass(frozen=True, slots=True)
class Read:
    """Elements that are wanted in memory.

    Parameters
    ----------
    slot : Slot
    extent : Extent
    dtype : str
        Element type wanted.
    into : memoryview
        As many bytes as these elements have, in the order of the extent.
    """

    slot: Slot
    extent: Extent
    dtype: str
    into: memoryview


def read_all(reads: Sequence[Read], *, checks: Checks | None = None) -> None:
    """Read the elements of many extents, several at a time.

    Parameters
    ----------
    reads : sequence of Read
    checks : Checks, optional
        Gets what is read; who made them finishes them when all that is to be read has been.

    Raises
    ------
    LayoutError
        The spans of a slot do not cover an extent exactly once; nothing has been read then.
    DamagedFileError
        A file ends too early.
    SourceError
        A file cannot be read.
    """
    batches = list(_batches(reads))
    threads = min(max(os.cpu_count() or 1, THREADS[0]), THREADS[-1], len(batches))
    watching = checks or Checks()
    if threads <= 1:
        for batch in batches:
            watching.add(_run(batch, watching.watched))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="zckpt-read") as pool:
        for done in [pool.submit(_run, batch, watching.watched) for batch in batches]:
            watching.add(done.result())


def check_reads(reads: Iterable[Read]) -> None:
    """Check all that can be known before elements are read; nothing is read.

    Spans cover every extent once, elements can be cast to the type wanted, and files open and are long enough.

    Raises
    ------
    SourceError
        As `read_all`; UnsupportedError for types that are not cast.
    """
    needed: dict[str, int] = {}
    casts: dict[tuple[str, str], str] = {}
    indexes: dict[int, SpanIndex] = {}
    for read in reads:
        if id(read.slot) not in indexes:
            indexes[id(read.slot)] = SpanIndex(read.slot)
        reaching = indexes[id(read.slot)].reaching(read.extent)
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


def _ends(copy: Copy) -> Iterator[tuple[str, int]]:
    """Yield which files a copy reads from, and the byte behind the last one that it reads."""
    for source in copy.sources:
        steps = zip(copy.shape, source.strides, strict=True)
        yield source.path, source.offset + sum((n - 1) * step for n, step in steps) + itemsize(copy.source_dtype)


def read_extent(slot: Slot, extent: Extent, sources: Sources, *, dtype: str | None = None) -> Array:
    """Return the elements of an extent of a slot, flat.

    Parameters
    ----------
    slot : Slot
    extent : Extent
    sources : Sources
    dtype : str, optional
        Element type wanted; by default the slot's own.

    Raises
    ------
    LayoutError
        The slot's spans do not cover the extent exactly once.
    DamagedFileError
        A file ends too early.
    """
    wanted = dtype or slot.dtype
    result = np.empty(extent.numel, numpy_dtype(wanted))
    view = memoryview(result.view(np.uint8).data) if extent.numel else memoryview(b"")
    for piece in _pieces(Hole(0, slot.name, slot, extent, wanted)):
        read_piece(piece, view, sources)
    return result


def read_slot(slot: Slot, *, dtype: str | None = None) -> Array:
    """Return all elements of a slot, in its shape; errors are those of `read_extent`."""
    with Sources() as sources:
        return read_extent(slot, Extent.whole(slot.shape), sources, dtype=dtype).reshape(slot.shape)


def _pieces(hole: Hole) -> Iterator[Piece]:
    return pieces(Fill(hole, tuple(fill(hole))), READ_PIECE_NBYTES, READ_PIECE_NBYTES)


def _batches(reads: Sequence[Read]) -> Iterator[list[tuple[Piece, memoryview]]]:
    """Yield pieces and where they go, some megabytes at a time."""
    batch: list[tuple[Piece, memoryview]] = []
    nbytes = 0
    indexes: dict[int, SpanIndex] = {}
    for read in reads:
        if id(read.slot) not in indexes:
            indexes[id(read.slot)] = SpanIndex(read.slot)
        reaching = indexes[id(read.slot)].reaching(read.extent)
        for piece in _pieces(Hole(0, read.slot.name, reaching, read.extent, read.dtype)):
            batch.append((piece, read.into))
            nbytes += piece.nbytes
            if nbytes >= BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _run(batch: Sequence[tuple[Piece, memoryview]], watched: frozenset[str]) -> list[Part]:
    with WatchedSources(watched) as sources:
        for piece, into in batch:
            read_piece(piece, into, sources)
        return sources.parts


def read_piece(piece: Piece, into: memoryview, sources: Sources) -> None:
    """Read a piece into its place in a buffer; what is stored as it is wanted is not copied on the way."""
    view = into[piece.offset : piece.offset + piece.nbytes]
    if piece.is_bytewise:
        source = piece.copies[0].sources[0]
        sources.read(source.path, source.offset, view)
    else:
        view[:] = elements(piece, sources)
