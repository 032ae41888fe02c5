"""Whole tensors by name, from the partitions of all ranks and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zckpt.optim.zero import gather
from zckpt.optim.zero.flat_group import FlatGroup

if TYPE_CHECKING:
    from zckpt.optim.zero.flat import FlatOptimizer

MASTER = "master"
GRADIENT = "gradient"


def slots(optimizer: FlatOptimizer, group: FlatGroup) -> dict[str, Any]:
    """Return what this rank holds of a group: its masters, gradients and the local optimizer's state."""
    found: dict[str, Any] = {MASTER: group.master.detach(), **optimizer.optim.state.get(group.master, {})}
    if group.gradient is not None:
        found[GRADIENT] = group.gradient
    return found


def get(optimizer: FlatOptimizer, name: str, slot: str) -> Any:
    """Return one slot of one parameter, whole, on every rank; see `ZeroOptimizer.full_state`."""
    group, position = optimizer.find(name)
    if slot == MASTER:
        group.adopt_weights(position)
    held = _slot(optimizer, group, name, slot)
    if not _is_flat(held, group):
        return held.clone() if isinstance(held, torch.Tensor) else held
    device = group.flat.device
    whole = torch.empty(group.numels[position], dtype=held.dtype, device=device)
    handles = []
    for rank in range(group.world_size):
        for f in group.fragments(rank):
            if f.index != position:
                continue
            part = whole[f.start : f.start + f.numel]
            if rank == group.rank:
                part.copy_(held[f.position : f.position + f.numel])
            if group.world_size > 1:
                source = dist.get_global_rank(group.process_group, rank)
                handles.append(dist.broadcast(part, src=source, group=group.process_group, async_op=True))
    gather.wait(handles)
    return whole.view(group.shapes[position])


def put(optimizer: FlatOptimizer, name: str, slot: str, value: torch.Tensor) -> None:
    """Set one slot of one parameter on every rank; see `ZeroOptimizer.set_full_state`."""
    group, position = optimizer.find(name)
    held = _slot(optimizer, group, name, slot)
    if not _is_flat(held, group):
        raise ValueError(f"{slot} of {name} is one value for all of its param group, and cannot be set for a parameter")
    if value.shape != group.shapes[position]:
        raise ValueError(f"{name} has the shape {tuple(group.shapes[position])}, not {tuple(value.shape)}")
    flat = value.detach().reshape(-1)
    for f in group.own:
        if f.index == position:
            held[f.position : f.position + f.numel].copy_(flat[f.start : f.start + f.numel])
    if slot == MASTER:
        start = group.starts[position]
        group.point(position)
        group.flat[start : start + flat.numel()].copy_(flat.to(group.master.dtype))


def _slot(optimizer: FlatOptimizer, group: FlatGroup, name: str, slot: str) -> Any:
    held = slots(optimizer, group)
    if slot not in held:
        raise ValueError(f"{name} has no {slot}: there are {', '.join(held)}")
    return held[slot]


def _is_flat(held: object, group: FlatGroup) -> bool:
    return isinstance(held, torch.Tensor) and held.shape == group.master.shape and held.dim() > 0
