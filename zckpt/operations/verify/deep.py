"""The blocks of a checkpoint, read in parallel and in bounded memory, and what is found in their elements.

Blocks are of bytes in files, whatever lies in them, for each byte counts for a checksum; `engine.scan` knows elements
of slots only. A block that cannot be read is an error among what was found, and the rest is looked at all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from zckpt.engine import Reporter
from zckpt.engine.cast import Array
from zckpt.engine.checking import Sum
from zckpt.engine.read import read_extent
from zckpt.engine.tasks import Portions
from zckpt.engine.workers import WRITERS, Budget, Workers, batched, budget
from zckpt.errors import LayoutError, SourceError, UnsupportedError
from zckpt.operations.verify.blocks import Block, Subjects, Work, paths_of, subjects_of
from zckpt.operations.verify.elements import Tally, Unequal, not_copied, not_rounded, tally, typed
from zckpt.operations.verify.inventory import Inventory, Partner, Piece, Scattered
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


@dataclass(slots=True)
class Outcome:
    """What was found.

    Parameters
    ----------
    tallies : dict of (subject, checksum) to Tally
    compared : dict of (subject, file, checksums) to [elements, Unequal]
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
    compared: dict[tuple[int, str, str, int, int], tuple[int, Unequal]] = field(default_factory=dict)
    duplicates: dict[int, Unequal] = field(default_factory=dict)
    crcs: list[tuple[int, int, int, int]] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)
    elements: int = 0
    checksums: int = 0

    def add_tally(self, subject: int, checksum: int, found: Tally) -> None:
        """Add what is wrong with elements of a subject."""
        if found:
            key = (subject, checksum)
            self.tallies[key] = self.tallies.get(key, Tally()).plus(found)

    def add_comparison(self, key: tuple[int, str, str, int, int], numel: int, found: Unequal) -> None:
        """Add a comparison of some elements of a master."""
        before, known = self.compared.get(key, (0, Unequal(0)))
        self.compared[key] = (before + numel, _both(known, found))

    def add(self, other: Outcome) -> None:
        """Add what a task has found."""
        for (subject, checksum), found in other.tallies.items():
            self.add_tally(subject, checksum, found)
        for key, (numel, unequal) in other.compared.items():
            self.add_comparison(key, numel, unequal)
        for number, unequal in other.duplicates.items():
            self.duplicates[number] = _both(self.duplicates.get(number, Unequal(0)), unequal)
        self.errors += other.errors
        self.elements += other.elements


def _both(one: Unequal, other: Unequal) -> Unequal:
    if not one.count or not other.count:
        return one if one.count else other
    first = one if one.first <= other.first else other
    return Unequal(one.count + other.count, first.first, first.detail)


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

    Parameters
    ----------
    inventory : Inventory
    sums : sequence of Sum
    work : iterable of Block and Scattered
    share : Budget
        Of a block.
    total : int, bytes
        Of all work.
    reporter : Reporter
    direct : bool
        Read past the page cache.
    """
    outcome, checks = Outcome(), Checks(sums)
    batches = ((some, subjects_of(inventory, some)) for some in batched(work, nbytes_of))
    portions: Portions[tuple[tuple[Work, ...], Subjects]] = Portions(
        total, lambda batch: sum(map(nbytes_of, batch[0])), lambda batch: (p for one in batch[0] for p in paths_of(one))
    )
    look = partial(_run_batch, share.nbytes, [], share.nbytes if direct else 0)
    with (
        Workers(WRITERS, at_once=share.at_once) as workers,
        closing(workers.run(look, batches, portions)) as results,
    ):
        for (batch, _), found in results:
            outcome.add(found)
            checks.add(found.crcs)
            reporter.advance(sum(map(nbytes_of, batch)))
    outcome.checksums = checks.count
    return outcome, checks.wrong


def nbytes_of(work: Work) -> int:
    """Return the bytes that some work reads."""
    if isinstance(work, Block):
        return work.read_nbytes
    other = 0 if work.other is None else itemsize(work.other.dtype)
    return work.extent.numel * (itemsize(work.slot.dtype) + other)


Rooms = tuple[memoryview, memoryview]
"""Memory for a block and for its partners."""


def _run_batch(most: int, spare: list[Rooms], direct: int, given: tuple[Sequence[Work], Subjects]) -> Outcome:
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
    base = (block.pieces[0].offset - block.offset) % ALIGNMENT if block.pieces else 0
    base = (ALIGNMENT - base) % ALIGNMENT  # so that the first piece begins where elements may
    data = _bytes(block.path, block.offset, rooms[0], base, block.nbytes, sources)
    if block.checksum >= 0:
        found.crcs.append((block.checksum, block.offset, block.nbytes, crc32(data.data)))
    for piece in block.pieces:
        low = piece.offset - block.offset
        values = typed(data[low : low + piece.end - piece.offset], piece.dtype, piece.byteorder)
        shares = None if piece.many is None else piece.many.within(piece.first, piece.first + piece.numel)
        found.elements += piece.numel if shares is None else int((shares[:, 2] - shares[:, 1]).sum())
        subject, wrong = subjects[piece.subject], tally(values, piece.dtype, subjects[piece.subject], piece.first)
        if wrong and piece.many is not None and shares is not None:
            for index, begin, end, first in shares.tolist():
                some = values[begin - piece.first : end - piece.first]
                number = piece.many.subjects[index]
                found.add_tally(number, block.checksum, tally(some, piece.dtype, subject, first))
        else:
            found.add_tally(piece.subject, block.checksum, wrong)
        if piece.partner is not None:
            _look_at_partner(found, subjects, piece, piece.partner, values, block, rooms[1], sources)


def _bytes(path: str, offset: int, room: memoryview, base: int, nbytes: int, sources: Sources) -> Array:
    """Return bytes of a file, read behind `base` bytes of memory, or as far behind a page as they are in the file."""
    view, _ = sources.window(path, offset, room[base : base + nbytes], room)
    return np.frombuffer(view, np.uint8)


def _look_at_partner(
    found: Outcome,
    subjects: Subjects,
    piece: Piece,
    partner: Partner,
    masters: Array,
    block: Block,
    room: memoryview,
    sources: Sources,
) -> None:
    """Read the weights of a piece of masters, look at them, and hold them against it."""
    nbytes = piece.numel * itemsize(partner.dtype)
    data = _bytes(partner.path, partner.offset, room, 0, nbytes, sources)
    if partner.checksum >= 0:
        found.crcs.append((partner.checksum, partner.offset, nbytes, crc32(data.data)))
    weights = typed(data, partner.dtype, partner.byteorder)
    found.elements += piece.numel
    subject = subjects[partner.subject]
    found.add_tally(partner.subject, partner.checksum, tally(weights, partner.dtype, subject, piece.first))
    key = (piece.subject, block.path, partner.path, block.checksum, partner.checksum)
    found.add_comparison(key, piece.numel, not_rounded(masters, weights, partner.dtype, piece.first))


def _look_at_scattered(found: Outcome, subjects: Subjects, work: Scattered, most: int, sources: Sources) -> None:
    whole, subject = work.extent, subjects[work.subject]
    indexes = [SpanIndex(slot) for slot in (work.slot, work.other) if slot is not None]
    step = max(most // max(itemsize(index.slot.dtype) for index in indexes), 1)
    for start in range(0, whole.numel, step):
        extent = Extent(whole.offsets, whole.sizes, whole.start + start, min(step, whole.numel - start))
        slots = [index.reaching(extent) for index in indexes]
        values = [read_extent(slot, extent, sources) for slot in slots]
        if work.other is None:
            found.elements += extent.numel
            found.add_tally(work.subject, -1, tally(values[0], work.slot.dtype, subject, extent.start))
        elif work.duplicate is not None:
            unequal = not_copied(values[0], values[1], extent.start)
            found.duplicates[work.duplicate] = _both(found.duplicates.get(work.duplicate, Unequal(0)), unequal)
        else:
            unequal = not_rounded(values[0], values[1], work.other.dtype, extent.start)
            paths = (slots[0].spans[0].path, slots[1].spans[0].path)
            found.add_comparison((work.subject, *paths, -1, -1), extent.numel, unequal)
