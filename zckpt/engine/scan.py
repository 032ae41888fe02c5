"""Slots of one shape read side by side, block by block: in parallel, in bounded memory, at the speed of the disk.

A row of slots is cut into blocks of as many elements each. The elements of a block are read from every slot of the row,
as the copier would write them, into buffers that a worker uses over and over; what is found out about them there is the
caller's. What blocks have in common with others - differences, digests, counts - is put together by the caller too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter, SilentReporter
from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.copy import pieces
from zckpt.engine.flat_runs import FlatRuns, Stretch, flat_runs
from zckpt.engine.plan import Fill, Hole, fill
from zckpt.engine.read import read_piece
from zckpt.engine.repeats import refuse_endless
from zckpt.engine.span_index import SpanIndex
from zckpt.engine.workers import READERS, Workers, batched, buffer_nbytes
from zckpt.state import Extent, Slot
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import Sources, read_into

BLOCK_NBYTES = 1 << 20
"""Read of each slot at once: small enough to be looked at in the cache, and planning it costs little beside it."""

BUFFERS_PER_WORKER = 8
"""What a block may need at once: the slots of its row, and what a gather, a cast and the visit take beside them."""

Result = TypeVar("Result")

Visit = Callable[[int, int, Sequence[Array]], Result | None]
"""Called with the index of a row, the first element of a block, and the elements of each slot; in any thread.

What it returns, if anything, is yielded with the index. The arrays are used again afterwards.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Slots that are read side by side.

    Parameters
    ----------
    label : str
        `exp_avg/wte.weight`, for messages.
    slots : tuple of Slot
        Of one shape.
    dtypes : tuple of str
        Element type that each is read as.
    """

    label: str
    slots: tuple[Slot, ...]
    dtypes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each slot."""
        return self.slots[0].shape

    @property
    def numel(self) -> int:
        """Number of elements of each slot."""
        return self.slots[0].numel

    @property
    def widest(self) -> int:
        """Bytes that an element takes at most, as it is stored or as it is read."""
        return max(itemsize(dtype) for dtype in [*self.dtypes, *(slot.dtype for slot in self.slots)])


Source = Slot | tuple[Stretch, ...]
"""Where the elements of a block lie: stretches that are read one after the other, or a slot that a plan is made for."""


@dataclass(frozen=True, slots=True)
class Block:
    """Elements [start, start + numel) of a row.

    Parameters
    ----------
    index : int
        Of the row.
    label : str
    shape : tuple of int
    dtypes : tuple of str
    sources : tuple of Source
        One for each slot; slots have only the spans that reach into the block.
    start, numel : int, elements
    nbytes : int, bytes
        Of the widest type in it.
    """

    index: int
    label: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    sources: tuple[Source, ...]
    start: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Batch(Generic[Result]):
    """Blocks that one task visits."""

    blocks: tuple[Block, ...]
    visit: Visit[Result]


def visit_rows(
    rows: Sequence[Row],
    visit: Visit[Result],
    *,
    numel: int | None = None,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    wanted: Callable[[int], bool] | None = None,
) -> Generator[tuple[int, Result]]:
    """Read rows of slots block by block, and yield what the visits return with the index of the row, in order.

    Parameters
    ----------
    rows : sequence of Row
    visit : callable
        See `Visit`. Where an executor of processes runs it, it must be picklable.
    numel : int, elements, optional
        Of each block but a row's last; by default as many as have `BLOCK_NBYTES` bytes, or as `memory` allows.
    memory : int, bytes
        Upper bound of what buffers take together, where `numel` is not given.
    reporter : Reporter, optional
        Told of progress, in bytes of the first slot of each row as it is read.
    wanted : callable, optional
        Asked with the index of a row whether more of it is to be visited.

    Raises
    ------
    LayoutError
        A slot does not cover every element once.
    UnsupportedError
        A slot is not cast to the type it is to be read as, or says a few elements again and again without end.
    SourceError
        A file cannot be read.
    """
    for row in rows:
        for slot in row.slots:
            refuse_endless(slot, row.label)
    progress = reporter or SilentReporter()
    progress.begin(sum(row.numel * itemsize(row.dtypes[0]) for row in rows))
    try:
        with Workers(READERS) as workers:
            most = buffer_nbytes(memory, READERS, buffers=BUFFERS_PER_WORKER, most=BLOCK_NBYTES)
            blocks = (block for index, row in enumerate(rows) for block in _blocks(index, row, numel, most, wanted))
            batches = (Batch(some, visit) for some in batched(blocks, attrgetter("nbytes")))
            with closing(workers.run(visit_batch, batches)) as results:
                for batch, found in results:
                    progress.advance(sum(block.numel * itemsize(block.dtypes[0]) for block in batch.blocks))
                    yield from found
    finally:
        progress.end()


def _blocks(
    index: int, row: Row, numel: int | None, most: int, wanted: Callable[[int], bool] | None
) -> Iterator[Block]:
    widest = row.widest
    step = numel or max(most // widest, 1)
    held = [
        flat_runs(slot, dtype) or _indexed(slot, row.numel > step)
        for slot, dtype in zip(row.slots, row.dtypes, strict=True)
    ]
    for start in range(0, row.numel, step):
        if wanted is not None and not wanted(index):
            return
        count = min(step, row.numel - start)
        sources = tuple(_within(one, row.shape, start, count) for one in held)
        yield Block(index, row.label, row.shape, row.dtypes, sources, start, count, count * widest)


def _indexed(slot: Slot, several: bool) -> Slot | SpanIndex:
    return SpanIndex(slot) if several else slot  # one block needs no index


def _within(held: FlatRuns | SpanIndex | Slot, shape: tuple[int, ...], start: int, numel: int) -> Source:
    if isinstance(held, FlatRuns):
        return held.stretches(start, numel)
    return held.reaching(Extent.flat(shape, start, numel)) if isinstance(held, SpanIndex) else held


def visit_batch(batch: Batch[Result]) -> list[tuple[int, Result]]:
    """Visit the blocks of a batch; return what the visits return, by index of the row. May run in another process."""
    buffers: list[Array] = []
    results = []
    with Sources() as sources:
        for block in batch.blocks:
            arrays = [_read(block, number, buffers, sources) for number in range(len(block.sources))]
            found = batch.visit(block.index, block.start, arrays)
            if found is not None:
                results.append((block.index, found))
    return results


def _read(block: Block, number: int, buffers: list[Array], sources: Sources) -> Array:
    """Read a block of one slot of its row into the buffer that such slots have."""
    dtype, source = block.dtypes[number], block.sources[number]
    nbytes = block.numel * itemsize(dtype)
    while len(buffers) <= number:
        buffers.append(np.empty(0, np.uint8))
    if len(buffers[number]) < nbytes:
        buffers[number] = np.empty(nbytes, np.uint8)
    view = buffers[number][:nbytes]
    if isinstance(source, Slot):
        extent = Extent.flat(block.shape, block.start, block.numel)
        hole = Hole(0, block.label, source, extent, dtype)
        for piece in pieces(Fill(hole, tuple(fill(hole))), nbytes, nbytes):
            read_piece(piece, view.data, sources)
    else:
        at = 0
        for path, offset, size in source:
            read_into(sources.descriptor(path), offset, view[at : at + size].data, path=path)
            at += size
    return view.view(numpy_dtype(dtype))
