"""Which file has which elements of a slot, as the document says, and where: read from headers, or computed.

Each file has its tensors in one order (see `rank_file`), so their offsets are sums of the sizes of those before. A few
pieces are summed up one by one. A layout of thousands of slots by thousands of files has only a few kinds of slots:

    offset in a file  =  where its tensors begin  +  sum over kinds (slots of the kind before this one x size there)

so that a table of slots by kinds, and one of kinds by files, hold all offsets, and there is no object for each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.document import Members, wrong
from zckpt.formats.native.node_kinds import Json
from zckpt.formats.native.rank_file import (
    DIGEST_NBYTES,
    Listed,
    RankFile,
    header_for,
    order_key,
    shape_of,
    stored_as,
)
from zckpt.state import Extent, Span, Spans
from zckpt.state.boxes import bounds
from zckpt.state.dtypes import itemsize
from zckpt.storage.crc32 import crc32

Pieces = list[tuple[int, Extent]]
"""Which file, and which elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece as the document has it: what it leaves out depends on the slot's shape."""

    file: int
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    flat: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Cut:
    """A slot as the document has it: `key` is the name of its tensors in the files."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: int


class Layouts:
    """The layouts of a document, which lists `count` files."""

    def __init__(self, layouts: list[Json], count: int) -> None:
        self._count = count
        self._layouts = [self._layout(one) for one in layouts]
        self._checked: dict[tuple[int, tuple[int, ...]], Pieces] = {}

    def pieces(self, cut: Cut) -> Pieces:
        """Return which file has which elements of a slot: together as many as it has.

        Raises
        ------
        DamagedFileError
            The layout does not fit the slot.
        """
        if not 0 <= cut.layout < len(self._layouts):
            raise wrong(f"layout of {cut.key}", f"a number below {len(self._layouts)}", cut.layout)
        found = self._checked.get((cut.layout, cut.shape))
        if found is None:
            found = self._checked[cut.layout, cut.shape] = self._pieces(cut.layout, cut.key, cut.shape)
        return found

    def _layout(self, found: Json) -> list[Piece]:
        if type(found) is not list:
            raise wrong("layout", "a list of pieces", found)
        return [self._piece(one) for one in found]

    def _piece(self, found: Json) -> Piece:
        members = Members(found, "piece", ("file", "offsets", "sizes", "start", "numel"))
        box = flat = None
        if members.has("offsets") or members.has("sizes"):
            box = members.shape("offsets"), members.shape("sizes")
        if members.has("start") or members.has("numel"):
            flat = members.integer("start"), members.integer("numel")
        return Piece(members.integer("file", most=self._count - 1), box, flat)

    def _pieces(self, layout: int, key: str, shape: tuple[int, ...]) -> Pieces:
        """Return the pieces of a slot of a shape, which hold as many elements as it has."""
        pieces = [(piece.file, _extent(piece, key, shape)) for piece in self._layouts[layout]]
        numel = sum(extent.numel for _, extent in pieces)
        if numel != math.prod(shape):
            raise DamagedFileError(
                f"layout {layout} does not fit {key}", expected=f"{math.prod(shape)} elements", found=numel
            )
        return pieces


def _extent(piece: Piece, key: str, shape: tuple[int, ...]) -> Extent:
    offsets, sizes = piece.box or ((0,) * len(shape), shape)
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise wrong(f"box of {key}", f"{len(shape)} dimensions", sizes)
    if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
        raise wrong(f"box of {key}", f"within {shape}", (offsets, sizes))
    start, numel = piece.flat or (0, math.prod(sizes))
    if start + numel > math.prod(sizes):
        raise wrong(f"range of {key}", f"within {math.prod(sizes)} elements", (start, numel))
    return Extent(offsets, sizes, start, numel)


LARGE = 1 << 16
"""Pieces that are summed up one by one, and whose headers are held against the document."""

MAX_CELLS = 1 << 24
"""Of the table of slots by kinds: 64 MiB."""

MAX_NBYTES = 1 << 44
"""Of a file of a table, so that no sum leaves 64 bits."""

Cuts = Sequence[tuple[Cut, Pieces]]


class Offsets(ABC):
    """Says where the tensors of slots are."""

    @abstractmethod
    def offsets(self, cut: Cut, pieces: Pieces) -> tuple[int, ...]:
        """Return where each piece of a slot is in its file, in bytes.

        Raises
        ------
        DamagedFileError
            A file that was read does not hold what the document says.
        """

    def spans(self, cut: Cut, pieces: Pieces, paths: Sequence[str]) -> Sequence[Span]:
        """Return the spans of a slot; errors are those of `offsets`."""
        return tuple(
            Span(extent, paths[file], offset, cut.dtype)
            for (file, extent), offset in zip(pieces, self.offsets(cut, pieces), strict=True)
            if extent.numel
        )


class Headers(Offsets):
    """Finds the tensors of slots in the headers of the ranks' files, which were read."""

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._files = files

    def offsets(self, cut: Cut, pieces: Pieces) -> tuple[int, ...]:
        """Return where the headers have the pieces."""
        return tuple(
            self._files[file].take(cut.key, *stored_as(cut.dtype, shape_of(extent))) for file, extent in pieces
        )


class Order(Offsets):
    """Sums up where tensors are, one by one. Takes all that the files hold.

    `is_proven`: whether the headers that follow from the document have the CRC-32 that it lists. If not, headers are to
    be read.
    """

    def __init__(self, files: Sequence[Listed], identity: str, cuts: Cuts) -> None:
        tensors: list[list[tuple[str, str, tuple[int, ...]]]] = [[] for _ in files]
        ordered = sorted(cuts, key=_sort_key)
        for cut, pieces in ordered:
            for file, extent in pieces:
                tensors[file].append((cut.key, *stored_as(cut.dtype, shape_of(extent))))
        at = [one.header_nbytes + DIGEST_NBYTES * len(held) for one, held in zip(files, tensors, strict=True)]
        self._offsets: dict[str, tuple[int, ...]] = {}
        for cut, pieces in ordered:
            found = []
            for file, extent in pieces:
                found.append(at[file])
                at[file] += extent.numel * itemsize(cut.dtype)
            self._offsets[cut.key] = tuple(found)
        self.is_proven = (
            len(self._offsets) == len(ordered)
            and at == [one.nbytes for one in files]
            and all(one == _listed(one, held, identity) for one, held in zip(files, tensors, strict=True))
        )

    def offsets(self, cut: Cut, _: Pieces) -> tuple[int, ...]:
        """Return where each piece of a slot is in its file, in bytes."""
        return self._offsets[cut.key]


class Table(Offsets):
    """Computes where a tensor is when asked. Takes all that the files hold, from a document as it was written.

    `is_proven`: whether the sizes of all tensors are those of the files. If not, headers are to be read.
    """

    def __init__(self, files: Sequence[Listed], cuts: Cuts) -> None:
        import numpy as np

        ordered = sorted(cuts, key=_sort_key)
        self._rows = {cut.key: row for row, (cut, _) in enumerate(ordered)}
        kinds: dict[tuple[int, int], int] = {}
        numbers = [kinds.setdefault((id(pieces), itemsize(cut.dtype)), len(kinds)) for cut, pieces in ordered]
        layouts = {id(pieces): pieces for _, pieces in ordered}
        self._held = {key: Held(pieces) for key, pieces in layouts.items()}
        self.is_proven = (
            len(self._rows) == len(ordered)
            and len(kinds) * len(ordered) <= MAX_CELLS
            and max(one.nbytes for one in files) <= MAX_NBYTES
            and all(held.fits(files) for held in self._held.values())
        )
        if not self.is_proven:
            return
        self._sizes = np.zeros((len(kinds), len(files)), np.int64)
        there = np.zeros((len(kinds), len(files)), np.int64)
        for (key, width), kind in kinds.items():
            which = [file for file, _ in layouts[key]]
            there[kind, which] = 1
            self._sizes[kind, which] = [width * extent.numel for _, extent in layouts[key]]
        steps = np.zeros((len(ordered) + 1, len(kinds)), np.int32)
        steps[np.arange(1, len(ordered) + 1), numbers] = 1
        self._before = np.cumsum(steps, axis=0, dtype=np.int32)
        every = self._before[-1].astype(np.int64)
        self._starts = np.array([one.header_nbytes for one in files]) + DIGEST_NBYTES * (every @ there)
        ends = self._starts + every @ self._sizes
        self.is_proven = ends.tolist() == [one.nbytes for one in files]

    def offsets(self, cut: Cut, pieces: Pieces) -> tuple[int, ...]:
        """Return where each piece of a slot is in its file, in bytes."""
        found = self.column(self._rows[cut.key])
        return tuple(found[file] for file, _ in pieces)

    def column(self, row: int) -> list[int]:
        """Return where the tensor of a slot is in each file that has one."""
        found: list[int] = (self._starts + self._before[row] @ self._sizes).tolist()
        return found

    def offset(self, row: int, file: int) -> int:
        """Return where the tensor of a slot is in one file."""
        return int(self._starts[file] + self._before[row] @ self._sizes[:, file])

    def spans(self, cut: Cut, pieces: Pieces, paths: Sequence[str]) -> Sequence[Span]:
        """Return the spans of a slot, each computed when it is asked for."""
        return PieceSpans(self, self._rows[cut.key], cut, self._held[id(pieces)], paths)


class Held:
    """The pieces of a layout that have elements, by what may be asked for."""

    def __init__(self, pieces: Pieces) -> None:
        self._every = pieces
        self.pieces = [(file, extent) for file, extent in pieces if extent.numel]
        self._by_low: tuple[Pieces, list[int], list[int]] | None = None

    def fits(self, files: Sequence[Listed]) -> bool:
        """Tell whether no file has two pieces, and each may have its own."""
        counts = Counter(file for file, _ in self._every)
        return len(counts) == len(self._every) and all(e.numel <= files[file].nbytes for file, e in self._every)

    def reaching(self, shape: tuple[int, ...], low: int, high: int) -> Pieces:
        """Return the pieces that may have some of elements [low, high) of the flattened slot."""
        placed, lows, highs = self._sorted(shape)
        return placed[bisect_right(highs, low) : bisect_left(lows, high)]

    def _sorted(self, shape: tuple[int, ...]) -> tuple[Pieces, list[int], list[int]]:
        if self._by_low is None:
            found = sorted(((*bounds(one[1], shape), one) for one in self.pieces), key=lambda one: one[:2])
            highs = list(accumulate((high for _, high, _ in found), max))  # of this one and all before
            self._by_low = [one for *_, one in found], [low for low, *_ in found], highs
        return self._by_low


class PieceSpans(Spans):
    """The spans of a slot whose pieces lie in many files, by its row of the table; slots cut alike share `held`."""

    __slots__ = ("_cut", "_held", "_paths", "_row", "_table")

    def __init__(self, table: Table, row: int, cut: Cut, held: Held, paths: Sequence[str]) -> None:
        self._table = table
        self._row = row
        self._cut = cut
        self._held = held
        self._paths = paths

    def __len__(self) -> int:
        """Return the number of files that have some of it."""
        return len(self._held.pieces)

    def numbered(self, index: int) -> Span:
        """Return one of them, in the order of the layout."""
        return self._span(self._held.pieces[index])

    def __iter__(self) -> Iterator[Span]:
        """Yield the spans in the order of the layout."""
        offsets = self._table.column(self._row)
        for file, extent in self._held.pieces:
            yield Span(extent, self._paths[file], offsets[file], self._cut.dtype)

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that have some of elements [low, high) of the flattened tensor."""
        return tuple(map(self._span, self._held.reaching(self._cut.shape, low, high)))

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        pieces = [piece for piece in self._held.pieces if self._paths[piece[0]] in paths]
        return tuple(map(self._span, pieces))

    def _span(self, piece: tuple[int, Extent]) -> Span:
        file, extent = piece
        return Span(extent, self._paths[file], self._table.offset(self._row, file), self._cut.dtype)


def order_of(files: Sequence[Listed], identity: str, cuts: Cuts, *, is_as_written: bool) -> Order | Table:
    """Return where the tensors of all slots are, as it follows from a document.

    A product of slots and files goes unproven only where `is_as_written`: where the document has a checksum of its own.
    """
    count = sum(len(pieces) for _, pieces in cuts)
    if is_as_written and count > LARGE and count > 4 * (len(cuts) + len(files)):
        return Table(files, cuts)
    return Order(files, identity, cuts)


def _sort_key(one: tuple[Cut, Pieces]) -> tuple[int, str]:
    return order_key(one[0].key, itemsize(one[0].dtype))


def _listed(one: Listed, tensors: Sequence[tuple[str, str, tuple[int, ...]]], identity: str) -> Listed | None:
    """Return what a document says of a file of these tensors; None where there can be none."""
    try:
        header = header_for(tensors, identity, nbytes=one.header_nbytes)
    except UnsupportedError:
        return None
    return Listed(one.name, one.nbytes, len(header), crc32(header))
