"""What all ranks have of a tensor, put together: spans of every element once, and the copies beside them.

Rows that ranks hold in turn (FSDP) are a rule, `CutSpans`; any other boxes, which tensor parallelism and other
dimensions make, are spans one by one. Boxes have to be the cells of a grid: then no element is missing or there twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from zckpt.codes import DTYPES_DIFFER, WRONG_RANK
from zckpt.errors import LayoutError, ShardError, UnsupportedError
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held
from zckpt.formats.torch_files.tensors import slot_of, unresolved
from zckpt.state import Checkpoint, Duplicate, Parameter, Slot
from zckpt.state.spans import CutFiles, CutSpans
from zckpt.state.views import placed
from zckpt.torchfile import Tensor

Cell = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box."""


class RankFiles:
    """The files of one kind (`model`, `optim`), by rank; gives the tensors of several ranks their files."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._known: dict[tuple[int, ...], tuple[tuple[str, ...], dict[str, int]]] = {}

    def cut(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> CutFiles | None:
        """Return one tensor in each of some ranks' files as a line; None where they are not all alike and dense."""
        first = tensors[0]
        for rank, one in zip(ranks, tensors, strict=True):
            if unresolved(one, self.paths[rank]) or not one.is_contiguous or one.byteorder != first.byteorder:
                return None
        if ranks not in self._known:  # what files have in common is kept once for all parameters
            self._known[ranks] = tuple(self.paths[rank] for rank in ranks), {}
        paths, indexes = self._known[ranks]
        return CutFiles(paths, tuple(one.offset for one in tensors), first.dtype, first.byteorder, indexes)

    def joined(self, name: str, label: str, held: Sequence[tuple[int, Held]]) -> list[tuple[int, Slot]]:
        """Return each whole copy of a slot that ranks have, and the first rank of those that it is on.

        Parameters
        ----------
        name : str
            Of the slot.
        label : str
            What to call it in messages: the parameter.
        held : sequence of (int, Held)
            Ranks, in order, and what each has.

        Raises
        ------
        LayoutError
            Ranks have other shapes or types than the first, or together not every element once.
        ShardError
            A file is another rank's than its name says.
        UnsupportedError
            They have flattened pieces of which nothing says where they lie.
        """
        rank, first = held[0]
        if {(one.kind, len(one.shape), one.dtype) for _, one in held} == {(PLAIN, 1, first.dtype)}:
            sizes = [one.shape[0] for _, one in held]  # where all ranks have nothing, it is an empty parameter
            if 0 in sizes and len(set(sizes)) > 1:
                raise UnsupportedError(
                    f"{label} is in pieces of one axis, of which no file says where they lie, as FSDP1 with "
                    "use_orig_params saves its LOCAL_STATE_DICT",
                    path=self.paths[rank],
                    expected="a tensor that every rank has whole, or a sharded one",
                    found=f"{', '.join(map(str, sizes[:8]))} elements",
                    advice="load it in its own program and save it as SHARDED_STATE_DICT",
                )
        for other, one in held:
            if one.mesh is not None and one.mesh.rank not in (None, other):
                raise ShardError(
                    "is another rank's file",
                    path=self.paths[other],
                    expected=f"rank {other}",
                    found=f"rank {one.mesh.rank}",
                    code=WRONG_RANK,
                    ranks=[other],
                )
            if (one.shape, one.dtype) != (first.shape, first.dtype):
                raise LayoutError(
                    f"{label} is another tensor than rank {rank}'s",
                    path=self.paths[other],
                    expected=f"{first.dtype} of shape {first.shape}",
                    found=f"{one.dtype} of shape {one.shape}",
                    code=DTYPES_DIFFER if one.shape == first.shape else None,
                    ranks=[other],
                    parameters=[label],
                )
        cells: dict[Cell, list[tuple[int, Tensor]]] = {}
        for other, one in held:
            for box in one.boxes:
                cells.setdefault((box.offsets, box.sizes), []).append((other, box.tensor))
        if not math.prod(first.shape):
            return [(rank, Slot(name, first.dtype, first.shape, ()))]
        self._check(label, first.shape, cells)
        ordered = sorted(cells.items())
        count = min(len(holders) for _, holders in ordered)
        rest = [(cell, holder) for cell, holders in ordered for holder in holders[count:]]
        if rest:
            raise LayoutError(
                f"ranks have other copies of some elements of {label} than of the rest",
                path=self.paths[rest[0][1][0]],
                expected=f"{count} of each",
                ranks=[rest[0][1][0]],
                parameters=[label],
            )
        return [
            (
                min(holders[turn][0] for _, holders in ordered),
                self._slot(name, first, [(cell, *holders[turn]) for cell, holders in ordered]),
            )
            for turn in range(count)
        ]

    def _slot(self, name: str, one: Held, pieces: Sequence[tuple[Cell, int, Tensor]]) -> Slot:
        width = _row_width([cell for cell, _, _ in pieces], one.shape)
        if width is not None and len(pieces) > 1:
            files = self.cut(tuple(rank for _, rank, _ in pieces), [tensor for _, _, tensor in pieces])
            if files is not None:
                return Slot(name, one.dtype, one.shape, CutSpans(files, one.shape, 0, width))
        return placed([(low, slot_of(name, tensor, self.paths[rank])) for (low, _), rank, tensor in pieces])

    def _check(self, label: str, shape: tuple[int, ...], cells: dict[Cell, list[tuple[int, Tensor]]]) -> None:
        """Raise unless boxes are the cells of a grid over the whole tensor."""
        axes = []
        for dim, whole in enumerate(shape):
            ranges = sorted({(offsets[dim], sizes[dim]) for offsets, sizes in cells})
            end = 0
            for low, size in ranges:
                end = low + size if low == end else -1
            axes.append(ranges if end == whole else [])
        if (
            cells
            and math.prod(map(len, axes)) == len(cells)
            and all((tuple(low for low, _ in cell), tuple(n for _, n in cell)) in cells for cell in product(*axes))
        ):
            return
        held = sum(math.prod(sizes) for _, sizes in cells)
        raise LayoutError(
            f"ranks' files do not have every element of {label} once",
            path=self.paths[0],
            expected=f"{math.prod(shape)} elements of shape {shape}",
            found=f"{held} in {len(cells)} boxes",
            advice="files of ranks are missing, or are of other runs",
            parameters=[label],
        )


def _row_width(cells: Sequence[Cell], shape: tuple[int, ...]) -> int | None:
    """Return of how many elements each cell but the last is, where all are whole rows; None where they are not."""
    if not shape or any(sizes[1:] != shape[1:] for _, sizes in cells):
        return None
    rows = cells[0][1][0]
    if any(sizes[0] != rows for _, sizes in cells[:-1]) or cells[-1][1][0] > rows:
        return None
    return rows * math.prod(shape[1:])


def add(
    checkpoint: Checkpoint, parameter: Parameter, name: str, found: Sequence[tuple[int, Slot]], kind: str = "parameter"
) -> None:
    """Give a parameter a slot, from `RankFiles.joined`; others of it are copies."""
    (_, original), *copies = found
    parameter.slots[name] = original
    own = parameter.name
    checkpoint.duplicates += [Duplicate(kind, own, own, copy, original, rank) for rank, copy in copies]
