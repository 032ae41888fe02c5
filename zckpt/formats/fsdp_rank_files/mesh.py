"""Which box of a tensor a rank has, by the mesh and the placements that a DTensor is pickled with. Pure.

DTensor      _local_tensor, _spec: DTensorSpec(mesh, placements, tensor_meta)
mesh         its sizes, and the coordinate of the rank that wrote the file; torch has changed the rest several times:
             `mesh` (a tensor of ranks) in older versions, `_layout` of sizes and strides in newer ones
placements   for each dimension of the mesh: Replicate, Shard(dim), _StridedShard(dim, split_factor), or Partial
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.torchfile import Object, Tensor, brief

REPLICATE, SHARD, STRIDED = "Replicate", "Shard", "_StridedShard"

MAX_MESH_DIMENSIONS = 8
"""Of the meshes that programs make, pipeline, data, context, tensor and expert parallel have one each."""


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

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
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


def read_mesh(node: object) -> Mesh:
    """Return the mesh that a pickled `DeviceMesh` is.

    Raises UnsupportedError: it does not say how large it is, or where in it the rank is.
    """
    if not isinstance(node, Object) or not node.qualified.endswith("DeviceMesh"):
        raise DamagedFileError("a DTensor without a mesh", found=brief(node, 60))
    sizes, coordinate = _sizes(node), integers(node.get("_coordinate_on_dim"))
    names = node.get("_mesh_dim_names", node.get("mesh_dim_names"))
    if sizes is None or coordinate is None or len(sizes) != len(coordinate) or len(sizes) > MAX_MESH_DIMENSIONS:
        raise UnsupportedError(
            "a DTensor whose mesh does not say where in it the rank is",
            expected="the sizes of the mesh, and a coordinate",
            found=f"sizes {sizes}, coordinate {coordinate}",
        )
    if not all(0 <= at < size for at, size in zip(coordinate, sizes, strict=True)):
        raise DamagedFileError("a rank outside its mesh", expected=f"below {sizes}", found=coordinate)
    known = isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
    device = node.get("_device_type", node.get("device_type"))
    found = tuple(map(str, names)) if known and isinstance(names, (tuple, list)) else ()
    return Mesh(sizes, coordinate, found, device if isinstance(device, str) else "", _rank(node, sizes, coordinate))


def _rank(node: Object, sizes: Sequence[int], coordinate: Sequence[int]) -> int | None:
    rank, ranks = node.get("_rank"), integers(node.get("_flatten_mesh_list"))
    if type(rank) is int:
        return rank
    at = 0
    for size, one in zip(sizes, coordinate, strict=True):
        at = at * size + one
    return ranks[at] if ranks is not None and len(ranks) == math.prod(sizes) else None


def _sizes(node: Object) -> tuple[int, ...] | None:
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
    """Return the product of the numbers in a shape, which may be nested; None if it has anything else."""
    if type(shape) is int:
        return shape if shape >= 0 else None
    if not isinstance(shape, (tuple, list)) or len(shape) > MAX_MESH_DIMENSIONS:
        return None
    found = [one for one in shape if type(one) is int and one >= 0]
    return math.prod(found) if len(found) == len(shape) else None


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
                "a DTensor with a placement that is no cut and no copy",
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


def box_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of the box that a rank has.

    Each dimension of the mesh cuts what the ones before it have left, in pieces of ceil(n / ranks), of which the last
    are smaller or empty. `shape`: of the whole tensor; `placements`: one for each dimension of the mesh. Raises
    UnsupportedError: strided shards in another order than that of FSDP over tensor parallelism.

    Source: torch 2.13, `compute_local_shape_and_global_offset`; `torch.chunk`.
    """
    if len(placements) != len(mesh.sizes):
        raise DamagedFileError(
            "a DTensor with other placements than its mesh has dimensions",
            expected=len(mesh.sizes),
            found=len(placements),
        )
    offsets, sizes = [0] * len(shape), list(shape)
    for at in _order(placements, mesh):
        dim = placements[at].dim + (len(shape) if placements[at].dim < 0 else 0)
        if not 0 <= dim < len(shape):
            raise DamagedFileError("a DTensor cut along a dimension that it has not", found=dim)
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
                "a DTensor with strided shards in an order that is not read",
                expected="shards of FSDP over tensor parallelism",
                found=", ".join(f"{one.kind}({one.dim}, {one.split_factor})" for one in placements),
                advice="write it with torch.distributed.checkpoint in the program that wrote it",
            )
    return cutting[::-1]
