"""The blocks of a checkpoint, read in parallel and in bounded memory, and what is found in their elements.

Blocks are of bytes in files, whatever lies in them, for each byte counts for a checksum; `engine.scan` knows elements
of slots only. A block that cannot be read is an error among what was found, and the rest is looked at all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import numpy as np

from zckpt.engine import Reporter
from zckpt.engine.cast import Array
from zckpt.engine.checking import Sum
from zckpt.engine.copy import read_extent
from zckpt.engine.tasks import Portions
from zckpt.engine.workers import WRITERS, Budget, Workers, batched, budget
from zckpt.errors import LayoutError, SourceError, UnsupportedError
from zckpt.operations.verify.blocks import Block, Work
from zckpt.operations.verify.elements import Tally, Unequal, not_copied, not_rounded, tally, typed
from zckpt.operations.verify.inventory import NO_SUM, Inventory, Piece, Scattered, Subject
from zckpt.state import Extent
from zckpt.state.boxes import SpanIndex
from zckpt.state.dtypes import itemsize
from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import Sources

BLOCK_NBYTES = 1 << 20
"""Of a block at most: what is done with it finds it in the cache."""

BUFFERS_PER_WORKER = 8
"""What a block may need at once: itself, weights, masters as they round, and which elements are wrong."""

BUFFERS_OF_DIRECT = 1
"""And what is read into past the page cache, of what lies scattered."""

ALIGNMENT = 64

Subjects = dict[int, Subject]
"""Those that some work is about, by index: another process is sent no others."""

Batch = tuple[tuple[Work, ...], Subjects]

Key = TypeVar("Key")


Found = TypeVar("Found", Tally, Unequal)

Pair = tuple[int, str, str, int, int]
"""Of a comparison: the subject, the file of the masters and that of the weights, and their checksums."""


@dataclass(slots=True)
class Outcome:
    """What was found.

    Parameters
    ----------
    tallies : dict of (subject, checksum) to Tally
    compared : dict of Pair to Unequal
        Masters with their weights.
    duplicates : dict of int to Unequal
    crcs : list of (checksum, offset, nbytes, crc)
        Of blocks; not yet put together.
    errors : list of SourceError
    elements : int
        Looked at.
    checksums : int
        Compared.
    """

    tallies: dict[tuple[int, int], Tally] = field(default_factory=dict)
    compared: dict[Pair, Unequal] = field(default_factory=dict)
    duplicates: dict[int, Unequal] = field(default_factory=dict)
    crcs: list[tuple[int, int, int, int]] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)
    elements: int = 0
    checksums: int = 0

    def add(self, other: Outcome) -> None:
        """Add what a task has found."""
        for key, one in other.tallies.items():
            _add(self.tallies, key, one)
        for pair, unequal in other.compared.items():
            _add(self.compared, pair, unequal)
        for number, unequal in other.duplicates.items():
            _add(self.duplicates, number, unequal)
        self.errors += other.errors
        self.elements += other.elements

    def look(self, subjects: Subjects, piece: Piece, checksum: int, values: Array) -> None:
        """Add what is wrong with the elements of a piece."""
        wrong = tally(values, piece.dtype, subjects[piece.subject], piece.first)
        if piece.many is None:
            self.elements += piece.numel
            if wrong:
                _add(self.tallies, (piece.subject, checksum), wrong)
            return
        shares = piece.many.within(piece.first, piece.first + piece.numel)
        self.elements += int((shares[:, 2] - shares[:, 1]).sum())
        for index, begin, end, first in shares.tolist() if wrong else ():
            some = values[begin - piece.first : end - piece.first]
            if its := tally(some, piece.dtype, subjects[piece.subject], first):
                _add(self.tallies, (piece.many.subjects[index], checksum), its)


def _add(found: dict[Key, Found], key: Key, one: Found) -> None:
    found[key] = found[key].plus(one) if key in found else one


class Checks:
    """Puts CRC-32s of blocks together, whichever order they come in, and says which are wrong."""

    def __init__(self, sums: Sequence[Sum]) -> None:
        self._sums = sums
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}
        self._nbytes: dict[int, int] = {}
        self.count = sum(not one.nbytes for one in sums)
        self.wrong: dict[int, int] = {number: crc32(b"") for number, one in enumerate(sums)
                                      if not one.nbytes and one.crc32 != crc32(b"")}  # fmt: skip

    def add(self, crcs: Iterable[tuple[int, int, int, int]]) -> None:
        """Add those of blocks; a record is checked when its last one is there."""
        for number, offset, nbytes, crc in crcs:
            self._crcs.setdefault(number, []).append((offset, nbytes, crc))
            self._nbytes[number] = self._nbytes.get(number, 0) + nbytes
            if self._nbytes[number] == self._sums[number].nbytes:
                self._check(number)

    def _check(self, number: int) -> None:
        self.count += 1
        whole = crc32(b"")
        for _, nbytes, crc in sorted(self._crcs.pop(number)):
            whole = combine(whole, crc, nbytes)
        if whole != self._sums[number].crc32:
            self.wrong[number] = whole


def share_of(memory: int, *, direct: bool) -> Budget:
    """Return the size of a block, and how many are looked at at once, so that all buffers together fit into memory."""
    return budget(memory, WRITERS, buffers=BUFFERS_PER_WORKER + BUFFERS_OF_DIRECT * direct, most=BLOCK_NBYTES)


def run(
    inventory: Inventory,
    sums: Sequence[Sum],
    work: Iterable[Work],
    *,
    share: Budget,
    total: int,
    reporter: Reporter,
    direct: bool,
) -> tuple[Outcome, dict[int, int]]:
    """Do all work and return what was found, and the CRC-32 of each record whose bytes are not those written.

    `share`: of a block; `total`: bytes of all work; `direct`: read past the page cache.
    """
    outcome, checks = Outcome(), Checks(sums)
    batches = (
        (some, {number: inventory.subjects[number] for one in some for number in one.subjects})
        for some in batched(work, attrgetter("nbytes"))
    )
    portions: Portions[Batch] = Portions(total, _nbytes, lambda batch: (path for one in batch[0] for path in one.paths))
    look = partial(_run_batch, share.nbytes, [], share.nbytes if direct else 0)
    with (
        Workers(WRITERS, at_once=share.at_once) as workers,
        closing(workers.run(look, batches, portions)) as results,
    ):
        for batch, found in results:
            outcome.add(found)
            checks.add(found.crcs)
            reporter.advance(_nbytes(batch))
    outcome.checksums = checks.count
    return outcome, checks.wrong


def _nbytes(batch: Batch) -> int:
    return sum(one.nbytes for one in batch[0])


Rooms = tuple[memoryview, memoryview]
"""Memory for a block and for its partners."""


def _run_batch(most: int, spare: list[Rooms], direct: int, given: Batch) -> Outcome:
    """Look at some work. `spare` has what no batch uses at the moment; `direct` is as for `Sources`."""
    found, (batch, subjects) = Outcome(), given
    with Sources(direct) as sources:
        try:
            rooms = spare.pop()
        except IndexError:
            rooms = sources.room(most), sources.room(2 * most)
        for work in batch:
            try:
                if isinstance(work, Block):
                    _look_at_block(found, subjects, work, rooms, sources)
                else:
                    _look_at_scattered(found, subjects, work, most, sources)
            except LayoutError:
                continue  # elements are missing, which is a finding of the structure
            except SourceError as error:
                if not isinstance(error, UnsupportedError):  # types that cannot be compared
                    found.errors.append(error)
    spare.append(rooms)
    return found


def _look_at_block(found: Outcome, subjects: Subjects, block: Block, rooms: Rooms, sources: Sources) -> None:
    """Look at bytes of a file, and read, look at, and hold against them, the weights of masters among them."""

    def read(path: str, offset: int, nbytes: int, checksum: int, room: memoryview, base: int) -> Array:
        """Return bytes, read behind `base` bytes of memory, or as far behind a page as they are in the file."""
        view, _ = sources.window(path, offset, room[base : base + nbytes], room)
        data = np.frombuffer(view, np.uint8)
        if checksum != NO_SUM:
            found.crcs.append((checksum, offset, nbytes, crc32(data.data)))
        return data

    before = (block.pieces[0].offset - block.offset) % ALIGNMENT if block.pieces else 0
    base = (ALIGNMENT - before) % ALIGNMENT  # so that the first piece begins where elements may
    data = read(block.path, block.offset, block.size, block.checksum, rooms[0], base)
    for piece in block.pieces:
        low = piece.offset - block.offset
        values = typed(data[low : low + piece.nbytes], piece.dtype, piece.byteorder)
        found.look(subjects, piece, block.checksum, values)
        its = piece.partner
        if its is None:
            continue
        weights = typed(read(its.path, its.offset, its.nbytes, its.checksum, rooms[1], 0), its.dtype, its.byteorder)
        found.look(subjects, its, its.checksum, weights)
        pair = (piece.subject, block.path, its.path, block.checksum, its.checksum)
        _add(found.compared, pair, not_rounded(values, weights, its.dtype, piece.first))


def _look_at_scattered(found: Outcome, subjects: Subjects, work: Scattered, most: int, sources: Sources) -> None:
    whole = work.extent
    indexes = [SpanIndex(slot) for slot in work.slots]
    step = max(most // max(itemsize(slot.dtype) for slot in work.slots), 1)
    for start in range(0, whole.numel, step):
        extent = Extent(whole.offsets, whole.sizes, whole.start + start, min(step, whole.numel - start))
        slots = [index.reaching(extent) for index in indexes]
        values, *others = (read_extent(slot, extent, sources) for slot in slots)
        if not others:
            found.elements += extent.numel
            if wrong := tally(values, slots[0].dtype, subjects[work.subject], extent.start):
                _add(found.tallies, (work.subject, NO_SUM), wrong)
        elif work.duplicate is not None:
            _add(found.duplicates, work.duplicate, not_copied(values, others[0], extent.start))
        else:
            paths = (slots[0].spans[0].path, slots[1].spans[0].path)
            unequal = not_rounded(values, others[0], slots[1].dtype, extent.start)
            _add(found.compared, (work.subject, *paths, NO_SUM, NO_SUM), unequal)
