"""What ranks send each other: updated parameters after a step; and state and gradients, where parameters change ranks.

Parameters that are large go as they are. Small ones of a rank, of one device and element type, go together in a
bucket. Where parameters are views of buckets (`parameters_as_bucket_view`), a bucket goes as it is, and on GPUs, if the
ranks' shares are nearly equal, the buckets of all ranks are one buffer that a single all-gather completes. (Gloo's
all-gather copies the whole buffer twice; it takes twice as long as gloo's broadcasts.)

Of state, what each rank holds (keys, shapes, element types, numbers) is sent first. Then every tensor is sent to its
target and to nobody else, one after the other: a rank that is not the target needs memory for one tensor at most, and
that only where its bytes are not in one piece on a device that the backend can send from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zckpt.optim import tensors
from zckpt.optim.param_groups import copied
from zckpt.optim.ranks import all_gather_flat
from zckpt.optim.tensors import flat, is_dense

DIRECT_NBYTES = 1 << 20
"""A contiguous parameter of this size is sent by itself: packing it would cost more than a message."""

BUCKET_NBYTES = 8 << 20
"""Small parameters are packed up to this size."""

EVEN = 1.1
"""One all-gather serves where padding all shares to the largest one costs at most this factor."""

Kind = tuple[torch.device, torch.dtype]


@dataclass(slots=True)
class Bucket:
    """Parameters that one rank of the process group sends together.

    `tensor` is flat, and the parameters are views of it; None: they are packed when they are sent.
    """

    rank: int
    parameters: list[torch.Tensor]
    tensor: torch.Tensor | None = None


@dataclass(slots=True)
class Gathered:
    """A buffer of equal shares, [world size x width elements], that an all-gather completes; by rank what is in it."""

    tensor: torch.Tensor
    width: int
    shares: list[Bucket]


@dataclass(slots=True)
class Exchange:
    """All that is sent after a step."""

    buckets: list[Bucket] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)

    def is_intact(self) -> bool:
        """Tell whether parameters are still where they were put: `p.data = x` takes one out of its bucket."""
        views = [bucket for bucket in self.buckets if bucket.tensor is not None]
        views += [share for gathered in self.gathered for share in gathered.shares]
        return all(is_flat(share.tensor, share.parameters) for share in views if share.tensor is not None)


def by_kind(shares: Sequence[Sequence[torch.Tensor]]) -> dict[Kind, list[list[torch.Tensor]]]:
    """Return for each device and element type the parameters of each rank, in an order that all ranks agree on."""
    kinds: dict[Kind, list[list[torch.Tensor]]] = {}
    for rank, parameters in enumerate(shares):
        for parameter in parameters:
            kind = (parameter.device, parameter.dtype)
            kinds.setdefault(kind, [[] for _ in shares])[rank].append(parameter)
    return kinds


def plain_exchange(shares: Sequence[Sequence[torch.Tensor]]) -> Exchange:
    """Return the exchange of parameters that stay where they are."""
    exchange = Exchange()
    for ranks in by_kind(shares).values():
        for rank, parameters in enumerate(ranks):
            exchange.buckets += [Bucket(rank, members) for members in _packed(parameters)]
    return exchange


def _packed(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return large parameters alone and small ones together."""
    alone: list[list[torch.Tensor]] = []
    packs: list[list[torch.Tensor]] = []
    nbytes = BUCKET_NBYTES
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if size == 0:
            continue
        if size >= DIRECT_NBYTES and parameter.is_contiguous():
            alone.append([parameter])
            continue
        if nbytes + size > BUCKET_NBYTES:
            packs.append([])
            nbytes = 0
        packs[-1].append(parameter)
        nbytes += size
    return alone + packs


def bucket_view_exchange(shares: Sequence[Sequence[torch.Tensor]], *, gather: bool) -> Exchange:
    """Return the exchange of parameters, given by rank, that become views of buckets; their `data` is moved there.

    With `gather`, shares that are nearly equal are gathered at once.
    """
    exchange = Exchange()
    for (device, dtype), ranks in by_kind(shares).items():
        numels = [sum(p.numel() for p in parameters) for parameters in ranks]
        width = max(numels)
        if not width:
            continue
        if gather and width * len(ranks) <= EVEN * sum(numels):
            whole = torch.zeros(width * len(ranks), dtype=dtype, device=device)
            each = enumerate(zip(ranks, torch.split(whole, width), strict=True))
            views = [Bucket(rank, parameters, elements) for rank, (parameters, elements) in each]
            exchange.gathered.append(Gathered(whole, width, views))
        else:
            views = [
                Bucket(rank, parameters, torch.empty(numels[rank], dtype=dtype, device=device))
                for rank, parameters in enumerate(ranks)
                if numels[rank]
            ]
            exchange.buckets += views
        for view in views:
            if view.tensor is not None:
                flatten(view.tensor, view.parameters)
    return exchange


def flatten(tensor: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    """Make parameters views of a flat tensor, end to end, that lie as they did."""
    at = 0
    for parameter in parameters:
        view = tensors.shaped(tensor[at : at + parameter.numel()], parameter)
        view.copy_(parameter.data)
        parameter.data = view
        at += parameter.numel()


def is_flat(tensor: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """Tell whether parameters are views of a flat tensor, as `flatten` makes them."""
    address = tensor.data_ptr()
    for parameter in parameters:
        nbytes = parameter.numel() * tensor.element_size()
        if nbytes and (parameter.data_ptr() != address or parameter.dtype != tensor.dtype):
            return False
        address += nbytes
    return True


def run(exchange: Exchange, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
    """Send this rank's parameters and receive all others'. All ranks of the group call it together."""
    if world_size == 1:
        return
    sent: list[tuple[Bucket, torch.Tensor]] = []
    handles = []
    for gathered in exchange.gathered:
        own = gathered.tensor[rank * gathered.width : (rank + 1) * gathered.width]
        handles.append(all_gather_flat(gathered.tensor, own, group=group, async_op=True))
    for bucket in exchange.buckets:
        tensor = _tensor(bucket, mine=bucket.rank == rank)
        sent.append((bucket, tensor))
        source = dist.get_global_rank(group, bucket.rank)
        handles.append(dist.broadcast(tensor, src=source, group=group, async_op=True))
    for handle in handles:
        handle.wait()
    for bucket, tensor in sent:
        if bucket.rank != rank and bucket.tensor is None and not _is_direct(bucket):
            unpack(tensor, bucket.parameters)


def _is_direct(bucket: Bucket) -> bool:
    return len(bucket.parameters) == 1 and bucket.parameters[0].is_contiguous()


def _tensor(bucket: Bucket, *, mine: bool) -> torch.Tensor:
    """Return the tensor that is sent or received."""
    if bucket.tensor is not None:
        return bucket.tensor
    first = bucket.parameters[0]
    if _is_direct(bucket):
        return first.data.view(-1)
    if mine:
        return torch.cat([p.data.reshape(-1) for p in bucket.parameters])
    numel = sum(p.numel() for p in bucket.parameters)
    return torch.empty(numel, dtype=first.dtype, device=first.device)


def unpack(tensor: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    """Copy a flat tensor into parameters, end to end."""
    at = 0
    for parameter in parameters:
        parameter.data.copy_(tensor[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()


State = dict[int, dict[str, Any]]
"""State by global parameter number: position over all groups, in order."""


# --- state and gradients


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
    """Return the state of all ranks on the CPU, and what each said, on rank `to` of the group; None on the others.

    Parameters
    ----------
    state : mapping
        This rank's state by global parameter number. Nothing of it is kept: tensors are copied.
    about : object
        What else this rank has to say: small, and without tensors.
    group : ProcessGroup
    to : int
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
    state, about : mapping, object
        As for `collect`.
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
    to: torch.device | str,
) -> dict[str, Any]:
    """Return a parameter's state from another rank, on a device; what was on the CPU stays there."""
    found: dict[str, Any] = {}
    for key, about in described.items():
        if isinstance(about, Number):
            found[key] = torch.tensor(about.value, dtype=about.dtype, device="cpu" if about.on_cpu else to)
        elif isinstance(about, Described):
            tensor = torch.empty_strided(about.shape, about.stride, dtype=about.dtype, device=device)
            if tensor.numel():
                dist.recv(flat(tensor).view(torch.uint8), src=dist.get_global_rank(group, source), group=group)
            found[key] = tensor.to("cpu" if about.on_cpu else to)
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
