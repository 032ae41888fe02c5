"""Which file has which elements of a slot, as the document says, and where: read from headers, or computed.

Each file has its tensors in one order (see `rank_file`), so their offsets are sums of the sizes of those before. A few
pieces are summed up one by one. A layout of thousands of slots by thousands of files has only a few kinds of slots:

    offset in a file  =  where its tensors begin  +  sum over kinds (slots of the kind before this one x size there)

so that a table of slots by kinds, and one of kinds by files, hold all offsets, and there is no object for each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.document import Form, Json, formed, record, wrong
from zckpt.formats.native.rank_file import DIGEST_NBYTES, Listed, RankFile, header_for, order_key, stored_as
from zckpt.immutable import immutable
from zckpt.state import Extent, Shape, Span, Spans, itemsize
from zckpt.state.boxes import ByPlace, is_within
from zckpt.storage.crc32 import crc32

Pieces = Sequence[tuple[int, Extent]]
"""Which file, and which elements."""

PIECE = {
    "offsets": Form.SIZES,
    "sizes": Form.SIZES,
    "start": Form.INTEGER,
    "numel": Form.INTEGER,
}
"""What a piece leaves out depends on the slot's shape."""


@immutable
class Cut:
    """A slot as the document has it: `key` is the name of its tensors in the files."""

    name: str
    key: str
    dtype: str
    shape: Shape
    pieces: Pieces

    @property
    def order(self) -> tuple[int, str]:
        """What the tensors of a file are sorted by."""
        return order_key(self.key, itemsize(self.dtype))

    def tensor(self, extent: Extent) -> tuple[str, str, Shape]:
        """Return name, type and shape of the tensor that some of its elements are."""
        return self.key, *stored_as(self.dtype, extent)


class Layouts:
    """The layouts of a document, which lists `count` files."""

    def __init__(self, layouts: list[Json], count: int) -> None:
        self._layouts = [
            [record(piece, "piece", {"file": Form.INTEGER}, PIECE) for piece in formed(Form.LIST, one, "layout")]
            for one in layouts
        ]
        for piece in (piece for layout in self._layouts for piece in layout):
            if piece["file"] >= count:
                raise wrong("file of piece", f"a number below {count}", piece["file"])
        self._checked: dict[tuple[int, Shape], Pieces] = {}

    def pieces(self, layout: int, key: str, shape: Shape) -> Pieces:
        """Return which file has which elements of a slot: together as many as it has.

        Raises DamagedFileError: the layout does not fit the slot.
        """
        if layout >= len(self._layouts):
            raise wrong(f"layout of {key}", f"a number below {len(self._layouts)}", layout)
        found = self._checked.get((layout, shape))
        if found is not None:
            return found
        found = []
        for piece in self._layouts[layout]:
            offsets, sizes, start, numel = (piece[name] for name in PIECE)
            if (offsets is None) != (sizes is None) or (start is None) != (numel is None):
                raise wrong(f"piece of {key}", "offsets and sizes, start and numel", piece)
            if offsets is None:
                offsets, sizes = (0,) * len(shape), shape
            if start is None:
                start, numel = 0, math.prod(sizes)
            if not is_within((offsets, sizes), shape):
                raise wrong(f"box of {key}", f"within {shape}", (offsets, sizes))
            if start + numel > math.prod(sizes):
                raise wrong(f"range of {key}", f"within {math.prod(sizes)} elements", (start, numel))
            found.append((piece["file"], Extent(offsets, sizes, start, numel)))
        total = sum(extent.numel for _, extent in found)
        if total != math.prod(shape):
            raise DamagedFileError(
                f"layout {layout} does not fit {key}", expected=f"{math.prod(shape)} elements", found=total
            )
        self._checked[layout, shape] = found
        return found


MAX_CELLS = 1 << 24
"""Of the table of slots by kinds: 64 MiB."""

MAX_NBYTES = 1 << 44
"""Of a file of a table, so that no sum leaves 64 bits."""

Offsets = Mapping[str, Shape]
"""Where each piece of a slot is in its file, in bytes, by the slot's key."""


def offsets_in(files: Sequence[RankFile], cuts: Sequence[Cut]) -> Offsets:
    """Return where the headers of files, which were read, have the pieces of slots.

    Raises DamagedFileError: a file does not hold what the document says.
    """
    return {cut.key: tuple(files[file].take(*cut.tensor(extent)) for file, extent in cut.pieces) for cut in cuts}


def summed(files: Sequence[Listed], identity: str, cuts: Sequence[Cut]) -> Offsets | None:
    """Return where the pieces of all that the files hold are, summed up one by one.

    None where the headers that follow from the document have not the CRC-32 that it lists: headers are to be read.
    """
    tensors: list[list[tuple[str, str, Shape]]] = [[] for _ in files]
    ordered = sorted(cuts, key=lambda cut: cut.order)
    for cut in ordered:
        for file, extent in cut.pieces:
            tensors[file].append(cut.tensor(extent))
    at = [one.header_nbytes + DIGEST_NBYTES * len(held) for one, held in zip(files, tensors, strict=True)]
    found: dict[str, Shape] = {}
    for cut in ordered:
        own = []
        for file, extent in cut.pieces:
            own.append(at[file])
            at[file] += extent.numel * itemsize(cut.dtype)
        found[cut.key] = tuple(own)
    if len(found) != len(ordered) or at != [one.nbytes for one in files]:
        return None
    try:
        for one, held in zip(files, tensors, strict=True):
            header = header_for(held, identity, nbytes=one.header_nbytes)
            if (len(header), crc32(header)) != (one.header_nbytes, one.header_crc32):
                return None
    except UnsupportedError:  # there can be no such file
        return None
    return found


class Table:
    """Computes where a tensor is when asked. Takes all that the files hold, from a document as it was written.

    `is_proven`: whether the sizes of all tensors are those of the files. If not, headers are to be read.
    """

    def __init__(self, files: Sequence[Listed], cuts: Sequence[Cut]) -> None:
        import numpy as np

        ordered = sorted(cuts, key=lambda cut: cut.order)
        self.rows = {cut.key: row for row, cut in enumerate(ordered)}
        kinds: dict[tuple[int, int], int] = {}
        numbers = [kinds.setdefault((id(cut.pieces), itemsize(cut.dtype)), len(kinds)) for cut in ordered]
        layouts = {id(cut.pieces): cut.pieces for cut in ordered}
        self.held = {key: Held(pieces) for key, pieces in layouts.items()}
        self.is_proven = (
            len(self.rows) == len(ordered)
            and len(kinds) * len(ordered) <= MAX_CELLS
            and max(one.nbytes for one in files) <= MAX_NBYTES
            and all(len({file for file, _ in pieces}) == len(pieces) for pieces in layouts.values())
            and all(one.numel <= files[file].nbytes for pieces in layouts.values() for file, one in pieces)
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

    def __getitem__(self, key: str) -> list[int]:
        """Return where the tensor of a slot is in each file that has one."""
        found: list[int] = (self._starts + self._before[self.rows[key]] @ self._sizes).tolist()
        return found

    def offset(self, key: str, file: int) -> int:
        """Return where the tensor of a slot is in one file."""
        return int(self._starts[file] + self._before[self.rows[key]] @ self._sizes[:, file])


class Held:
    """The pieces of a layout that have elements, by what may be asked for."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = [(file, extent) for file, extent in pieces if extent.numel]
        self._placed: ByPlace[tuple[int, Extent]] | None = None

    def reaching(self, shape: Shape, low: int, high: int) -> Pieces:
        """Return the pieces that may have some of elements [low, high) of the flattened slot."""
        if self._placed is None:
            self._placed = ByPlace(shape, ((one, one[1]) for one in self.pieces))
        return self._placed.reaching(low, high)


class PieceSpans(Spans):
    """The spans of a slot whose pieces lie in many files, as a table says; slots cut alike share what they hold."""

    __slots__ = ("_cut", "_held", "_paths", "_table")

    def __init__(self, table: Table, cut: Cut, paths: Sequence[str]) -> None:
        self._table, self._cut, self._paths = table, cut, paths
        self._held = table.held[id(cut.pieces)]

    def __len__(self) -> int:
        """Return the number of files that have some of it."""
        return len(self._held.pieces)

    def numbered(self, index: int) -> Span:
        """Return one of them, in the order of the layout."""
        return self._span(self._held.pieces[index])

    def __iter__(self) -> Iterator[Span]:
        """Yield the spans in the order of the layout."""
        offsets = self._table[self._cut.key]
        for file, extent in self._held.pieces:
            yield Span(extent, self._paths[file], offsets[file], self._cut.dtype)

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that have some of elements [low, high) of the flattened tensor."""
        return tuple(map(self._span, self._held.reaching(self._cut.shape, low, high)))

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        return tuple(self._span(piece) for piece in self._held.pieces if self._paths[piece[0]] in paths)

    def _span(self, piece: tuple[int, Extent]) -> Span:
        file, extent = piece
        return Span(extent, self._paths[file], self._table.offset(self._cut.key, file), self._cut.dtype)


def spans_of(cut: Cut, where: Offsets | Table, paths: Sequence[str]) -> Sequence[Span]:
    """Return the spans of a slot, those of a table each computed when it is asked for."""
    if isinstance(where, Table):
        return PieceSpans(where, cut, paths)
    return tuple(
        Span(extent, paths[file], offset, cut.dtype)
        for (file, extent), offset in zip(cut.pieces, where[cut.key], strict=True)
        if extent.numel
    )
