"""NaN, Inf, sign and equality of elements in memory; every byte of the files, once, in batches of bounded size.

    file      | record .............................. | record ...
    block   [ piece | piece | padding | piece ][ piece ...  ]           one read, one CRC-32, each piece looked at
                            `-- partner: the weight of a master, in another file, which is read with it

The bytes of a partner count for the checksum of its own record, and are left out of the blocks of its own file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zckpt.compare import rounding
from zckpt.engine.cast import Array, cast, numpy_dtype, swapped
from zckpt.operations.verify.inventory import BUFFER, NO_SUM, PADDING, Inventory, Piece, Subject, SumIndex
from zckpt.state.dtypes import is_floating, itemsize

NOT_NEGATIVE = frozenset({"square_avg", "acc_delta", "sum", "exp_inf", "row_var", "col_var", "variance"})
"""Sums and means of squares or of magnitudes, beside `exp_avg_sq` and what begins or ends with it: of RMSprop,
Adadelta, Adagrad, Adamax and Adafactor (torch 2.13)."""

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in NaN and Inf."""

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


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
        place = int(np.argmax(odd)) // (2 if dtype in _PARTS else 1)
        found = Tally(nan=int(np.count_nonzero(nan)), inf=infinite, first=first + place)
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
    if dtype in _PARTS:
        return not_finite(_real(values, dtype), _PARTS[dtype])
    if not is_floating(dtype):
        return None
    wide = values if values.dtype.kind == "f" else values.astype(np.float32)
    finite: Array = ~np.isfinite(wide)
    return finite


def _real(values: Array, dtype: str) -> Array:
    return values.view(numpy_dtype(_PARTS[dtype])) if dtype in _PARTS else values


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
    """Compare weights with their masters, rounded; NaN and Inf are told of elsewhere."""
    where = rounding.not_rounded(master, weight)
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
    size = one.dtype.itemsize
    wrong = (one.view(np.uint8) != other.view(np.uint8)).reshape(-1, size).any(axis=1)
    count = int(np.count_nonzero(wrong))
    return Unequal(count, first + int(np.argmax(wrong))) if count else Unequal(0)


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are read at once, and the pieces in them."""

    path: str
    offset: int
    nbytes: int
    checksum: int
    pieces: tuple[Piece, ...] = ()

    @property
    def read_nbytes(self) -> int:
        """Bytes read, those of partners too."""
        return self.nbytes + sum(r.numel * itemsize(r.partner.dtype) for r in self.pieces if r.partner is not None)


def blocks(inventory: Inventory, sums: SumIndex, paths: Sequence[str], most: int) -> Iterator[Block]:
    """Yield the blocks of all files: every byte that has a checksum or an element, once.

    Parameters
    ----------
    inventory : Inventory
    sums : SumIndex
    paths : sequence of str
        All files.
    most : int, bytes
        Of a block.
    """
    for path in paths:
        pieces, overlapping = _apart(sorted(inventory.pieces.get(path, ()), key=lambda piece: piece.offset))
        intervals = list(_without(sums.of(path), inventory.claimed.get(path, [])))
        intervals += _beside(pieces, intervals)
        yield from _cut(path, sorted(intervals), pieces, most)
        for piece in overlapping:
            yield from _cut(path, [(piece.offset, piece.end, NO_SUM)], [piece], most)


def _apart(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Return pieces of which no two share a byte, and the others."""
    alone: list[Piece] = []
    others: list[Piece] = []
    end = 0
    for piece in pieces:
        (others if piece.offset < end else alone).append(piece)
        end = max(end, piece.end)
    return alone, others


Interval = tuple[int, int, int]
"""Begin, end and checksum."""


def _without(places: Sequence[Interval], claimed: Sequence[tuple[int, int]]) -> Iterator[Interval]:
    """Yield what of records is not read elsewhere."""
    at = 0
    for low, high, number in places:
        begin = low
        while at < len(claimed) and claimed[at][1] <= low:
            at += 1
        here = at
        while here < len(claimed) and claimed[here][0] < high:
            if begin < claimed[here][0]:
                yield begin, claimed[here][0], number
            begin = max(begin, claimed[here][1])
            here += 1
        if begin < high:
            yield begin, high, number


def _beside(pieces: Sequence[Piece], intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals for the pieces that none has, neighbours as one."""
    found: list[Interval] = []
    begins = [low for low, _, _ in intervals]
    for piece in pieces:
        at = bisect_right(begins, piece.offset) - 1
        if at >= 0 and piece.offset < intervals[at][1]:
            continue
        if found and found[-1][1] == piece.offset:
            found[-1] = (found[-1][0], piece.end, NO_SUM)
        else:
            found.append((piece.offset, piece.end, NO_SUM))
    return found


def _cut(path: str, intervals: Sequence[Interval], pieces: Sequence[Piece], most: int) -> Iterator[Block]:
    at = 0
    for low, high, number in intervals:
        begin = low
        while begin < high:
            end = min(begin + most, high)
            while at < len(pieces) and pieces[at].end <= begin:
                at += 1
            inside, here = [], at
            while here < len(pieces) and pieces[here].offset < end:
                piece = pieces[here]
                if piece.end > end:  # begin and end with an element
                    size = itemsize(piece.dtype)
                    end = piece.offset + (end - piece.offset) // size * size
                if piece.offset < end:
                    inside.append(piece.part(begin, end))
                here += 1
            yield Block(path, begin, end - begin, number, tuple(inside))
            begin = end
