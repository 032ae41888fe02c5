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

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
import torch.distributed as dist

from zckpt.engine.workers import batched
from zckpt.immutable import immutable, mutable
from zckpt.optim.param_groups import copied_to_cpu
from zckpt.optim.ranks import all_gather_flat, broadcast, wait_for
from zckpt.optim.tensors import end_to_end, flat, is_dense, shaped

DIRECT_NBYTES = 1 << 20
"""A contiguous parameter of this size is sent by itself: packing it would cost more than a message."""

BUCKET_NBYTES = 8 << 20
"""Small parameters are packed up to this size."""

EVEN = 1.1
"""One all-gather serves where padding all shares to the largest one costs at most this factor."""

Kind = tuple[torch.device, torch.dtype]

Shares = Sequence[Sequence[torch.Tensor]]
"""The parameters of each rank."""


@mutable
class Bucket:
    """Parameters that one rank of the process group sends together.

    `tensor` is flat, and the parameters are views of it; None: they are packed when they are sent.
    """

    rank: int
    parameters: list[torch.Tensor]
    tensor: torch.Tensor | None = None

    @property
    def is_direct(self) -> bool:
        """Whether what is sent is one parameter's own memory."""
        return self.tensor is None and len(self.parameters) == 1 and self.parameters[0].is_contiguous()

    def wire(self, *, mine: bool) -> torch.Tensor:
        """Return the tensor that is sent or received."""
        if self.tensor is not None:
            return self.tensor
        first = self.parameters[0]
        if self.is_direct:
            return first.data.view(-1)
        if mine:
            return torch.cat([p.data.reshape(-1) for p in self.parameters])
        return first.detach().new_empty(sum(p.numel() for p in self.parameters))


@mutable
class Exchange:
    """All that is sent after a step.

    `gathered` are buffers of equal shares of all ranks, which an all-gather completes; `views` are flat tensors of
    which parameters are views.
    """

    buckets: list[Bucket] = field(default_factory=list)
    gathered: list[torch.Tensor] = field(default_factory=list)
    views: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)

    def is_intact(self) -> bool:
        """Tell whether parameters are still where they were put: `p.data = x` takes one out of its bucket."""
        return all(is_flat(elements, parameters) for elements, parameters in self.views)


def by_kind(shares: Shares) -> dict[Kind, list[list[torch.Tensor]]]:
    """Return for each device and element type the parameters of each rank, in an order that all ranks agree on."""
    kinds: dict[Kind, list[list[torch.Tensor]]] = {}
    for rank, parameters in enumerate(shares):
        for parameter in parameters:
            kind = (parameter.device, parameter.dtype)
            kinds.setdefault(kind, [[] for _ in shares])[rank].append(parameter)
    return kinds


def plain_exchange(shares: Shares) -> Exchange:
    """Return the exchange of parameters that stay where they are: large ones alone, and small ones together."""
    exchange = Exchange()
    for ranks in by_kind(shares).values():
        for rank, parameters in enumerate(ranks):
            small: list[torch.Tensor] = []
            for one in parameters:
                if one.nbytes >= DIRECT_NBYTES and one.is_contiguous():
                    exchange.buckets.append(Bucket(rank, [one]))
                elif one.numel():
                    small.append(one)
            for members in batched(small, lambda one: one.nbytes, BUCKET_NBYTES, count=None):
                exchange.buckets.append(Bucket(rank, list(members)))
    return exchange


def bucket_view_exchange(shares: Shares, *, gather: bool) -> Exchange:
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
            exchange.gathered.append(whole)
            views = list(zip(torch.split(whole, width), ranks, strict=True))
        else:
            made = [torch.empty(numel, dtype=dtype, device=device) for numel in numels]
            views = list(zip(made, ranks, strict=True))
            exchange.buckets += [Bucket(rank, its, one) for rank, (one, its) in enumerate(views) if one.numel()]
        for elements, parameters in views:
            flatten(elements, parameters)
        exchange.views += views
    return exchange


def flatten(tensor: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    """Make parameters views of a flat tensor, end to end, that lie as they did."""
    for parameter, elements in end_to_end(tensor, parameters):
        view = shaped(elements, parameter)
        view.copy_(parameter.data)
        parameter.data = view


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
    handles = []
    for whole in exchange.gathered:
        own = whole.view(world_size, -1)[rank]
        handles.append(all_gather_flat(whole, own, group=group, async_op=True))
    sent = [(bucket, bucket.wire(mine=bucket.rank == rank)) for bucket in exchange.buckets]
    wait_for([*handles, *(broadcast(tensor, bucket.rank, group) for bucket, tensor in sent)])
    for bucket, tensor in sent:
        if bucket.rank != rank and bucket.tensor is None and not bucket.is_direct:
            for parameter, elements in end_to_end(tensor, bucket.parameters):
                parameter.data.copy_(elements.view(parameter.shape))


State = dict[int, dict[str, Any]]
"""State by global parameter number: position over all groups, in order."""


# --- state and gradients


@immutable
class Described:
    """A tensor that will be sent: its shape, how it lies in memory, its element type, and whether it is on the CPU.

    Of one without dimensions, such as `step`, the value goes along.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    value: float | complex | None = None

    @classmethod
    def of(cls, value: object) -> object:
        """Return what is said of a value: itself, if it is no tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        lying = value if is_dense(value) else torch.empty(value.shape, device="meta")
        number = None if value.dim() else value.item()
        return cls(tuple(value.shape), lying.stride(), value.dtype, value.device.type == "cpu", number)

    def receive(self, source: int, group: dist.ProcessGroup, to: torch.device) -> torch.Tensor:
        """Return the tensor that another rank sends, on a device; what was on the CPU stays there."""
        if self.on_cpu:
            to = torch.device("cpu")
        if self.value is not None:
            return torch.tensor(self.value, dtype=self.dtype, device=to)
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=wire_device(group))
        if tensor.numel():
            dist.recv(flat(tensor).view(torch.uint8), src=dist.get_global_rank(group, source), group=group)
        return tensor.to(to)


def move(
    state: Mapping[int, Mapping[str, Any]],
    about: object,
    before: Sequence[int],
    after: Sequence[int],
    group: dist.ProcessGroup,
    devices: Sequence[torch.device] | None = None,
) -> tuple[State, list[Any]]:
    """Return the state that this rank is to have, and what all ranks said. Called on all of them.

    Parameters
    ----------
    state : mapping
        This rank's, by global parameter number.
    about : object
        What else this rank has to say: small, and without tensors.
    before, after : sequence of int
        The rank in the group that has, and is to have, the state of each parameter.
    group : ProcessGroup
    devices : sequence of torch.device, optional
        To which that of each parameter goes. By default it goes to the CPU, and what stays on its rank is copied.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    described = {number: {key: Described.of(value) for key, value in one.items()} for number, one in state.items()}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (described, about), group=group)
    found: State = {}
    for number, (source, target) in enumerate(zip(before, after, strict=True)):
        its = gathered[source][0].get(number)
        if its is None:
            continue
        if rank == source == target:
            found[number] = copied_to_cpu(state[number]) if devices is None else dict(state[number])
        elif rank == source:
            for value in state[number].values():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel():
                    tensor = value.detach() if is_dense(value) else value.detach().contiguous()
                    sent = flat(tensor).to(wire_device(group)).view(torch.uint8)
                    dist.send(sent, dst=dist.get_global_rank(group, target), group=group)
        elif rank == target:
            to = devices[number] if devices else torch.device("cpu")
            found[number] = {
                key: one.receive(source, group, to) if isinstance(one, Described) else one for key, one in its.items()
            }
    return found, [said for _, said in gathered]


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that a group sends from: the CPU where a backend does, else the current one of its kind."""
    kinds = [torch.device(kind).type for kind in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], getattr(torch, kinds[0]).current_device())


# --- DDP's buckets, given to ranks


class OverlapStatus(enum.IntEnum):
    """How far the preparation is."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


@mutable(eq=False)
class BucketAssignment:
    """Neighbours among a bucket's parameters that one rank steps.

    `offset` is the position of the first among the bucket's parameters, `tensor` flat, and they are views of it.
    """

    parameters: list[torch.Tensor]
    offset: int
    tensor: torch.Tensor | None = None

    def flattened(self) -> torch.Tensor:
        """Make the parameters views of the flat tensor, which is made if there is none, and return that."""
        if self.tensor is None or not is_flat(self.tensor, self.parameters):
            self.tensor = self.parameters[0].detach().new_empty(sum(p.numel() for p in self.parameters))
            flatten(self.tensor, self.parameters)
        return self.tensor


@mutable(eq=False)
class OverlapInfo:
    """What the hooks and the optimizer know together; under the names of torch's class, which torch's hooks use.

    `shard_buckets` says whether a bucket is cut for several ranks; `offsets`, of each bucket that this rank has a share
    of, where that begins in `params_per_rank[rank]`. All from `broadcast_handles` on is of one iteration.
    """

    world_size: int
    status: OverlapStatus = OverlapStatus.UNINITIALIZED
    shard_buckets: bool = False
    params_per_bucket: list[list[torch.Tensor]] = field(default_factory=list)
    params_per_rank: list[list[torch.Tensor]] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    assigned_ranks_per_bucket: list[set[int]] = field(default_factory=list)
    num_bucket_assignments: int = 0
    total_size: int | None = None
    broadcast_handles: list[Any] = field(default_factory=list)
    bucket_indices_seen: list[int] = field(default_factory=list)
    bucket_index_to_future: dict[int, torch.futures.Future[Any]] = field(default_factory=dict)
    bucket_index_to_bucket: dict[int, Any] = field(default_factory=dict)

    def wait_for_broadcasts(self) -> None:
        """Wait until all parameters of this iteration have arrived."""
        wait_for(self.broadcast_handles)
        self.broadcast_handles.clear()

    def clear_per_iter_info(self) -> None:
        """Forget what belongs to this iteration."""
        self.bucket_indices_seen.clear()
        self.bucket_index_to_future.clear()
        self.bucket_index_to_bucket.clear()


def cut(numels: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return at most so many extents [begin, end) of a bucket's parameters, of about equal size, none of them empty.

    `numels`: of the parameters.
    """
    extents: list[tuple[int, int]] = []
    begin, rest = 0, sum(numels)
    for left in range(min(count, len(numels)), 0, -1):
        end, size = begin + 1, numels[begin]
        while end <= len(numels) - left and size + numels[end] / 2 <= rest / left:
            size += numels[end]
            end += 1
        extents.append((begin, end))
        begin, rest = end, rest - size
    return extents


def assign(info: OverlapInfo, rank: int) -> list[dict[int, BucketAssignment]]:
    """Give every share of every bucket to a rank, and note it in `info`; return those of each rank by bucket."""
    found: list[dict[int, BucketAssignment]] = [{} for _ in range(info.world_size)]
    held = [0] * info.world_size
    info.params_per_rank = [[] for _ in range(info.world_size)]
    info.assigned_ranks_per_bucket = [set() for _ in info.params_per_bucket]
    info.offsets.clear()
    for index, parameters in enumerate(info.params_per_bucket):
        numels = [p.numel() for p in parameters]
        extents = cut(numels, info.world_size if info.shard_buckets else 1)
        largest = sorted(extents, key=lambda extent: -sum(numels[slice(*extent)]))
        free = sorted(range(info.world_size), key=lambda r: (held[r], r)) if info.shard_buckets else []
        for number, (begin, end) in enumerate(largest):
            owner = free[number] if info.shard_buckets else index % info.world_size
            held[owner] += sum(numels[begin:end])
            found[owner][index] = BucketAssignment(parameters[begin:end], begin)
            info.assigned_ranks_per_bucket[index].add(owner)
            if owner == rank:
                info.offsets[index] = len(info.params_per_rank[owner])
            info.params_per_rank[owner].extend(parameters[begin:end])
    info.num_bucket_assignments = sum(map(len, found))
    return found
