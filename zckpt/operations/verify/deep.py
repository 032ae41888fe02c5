"""Reads the stretches of a checkpoint in parallel, in bounded memory, and adds up what is found in them."""

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
from zckpt.engine.span_index import SpanIndex
from zckpt.engine.workers import WRITERS, Workers, batched, buffer_nbytes
from zckpt.errors import LayoutError, SourceError, UnsupportedError
from zckpt.operations.verify.elements import Stretch, Tally, Unequal, not_equal, not_rounded, tally, typed
from zckpt.operations.verify.inventory import Apart, Inventory, Partner, Run
from zckpt.state import Extent
from zckpt.state.dtypes import itemsize
from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import Sources, read_into

STRETCH_NBYTES = 1 << 20
"""Read at once: what is done with it finds it in the cache."""

BUFFERS_PER_WORKER = 8
"""What a stretch may need at once: itself, weights beside it, masters as they round, and which elements are wrong."""

ALIGNMENT = 64

Place = tuple[int, int, int]
"""Subject, the checksum of its bytes, and that of what it was held against."""


@dataclass(slots=True)
class Outcome:
    """What was found.

    Parameters
    ----------
    tallies : dict of (subject, checksum) to Tally
    compared : dict of (subject, file, checksums) to [elements, Unequal]
        Masters with their weights.
    duplicates : dict of int to Unequal
    parts : list of (checksum, offset, nbytes, crc)
        Not yet put together.
    errors : list of SourceError
    elements : int
        Looked at.
    checksums : int
        Compared.
    """

    tallies: dict[tuple[int, int], Tally] = field(default_factory=dict)
    compared: dict[tuple[int, str, str, int, int], tuple[int, Unequal]] = field(default_factory=dict)
    duplicates: dict[int, Unequal] = field(default_factory=dict)
    parts: list[tuple[int, int, int, int]] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)
    elements: int = 0
    checksums: int = 0

    def add_tally(self, subject: int, checksum: int, found: Tally) -> None:
        """Add what is wrong with elements of a subject."""
        if found:
            key = (subject, checksum)
            self.tallies[key] = self.tallies.get(key, Tally()).plus(found)

    def add_comparison(self, key: tuple[int, str, str, int, int], numel: int, found: Unequal) -> None:
        """Add a comparison of a part of a master."""
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


Work = Stretch | Apart


class Checks:
    """Puts CRC-32s of parts together, whichever order they come in, and says which are wrong."""

    def __init__(self, sums: Sequence[Sum]) -> None:
        self._sums = sums
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._nbytes: dict[int, int] = {}
        self.count = sum(not one.nbytes for one in sums)
        self.wrong: dict[int, int] = {number: crc32(b"") for number, one in enumerate(sums)
                                      if not one.nbytes and one.crc32 != crc32(b"")}  # fmt: skip

    def add(self, parts: Iterable[tuple[int, int, int, int]]) -> None:
        """Add parts; a record is checked when its last one is there."""
        for number, offset, nbytes, crc in parts:
            self._parts.setdefault(number, []).append((offset, nbytes, crc))
            self._nbytes[number] = self._nbytes.get(number, 0) + nbytes
            if self._nbytes[number] == self._sums[number].nbytes:
                self._check(number)

    def _check(self, number: int) -> None:
        self.count += 1
        whole = crc32(b"")
        for _, nbytes, crc in sorted(self._parts.pop(number)):
            whole = combine(whole, crc, nbytes)
        if whole != self._sums[number].crc32:
            self.wrong[number] = whole


def stretch_nbytes(memory: int) -> int:
    """Return the size of a stretch so that all workers' buffers together fit into memory."""
    return buffer_nbytes(memory, WRITERS, buffers=BUFFERS_PER_WORKER, most=STRETCH_NBYTES)


def run(
    inventory: Inventory, sums: Sequence[Sum], work: Iterable[Work], *, most: int, reporter: Reporter
) -> tuple[Outcome, dict[int, int]]:
    """Do all work and return what was found, and the CRC-32 of each record whose bytes are not those written.

    Parameters
    ----------
    inventory : Inventory
    sums : sequence of Sum
    work : iterable of Stretch and Apart
    most : int, bytes
        Of a stretch.
    reporter : Reporter
        Is told of bytes.
    """
    outcome, checks = Outcome(), Checks(sums)
    with (
        Workers(WRITERS) as workers,
        closing(workers.run(partial(_run_batch, inventory, most), batched(work, nbytes_of))) as results,
    ):
        for batch, found in results:
            outcome.add(found)
            checks.add(found.parts)
            reporter.advance(sum(map(nbytes_of, batch)))
    outcome.checksums = checks.count
    return outcome, checks.wrong


def nbytes_of(work: Work) -> int:
    """Return the bytes that some work reads."""
    if isinstance(work, Stretch):
        return work.read_nbytes
    other = 0 if work.other is None else itemsize(work.other.dtype)
    return work.extent.numel * (itemsize(work.slot.dtype) + other)


def _run_batch(inventory: Inventory, most: int, batch: Sequence[Work]) -> Outcome:
    found = Outcome()
    buffers: tuple[Array, Array] = np.empty(most + ALIGNMENT, np.uint8), np.empty(2 * most + ALIGNMENT, np.uint8)
    with Sources() as sources:
        for work in batch:
            try:
                if isinstance(work, Stretch):
                    _run_stretch(found, inventory, work, buffers, sources)
                else:
                    _run_apart(found, inventory, work, most, sources)
            except LayoutError:
                continue  # elements are missing, of which the structure has told
            except SourceError as error:
                if not isinstance(error, UnsupportedError):  # types that cannot be compared
                    found.errors.append(error)
    return found


def _run_stretch(
    found: Outcome, inventory: Inventory, stretch: Stretch, buffers: tuple[Array, Array], sources: Sources
) -> None:
    base = (stretch.runs[0].offset - stretch.offset) % ALIGNMENT if stretch.runs else 0
    base = (ALIGNMENT - base) % ALIGNMENT  # so that the first run begins where elements may
    data = buffers[0][base : base + stretch.nbytes]
    read_into(sources.descriptor(stretch.path), stretch.offset, data.data, path=stretch.path)
    if stretch.checksum >= 0:
        found.parts.append((stretch.checksum, stretch.offset, stretch.nbytes, crc32(data.data)))
    for run in stretch.runs:
        low = run.offset - stretch.offset
        values = typed(data[low : low + run.end - run.offset], run.dtype, run.byteorder)
        found.elements += run.numel
        found.add_tally(
            run.subject, stretch.checksum, tally(values, run.dtype, inventory.subjects[run.subject], run.first)
        )
        if run.partner is not None:
            _run_partner(found, inventory, run, run.partner, values, stretch, buffers[1], sources)


def _run_partner(
    found: Outcome,
    inventory: Inventory,
    run: Run,
    partner: Partner,
    masters: Array,
    stretch: Stretch,
    buffer: Array,
    sources: Sources,
) -> None:
    """Read the weights of a run of masters, look at them, and hold them against it."""
    nbytes = run.numel * itemsize(partner.dtype)
    data = buffer[:nbytes]
    read_into(sources.descriptor(partner.path), partner.offset, data.data, path=partner.path)
    if partner.checksum >= 0:
        found.parts.append((partner.checksum, partner.offset, nbytes, crc32(data.data)))
    weights = typed(data, partner.dtype, partner.byteorder)
    found.elements += run.numel
    subject = inventory.subjects[partner.subject]
    found.add_tally(partner.subject, partner.checksum, tally(weights, partner.dtype, subject, run.first))
    key = (run.subject, stretch.path, partner.path, stretch.checksum, partner.checksum)
    found.add_comparison(key, run.numel, not_rounded(masters, weights, partner.dtype, run.first))


def _run_apart(found: Outcome, inventory: Inventory, work: Apart, most: int, sources: Sources) -> None:
    whole, subject = work.extent, inventory.subjects[work.subject]
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
            unequal = not_equal(values[0], values[1], extent.start)
            found.duplicates[work.duplicate] = _both(found.duplicates.get(work.duplicate, Unequal(0)), unequal)
        else:
            unequal = not_rounded(values[0], values[1], work.other.dtype, extent.start)
            paths = (slots[0].spans[0].path, slots[1].spans[0].path)
            found.add_comparison((work.subject, *paths, -1, -1), extent.numel, unequal)
