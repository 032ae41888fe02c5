"""What ranks have of a tensor: the shape of the whole, the boxes that are in each file, and all of them put together.

DTensor          one box, which the mesh and the placements that it is pickled with say
ShardedTensor    the boxes of its local shards, each with its offsets
Tensor           the whole tensor

DTensor      _local_tensor, _spec: DTensorSpec(mesh, placements, tensor_meta)
mesh         its sizes, and the coordinate of the rank that wrote the file; torch has changed the rest: see `FORMS`
placements   for each dimension of the mesh: Replicate, Shard(dim), _StridedShard(dim, split_factor), or Partial

Put together they are spans of every element once, and the copies beside them. Rows that ranks hold in turn (FSDP) are a
rule, `CutSpans`; any other boxes, which tensor parallelism and other dimensions make, are spans one by one. Boxes have
to be the cells of a grid: then no element is missing or there twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from zckpt.codes import DTYPES_DIFFER, WRONG_RANK
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError, UnsupportedError, about
from zckpt.formats.lost import absent_boxes, is_lost, tensor_of
from zckpt.formats.torch_files.tensors import slot_of, unresolved
from zckpt.state import Checkpoint, Duplicate, Parameter, Shape, Slot
from zckpt.state.boxes import is_within, row_major
from zckpt.state.inventory import IMPLIED, REST, Rule
from zckpt.state.spans import Chosen, CutFiles, CutSpans, position
from zckpt.state.views import placed
from zckpt.torchfile import LEAVES, MetaTensor, Object, Place, Tensor, TorchFile, brief, children, filled

REPLICATE, SHARD, STRIDED = "Replicate", "Shard", "_StridedShard"

MAX_MESH_DIMENSIONS = 8
"""Of the meshes that programs make, pipeline, data, context, tensor and expert parallel have one each."""


Form = tuple[int, int]
"""The first version of torch that has pickled DTensors so."""

FORMS: dict[Form, str] = {
    (2, 3): "torch.distributed._tensor.api.DTensor",
    (2, 5): "torch.distributed.tensor.DTensor",
    (2, 10): "torch.distributed._mesh_layout._MeshLayout",
    (2, 13): "torch.distributed._mesh_layout._FlatLayout",
}
"""By form, oldest first, what its files name and those of older ones do not.

2.3    a mesh is a tensor of ranks; with its groups' ranks up to 2.7, and their names from 2.8 on
2.5    the same; classes have moved to `torch.distributed.tensor`
2.10   a mesh is a layout of sizes and strides, and its ranks in a line; a spec has the order of the shards
2.13   the layout has a layout for each dimension
"""


def form_of(file: TorchFile) -> Form | None:
    """Return the form of the DTensors in a file; None where it has none."""
    names = {name for names in file.globals.values() for name in names}
    return max((form for form, marker in FORMS.items() if marker in names), default=None)


def versions_with(form: Form) -> str:
    """Say which versions of torch have a form."""
    ends = [f"to {major}.{minor - 1}" for major, minor in FORMS if (major, minor) > form]
    return " ".join([f"{form[0]}.{form[1]}", ends[0] if ends else "and newer"])


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks, as one of them sees it.

    Parameters
    ----------
    sizes : tuple of int, ranks
        Along each dimension.
    coordinate : tuple of int
        Of the rank that wrote the file.
    names : tuple of str
        Of the dimensions; empty where they have none.
    device : str
        Type of the devices.
    rank : int or None
        The rank that wrote the file, of all; None where it does not say.
    """

    sizes: Shape
    coordinate: Shape
    names: tuple[str, ...] = ()
    device: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies along one dimension of the mesh.

    `dim`: of the tensor, where it is cut; `split_factor`: of a strided one: into how many shards later dimensions of
    the mesh have cut that dimension before.
    """

    kind: str
    dim: int = 0
    split_factor: int = 1


def read_mesh(node: object, numbers: Sequence[int | str] = ()) -> Mesh:
    """Return the mesh that a pickled `DeviceMesh` is; `numbers`: of its file, where the tree has blanks.

    Raises UnsupportedError: it does not say how large it is, or where in it the rank is.
    """
    if not isinstance(node, Object) or not node.qualified.endswith("DeviceMesh"):
        raise DamagedFileError("a DTensor without a mesh", found=brief(node, 60))
    sizes, coordinate = _sizes(node), integers(filled(node.get("_coordinate_on_dim"), numbers))
    names = node.get("_mesh_dim_names", node.get("mesh_dim_names"))
    if sizes is None or coordinate is None or len(sizes) != len(coordinate) or len(sizes) > MAX_MESH_DIMENSIONS:
        raise UnsupportedError(
            "a DTensor whose mesh does not state the rank's coordinate",
            expected="mesh sizes and a coordinate",
            found=f"sizes {sizes}, coordinate {coordinate}",
        )
    if not all(0 <= at < size for at, size in zip(coordinate, sizes, strict=True)):
        raise DamagedFileError("a rank outside its mesh", expected=f"below {sizes}", found=coordinate)
    known = names if isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names) else ()
    device = node.get("_device_type", node.get("device_type"))
    device = device if isinstance(device, str) else ""
    return Mesh(sizes, coordinate, tuple(known), device, _rank(node, sizes, coordinate, numbers))


def _rank(node: Object, sizes: Sequence[int], coordinate: Sequence[int], numbers: Sequence[int | str]) -> int | None:
    rank, ranks = filled(node.get("_rank"), numbers), integers(node.get("_flatten_mesh_list"))
    if type(rank) is int:
        return rank
    if ranks is None or len(ranks) != math.prod(sizes):
        return None
    return ranks[position(coordinate, row_major(sizes))]


def _sizes(node: Object) -> Shape | None:
    mesh = node.get("mesh")
    if isinstance(mesh, Tensor):
        return mesh.shape
    layout = node.get("_layout")
    if not isinstance(layout, Object):
        return None
    axes = layout.get("axes")
    if isinstance(axes, (tuple, list)):
        shapes = [axis.get("shape") if isinstance(axis, Object) else None for axis in axes]
    else:
        whole = layout.get("shape", layout.get("sizes"))
        shapes = list(whole) if isinstance(whole, (tuple, list)) else [whole]
    found = [_product(shape) for shape in shapes]
    return tuple(size for size in found if size is not None) if None not in found else None


def _product(shape: object) -> int | None:
    """Return the product of the numbers in a shape, or a number by itself; None if it has anything else."""
    sizes = integers((shape,) if type(shape) is int else shape)
    usable = sizes is not None and len(sizes) <= MAX_MESH_DIMENSIONS and min(sizes, default=0) >= 0
    return math.prod(sizes) if sizes is not None and usable else None


def integers(value: object) -> tuple[int, ...] | None:
    """Return what is a tuple or a list of integers only."""
    if not isinstance(value, (tuple, list)) or not all(type(one) is int for one in value):
        return None
    return tuple(one for one in value if type(one) is int)


def read_placements(node: object) -> tuple[Placement, ...]:
    """Return the placements that a DTensor's spec has.

    Raises UnsupportedError: one of another kind: a rank's elements are then no part of the tensor, as partial sums are.
    """
    if not isinstance(node, (tuple, list)):
        raise DamagedFileError("a DTensor without placements", found=brief(node, 60))
    found = []
    for one in node:
        kind = one.qualified.rpartition(".")[2] if isinstance(one, Object) else ""
        if not isinstance(one, Object) or kind not in (REPLICATE, SHARD, STRIDED):
            raise UnsupportedError(
                "a DTensor with an unsupported placement",
                expected="Shard or Replicate",
                found=kind or brief(one, 60),
            )
        dim, factor = one.get("dim", next(iter(one.args), None)), one.get("split_factor", 1)
        if kind == REPLICATE:
            dim, factor = 0, 1
        if type(dim) is not int or type(factor) is not int:
            raise DamagedFileError("a DTensor with an unreadable placement", expected="Shard(dim)", found=dim)
        found.append(Placement(kind, dim, factor))
    return tuple(found)


def box_of(shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh) -> tuple[Shape, Shape]:
    """Return the offsets and sizes of the box that a rank has.

    Each dimension of the mesh cuts what the ones before it have left, in pieces of ceil(n / ranks), of which the last
    are smaller or empty. `shape`: of the whole tensor; `placements`: one for each dimension of the mesh. Raises
    UnsupportedError: strided shards in another order than that of FSDP over tensor parallelism.

    Source: torch 2.13, `compute_local_shape_and_global_offset`; `torch.chunk`.
    """
    if len(placements) != len(mesh.sizes):
        raise DamagedFileError(
            "a DTensor whose number of placements differs from its mesh's dimensions",
            expected=len(mesh.sizes),
            found=len(placements),
        )
    offsets, sizes = [0] * len(shape), list(shape)
    for at in _order(placements, mesh):
        dim = placements[at].dim + (len(shape) if placements[at].dim < 0 else 0)
        if not 0 <= dim < len(shape):
            raise DamagedFileError("a DTensor cut along a dimension that it does not have", found=dim)
        step = -(-sizes[dim] // mesh.sizes[at])
        start = min(step * mesh.coordinate[at], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _order(placements: Sequence[Placement], mesh: Mesh) -> list[int]:
    """Return the dimensions of the mesh that cut, in the order in which they do.

    FSDP cuts what tensor parallelism has left, and comes first in the mesh: its shard is then strided, by as many as
    the later ones have cut before it.
    """
    cutting = [at for at, one in enumerate(placements) if one.kind != REPLICATE]
    if all(placements[at].kind == SHARD for at in cutting):
        return cutting
    for at in cutting:
        same = [later for later in cutting if later > at and placements[later].dim == placements[at].dim]
        if placements[at].split_factor != math.prod(mesh.sizes[later] for later in same):
            raise UnsupportedError(
                "a DTensor with strided shards in an unsupported order",
                expected="shards of FSDP over tensor parallelism",
                found=", ".join(f"{one.kind}({one.dim}, {one.split_factor})" for one in placements),
                advice="save it with torch.distributed.checkpoint in the program that wrote it",
            )
    return cutting[::-1]


PLAIN, DTENSOR, SHARDED = "Tensor", "DTensor", "ShardedTensor"

PARAMETER = "torch._utils._rebuild_parameter"


CLONED = "_has_been_cloned"
"""An attribute that FSDP1 leaves on parameters which it saves whole, and not on buffers."""

_ABOUT = "the places of its elements, and their ranks"

_PLACES = (
    ("attributes", CLONED),
    ("state", "*", "_spec", REST),
    ("attributes", "_spec", REST),
    ("state", "0", "*", "cls"),
    ("state", "0", "*", "state", "*", "metadata", REST),
    ("state", "1", "cls"),
    ("state", "1", "state", REST),
    ("state", "2", REST),
    ("state", "3", REST),
    ("state", "4"),
)
"""Within a DTensor or a ShardedTensor, all but its elements."""


def rules_of(*place: str) -> tuple[Rule, ...]:
    """Return the inventory's rules for DTensors and ShardedTensors at some place in a file's tree."""
    return tuple(Rule((*place, *steps), IMPLIED, _ABOUT, tensors="_spec" in steps) for steps in _PLACES)


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor and the tensor that has its elements."""

    offsets: Shape
    sizes: Shape
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank has of a tensor.

    Parameters
    ----------
    kind : {"Tensor", "DTensor", "ShardedTensor"}
    shape : tuple of int
        Of the whole tensor.
    dtype : str
    boxes : tuple of Box
        Those without elements are left out.
    mesh : Mesh or None
        Of a DTensor, or of the process groups of a ShardedTensor: copies by shards.
    is_parameter : bool
        Whether FSDP has shown that it is one: what it has cut, or put together again.
    local : Tensor or None
        The elements that a DTensor has, or none of them.
    placements : tuple of Placement
        Of a DTensor.
    at : int
        Which of the meshes of its file its mesh is.
    """

    kind: str
    shape: Shape
    dtype: str
    boxes: tuple[Box, ...]
    mesh: Mesh | None = None
    is_parameter: bool = True
    local: Tensor | None = None
    placements: tuple[Placement, ...] = ()
    at: int = 0


def elements(node: object) -> object:
    """Return what the inventory has to look at of a tensor: of a DTensor or a ShardedTensor the tensors it holds.

    Where its elements belong follows from the rest. One that has anything else, or is none, is returned as it is.
    """
    if not isinstance(node, MetaTensor) or node.attributes is not None or not isinstance(node.state, tuple):
        return node
    kind = _class_of(node)
    match node.state:
        case (None, dict(slots)) if kind == DTENSOR and slots.keys() == {"_local_tensor", "_spec"}:
            return slots["_local_tensor"]
        case (list(shards), *_) if kind == SHARDED and all(isinstance(one, Object) for one in shards):
            return [one.get("tensor") for one in shards]
    return node


def _class_of(node: MetaTensor) -> str:
    """Return the name of a tensor's class; empty where it has none of its own."""
    return "" if node.subclass is None else node.subclass.name


def is_share(file: TorchFile) -> bool:
    """Tell whether a file names the classes of tensors that several ranks share."""
    return any(name.rpartition(".")[2] in (DTENSOR, SHARDED) for names in file.globals.values() for name in names)


def shares(root: object) -> Iterator[tuple[Place, MetaTensor]]:
    """Yield the tensors below a node that several ranks share, and the keys that lead to them."""
    waiting: list[tuple[Place, object]] = [((), root)]
    seen: set[int] = set()
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, MetaTensor) and _class_of(node) in (DTENSOR, SHARDED):
            yield place, node
        elif id(node) not in seen:
            seen.add(id(node))
            below = [((*place, step), child) for step, child in children(node) if type(child) not in LEAVES]
            waiting.extend(reversed(below))


def refuse_share(file: TorchFile) -> None:
    """Raise UnsupportedError if a file, whatever its name is, has what one rank has of tensors that several share."""
    share = next(shares(file.root), None) if is_share(file) else None
    if share is None:
        return
    place, node = share
    try:
        held = RankReader().held(node)
    except SourceError:
        held = None
    mesh = None if held is None else held.mesh
    raise UnsupportedError(
        f"holds one rank's part of a sharded checkpoint: {'.'.join(map(str, place))[:80]} is a {_class_of(node)}",
        path=file.path,
        expected="whole tensors, or a format whose files state their rank",
        found=None if mesh is None else f"rank {mesh.rank} of {math.prod(mesh.sizes)}",
        advice="save it with torch.distributed.checkpoint on all ranks of the program that wrote it",
        ranks=[] if mesh is None or mesh.rank is None else [mesh.rank],
    )


def _data_of(node: object) -> object:
    """Return the data of a parameter of another kind of tensor; any other node as it is."""
    return node.args[0] if isinstance(node, Object) and node.qualified == PARAMETER and node.args else node


class RankReader:
    """Reads the tensors of one rank's file, which share meshes and placements.

    `numbers`: of the file; `meshes`: the nodes of its meshes, and what each is.
    """

    def __init__(self, numbers: Sequence[int | str] = ()) -> None:
        self._specs: dict[int, tuple[int, tuple[Placement, ...]]] = {}
        self._at: dict[int, int] = {}
        self._numbers = numbers
        self.meshes: list[tuple[object, Mesh]] = []

    def held(self, node: object) -> Held | None:
        """Return what a node is of a tensor; None if it is none.

        Raises SourceError: it is one of a kind that is not read, or contradicts itself.
        """
        node = _data_of(node)
        if isinstance(node, Tensor):
            boxes = (Box((0,) * len(node.shape), node.shape, node),) if node.numel else ()
            return Held(PLAIN, node.shape, node.dtype, boxes, None, CLONED in (node.attributes or {}))
        if not isinstance(node, MetaTensor):
            return None
        if _class_of(node) == DTENSOR:
            return self._dtensor(node)
        if _class_of(node) == SHARDED:
            return self._sharded(node)
        raise UnsupportedError(f"holds a tensor of class {node.subclass}", expected="Tensor, DTensor or ShardedTensor")

    def _dtensor(self, node: MetaTensor) -> Held:
        local, spec = _data_of(node.get("_local_tensor")), node.get("_spec")
        if not isinstance(local, Tensor) or not isinstance(spec, Object):
            raise UnsupportedError("a DTensor without local elements", expected="a local tensor", found=brief(local))
        at, placements = self._spec(spec)
        return _dtensor(
            Held(DTENSOR, node.shape, local.dtype, (), None, True, local, placements, at), self.meshes[at][1]
        )

    def _spec(self, spec: Object) -> tuple[int, tuple[Placement, ...]]:
        """Return which mesh a spec has, and its placements; both are objects that many tensors share."""
        known = self._specs.get(id(spec))  # the file's tree keeps both, so that their ids stay their own
        if known is None:
            mesh = spec.get("mesh")
            if id(mesh) not in self._at:
                self._at[id(mesh)] = len(self.meshes)
                self.meshes.append((mesh, read_mesh(mesh, self._numbers)))
            known = self._specs[id(spec)] = self._at[id(mesh)], read_placements(spec.get("placements"))
        return known

    def _sharded(self, node: MetaTensor) -> Held:
        state = node.state
        shards, metadata = (state[0], state[1]) if isinstance(state, tuple) and len(state) >= 2 else (None, None)
        size = integers(metadata.get("size")) if isinstance(metadata, Object) else None
        if not isinstance(shards, list) or size is None or size != node.shape:
            raise DamagedFileError("an unreadable ShardedTensor", expected=f"shards of shape {node.shape}", found=size)
        boxes = [self._shard(shard, size) for shard in shards]
        return Held(SHARDED, size, node.dtype, tuple(box for box in boxes if box.tensor.numel), _groups(state))

    def _shard(self, shard: object, shape: Shape) -> Box:
        tensor = shard.get("tensor") if isinstance(shard, Object) else None
        about = shard.get("metadata") if isinstance(shard, Object) else None
        offsets, sizes = (
            integers(about.get(key)) if isinstance(about, Object) else None for key in ("shard_offsets", "shard_sizes")
        )
        if not isinstance(tensor, Tensor) or offsets is None or sizes is None or tensor.shape != sizes:
            raise DamagedFileError(
                "an unreadable shard of a ShardedTensor",
                expected=f"a tensor of shape {sizes}",
                found=tensor.shape if isinstance(tensor, Tensor) else brief(tensor),
            )
        if not is_within((offsets, sizes), shape):
            raise DamagedFileError(
                "a shard outside its tensor", expected=f"within {shape}", found=f"{offsets} + {sizes}"
            )
        return Box(offsets, sizes, tensor)


def _dtensor(held: Held, mesh: Mesh) -> Held:
    """Return what a rank has of a DTensor, in whose file the mesh is this one. Raises DamagedFileError: it is not."""
    local = held.local
    offsets, sizes = box_of(held.shape, held.placements, mesh)
    if local is None or local.shape != sizes:
        raise DamagedFileError(
            f"a DTensor of shape {held.shape} whose local tensor does not fit its mesh",
            expected=f"shape {sizes}",
            found=None if local is None else local.shape,
        )
    return replace(held, mesh=mesh, boxes=(Box(offsets, sizes, local),) if local.numel else ())


def _groups(state: object) -> Mesh | None:
    """Return the process group that a ShardedTensor was cut for, as the last dimension of a mesh of all ranks."""
    group = state[2] if isinstance(state, tuple) and len(state) > 2 else None
    keys = ("local_rank", "local_world_size", "global_rank", "global_world_size")
    known = integers(tuple(group.get(key) for key in keys)) if isinstance(group, Object) else None
    if known is None or not 0 <= known[0] < known[1] or not 0 <= known[2] < known[3] or known[3] % known[1]:
        return None
    return Mesh((known[3] // known[1], known[1]), (known[2] // known[1], known[0]), rank=known[2])


Cell = tuple[Shape, Shape]
"""Offsets and sizes of a box."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Ranks that have rows of a tensor in turn, `width` elements each, and whose trees they have: see `RankFiles`."""

    ranks: tuple[int, ...]
    width: int
    trees: tuple[int, ...]
    which: tuple[int, ...]


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
        self._turns: dict[object, list[_Turn] | None] = {}

    def begin(self, rank: int, file: TorchFile) -> tuple[int, RankReader]:
        """Return the first rank whose file has the tree that a rank's has, and what reads that."""
        if id(file.storages) not in self._trees:
            self._trees[id(file.storages)] = file.storages, rank, RankReader(file.numbers)
        _, first, reader = self._trees[id(file.storages)]
        self.tree[rank] = first
        if first != rank:
            self._meshes[rank] = [read_mesh(node, file.numbers) for node, _ in reader.meshes]
        return first, reader

    def of(self, rank: int, held: Held) -> Held:
        """Return what a rank has, given what the first of its group has."""
        if held.local is None or rank not in self._meshes:
            return held
        with about(self.paths[rank]):
            return _dtensor(held, self._meshes[rank][held.at])

    def turns(self, across: Across) -> list[_Turn] | None:
        """Return each copy of a DTensor that ranks have in turn; None of what is cut otherwise, or does not fit.

        It depends on shapes and meshes alone, which thousands of tensors have in common.
        """
        helds = across.by_tree
        one = next(iter(helds.values()))
        if self.lost or any((x.kind, x.shape, x.dtype, x.placements) != (DTENSOR, one.shape, one.dtype, one.placements)
                            for x in helds.values()):  # fmt: skip
            return None
        key = (
            one.shape,
            one.placements,
            *((tree, x.at, x.local.shape if x.local else None) for tree, x in helds.items()),
        )
        if key not in self._turns:
            self._turns[key] = self._turns_of(across)
        return self._turns[key]

    def _turns_of(self, across: Across) -> list[_Turn] | None:
        try:
            held = list(across)
        except SourceError:  # which is raised where it is said of which tensor
            return None
        _, first = held[0]
        if any(one.mesh is not None and one.mesh.rank not in (None, rank) for rank, one in held):
            return None
        cells: dict[Cell, list[int]] = {}
        for rank, one in held:
            for box in one.boxes:
                cells.setdefault((box.offsets, box.sizes), []).append(rank)
        ordered = sorted(cells.items())
        counts = {len(holders) for _, holders in ordered}
        width = _rows([cell for cell, _ in ordered], first.shape)
        if len(counts) != 1 or not width or not _is_grid(first.shape, cells):
            return None
        found = []
        for turn in range(counts.pop()):
            ranks = tuple(holders[turn] for _, holders in ordered)
            trees = tuple(dict.fromkeys(self.tree[rank] for rank in ranks))
            at = {tree: number for number, tree in enumerate(trees)}
            found.append(_Turn(ranks, width, trees, tuple(at[self.tree[rank]] for rank in ranks)))
        return found

    def _in_turn(self, name: str, across: Across, turn: _Turn) -> Slot | None:
        """Return a slot that ranks have in turn; None where their tensors are not all alike and dense."""
        tensors = [across.by_tree[tree].boxes[0].tensor for tree in turn.trees]
        first = tensors[0]
        for tree, one in zip(turn.trees, tensors, strict=True):
            if unresolved(one, self.paths[tree]) or not one.is_contiguous or one.byteorder != first.byteorder:
                return None
        offsets = Chosen(turn.which, tuple(one.offset for one in tensors))
        files = self._files(turn.ranks, offsets, first)
        whole = across.first[1]
        return Slot(name, whole.dtype, whole.shape, CutSpans(files, whole.shape, 0, turn.width))

    def _files(self, ranks: tuple[int, ...], offsets: Sequence[int], like: Tensor) -> CutFiles:
        if ranks not in self._known:  # what files have in common is kept once for all parameters
            self._known[ranks] = tuple(self.paths[rank] for rank in ranks), {}
        paths, indexes = self._known[ranks]
        return CutFiles(paths, offsets, like.dtype, like.byteorder, indexes)

    def cut(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> CutFiles | None:
        """Return one tensor in each of some ranks' files as a line; None where they are not all alike and dense."""
        first = tensors[0]
        for rank, one in zip(ranks, tensors, strict=True):
            if unresolved(one, self.paths[rank]) or not one.is_contiguous or one.byteorder != first.byteorder:
                return None
        return self._files(ranks, tuple(one.offset for one in tensors), first)

    def joined(self, name: str, label: str, across: Across) -> list[tuple[int, Slot]]:
        """Return each whole copy of a slot that ranks have, and the first rank of those that it is on.

        Parameters
        ----------
        name : str
            Of the slot.
        label : str
            What to call it in messages: the parameter.
        across : Across

        Raises
        ------
        LayoutError
            Ranks have other shapes or types than the first, or together not every element once.
        ShardError
            A file is another rank's than its name says.
        UnsupportedError
            They have flattened pieces of which nothing says where they lie.
        """
        in_turn = [(min(turn.ranks), self._in_turn(name, across, turn)) for turn in self.turns(across) or ()]
        found = [(rank, slot) for rank, slot in in_turn if slot is not None]
        if found and len(found) == len(in_turn):
            return found
        held = list(across)
        rank, first = held[0]
        if {(one.kind, len(one.shape), one.dtype) for _, one in held} == {(PLAIN, 1, first.dtype)}:
            sizes = [one.shape[0] for _, one in held]  # where all ranks have nothing, it is an empty parameter
            if 0 in sizes and len(set(sizes)) > 1:
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
            if (one.shape, one.dtype) != (first.shape, first.dtype):
                raise LayoutError(
                    f"{label} differs from rank {rank}'s",
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
        if self.lost:
            cells |= {box: [] for box in absent_boxes(first.shape, list(cells))}
            most = max(map(len, cells.values()))
            for (_, shape), holders in cells.items():
                holders.extend([(self.lost[0], tensor_of(first.dtype, shape))] * (max(most, 1) - len(holders)))
        self._check(label, first.shape, cells)
        ordered = sorted(cells.items())
        count = min(len(holders) for _, holders in ordered)
        rest = [(cell, holder) for cell, holders in ordered for holder in holders[count:]]
        if rest:
            raise LayoutError(
                f"ranks do not have the same number of copies of all elements of {label}",
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
        width = _rows([cell for cell, _, _ in pieces], one.shape)
        if width:
            files = self.cut(tuple(rank for _, rank, _ in pieces), [tensor for _, _, tensor in pieces])
            if files is not None:
                return Slot(name, one.dtype, one.shape, CutSpans(files, one.shape, 0, width))
        return placed([(low, slot_of(name, tensor, self.paths[rank])) for (low, _), rank, tensor in pieces])

    def _check(self, label: str, shape: Shape, cells: dict[Cell, list[tuple[int, Tensor]]]) -> None:
        """Raise unless boxes are the cells of a grid over the whole tensor."""
        if _is_grid(shape, cells):
            return
        held = sum(math.prod(sizes) for _, sizes in cells)
        raise LayoutError(
            f"rank files do not have every element of {label} exactly once",
            path=self.paths[0],
            expected=f"{math.prod(shape)} elements of shape {shape}",
            found=f"{held} in {len(cells)} boxes",
            advice="rank files are missing, or from other runs",
            parameters=[label],
        )


def _is_grid(shape: Shape, cells: Collection[Cell]) -> bool:
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


def _rows(cells: Sequence[Cell], shape: Shape) -> int:
    """Return how many elements of whole rows each box but the last has, which may have fewer; 0 of other boxes."""
    rows = [sizes[0] for _, sizes in cells if sizes and sizes[1:] == shape[1:]]
    are_alike = len(cells) == len(rows) > 1 and set(rows[:-1]) == {rows[0]} and rows[-1] <= rows[0]
    return rows[0] * math.prod(shape[1:]) if are_alike else 0


@dataclass(slots=True)
class Across:
    """What ranks have of one tensor: of those whose files share a tree, what the first has.

    `by_tree`: by that rank, in order; ranks of other trees have nothing.
    """

    files: RankFiles
    by_tree: dict[int, Held] = field(default_factory=dict)

    @property
    def first(self) -> tuple[int, Held]:
        """The first rank, and what it has."""
        return next(iter(self.by_tree.items()))

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
