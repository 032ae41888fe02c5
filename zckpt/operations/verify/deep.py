"""NaN, Inf, sign and equality of elements: the blocks of a checkpoint, read in parallel and in bounded memory.

Blocks are of bytes in files, whatever lies in them, for each byte counts for a checksum; `engine.scan` knows elements
of slots only. A block that cannot be read is an error among what was found, and the rest is looked at all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from zckpt.compare import weights
from zckpt.compare.slots import unequal_bits
from zckpt.engine import Reporter
from zckpt.engine.boxes import SpanIndex
from zckpt.engine.cast import Array, cast, numpy_dtype, swapped
from zckpt.engine.checking import Sum
from zckpt.engine.read import read_extent
from zckpt.engine.tasks import Portions
from zckpt.engine.workers import WRITERS, Budget, Workers, batched, budget
from zckpt.errors import LayoutError, SourceError, UnsupportedError
from zckpt.operations.verify.blocks import Block, Subjects, Work, paths_of, subjects_of
from zckpt.operations.verify.inventory import BUFFER, PADDING, Inventory, Partner, Piece, Scattered, Subject
from zckpt.state import Extent
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import Sources, read_into

NOT_NEGATIVE = frozenset({"square_avg", "acc_delta", "sum", "exp_inf", "row_var", "col_var", "variance"})
"""Sums and means of squares or of magnitudes, besides `exp_avg_sq` and what begins or ends with it: of RMSprop,
Adadelta, Adagrad, Adamax and Adafactor (torch 2.13)."""

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in NaN and Inf."""

_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def is_second_moment(slot: str) -> bool:
    """Tell by its name whether a slot cannot be negative."""
    return "exp_avg_sq" in slot or slot in NOT_NEGATIVE


@dataclass(frozen=True, slots=True)
class Tally:
    """What is wrong with some elements of one subject.

    Parameters
    ----------
    nan, inf, negative, nonzero : int, elements
        `nonzero` of padding, in bytes.
    first : int
        Index of the first one.
    """

    nan: int = 0
    inf: int = 0
    negative: int = 0
    nonzero: int = 0
    first: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf or self.negative or self.nonzero)

    def plus(self, other: Tally) -> Tally:
        """Return the tally of both."""
        if not self or not other:
            return self or other
        return Tally(
            self.nan + other.nan,
            self.inf + other.inf,
            self.negative + other.negative,
            self.nonzero + other.nonzero,
            min(self.first, other.first),
        )


def tally(values: Array, dtype: str, subject: Subject, first: int) -> Tally:
    """Return what is wrong with elements.

    Parameters
    ----------
    values : ndarray
        Flat, in the machine's byte order.
    dtype : str
    subject : Subject
    first : int
        Index of the first of them.
    """
    if subject.kind == PADDING:
        wrong = values.view(np.uint8) != 0
        return replace(Tally(nonzero=int(np.count_nonzero(wrong))), first=first + int(np.argmax(wrong)))
    odd = not_finite(values, dtype)
    found = Tally()
    if odd is not None and odd.any():
        nan = np.isnan(_real(values, dtype)[odd].astype(np.float64))
        infinite = 0 if subject.kind == BUFFER else int(len(nan) - np.count_nonzero(nan))  # a mask of -inf is one
        at = int(np.argmax(odd)) // (2 if dtype in _REAL else 1)
        found = Tally(nan=int(np.count_nonzero(nan)), inf=infinite, first=first + at)
    if subject.kind != BUFFER and is_floating(dtype) and is_second_moment(subject.slot):
        below = values < 0
        if odd is not None and below.any():
            below &= ~odd
        found = found.plus(Tally(negative=int(np.count_nonzero(below)), first=first + int(np.argmax(below))))
    return found


def not_finite(values: Array, dtype: str) -> Array | None:
    """Return which elements are NaN or Inf; None for a type that has neither. A complex number counts as two."""
    if dtype in _EXPONENT:
        mask = _EXPONENT[dtype]
        found: Array = (values.view(np.uint16) & mask) == mask
        return found
    if dtype in _REAL:
        return not_finite(_real(values, dtype), _REAL[dtype])
    if not is_floating(dtype):
        return None
    wide = values if values.dtype.kind == "f" else values.astype(np.float32)
    finite: Array = ~np.isfinite(wide)
    return finite


def _real(values: Array, dtype: str) -> Array:
    return values.view(numpy_dtype(_REAL[dtype])) if dtype in _REAL else values


def typed(data: Array, dtype: str, byteorder: str) -> Array:
    """Return bytes as elements, in the machine's byte order."""
    values: Array = data.view(numpy_dtype(dtype))
    return values if byteorder == "little" else swapped(values, dtype)


@dataclass(frozen=True, slots=True)
class Unequal:
    """How many elements differ, and the first of them."""

    count: int
    first: int = 0
    detail: str = ""


def not_rounded(master: Array, weight: Array, dtype: str, first: int) -> Unequal:
    """Compare weights with their masters, rounded; NaN and Inf are other findings."""
    where = weights.not_rounded(master, weight)
    kept = np.isfinite(master[where].astype(np.float32))
    odd = not_finite(weight[where], dtype)
    where = where[kept if odd is None else kept & ~odd]
    if not len(where):
        return Unequal(0)
    at = int(where[0])
    rounded = float(cast(master[at : at + 1], dtype)[0])
    detail = f"{float(weight[at])!r} where the master rounds to {rounded!r}, at element {first + at}"
    return Unequal(len(where), first + at, detail)


def not_equal(one: Array, other: Array, first: int) -> Unequal:
    """Compare elements bit for bit."""
    wrong = unequal_bits(one, other)
    count = int(np.count_nonzero(wrong))
    return Unequal(count, first + int(np.argmax(wrong))) if count else Unequal(0)


BLOCK_NBYTES = 1 << 20
"""Of a block at most: what is done with it finds it in the cache."""

BUFFERS_PER_WORKER = 8
"""What a block may need at once: itself, weights, masters as they round, and which elements are wrong."""

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


def share_of(memory: int) -> Budget:
    """Return the size of a block, and how many are looked at at once, so that all buffers together fit into memory."""
    return budget(memory, WRITERS, buffers=BUFFERS_PER_WORKER, most=BLOCK_NBYTES)


def run(
    inventory: Inventory, sums: Sequence[Sum], work: Iterable[Work], *, share: Budget, total: int, reporter: Reporter
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
    """
    outcome, checks = Outcome(), Checks(sums)
    batches = ((some, subjects_of(inventory, some)) for some in batched(work, nbytes_of))
    portions: Portions[tuple[tuple[Work, ...], Subjects]] = Portions(
        total, lambda batch: sum(map(nbytes_of, batch[0])), lambda batch: (p for one in batch[0] for p in paths_of(one))
    )
    with (
        Workers(WRITERS, at_once=share.at_once) as workers,
        closing(workers.run(partial(_run_batch, share.nbytes), batches, portions)) as results,
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


def _run_batch(most: int, given: tuple[Sequence[Work], Subjects]) -> Outcome:
    found, (batch, subjects) = Outcome(), given
    buffers: tuple[Array, Array] = np.empty(most + ALIGNMENT, np.uint8), np.empty(2 * most + ALIGNMENT, np.uint8)
    with Sources() as sources:
        for work in batch:
            try:
                if isinstance(work, Block):
                    _look_at_block(found, subjects, work, buffers, sources)
                else:
                    _look_at_scattered(found, subjects, work, most, sources)
            except LayoutError:
                continue  # elements are missing, which is a finding of the structure
            except SourceError as error:
                if not isinstance(error, UnsupportedError):  # types that cannot be compared
                    found.errors.append(error)
    return found


def _look_at_block(
    found: Outcome, subjects: Subjects, block: Block, buffers: tuple[Array, Array], sources: Sources
) -> None:
    base = (block.pieces[0].offset - block.offset) % ALIGNMENT if block.pieces else 0
    base = (ALIGNMENT - base) % ALIGNMENT  # so that the first piece begins where elements may
    data = buffers[0][base : base + block.nbytes]
    read_into(sources.descriptor(block.path), block.offset, data.data, path=block.path)
    if block.checksum >= 0:
        found.crcs.append((block.checksum, block.offset, block.nbytes, crc32(data.data)))
    for piece in block.pieces:
        low = piece.offset - block.offset
        values = typed(data[low : low + piece.end - piece.offset], piece.dtype, piece.byteorder)
        found.elements += piece.numel
        found.add_tally(piece.subject, block.checksum, tally(values, piece.dtype, subjects[piece.subject], piece.first))
        if piece.partner is not None:
            _look_at_partner(found, subjects, piece, piece.partner, values, block, buffers[1], sources)


def _look_at_partner(
    found: Outcome,
    subjects: Subjects,
    piece: Piece,
    partner: Partner,
    masters: Array,
    block: Block,
    buffer: Array,
    sources: Sources,
) -> None:
    """Read the weights of a piece of masters, look at them, and hold them against it."""
    nbytes = piece.numel * itemsize(partner.dtype)
    data = buffer[:nbytes]
    read_into(sources.descriptor(partner.path), partner.offset, data.data, path=partner.path)
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
            unequal = not_equal(values[0], values[1], extent.start)
            found.duplicates[work.duplicate] = _both(found.duplicates.get(work.duplicate, Unequal(0)), unequal)
        else:
            unequal = not_rounded(values[0], values[1], work.other.dtype, extent.start)
            paths = (slots[0].spans[0].path, slots[1].spans[0].path)
            found.add_comparison((work.subject, *paths, -1, -1), extent.numel, unequal)
