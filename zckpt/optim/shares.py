"""Which elements of a tensor this rank has, and which ranks have the same ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zckpt.errors import UnsupportedError
from zckpt.state import Extent


@dataclass(frozen=True, slots=True)
class Share:
    """Elements of a tensor that this rank has.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor.
    extent : Extent
        A whole box, or a range of the flattened tensor.
    tensor : Tensor
        Those elements, in the extent's order; not a copy.
    ranks : tuple of int or None
        The ranks, in the world, that have the same; None: all that save together.
    """

    shape: tuple[int, ...]
    extent: Extent
    tensor: torch.Tensor
    ranks: tuple[int, ...] | None = None


def share_of(tensor: torch.Tensor, name: str) -> Share | None:
    """Return what this rank has of a tensor; None if it has nothing of it.

    Raises
    ------
    UnsupportedError
        A DTensor that is yet to be summed up, or of which a rank has several boxes; a sparse tensor.
    """
    if isinstance(tensor, DTensor):
        return _share_of_dtensor(tensor, name)
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} is {tensor.layout}, of which no part can be told", advice="make it dense")
    shape = tuple(tensor.shape)
    return Share(shape, Extent.whole(shape), tensor.detach())


def _share_of_dtensor(tensor: DTensor, name: str) -> Share | None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(f"{name} is a partial sum on each rank", found=tensor.placements)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = tensor.to_local().detach()
    if len(chunks) > 1:
        raise UnsupportedError(f"{name} has {len(chunks)} parts on one rank", found=tensor.placements)
    if not chunks:
        return None
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    extent = Extent(offsets, sizes, 0, local.numel())
    return Share(tuple(tensor.shape), extent, local, _replicas(tensor))


def _replicas(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks whose coordinates differ from this one's only where the tensor is replicated."""
    if not any(placement.is_replicate() for placement in tensor.placements):
        return (world_rank(),)
    mesh = tensor.device_mesh
    own = list(mesh.get_coordinate() or ())
    along = [
        range(mesh.size(dim)) if placement.is_replicate() else (own[dim],)
        for dim, placement in enumerate(tensor.placements)
    ]
    every = mesh.mesh
    return tuple(sorted(int(every[coordinate].item()) for coordinate in itertools.product(*along)))


def world_rank() -> int:
    """Return this rank's number in the world."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
