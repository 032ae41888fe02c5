"""What a rank has of a tensor: the shape of the whole, and the boxes that are in its file.

DTensor          one box, which the mesh and the placements that it is pickled with say
ShardedTensor    the boxes of its local shards, each with its offsets
Tensor           the whole tensor

DTensor      _local_tensor, _spec: DTensorSpec(mesh, placements, tensor_meta)
mesh         its sizes, and the coordinate of the rank that wrote the file; torch has changed the rest: see `FORMS`
placements   for each dimension of the mesh: Replicate, Shard(dim), _StridedShard(dim, split_factor), or Partial
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from zckpt.errors import DamagedFileError, SourceError, UnsupportedError
from zckpt.immutable import immutable
from zckpt.state import Shape, are_texts, list_of
from zckpt.state.boxes import Box, is_within, row_major
from zckpt.state.inventory import IMPLIED, REST, Rule
from zckpt.state.spans import position
from zckpt.torchfile import LEAVES, MetaTensor, Object, Place, Tensor, TorchFile, brief, children, filled, unwrapped

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


@immutable
class Mesh:
    """A mesh of ranks, as one of them sees it."""

    sizes: Shape  # along each dimension
    coordinate: Shape  # of the rank that wrote the file
    names: tuple[str, ...] = ()  # of the dimensions; empty where they have none
    device: str = ""  # type of the devices
    rank: int | None = None  # the rank that wrote the file, of all; None where it does not say
    keeps_order: bool = False  # whether torch cuts by its order, as 2.15 does if told to, and not by ascending ranks

    @property
    def named(self) -> dict[str, int]:
        """The size of each dimension, by its name; empty where they have none."""
        return dict(zip(self.names, self.sizes, strict=False))


@immutable
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
    coordinate = integers(filled(node.get("_coordinate_on_dim"), numbers))
    mesh, layout = node.get("mesh"), node.get("_layout")
    if isinstance(mesh, Tensor):
        sizes: Shape | None = mesh.shape
    else:
        if isinstance(axes := _said(layout, "axes"), (tuple, list)):
            shapes = [_said(axis, "shape") for axis in axes]
        else:
            whole = layout.get("shape", layout.get("sizes")) if isinstance(layout, Object) else None
            shapes = list(whole) if isinstance(whole, (tuple, list)) else [whole]
        found = [_product(shape) for shape in shapes]
        sizes = tuple(size for size in found if size is not None) if None not in found else None
    names = node.get("_mesh_dim_names", node.get("mesh_dim_names"))
    if sizes is None or coordinate is None or len(sizes) != len(coordinate) or len(sizes) > MAX_MESH_DIMENSIONS:
        raise UnsupportedError(
            "a DTensor whose mesh does not state the rank's coordinate",
            expected="mesh sizes and a coordinate",
            found=f"sizes {sizes}, coordinate {coordinate}",
        )
    if not all(0 <= at < size for at, size in zip(coordinate, sizes, strict=True)):
        raise DamagedFileError("a rank outside its mesh", expected=f"below {sizes}", found=coordinate)
    known = list_of(names)
    known = known if are_texts(known) and len(known) == len(sizes) else []
    device = node.get("_device_type", node.get("device_type"))
    device = device if isinstance(device, str) else ""
    rank, ranks = filled(node.get("_rank"), numbers), integers(node.get("_flatten_mesh_list"))
    if type(rank) is not int:
        is_listed = ranks is not None and len(ranks) == math.prod(sizes)
        rank = ranks[position(coordinate, row_major(sizes))] if ranks is not None and is_listed else None
    return Mesh(sizes, coordinate, tuple(known), device, rank, node.get("_preserve_rank_order") is True)


def _said(node: object, name: str) -> object:
    """Return an attribute of what should be an object."""
    return node.get(name) if isinstance(node, Object) else None


def _product(shape: object) -> int | None:
    """Return the product of the numbers in a shape, or a number by itself; None if it has anything else."""
    sizes = integers((shape,) if type(shape) is int else shape)
    if sizes is None or len(sizes) > MAX_MESH_DIMENSIONS or min(sizes, default=0) < 0:
        return None
    return math.prod(sizes)


def integers(value: object) -> tuple[int, ...] | None:
    """Return what is a tuple or a list of integers only."""
    return tuple(value) if isinstance(value, (tuple, list)) and all(type(one) is int for one in value) else None


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


def box_of(shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh) -> Box:
    """Return the offsets and sizes of the box that a rank has.

    Each dimension of the mesh cuts what the ones before it have left, in pieces of ceil(n / ranks), of which the last
    are smaller or empty. FSDP cuts what tensor parallelism has left, and comes first in the mesh: its shard is then
    strided, by as many as the later ones have cut before it. `shape`: of the whole tensor; `placements`: one for each
    dimension of the mesh. Raises UnsupportedError: strided shards in another order than that.

    Source: torch 2.13, `compute_local_shape_and_global_offset`; `torch.chunk`.
    """
    if len(placements) != len(mesh.sizes):
        raise DamagedFileError(
            "a DTensor whose number of placements differs from its mesh's dimensions",
            expected=len(mesh.sizes),
            found=len(placements),
        )
    cutting = [at for at, one in enumerate(placements) if one.kind != REPLICATE]
    if any(placements[at].kind != SHARD for at in cutting):
        for at in cutting:
            same = [later for later in cutting if later > at and placements[later].dim == placements[at].dim]
            if placements[at].split_factor != math.prod(mesh.sizes[later] for later in same):
                raise UnsupportedError(
                    "a DTensor with strided shards in an unsupported order",
                    expected="shards of FSDP over tensor parallelism",
                    found=", ".join(f"{one.kind}({one.dim}, {one.split_factor})" for one in placements),
                    advice="save it with torch.distributed.checkpoint in the program that wrote it",
                )
        cutting = cutting[::-1]
    offsets, sizes = [0] * len(shape), list(shape)
    for at in cutting:
        dim = placements[at].dim
        dim += len(shape) if dim < 0 else 0
        if not 0 <= dim < len(shape):
            raise DamagedFileError("a DTensor cut along a dimension that it does not have", found=dim)
        step = -(-sizes[dim] // mesh.sizes[at])
        start = min(step * mesh.coordinate[at], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


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


@immutable
class Piece:
    """A box of a tensor and the tensor that has its elements."""

    box: Box
    tensor: Tensor


@immutable
class Held:
    """What one rank has of a tensor."""

    kind: str  # {"Tensor", "DTensor", "ShardedTensor"}
    shape: Shape  # of the whole tensor
    dtype: str
    pieces: tuple[Piece, ...]  # those without elements are left out
    mesh: Mesh | None = None  # of a DTensor, or of the process groups of a ShardedTensor: copies by shards
    is_parameter: bool = True  # whether FSDP has shown that it is one: what it has cut, or put together again
    local: Tensor | None = None  # the elements that a DTensor has, or none of them
    placements: tuple[Placement, ...] = ()  # of a DTensor
    at: int = 0  # which of the meshes of its file its mesh is


def elements(node: object) -> object:
    """Return what the inventory has to look at of a tensor: of a DTensor or a ShardedTensor the tensors it holds.

    Where its elements belong follows from the rest. One that has anything else, or is none, is returned as it is.
    """
    if not isinstance(node, MetaTensor) or node.attributes is not None or not isinstance(node.state, tuple):
        return node
    kind = _class_of(node)
    match node.state:
        case (None, dict(slots)) if kind == DTENSOR and slots.keys() == {"_local_tensor", "_spec"}:
            return unwrapped(slots["_local_tensor"])
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


def with_shares(root: object, of: Callable[[MetaTensor], object]) -> object:
    """Return dicts and lists, which may be within themselves, with something else in the place of what ranks share."""
    made: dict[int, Any] = {}

    def other(node: object) -> object:
        if isinstance(node, MetaTensor):
            return of(node)
        if id(node) not in made and isinstance(node, list):
            found = made[id(node)] = []
            found.extend(map(other, node))
        elif id(node) not in made and isinstance(node, dict):
            several = made[id(node)] = {}
            several.update((key, other(value)) for key, value in node.items())
        return made.get(id(node), node)

    return other(root)


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
    """Return the data of a parameter of another kind of tensor, or of a wrapper; any other node as it is."""
    return unwrapped(node.args[0] if isinstance(node, Object) and node.qualified == PARAMETER and node.args else node)


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
            marks = node.attributes or {}
            stated = integers(marks.get("global_shape")) if "global_offsets" in marks else None
            if stated not in (None, node.shape):
                raise UnsupportedError(
                    "a tensor that is marked as a part of another, as torch 2.15's CheckpointableTensor is",
                    found=f"{node.shape} of {brief(stated)}",
                    advice="save it by torch.distributed.checkpoint, whose files zckpt reads",
                )
            pieces = (Piece(((0,) * len(node.shape), node.shape), node),) if node.numel else ()
            return Held(PLAIN, node.shape, node.dtype, pieces, None, CLONED in marks)
        if not isinstance(node, MetaTensor):
            return None
        if _class_of(node) == DTENSOR:
            local, spec = _data_of(node.get("_local_tensor")), node.get("_spec")
            if not isinstance(local, Tensor) or not isinstance(spec, Object):
                raise UnsupportedError(
                    "a DTensor without local elements", expected="a local tensor", found=brief(local)
                )
            # Many tensors share a spec and a mesh; the file's tree keeps both, so that their ids stay their own.
            known = self._specs.get(id(spec))
            if known is None:
                mesh = spec.get("mesh")
                if id(mesh) not in self._at:
                    self._at[id(mesh)] = len(self.meshes)
                    self.meshes.append((mesh, read_mesh(mesh, self._numbers)))
                known = self._specs[id(spec)] = self._at[id(mesh)], read_placements(spec.get("placements"))
            at, placements = known
            whole = Held(DTENSOR, node.shape, local.dtype, (), None, True, local, placements, at)
            return with_mesh(whole, self.meshes[at][1])
        if _class_of(node) == SHARDED:
            return self._sharded(node)
        raise UnsupportedError(f"holds a tensor of class {node.subclass}", expected="Tensor, DTensor or ShardedTensor")

    def _sharded(self, node: MetaTensor) -> Held:
        state = node.state if isinstance(node.state, tuple) else ()
        shards, metadata = state[:2] if len(state) >= 2 else (None, None)
        size = integers(_said(metadata, "size"))
        if not isinstance(shards, list) or size is None or size != node.shape:
            raise DamagedFileError("an unreadable ShardedTensor", expected=f"shards of shape {node.shape}", found=size)
        pieces = []
        for shard in shards:
            tensor, about = (_said(shard, key) for key in ("tensor", "metadata"))
            offsets, sizes = (integers(_said(about, key)) for key in ("shard_offsets", "shard_sizes"))
            if not isinstance(tensor, Tensor) or offsets is None or sizes is None or tensor.shape != sizes:
                raise DamagedFileError(
                    "an unreadable shard of a ShardedTensor",
                    expected=f"a tensor of shape {sizes}",
                    found=tensor.shape if isinstance(tensor, Tensor) else brief(tensor),
                )
            if not is_within((offsets, sizes), size):
                raise DamagedFileError(
                    "a shard outside its tensor", expected=f"within {size}", found=f"{offsets} + {sizes}"
                )
            if tensor.numel:
                pieces.append(Piece((offsets, sizes), tensor))
        # The process group that it was cut for, as the last dimension of a mesh of all ranks.
        group, mesh = state[2] if len(state) > 2 else None, None
        keys = ("local_rank", "local_world_size", "global_rank", "global_world_size")
        at, count, rank, world_size = integers(tuple(_said(group, key) for key in keys)) or (0, 0, 0, 0)
        if 0 <= at < count and 0 <= rank < world_size and not world_size % count:
            mesh = Mesh((world_size // count, count), (rank // count, at), rank=rank)
        return Held(SHARDED, size, node.dtype, tuple(pieces), mesh)


def with_mesh(held: Held, mesh: Mesh) -> Held:
    """Return what a rank has of a DTensor, in whose file the mesh is this one. Raises DamagedFileError: it is not."""
    local = held.local
    box = box_of(held.shape, held.placements, mesh)
    if local is None or local.shape != box[1]:
        raise DamagedFileError(
            f"a DTensor of shape {held.shape} whose local tensor does not fit its mesh",
            expected=f"shape {box[1]}",
            found=None if local is None else local.shape,
        )
    return replace(held, mesh=mesh, pieces=(Piece(box, local),) if local.numel else ())
