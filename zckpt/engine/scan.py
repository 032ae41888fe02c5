"""Slots of one shape looked at block by block: in parallel, in bounded memory, at the speed of the disk.

A set of slots is cut into blocks of as many elements each. The elements of a block are read from every slot of the set,
as the copier would write them, into buffers that a worker uses over and over; what is found out about them there is the
caller's. What blocks have in common with others - differences, digests, counts - is put together by the caller too.

What a rule cuts finely is read together with other blocks; all else is planned, block by block. A tensor that says the
same elements again and again, as torch's `expand` makes them (strides of 0), may be 10**12 elements in a file of a
kilobyte: whoever looks at elements looks at each stored one once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

import numpy as np

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter, reporting
from zckpt.engine.cast import Array, cast, numpy_dtype
from zckpt.engine.copy import pieces_of, ranges_read, read_piece
from zckpt.engine.plan import Piece, fine_cut
from zckpt.engine.targets import Hole
from zckpt.engine.together import CutPiece, arrays_of
from zckpt.engine.workers import Portions, Workers, batched, budget, threads_for
from zckpt.errors import UnsupportedError
from zckpt.immutable import immutable
from zckpt.state import Extent, Shape, Slot, itemsize
from zckpt.state.boxes import SpanIndexes
from zckpt.storage.files import PAGE_NBYTES, Sources
from zckpt.storage.stand_ins import ahead

BLOCK_NBYTES = 1 << 20
"""Read of each slot at once: small enough to be looked at in the cache, and planning it costs little in comparison."""

BUFFERS_PER_WORKER = 8
"""What a block may need at once: the slots of its set, and what a gather, a cast and `look` take besides."""

BUFFERS_OF_GIVEN = 4
"""The same, of one slot that is read in blocks of a given number of elements."""

BUFFERS_OF_CUTS = 4
"""What is read together, the table that it is read into, and as much as a block may need besides."""

BUFFERS_OF_DIRECT = 1
"""And what is read into past the page cache, before it is put together."""

MOST_NBYTES = 1 << 34
"""Bytes of elements, most of them repeated, that are read one by one where every one counts in what is found."""

MOST_REPEATED = 16
"""Times: a tensor that repeats its elements less often is not much larger than its file."""

Result = TypeVar("Result")

Look = Callable[[int, int, Sequence[Array]], Result | None]
"""Called with the index of a set of slots, the first element of a block, and the elements of each slot; in any thread.

What it returns, if anything, is yielded with the index. The arrays are used again afterwards.
"""


@immutable
class SlotSet:
    """Slots that are looked at together."""

    label: str  # `exp_avg/wte.weight`, for messages
    slots: tuple[Slot, ...]  # of one shape
    dtypes: tuple[str, ...]  # element type that each is read as

    @property
    def shape(self) -> Shape:
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


@immutable
class Block:
    """As many elements of each slot of a set."""

    index: int  # of the set
    start: int  # of the first element
    parts: tuple[Hole | CutPiece, ...]
    """One for each slot: slots have only the spans that reach into the block; what a rule cuts finely is read together
    with other blocks.
    """
    nbytes: int  # of the widest type in it


def scan(
    sets: Sequence[SlotSet],
    look: Look[Result],
    *,
    numel: int | None = None,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    goes_on: Callable[[int], bool] | None = None,
    direct: bool = False,
) -> Generator[tuple[int, Result]]:
    """Look at sets of slots block by block, and yield what `look` returns with the index of the set, in order.

    Parameters
    ----------
    sets : sequence of SlotSet
    look : callable
        See `Look`. Where an executor of processes runs it, it must be picklable.
    numel : int, elements, optional
        Of each block but a set's last; by default as many as have `BLOCK_NBYTES` bytes, or as `memory` allows.
    memory : int, bytes
        Upper bound of what the buffers of all workers take together; one block is looked at in any case.
    reporter : Reporter, optional
        Hears of progress, in bytes of the first slot of each set as it is read.
    goes_on : callable, optional
        Asked with the index of a set whether more of it is to be looked at.
    direct : bool
        Read past the page cache, where the file systems can.

    Raises
    ------
    LayoutError
        A slot does not cover every element once.
    UnsupportedError
        A slot is not cast to the type it is to be read as, or says a few elements again and again without end.
    SourceError
        A file cannot be read.
    """
    for one in sets:
        for slot in one.slots:
            refuse_endless(slot, one.label)
    total = sum(one.numel * itemsize(one.dtypes[0]) for one in sets)
    with reporting(reporter, total) as progress:
        threads, besides = threads_for((), direct=direct), BUFFERS_OF_DIRECT * direct
        if numel is None:
            share = budget(memory, threads, buffers=BUFFERS_PER_WORKER + besides, most=BLOCK_NBYTES)
        else:
            block = numel * max((one.widest for one in sets), default=1)
            share = budget(memory, threads, buffers=BUFFERS_OF_GIVEN + besides, most=block, least=block)
        with Workers(threads, at_once=share.at_once) as workers:
            most = share.nbytes
            blocks = (block for index, one in enumerate(sets) for block in _blocks(index, one, numel, most, goes_on))
            spare: list[dict[int, Array]] = []
            batches = batched(blocks, attrgetter("nbytes"))
            portions = Portions(total, _batch_nbytes, _reads)
            run = partial(look_at_batch, look, spare, most if direct else 0, memory // share.at_once // BUFFERS_OF_CUTS)
            with closing(workers.run(run, batches, portions)) as results:
                for batch, found in results:
                    progress.advance(_batch_nbytes(batch))
                    yield from found


def _batch_nbytes(batch: Sequence[Block]) -> int:
    return sum(block.parts[0].nbytes for block in batch)


def _reads(batch: Sequence[Block]) -> Iterator[str]:
    """Yield the files in which a batch lies; of a computed slot, whose inputs say it, none."""
    for part in (part for block in batch for part in block.parts):
        if isinstance(part, CutPiece):
            yield from part.paths()
        else:
            yield from (span.path for spans in part.slot.sets for span in spans)


def _blocks(
    index: int, one: SlotSet, numel: int | None, most: int, goes_on: Callable[[int], bool] | None
) -> Iterator[Block]:
    step = numel or max(most // one.widest, 1)
    rules = [fine_cut(slot, slot.flat(0, min(step, one.numel))) for slot in one.slots]
    indexes = SpanIndexes()
    for start in range(0, one.numel, step):
        if goes_on is not None and not goes_on(index):
            return
        count = min(step, one.numel - start)
        extent = Extent.flat(one.shape, start, count)
        parts: list[Hole | CutPiece] = []
        for slot, rule, dtype in zip(one.slots, rules, one.dtypes, strict=True):
            if rule is not None:
                parts.append(CutPiece(rule, start, count, label=one.label, dtype=dtype))
                continue
            near = slot if count == one.numel else indexes.reaching(slot, extent)  # one block needs no index
            parts.append(Hole(0, one.label, near, extent, dtype))
        yield Block(index, start, tuple(parts), count * one.widest)


def look_at_batch(
    look: Look[Result], spare: list[dict[int, Array]], direct: int, most: int, batch: Sequence[Block]
) -> list[tuple[int, Result]]:
    """Look at blocks; return what was found, by index of the set. May run in another process.

    `spare` has the buffers that no batch of the scan uses at the moment; `direct` is as for `Sources`; `most` bytes are
    read together.
    """
    buffers: dict[int, Array] = {}
    with suppress(IndexError):  # none are spare yet
        buffers = spare.pop()
    results = []
    planned = [
        [[] if isinstance(part, CutPiece) else [*pieces_of(part, block.nbytes)] for part in block.parts]
        for block in batch
    ]
    every = (piece for some in planned for each in some for piece in each)
    with Sources(direct) as sources, ahead(ranges_read(every)):
        found = iter(planned)
        for some in batched(batch, lambda block: block.nbytes * len(_cuts(block)), most):
            cuts = [part for block in some for part in _cuts(block)]
            read = iter(arrays_of(cuts, sources, most))
            for block in some:
                arrays = [
                    cast(next(read), part.dtype)
                    if isinstance(part, CutPiece)
                    else _read(part, number, pieces, buffers, sources)
                    for number, (part, pieces) in enumerate(zip(block.parts, next(found), strict=True))
                ]
                seen = look(block.index, block.start, arrays)
                if seen is not None:
                    results.append((block.index, seen))
    spare.append(buffers)
    return results


def _cuts(block: Block) -> list[CutPiece]:
    """Return what of a block is read together with others."""
    return [part for part in block.parts if isinstance(part, CutPiece)]


def _read(part: Hole, number: int, pieces: Sequence[Piece], buffers: dict[int, Array], sources: Sources) -> Array:
    """Read a block of one slot of its set into the buffer that such slots have."""
    nbytes = part.nbytes
    if len(buffers.get(number, ())) < nbytes + PAGE_NBYTES:
        buffers[number] = np.frombuffer(sources.room(nbytes), np.uint8)
    view = buffers[number][:nbytes]
    if len(pieces) == 1 and pieces[0].is_bytewise:
        source = pieces[0].copies[0].sources[0]
        found, _ = sources.window(source.path, source.offset, view.data, buffers[number].data)
        view = np.frombuffer(found, np.uint8)
    else:
        for piece in pieces:
            read_piece(piece, view.data, sources)
    return view.view(numpy_dtype(part.dtype))


def stored_once(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return slots of one shape without the elements that all of them repeat along the same dimensions.

    The elements of each are in the order in which they come first.
    """
    strides: list[Shape] = []  # of each that is one span with such
    for slot in slots:
        is_one = len(slot.spans) == 1 and not slot.replicas and slot.numel and slot.spans[0].extent == slot.whole
        strides.append((slot.spans[0].strides or ()) if is_one else ())
    alike = [not any(steps) for steps in zip(*strides, strict=True)] if all(strides) else []
    if not any(alike):
        return tuple(slots)
    shape = tuple(min(n, 1) if same else n for n, same in zip(slots[0].shape, alike, strict=True))
    whole = Extent.whole(shape)
    return tuple(replace(slot, shape=shape, spans=(replace(slot.spans[0], extent=whole),)) for slot in slots)


def refuse_endless(slot: Slot, name: str) -> None:
    """Refuse a tensor whose elements are too many to be read, since it repeats a few of them.

    Raises UnsupportedError: it is larger than `MOST_NBYTES`, and less than one in `MOST_REPEATED` of its elements is
    stored.
    """
    (once,) = stored_once([slot])
    if slot.nbytes > MOST_NBYTES and once.numel * MOST_REPEATED <= slot.numel:
        raise UnsupportedError(
            f"{name} repeats {once.numel} stored elements as {slot.numel}, which are too many to read",
            path=slot.spans[0].path,
            expected=f"at most {MOST_NBYTES} bytes of such a tensor",
            found=slot.nbytes,
            advice="save it again after .contiguous(), or omit it",
        )
