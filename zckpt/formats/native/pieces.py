"""Where the elements of slots lie: the layouts of a document, and where in the files the pieces of slots are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.native.leaves import wrong
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
from zckpt.formats.native.schema import Members
from zckpt.state import Extent
from zckpt.state.dtypes import itemsize
from zckpt.storage.crc32 import crc32

Pieces = list[tuple[int, Extent]]
"""Which file, and which elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece as the document has it: what it leaves out depends on the slot's shape."""

    file: int
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    run: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Cut:
    """A slot as the document has it.

    Parameters
    ----------
    name, key : str
        Of the slot, and of its tensors in the files.
    dtype : str
    shape : tuple of int
    layout : int
    """

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: int


class Layouts:
    """The layouts of a document.

    Parameters
    ----------
    layouts : list
        As the document has them.
    count : int
        Of the ranks' files.
    """

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
        box = run = None
        if members.has("offsets") or members.has("sizes"):
            box = members.shape("offsets"), members.shape("sizes")
        if members.has("start") or members.has("numel"):
            run = members.integer("start"), members.integer("numel")
        return Piece(members.integer("file", most=self._count - 1), box, run)

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
    start, numel = piece.run or (0, math.prod(sizes))
    if start + numel > math.prod(sizes):
        raise wrong(f"range of {key}", f"within {math.prod(sizes)} elements", (start, numel))
    return Extent(offsets, sizes, start, numel)


Offsets = tuple[int, ...]
"""Where each piece of a slot is in its file, in bytes."""


class Headers:
    """Finds the tensors of slots in the headers of the ranks' files, which were read.

    Parameters
    ----------
    files : sequence of RankFile
    """

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._files = files

    def offsets(self, cut: Cut, pieces: Pieces) -> Offsets:
        """Return where the pieces of a slot are.

        Raises
        ------
        DamagedFileError
            A file does not hold what the document says.
        """
        return tuple(
            self._files[file].take(cut.key, *stored_as(cut.dtype, shape_of(extent))) for file, extent in pieces
        )


class Order:
    """Computes where the tensors of slots are from what the document says: each file has them in one order.

    Parameters
    ----------
    files : sequence of Listed
    identity : str
    cuts : sequence of (Cut, Pieces)
        All that the files hold.

    Attributes
    ----------
    is_proven : bool
        Whether the headers that follow from the document have the CRC-32 that it lists. If not, headers are to be read.
    """

    def __init__(self, files: Sequence[Listed], identity: str, cuts: Sequence[tuple[Cut, Pieces]]) -> None:
        rows: list[list[tuple[str, str, tuple[int, ...]]]] = [[] for _ in files]
        ordered = sorted(cuts, key=lambda one: order_key(one[0].key, _width(one[0])))
        for cut, pieces in ordered:
            for file, extent in pieces:
                rows[file].append((cut.key, *stored_as(cut.dtype, shape_of(extent))))
        at = [one.header_nbytes + DIGEST_NBYTES * len(row) for one, row in zip(files, rows, strict=True)]
        self._offsets: dict[str, Offsets] = {}
        for cut, pieces in ordered:
            found = []
            for file, extent in pieces:
                found.append(at[file])
                at[file] += extent.numel * itemsize(cut.dtype)
            self._offsets[cut.key] = tuple(found)
        self.is_proven = (
            len(self._offsets) == len(ordered)
            and at == [one.nbytes for one in files]
            and all(one == listed_as(one, row, identity) for one, row in zip(files, rows, strict=True))
        )

    def offsets(self, cut: Cut, _: Pieces) -> Offsets:
        """Return where the pieces of a slot are."""
        return self._offsets[cut.key]


def _width(cut: Cut) -> int:
    """Return the bytes of an element as far as a tensor's place is concerned: a storage's count as bytes."""
    return itemsize(cut.dtype)


def listed_as(one: Listed, rows: Sequence[tuple[str, str, tuple[int, ...]]], identity: str) -> Listed | None:
    """Return what a document says of a file of these tensors; None where there can be none."""
    try:
        header = header_for(rows, identity)
    except UnsupportedError:
        return None
    return Listed(one.name, one.nbytes, len(header), crc32(header))
