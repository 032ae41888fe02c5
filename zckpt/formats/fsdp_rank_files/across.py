"""What all ranks have of a tensor, put together: spans of every element once, and the copies beside them.

Rows that ranks hold in turn (FSDP) are a rule, `CutSpans`; any other boxes, which tensor parallelism and other
dimensions make, are spans one by one. Boxes have to be the cells of a grid: then no element is missing or there twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field
from itertools import product

from zckpt.codes import DTYPES_DIFFER, WRONG_RANK
from zckpt.errors import LayoutError, ShardError, UnsupportedError, about
from zckpt.formats.fsdp_rank_files.held import PLAIN, REPLICATE, Held, Mesh, Placement, RankReader, read_mesh, with_mesh
from zckpt.formats.lost import absent_boxes, is_lost, tensor_of
from zckpt.formats.torch_files.tensors import slot_of, unresolved
from zckpt.immutable import immutable, mutable
from zckpt.state import Checkpoint, CutFiles, CutSpans, Duplicate, Parameter, Shape, Slot, by_key
from zckpt.state.boxes import Box
from zckpt.state.spans import Chosen
from zckpt.state.views import placed
from zckpt.torchfile import Tensor, TorchFile


@immutable
class _Copy:
    """A whole copy of a tensor, box by box: where each begins, and which rank has it.

    `pieces`: what ranks have of it: a tree, see `RankFiles`, and the number of a piece there; of a lost file the shape;
    `which` of these each box is. `width`: elements of whole rows that each box but the last has; 0 of other boxes.
    """

    lows: tuple[Shape, ...]
    ranks: tuple[int, ...]
    pieces: tuple[tuple[int, int | Shape], ...]
    which: tuple[int, ...]
    width: int


class RankFiles:
    """The files of one kind (`model`, `optim`), by rank; gives the tensors of several ranks their files.

    Of those that share a tree all have what the first has, but for the numbers of their meshes. `tree`: for each rank,
    which is the first that has its tree.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self.lost = [rank for rank, path in enumerate(paths) if is_lost(path)]
        self.there = [rank for rank in range(len(paths)) if rank not in self.lost]
        self.tree = [self.lost[0] if rank in self.lost else rank for rank in range(len(paths))]
        self._trees: dict[int, tuple[object, int, RankReader]] = {}
        self._meshes: dict[int, list[Mesh]] = {}
        self._known: dict[tuple[int, ...], tuple[tuple[str, ...], dict[str, int]]] = {}
        self._copies: dict[object, list[_Copy]] = {}

    def begin(self, rank: int, file: TorchFile) -> tuple[int, RankReader]:
        """Return the first rank whose file has the tree that a rank's has, and what reads that."""
        _, first, reader = self._trees.setdefault(id(file.storages), (file.storages, rank, RankReader(file.numbers)))
        self.tree[rank] = first
        if first != rank:
            self._meshes[rank] = [read_mesh(node, file.numbers) for node, _ in reader.meshes]
        return first, reader

    def of(self, rank: int, held: Held) -> Held:
        """Return what a rank has, given what the first of its group has."""
        if held.local is None or rank not in self._meshes:
            return held
        with about(self.paths[rank]):
            return with_mesh(held, self._meshes[rank][held.at])

    def cut(
        self, ranks: tuple[int, ...], held: Sequence[tuple[int, Tensor]], which: tuple[int, ...] | None = None
    ) -> CutFiles | None:
        """Return one tensor in each of some ranks' files as a line; None where they are not all alike and dense.

        `held`: each rank's, or of those whose trees the ranks have, of which `which` says each rank's.
        """
        first = held[0][1]
        if any(unresolved(one, self.paths[rank]) or not one.is_contiguous or one.byteorder != first.byteorder
               for rank, one in held):  # fmt: skip
            return None
        offsets = tuple(one.offset for _, one in held)
        if ranks not in self._known:  # what files have in common is kept once for all parameters
            self._known[ranks] = tuple(self.paths[rank] for rank in ranks), {}
        paths, indexes = self._known[ranks]
        return CutFiles(
            paths, offsets if which is None else Chosen(which, offsets), first.dtype, first.byteorder, indexes
        )

    def joined(self, name: str, label: str, across: Across) -> list[tuple[int, Slot]]:
        """Return each whole copy of a slot that ranks have, and the first rank of those that it is on.

        `name`: of the slot; `label`: what to call it in messages: the parameter. Raises LayoutError: ranks have other
        shapes or types than the first, or together not every element once; ShardError: a file is another rank's than
        its name says; UnsupportedError: they have flattened pieces of which nothing says where they lie.
        """
        # Where boxes lie depends on shapes and meshes alone, which thousands of tensors have in common.
        key = tuple(
            (tree, one.kind, one.shape, one.dtype, one.placements, one.at, one.local is None and one.mesh,
             *(piece.box for piece in one.pieces))
            for tree, one in across.by_tree.items()
        )  # fmt: skip
        if key not in self._copies:
            self._copies[key] = self._find_copies(label, across)
        shape, dtype, found = across.first.shape, across.first.dtype, []
        for copy in self._copies[key]:
            tensors = [
                (tree, tensor_of(dtype, at) if isinstance(at, tuple) else across.by_tree[tree].pieces[at].tensor)
                for tree, at in copy.pieces
            ]
            files = self.cut(copy.ranks, tensors, copy.which) if copy.width else None
            if files is None:
                parts = zip(copy.lows, copy.ranks, copy.which, strict=True)
                slot = placed([(low, slot_of(name, tensors[at][1], self.paths[rank])) for low, rank, at in parts])
            else:
                slot = Slot(name, dtype, shape, CutSpans(files, shape, 0, copy.width))
            found.append((min(copy.ranks), slot))
        return found or [(next(iter(across))[0], Slot(name, dtype, shape, ()))]

    def _find_copies(self, label: str, across: Across) -> list[_Copy]:
        """Return the copies that ranks have of a tensor; none of one without elements. Errors are those of `joined`."""
        held = list(across)
        self._check_alike(label, held)
        if not self.lost:
            self._check_order(label, held)
        shape = across.first.shape
        if not math.prod(shape):
            return []
        cells: dict[Box, list[tuple[int, int | Shape]]]
        cells = by_key((piece.box, (rank, at)) for rank, one in held for at, piece in enumerate(one.pieces))
        if self.lost:
            cells |= {box: [] for box in absent_boxes(label, shape, list(cells))}
            most = max(map(len, cells.values()))
            for (_, part), holders in cells.items():
                holders.extend([(self.lost[0], part)] * (max(most, 1) - len(holders)))
        if not _is_grid(shape, cells):
            numel = sum(math.prod(part) for _, part in cells)
            raise LayoutError(
                f"rank files do not have every element of {label} exactly once",
                path=self.paths[0],
                expected=f"{math.prod(shape)} elements of shape {shape}",
                found=f"{numel} in {len(cells)} boxes",
                advice="rank files are missing, or from other runs",
                parameters=[label],
            )
        ordered = sorted(cells.items())
        count = min(len(holders) for _, holders in ordered)
        rest = [rank for _, holders in ordered for rank, _ in holders[count:]]
        if rest:
            raise LayoutError(
                f"ranks do not have the same number of copies of all elements of {label}",
                path=self.paths[rest[0]],
                expected=f"{count} of each",
                ranks=rest[:1],
                parameters=[label],
            )
        lows, width = tuple(low for (low, _), _ in ordered), _rows([cell for cell, _ in ordered], shape)
        found = []
        for those in zip(*(holders for _, holders in ordered), strict=True):
            numbers: dict[tuple[int, int | Shape], int] = {}
            which = tuple(numbers.setdefault((self.tree[rank], at), len(numbers)) for rank, at in those)
            found.append(_Copy(lows, tuple(rank for rank, _ in those), tuple(numbers), which, width))
        return found

    def _check_alike(self, label: str, held: Sequence[tuple[int, Held]]) -> None:
        """Raise unless ranks have one shape and type, each in its own file; errors are those of `joined`."""
        rank, first = held[0]
        shape, dtype = first.shape, first.dtype
        if {(one.kind, len(one.shape), one.dtype) for _, one in held} == {(PLAIN, 1, dtype)}:
            sizes = [one.shape[0] for _, one in held]
            if len(set(sizes)) > 1:
                raise UnsupportedError(
                    f"{label} is in one-dimensional pieces, and no file says where they lie, as in a "
                    "LOCAL_STATE_DICT of FSDP1 with use_orig_params",
                    path=self.paths[rank],
                    expected="a tensor that every rank has whole, or a sharded tensor",
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
            if (one.shape, one.dtype) != (shape, dtype):
                raise LayoutError(
                    f"{label} differs from rank {rank}'s",
                    path=self.paths[other],
                    expected=f"{dtype} of shape {shape}",
                    found=f"{one.dtype} of shape {one.shape}",
                    code=DTYPES_DIFFER if one.shape == shape else None,
                    ranks=[other],
                    parameters=[label],
                )

    def _check_order(self, label: str, held: Sequence[tuple[int, Held]]) -> None:
        """Raise UnsupportedError where ranks do not ascend along a mesh: torch cuts by ascending ones."""
        meshes: dict[tuple[Shape, tuple[Placement, ...]], dict[Shape, list[int]]] = {}
        for rank, one in sorted(held, key=lambda pair: pair[0]):
            if one.mesh is not None and not one.mesh.keeps_order:
                mesh = meshes.setdefault((one.mesh.sizes, one.placements), {})
                mesh.setdefault(one.mesh.coordinate, []).append(rank)
        for (_, placements), mesh in meshes.items():
            cut = [dim for dim, one in enumerate(placements) if one.kind != REPLICATE]
            steps = ((at, (*at[:dim], at[dim] + 1, *at[dim + 1 :])) for at in mesh for dim in cut)
            pairs = (pair for at, then in steps for pair in zip(mesh[at], mesh.get(then, ()), strict=False))
            if (wrong := next((one for one, later in pairs if one > later), None)) is not None:
                raise UnsupportedError(
                    f"{label} is not where its mesh says, whose ranks do not ascend: torch cuts by ascending ones",
                    path=self.paths[wrong],
                    advice="save it from a mesh whose ranks ascend, or made with preserve_rank_order=True (torch 2.15)",
                )


def _is_grid(shape: Shape, cells: Collection[Box]) -> bool:
    """Tell whether boxes are the cells of a grid over a whole tensor."""
    axes = []
    for dim, whole in enumerate(shape):
        ranges = sorted({(offsets[dim], sizes[dim]) for offsets, sizes in cells})
        end = 0
        for low, size in ranges:
            end = low + size if low == end else -1
        axes.append(ranges if end == whole else [])
    return bool(
        cells
        and math.prod(map(len, axes)) == len(cells)
        and all((tuple(low for low, _ in cell), tuple(n for _, n in cell)) in cells for cell in product(*axes))
    )


def _rows(cells: Sequence[Box], shape: Shape) -> int:
    """Return how many elements of whole rows each box but the last has, which may have fewer; 0 of other boxes."""
    rows = [sizes[0] for _, sizes in cells if sizes and sizes[1:] == shape[1:]]
    are_alike = len(cells) == len(rows) > 1 and set(rows[:-1]) == {rows[0]} and rows[-1] <= rows[0]
    return rows[0] * math.prod(shape[1:]) if are_alike else 0


@mutable
class Across:
    """What ranks have of one tensor: of those whose files share a tree, what the first has.

    `by_tree`: by that rank, in order; ranks of other trees have nothing.
    """

    files: RankFiles
    by_tree: dict[int, Held] = field(default_factory=dict)

    @property
    def first(self) -> Held:
        """What the first rank has of it."""
        return next(iter(self.by_tree.values()))

    def __iter__(self) -> Iterator[tuple[int, Held]]:
        """Yield each rank that has any of it, in order, and what that has."""
        for rank, tree in enumerate(self.files.tree):
            if tree in self.by_tree:
                yield rank, self.files.of(rank, self.by_tree[tree])


def add(
    checkpoint: Checkpoint, parameter: Parameter, name: str, found: Sequence[tuple[int, Slot]], kind: str = "parameter"
) -> None:
    """Give a parameter a slot, from `RankFiles.joined`; others of it are copies."""
    (_, original), *copies = found
    parameter.slots[name] = original
    own = parameter.name
    checkpoint.duplicates += [Duplicate(kind, own, own, copy, original, rank) for rank, copy in copies]
