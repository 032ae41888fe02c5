"""State, gradients and objects that ranks send each other, such as the whole state on one rank.

What each rank holds (keys, shapes, element types, numbers) is sent to the target first. Then every tensor is sent to
the target and to nobody else, one after the other, as a tensor: a rank that is not the target needs memory for one
tensor at most, and that only where its bytes are not in one piece on a device that the backend can send from.

`_broadcast_object`, `_recursive_copy_to_device` and `_is_trainable` are private names of torch's module
`zero_redundancy_optimizer` that torch's own tests, and programs like them, import (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zckpt.optim.memory import flat, is_dense
from zckpt.optim.param_groups import copied

State = dict[int, dict[str, Any]]
"""State by global parameter number: position over all groups, in order."""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that will be sent: its shape, how it lies in memory, its element type, and whether it is on the CPU."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of no dimension, such as `step`: its value goes with the description."""

    value: float | complex
    dtype: torch.dtype
    on_cpu: bool


def collect(
    state: Mapping[int, Mapping[str, Any]], about: object, group: dist.ProcessGroup, to: int
) -> tuple[State, list[Any]] | None:
    """Return the state of all ranks, on the CPU, on rank `to` of the group; None on the others.

    Parameters
    ----------
    state : mapping
        This rank's state by global parameter number. Nothing of it is kept: tensors are copied.
    about : object
        What else this rank has to say: small, and without tensors. The target gets a list of what all ranks said.
    group : ProcessGroup
    to : int
        Rank in the group.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered: list[Any] = [(_described(state), about)]
    if world_size > 1:
        mine, gathered = gathered[0], [None] * world_size
        target = dist.get_global_rank(group, to)
        dist.gather_object(mine, gathered if rank == to else None, dst=target, group=group)
    device = wire_device(group)
    if rank != to:
        for one in state.values():
            _send(one, to, group, device)
        return None
    found: State = {}
    for source, (described, _) in enumerate(gathered):
        for number, one in described.items():
            found[number] = _kept(state[number]) if source == rank else _receive(one, source, group, device, "cpu")
    return {number: found[number] for number in sorted(found)}, [said for _, said in gathered]


def move(
    state: Mapping[int, Mapping[str, Any]],
    about: object,
    parameters: Sequence[torch.Tensor],
    before: Sequence[int],
    after: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[State, list[Any]]:
    """Return this rank's state when parameters go to other ranks, and what all ranks said. Called on all of them.

    Parameters
    ----------
    state : mapping
        This rank's state by parameter number.
    about : object
        What else this rank has to say: small, and without tensors.
    parameters : sequence of Tensor
        All of them: state goes to the device of its parameter.
    before, after : sequence of int
        The rank in the group that has each parameter.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (_described(state), about), group=group)
    device = wire_device(group)
    found: State = {}
    for number, (source, target) in enumerate(zip(before, after, strict=True)):
        described = gathered[source][0].get(number)
        if described is None:
            continue
        if rank == source == target:
            found[number] = dict(state[number])
        elif rank == source:
            _send(state[number], target, group, device)
        elif rank == target:
            found[number] = _receive(described, source, group, device, parameters[number].device)
    return found, [said for _, said in gathered]


def send_gradients(parameters: Sequence[torch.Tensor], to: int, group: dist.ProcessGroup) -> None:
    """Send the gradients of some parameters to a rank, and which of them have one."""
    device = wire_device(group)
    target = dist.get_global_rank(group, to)
    dist.send(torch.tensor([p.grad is not None for p in parameters], device=device), dst=target, group=group)
    for parameter in parameters:
        if parameter.grad is not None:
            _send({"gradient": parameter.grad}, to, group, device)


def receive_gradients(parameters: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Receive the gradients of some parameters; one that is there already is written to."""
    device = wire_device(group)
    present = torch.empty(len(parameters), dtype=torch.bool, device=device)
    dist.recv(present, src=dist.get_global_rank(group, source), group=group)
    for parameter, has in zip(parameters, present.tolist(), strict=True):
        if not has:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        described = {"gradient": _about(parameter.grad)}
        parameter.grad.copy_(_receive(described, source, group, device, parameter.device)["gradient"])


def _described(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, object]]:
    """Return what is said of state: a tensor's form, a single number, or the value itself."""
    return {number: {key: _about(value) for key, value in one.items()} for number, one in state.items()}


def _about(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim():
        lying = value if is_dense(value) else torch.empty(value.shape, device="meta")
        return Described(tuple(value.shape), lying.stride(), value.dtype, value.device.type == "cpu")
    return Number(value.item(), value.dtype, value.device.type == "cpu")


def _send(values: Mapping[str, Any], to: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send a parameter's tensors, one after the other."""
    for value in values.values():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel():
            tensor = value.detach() if is_dense(value) else value.detach().contiguous()
            dist.send(flat(tensor).to(device).view(torch.uint8), dst=dist.get_global_rank(group, to), group=group)


def _receive(
    described: Mapping[str, object],
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    place: torch.device | str,
) -> dict[str, Any]:
    """Return a parameter's state from another rank, on a device; what was on the CPU stays there."""
    found: dict[str, Any] = {}
    for key, about in described.items():
        if isinstance(about, Number):
            found[key] = torch.tensor(about.value, dtype=about.dtype, device="cpu" if about.on_cpu else place)
        elif isinstance(about, Described):
            tensor = torch.empty_strided(about.shape, about.stride, dtype=about.dtype, device=device)
            if tensor.numel():
                dist.recv(flat(tensor).view(torch.uint8), src=dist.get_global_rank(group, source), group=group)
            found[key] = tensor.to("cpu" if about.on_cpu else place)
        else:
            found[key] = about
    return found


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies on the CPU."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copied(value)
        for key, value in values.items()
    }


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that a group sends from: the CPU where a backend does, else the current one of its kind."""
    kinds = [torch.device(kind).type for kind in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], getattr(torch, kinds[0]).current_device())


def _broadcast_object(
    obj: Any, src_rank: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Any:
    """Return the object that one rank of the world has, on all ranks of a group; what is received is on `device`."""
    gathered = [obj]
    dist.broadcast_object_list(gathered, src=src_rank, group=group, device=torch.device(device))
    if dist.get_rank() == src_rank:
        return obj
    return _recursive_copy_to_device(gathered[0], non_blocking=False, device=torch.device(device))


def _recursive_copy_to_device(value: Any, non_blocking: bool, device: torch.device) -> Any:
    """Return a tree of lists, tuples and mappings with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, (list, tuple)):
        made = [_recursive_copy_to_device(one, non_blocking, device) for one in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, Mapping):
        return {key: _recursive_copy_to_device(one, non_blocking, device) for key, one in value.items()}
    return value


def _is_trainable(param: torch.Tensor) -> bool:
    """Tell whether a parameter is trained."""
    return param.requires_grad
