"""The whole state of a sharded optimizer on one rank.

What each rank holds (keys, shapes, element types, numbers) is told to the target first. Then every tensor is sent to
the target and to nobody else, one after the other, as a tensor: a rank that is not the target needs memory for one
tensor at most, and that only where its bytes are not in one piece on a device that the backend can send from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

State = dict[int, dict[str, Any]]
"""State by global parameter number: position over all groups, in order."""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that will be sent: its shape and element type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of no dimension, such as `step`: its value goes with the description."""

    value: float | complex
    dtype: torch.dtype
    on_cpu: bool


def collect(state: Mapping[int, Mapping[str, Any]], group: dist.ProcessGroup, to: int) -> State | None:
    """Return the state of all ranks, on the CPU, on rank `to` of the group; None on the others.

    Parameters
    ----------
    state : mapping
        This rank's state by global parameter number. Nothing of it is kept: tensors are copied.
    group : ProcessGroup
    to : int
        Rank in the group.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    described = {number: {key: _described(value) for key, value in one.items()} for number, one in state.items()}
    told: list[Any] = [described]
    if world_size > 1:
        told = [None] * world_size
        dist.gather_object(described, told if rank == to else None, dst=dist.get_global_rank(group, to), group=group)
    device = wire_device(group)
    if rank != to:
        for one in state.values():
            for value in one.values():
                if _is_sent(value):
                    dist.send(_wire(value, device), dst=dist.get_global_rank(group, to), group=group)
        return None
    found: State = {}
    for source in range(world_size):
        for number, one in told[source].items():
            own = state[number] if source == rank else {}
            received = {key: _received(value, own.get(key), source, group, device) for key, value in one.items()}
            found[number] = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in received.items()}
    return {number: found[number] for number in sorted(found)}


def move(
    state: Mapping[int, Mapping[str, Any]], before: Sequence[int], after: Sequence[int], group: dist.ProcessGroup
) -> State:
    """Return this rank's state when parameters go to other ranks. Called on all ranks of the group.

    Parameters
    ----------
    state : mapping
        This rank's state by parameter number, empty dicts included.
    before, after : sequence of int
        The rank in the group that has each parameter.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    described = {number: {key: _described(value) for key, value in one.items()} for number, one in state.items()}
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, described, group=group)
    device = wire_device(group)
    found: State = {}
    for number, (source, target) in enumerate(zip(before, after, strict=True)):
        if rank == source == target:
            found[number] = dict(state[number])
        elif rank == source:
            for value in state[number].values():
                if _is_sent(value):
                    dist.send(_wire(value, device), dst=dist.get_global_rank(group, target), group=group)
        elif rank == target:
            one = told[source][number]
            found[number] = {key: _received(value, None, source, group, device) for key, value in one.items()}
    return found


def _described(value: object) -> object:
    """Return what is told of a value: a tensor's form, a single number, or the value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim():
        return Described(tuple(value.shape), value.dtype)
    return Number(value.item(), value.dtype, value.device.type == "cpu")


def _is_sent(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _received(value: object, own: object, source: int, group: dist.ProcessGroup, device: torch.device) -> object:
    if isinstance(value, Number):
        return torch.tensor(value.value, dtype=value.dtype, device="cpu" if value.on_cpu else device)
    if not isinstance(value, Described):
        return value
    if isinstance(own, torch.Tensor):
        return own.detach().to("cpu", copy=True).contiguous()
    tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    if tensor.numel():
        dist.recv(tensor.view(-1).view(torch.uint8), src=dist.get_global_rank(group, source), group=group)
    return tensor


def _wire(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor's bytes where the backend sends from."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that a group's backend sends from: the current GPU for NCCL and its like, else the CPU."""
    backend = dist.get_backend(group)
    if any(name in backend for name in ("gloo", "mpi", "ucc")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
