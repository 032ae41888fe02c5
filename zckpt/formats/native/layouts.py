"""The layouts of a document: which file has which elements of a slot. Where they are in the files, `places` says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zckpt.errors import DamagedFileError
from zckpt.formats.native.node_kinds import Json
from zckpt.formats.native.values import Members, wrong
from zckpt.state import Extent

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
