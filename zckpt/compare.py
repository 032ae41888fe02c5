"""Two layouts of the same slots, compared element by element, bit for bit: in parallel, in bounded memory.

Each slot is cut into blocks. The bytes of a block are read from both sides, as the copier would write them, into two
buffers that a worker uses over and over, and compared there; only where they are not equal are elements looked at.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from zckpt.cast import Array
from zckpt.dtypes import itemsize
from zckpt.errors import LayoutError
from zckpt.execute import DEFAULT_MEMORY_NBYTES, MINIMUM_PIECE_NBYTES, THREADS, Reporter, SilentReporter
from zckpt.pieces import elements, pieces
from zckpt.plan import Fill, Hole, fill
from zckpt.span_index import SpanIndex
from zckpt.state import Extent, Slot
from zckpt.storage import Sources, read_into

BLOCK_NBYTES = 1 << 20
"""Read from each side at once: small enough to be compared from the cache, and planning it costs little beside it."""

BATCH_NBYTES = 16 << 20
"""Compared by one task, of each side."""

BATCH_BLOCKS = 1 << 10
"""Most blocks in a task: a batch of tiny tensors ends here."""

QUEUED_BATCHES = 64
"""Enough to keep every worker busy."""

BUFFERS_PER_WORKER = 8
"""What a block may need at once: both sides, their equality, and what a gather and cast takes beside its result."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A slot in two places.

    Parameters
    ----------
    label : str
        `exp_avg/wte.weight`, for messages.
    expected, found : Slot
        Of one shape. `expected` is cast to the element type of `found`, as the copier casts.
    """

    label: str
    expected: Slot
    found: Slot


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs in one slot.

    Parameters
    ----------
    label : str
    num_different, numel : int, elements
    first : int
        Index of the first different element of the flattened tensor.
    """

    label: str
    num_different: int
    numel: int
    first: int


@dataclass(frozen=True, slots=True)
class Block:
    """Elements [start, start + numel) of a pair, whose slots have only the spans that reach into them."""

    index: int
    pair: Pair
    start: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes compared, of one side."""
        return self.numel * itemsize(self.pair.found.dtype)


Compared = list[tuple[int, Difference]]
"""What differs in some blocks, each with the index of its pair."""


def differences(
    pairs: Iterable[Pair],
    *,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    executor: Executor | None = None,
) -> list[Difference]:
    """Return what differs in each of the slots that are not equal, bit for bit, in the order of the pairs.

    Parameters
    ----------
    pairs : iterable of Pair
    memory : int, bytes
        Upper bound of what buffers take together.
    reporter : Reporter, optional
        Told of progress, in bytes of the side that was found.
    executor : concurrent.futures.Executor, optional
        Runs the comparisons; by default threads of this process.

    Raises
    ------
    LayoutError
        The two sides of a pair have different shapes, or one of them does not cover every element once.
    UnsupportedError
        They have element types of which one is not cast to the other.
    SourceError
        A file cannot be read.
    """
    whole = list(pairs)
    for pair in whole:
        if pair.expected.shape != pair.found.shape:
            raise LayoutError(f"{pair.label} has two shapes", expected=pair.expected.shape, found=pair.found.shape)
    threads = min(max(os.cpu_count() or 1, THREADS[0]), THREADS[-1])
    most = max(min(memory // threads // BUFFERS_PER_WORKER, BLOCK_NBYTES), MINIMUM_PIECE_NBYTES)
    pool = executor or ThreadPoolExecutor(threads, thread_name_prefix="zckpt-compare")
    told = reporter or SilentReporter()
    found: dict[int, Difference] = {}
    told.begin(sum(pair.found.nbytes for pair in whole))
    try:
        with closing(_run(pool, _batches(whole, most))) as results:
            for nbytes, different in results:
                told.advance(nbytes)
                for index, one in different:
                    found[index] = _together(found[index], one) if index in found else one
    finally:
        told.end()
        if executor is None:
            pool.shutdown(wait=True, cancel_futures=True)
    return list(found.values())


def _together(a: Difference, b: Difference) -> Difference:
    return replace(a, num_different=a.num_different + b.num_different, first=min(a.first, b.first))


def _run(pool: Executor, batches: Iterator[Sequence[Block]]) -> Generator[tuple[int, Compared]]:
    """Yield the bytes and the result of every batch, in order; a bounded number waits."""
    waiting: deque[tuple[int, Future[Compared]]] = deque()
    try:
        while True:
            for batch in islice(batches, QUEUED_BATCHES - len(waiting)):
                waiting.append((sum(block.nbytes for block in batch), pool.submit(compare_blocks, batch)))
            if not waiting:
                break
            nbytes, future = waiting.popleft()
            yield nbytes, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def _batches(pairs: Sequence[Pair], most: int) -> Iterator[tuple[Block, ...]]:
    batch: list[Block] = []
    nbytes = 0
    for index, pair in enumerate(pairs):
        for block in _blocks(index, pair, most):
            batch.append(block)
            nbytes += block.nbytes
            if nbytes >= BATCH_NBYTES or len(batch) >= BATCH_BLOCKS:
                yield tuple(batch)
                batch, nbytes = [], 0
    if batch:
        yield tuple(batch)


def _blocks(index: int, pair: Pair, most: int) -> Iterator[Block]:
    """Cut a pair into blocks of at most `most` bytes on both sides."""
    numel = pair.found.numel
    step = max(most // max(itemsize(pair.expected.dtype), itemsize(pair.found.dtype)), 1)
    expected, found = SpanIndex(pair.expected), SpanIndex(pair.found)
    for start in range(0, numel, step):
        extent = Extent.flat(pair.found.shape, start, min(step, numel - start))
        yield Block(index, Pair(pair.label, expected.reaching(extent), found.reaching(extent)), start, extent.numel)


def compare_blocks(blocks: Sequence[Block]) -> Compared:
    """Compare blocks and return what differs, by index of the pair; may run in another process."""
    size = max(block.nbytes for block in blocks)
    buffers: tuple[Array, Array] = np.empty(size, np.uint8), np.empty(size, np.uint8)
    different = []
    with Sources() as sources:
        for block in blocks:
            one = _compare(block, buffers, sources)
            if one is not None:
                different.append((block.index, one))
    return different


def _compare(block: Block, buffers: tuple[Array, Array], sources: Sources) -> Difference | None:
    pair, dtype = block.pair, block.pair.found.dtype
    extent = Extent.flat(pair.found.shape, block.start, block.numel)
    for slot, buffer in zip((pair.expected, pair.found), buffers, strict=True):
        _read(Hole(0, pair.label, slot, extent, dtype), buffer[: block.nbytes].data, sources)
    word = f"u{min(itemsize(dtype), 8)}"
    expected, found = (buffer[: block.nbytes].view(word) for buffer in buffers)
    if np.array_equal(expected, found):
        return None
    unequal = (expected != found).reshape(block.numel, -1).any(axis=1)
    return Difference(
        pair.label, int(np.count_nonzero(unequal)), pair.found.numel, block.start + int(np.argmax(unequal))
    )


def _read(hole: Hole, buffer: memoryview, sources: Sources) -> None:
    """Fill a buffer with the bytes of a hole; what is stored as it is wanted is read into its place."""
    for piece in pieces(Fill(hole, tuple(fill(hole))), len(buffer), len(buffer)):
        place = buffer[piece.offset : piece.offset + piece.nbytes]
        if piece.is_bytewise:
            source = piece.copies[0].sources[0]
            read_into(sources.descriptor(source.path), source.offset, place, path=source.path)
        else:
            place[:] = elements(piece, sources.descriptor)
