"""What one rank's file has of a tensor: the shape of the whole, and the boxes that are there.

DTensor          one box, which the mesh and the placements say; see `mesh`
ShardedTensor    the boxes of its local shards, each with its offsets
Tensor           the whole tensor
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zckpt.errors import DamagedFileError, SourceError, UnsupportedError
from zckpt.formats.fsdp_rank_files.mesh import Mesh, Placement, box_of, integers, read_mesh, read_placements
from zckpt.state.inventory import IMPLIED, REST, Rule
from zckpt.torchfile import LEAVES, MetaTensor, Object, Tensor, TorchFile, brief, children

PLAIN, DTENSOR, SHARDED = "Tensor", "DTensor", "ShardedTensor"

PARAMETER = "torch._utils._rebuild_parameter"


CLONED = "_has_been_cloned"
"""An attribute that FSDP1 leaves on parameters which it saves whole, and not on buffers."""

_ABOUT = "where its elements belong, and on which ranks"

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

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
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
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    mesh: Mesh | None = None
    is_parameter: bool = True


def elements(node: object) -> object:
    """Return what the inventory has to look at of a tensor: of a DTensor or a ShardedTensor the tensors it holds.

    Where its elements belong follows from the rest. One that has anything else, or is none, is returned as it is.
    """
    if not isinstance(node, MetaTensor) or node.attributes is not None or not isinstance(node.state, tuple):
        return node
    kind = node.subclass.name if node.subclass is not None else ""
    match node.state:
        case (None, dict(slots)) if kind == DTENSOR and slots.keys() == {"_local_tensor", "_spec"}:
            return slots["_local_tensor"]
        case (list(shards), *_) if kind == SHARDED and all(isinstance(one, Object) for one in shards):
            return [one.get("tensor") for one in shards]
    return node


def refuse_share(file: TorchFile) -> None:
    """Raise UnsupportedError if a file, whatever its name is, has what one rank has of tensors that several share."""
    if not any(name.rpartition(".")[2] in (DTENSOR, SHARDED) for names in file.globals.values() for name in names):
        return
    waiting: list[tuple[tuple[object, ...], object]] = [((), file.root)]
    seen: set[int] = set()
    while waiting:
        place, node = waiting.pop()
        kind = node.subclass.name if isinstance(node, MetaTensor) and node.subclass is not None else ""
        if isinstance(node, MetaTensor) and kind in (DTENSOR, SHARDED):
            try:
                held = RankReader().held(node)
            except SourceError:
                held = None
            mesh = None if held is None else held.mesh
            raise UnsupportedError(
                f"holds one rank's part of what ranks share: {'.'.join(map(str, place))[:80]} is a {kind}",
                path=file.path,
                expected="whole tensors, or a format whose files say which rank's they are",
                found=None if mesh is None else f"rank {mesh.rank} of {math.prod(mesh.sizes)}",
                advice="save it with torch.distributed.checkpoint, at all ranks of the program that wrote it",
            )
        if id(node) not in seen:
            seen.add(id(node))
            below = [((*place, step), child) for step, child in children(node) if type(child) not in LEAVES]
            waiting.extend(reversed(below))


class RankReader:
    """Reads the tensors of one rank's file, which share meshes and placements."""

    def __init__(self) -> None:
        self._specs: dict[int, tuple[Mesh, tuple[Placement, ...]]] = {}
        self._meshes: dict[int, Mesh] = {}

    def held(self, node: object) -> Held | None:
        """Return what a node is of a tensor; None if it is none.

        Raises SourceError: it is one of a kind that is not read, or contradicts itself.
        """
        if isinstance(node, Object) and node.qualified == PARAMETER and node.args:
            node = node.args[0]
        if isinstance(node, Tensor):
            boxes = (Box((0,) * len(node.shape), node.shape, node),) if node.numel else ()
            return Held(PLAIN, node.shape, node.dtype, boxes, None, CLONED in (node.attributes or {}))
        if not isinstance(node, MetaTensor):
            return None
        kind = node.subclass.name if node.subclass is not None else ""
        if kind == DTENSOR:
            return self._dtensor(node)
        if kind == SHARDED:
            return self._sharded(node)
        raise UnsupportedError(f"holds a tensor of class {node.subclass}", expected="Tensor, DTensor or ShardedTensor")

    def _dtensor(self, node: MetaTensor) -> Held:
        local, spec = _attribute(node, "_local_tensor"), _attribute(node, "_spec")
        if isinstance(local, Object) and local.qualified == PARAMETER and local.args:
            local = local.args[0]
        if not isinstance(local, Tensor) or not isinstance(spec, Object):
            raise UnsupportedError(
                "a DTensor without elements of its own", expected="a local tensor", found=brief(local)
            )
        mesh, placements = self._spec(spec)
        offsets, sizes = box_of(node.shape, placements, mesh)
        if local.shape != sizes:
            raise DamagedFileError(
                f"a DTensor of shape {node.shape} with another local tensor than its mesh gives this rank",
                expected=f"shape {sizes}",
                found=local.shape,
            )
        boxes = (Box(offsets, sizes, local),) if local.numel else ()
        return Held(DTENSOR, node.shape, local.dtype, boxes, mesh)

    def _spec(self, spec: Object) -> tuple[Mesh, tuple[Placement, ...]]:
        """Return the mesh and the placements of a spec; both are objects that many tensors share."""
        known = self._specs.get(id(spec))  # the file's tree keeps both, so that their ids stay their own
        if known is None:
            mesh = spec.get("mesh")
            if id(mesh) not in self._meshes:
                self._meshes[id(mesh)] = read_mesh(mesh)
            known = self._specs[id(spec)] = self._meshes[id(mesh)], read_placements(spec.get("placements"))
        return known

    def _sharded(self, node: MetaTensor) -> Held:
        state = node.state
        shards, metadata = (state[0], state[1]) if isinstance(state, tuple) and len(state) >= 2 else (None, None)
        size = integers(metadata.get("size")) if isinstance(metadata, Object) else None
        if not isinstance(shards, list) or size is None or size != node.shape:
            raise DamagedFileError("an unreadable ShardedTensor", expected=f"shards of shape {node.shape}", found=size)
        boxes = [self._shard(shard, size) for shard in shards]
        return Held(SHARDED, size, node.dtype, tuple(box for box in boxes if box.tensor.numel), _groups(state))

    def _shard(self, shard: object, shape: tuple[int, ...]) -> Box:
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
        inside = len(offsets) == len(sizes) == len(shape) and all(
            low >= 0 and low + n <= whole for low, n, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise DamagedFileError(
                "a shard outside its tensor", expected=f"within {shape}", found=f"{offsets} + {sizes}"
            )
        return Box(offsets, sizes, tensor)


def _groups(state: object) -> Mesh | None:
    """Return the process group that a ShardedTensor was cut for, as the last dimension of a mesh of all ranks."""
    group = state[2] if isinstance(state, tuple) and len(state) > 2 else None
    keys = ("local_rank", "local_world_size", "global_rank", "global_world_size")
    known = integers(tuple(group.get(key) for key in keys)) if isinstance(group, Object) else None
    if known is None or not 0 <= known[0] < known[1] or not 0 <= known[2] < known[3] or known[3] % known[1]:
        return None
    return Mesh((known[3] // known[1], known[1]), (known[2] // known[1], known[0]), rank=known[2])


def _attribute(node: MetaTensor, name: str) -> object:
    """Return an attribute of a tensor, from its `__dict__` or its `__slots__`."""
    parts = [node.attributes, *(node.state if isinstance(node.state, tuple) else (node.state,))]
    return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)
