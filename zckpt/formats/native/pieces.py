"""Where the elements of slots lie: the layouts of a document, checked against the slots that are cut by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zckpt.errors import DamagedFileError
from zckpt.formats.native.leaves import wrong
from zckpt.formats.native.node_kinds import Json
from zckpt.formats.native.rank_file import RankFile, shape_of, stored_as
from zckpt.formats.native.schema import Members
from zckpt.state import Extent, Span

Pieces = list[tuple[int, Extent]]
"""Which file, and which elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece as the document has it: what it leaves out depends on the slot's shape."""

    file: int
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    run: tuple[int, int] | None


class Layouts:
    """The layouts of a document, and the files that they deal elements to.

    Parameters
    ----------
    layouts : list
        As the document has them.
    files : sequence of RankFile
    """

    def __init__(self, layouts: list[Json], files: Sequence[RankFile]) -> None:
        self._files = files
        self._layouts = [self._layout(one) for one in layouts]
        self._checked: dict[tuple[int, tuple[int, ...]], Pieces] = {}

    def spans(self, layout: int, key: str, dtype: str, shape: tuple[int, ...]) -> tuple[Span, ...]:
        """Return where the elements of a slot are.

        Raises
        ------
        DamagedFileError
            The layout does not fit the slot, or the files do not hold what it says.
        """
        if not 0 <= layout < len(self._layouts):
            raise wrong(f"layout of {key}", f"a number below {len(self._layouts)}", layout)
        pieces = self._checked.get((layout, shape))
        if pieces is None:
            pieces = self._checked[layout, shape] = self._pieces(layout, key, shape)
        found = []
        for number, extent in pieces:
            file = self._files[number]
            offset = file.take(key, *stored_as(dtype, shape_of(extent)))
            if extent.numel:
                found.append(Span(extent, file.path, offset, dtype))
        return tuple(found)

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
        return Piece(members.integer("file", most=len(self._files) - 1), box, run)

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
