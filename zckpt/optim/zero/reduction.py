"""Gradients averaged over ranks, bucket by bucket, while backward makes them; each rank keeps its own partition.

All ranks reduce the same buckets in the same order, whatever the order in which gradients become ready on each, and
whether all do: a parameter without gradient on a rank adds zeros there. So no rank waits for another for ever.
Averages are accumulated in place, or in pinned memory of the host: copies off a GPU run on a stream of their own, while
backward goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zckpt.optim.zero.buckets import Bucket, Member, Message, OwnedExtent, fill, make_bucket, members_of
from zckpt.optim.zero.flat import FlatGroup


@dataclass(frozen=True)
class Rules:
    """How gradients are averaged. See `ZeroOptimizer`."""

    process_group: dist.ProcessGroup
    reduce_bucket_size: int
    reduce_scatter: bool
    overlap_comm: bool
    communication_data_type: torch.dtype | None
    gradient_predivide_factor: float | None
    accumulation_dtype: torch.dtype | None
    accumulation_device: torch.device | None
    pin: bool


@dataclass(eq=False)
class _Flight:
    """A bucket on its way."""

    bucket: Bucket
    sent: list[tuple[Message, torch.Tensor]]
    handles: list[dist.Work]


class Reducer:
    """Takes gradients as they become ready and accumulates their averages over ranks in the owners' partitions.

    Parameters
    ----------
    take : callable
        Gives this rank's gradient of a parameter, or None, and frees it.
    while_backward : bool
        Whether to reduce gradients as they become ready, and not in the order of the parameters when all are.
    whole_till_then : bool
        Whether all gradients are there, whole, when the first are reduced. What this rank owns then gets its memory
        when the others' is free.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        rules: Rules,
        take: Callable[[torch.Tensor], torch.Tensor | None],
        *,
        while_backward: bool,
        whole_till_then: bool,
    ) -> None:
        self.groups = groups
        self.rules = rules
        self._take = take
        self._while_backward = while_backward
        self._held: deque[tuple[OwnedExtent, torch.Tensor]] | None = deque() if whole_till_then else None
        self._world_size = dist.get_world_size(rules.process_group)
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}
        self._deliveries = Deliveries()
        self._accumulated: set[torch.Tensor] = set()
        self._flights: deque[_Flight] = deque()
        self._turn = 0
        self.forget()

    def forget(self) -> None:
        """Forget the order of gradients: param groups have changed."""
        self.members = members_of(self.groups)
        self._member = {member.parameter: member for member in self.members}
        self._buckets: list[Bucket] | None = None
        self._times: dict[torch.Tensor, int] = {}
        self._late: set[torch.Tensor] = set()
        self._ready: set[torch.Tensor] = set()
        self._missing: list[torch.Tensor] = []
        self._next = 0

    # --- one backward

    def ready(self, parameter: torch.Tensor) -> None:
        """Note that a gradient is ready; reduce what is complete.

        Raises RuntimeError: the gradient has been reduced already in this backward.
        """
        if self._buckets is None:
            self._times[parameter] = self._times.get(parameter, 0) + 1
            return
        if not self._while_backward or parameter in self._late or not parameter.numel():
            self._ready.add(parameter)
            return
        if parameter in self._ready and self._next > self._bucket_of[parameter]:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after the first had been reduced; in the first "
                "backward of all it got one. Run such a backward under no_sync(), or let it come first"
            )
        self._ready.add(parameter)
        while self._next < len(self._buckets) and all(
            member.parameter in self._ready for member in self._buckets[self._next].members
        ):
            self._launch_next(self._buckets)

    def finish(self) -> list[torch.Tensor]:
        """Reduce what is left and wait for all of it; return the parameters that had no gradient on this rank."""
        buckets = self._buckets
        if buckets is None:
            buckets = self._agreed()
            self._ready |= self._times.keys()
            self._times.clear()
        while self._next < len(buckets):
            self._launch_next(buckets)
        self.drain()
        missing, self._missing = self._missing, []
        self._ready.clear()
        self._next = 0
        if len(self._late) == len(self.members):  # no backward has been seen
            self._buckets = None
        return missing

    def end_window(self) -> None:
        """Begin again: the next gradients take the place of those accumulated."""
        self._accumulated.clear()
        if self._held is not None:
            self._held.clear()
            for group in self.groups:
                group.gradient = None

    def _launch_next(self, buckets: list[Bucket]) -> None:
        bucket = buckets[self._next]
        self._next += 1
        values = [self._take(member.parameter) for member in bucket.members]
        self._missing += [m.parameter for m, value in zip(bucket.members, values, strict=True) if value is None]
        first = bucket.members[0].parameter  # one that is alone is sent from where it is, if backward has made it
        self.launch(bucket, values, keep=first not in self._ready)

    def _lay_out(self, early: Sequence[Member], late: Sequence[Member]) -> list[Bucket]:
        """Fill buckets; with what has a gradient in each backward, and then with what may have one."""
        size = self.rules.reduce_bucket_size
        made = [self._bucket(its) for its in (*fill(early, size), *fill(late, size))]
        self._bucket_of = {m.parameter: index for index, bucket in enumerate(made) for m in bucket.members}
        self._late = {member.parameter for member in late}
        self._buckets = made
        return made

    def _agreed(self) -> list[Bucket]:
        """Let all ranks fill buckets as the gradients of this backward became ready on the first; the rest come last.

        What came last, or twice, is reduced when backward has ended.
        """
        early = [number for number, member in enumerate(self.members) if self._times.get(member.parameter) == 1]
        if self._while_backward:
            turn = {parameter: index for index, parameter in enumerate(self._times)}
            early.sort(key=lambda number: turn[self.members[number].parameter])
        order = [*early, *sorted(set(range(len(self.members))) - set(early))]
        if not order:
            return self._lay_out([], [])
        agreed = torch.tensor([len(early), *order], device=self.members[0].parameter.device)
        root = dist.get_global_rank(self.rules.process_group, 0)
        dist.broadcast(agreed, src=root, group=self.rules.process_group)
        count, *order = agreed.tolist()
        members = [self.members[number] for number in order]
        return self._lay_out(members[:count], members[count:])

    # --- one bucket

    def bucket_of(self, parameters: Sequence[torch.Tensor]) -> Bucket:
        """Return a bucket of these parameters."""
        return self._bucket([self._member[parameter] for parameter in parameters])

    def _bucket(self, members: Sequence[Member]) -> Bucket:
        return make_bucket(members, dtype=self.rules.communication_data_type, by_owner=self.rules.reduce_scatter)

    def launch(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None], *, keep: bool = False) -> None:
        """Send gradients of a bucket's members; `drain` waits for the result. They are overwritten, or kept."""
        while len(self._flights) >= (2 if self.rules.overlap_comm else 1):
            self._land()
        self._turn = 1 - self._turn if self.rules.overlap_comm else 0
        values = {
            member.parameter: None if gradient is None else gradient.detach().reshape(-1)
            for member, gradient in zip(bucket.members, gradients, strict=True)
        }
        sent = [(message, self._pack(message, values, keep=keep)) for message in bucket.messages]
        handles = [
            handle for message, wire in sent for handle in _send(message, wire, reduce=self.rules.reduce_scatter)
        ]
        self._flights.append(_Flight(bucket, sent, handles))
        if not self.rules.overlap_comm:
            self._land()

    def accept(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Keep what this rank owns of gradients that have been averaged already."""
        values = dict(zip(parameters, (gradient.detach().reshape(-1) for gradient in gradients), strict=True))
        for message in self.bucket_of(parameters).messages:
            for extent in message.extents:
                value = values[extent.member.parameter]
                self._receive(message, extent, value[extent.start : extent.start + extent.numel])
        self._accumulated |= set(parameters)

    def drain(self) -> None:
        """Wait for all buckets that are on their way."""
        while self._flights:
            self._land()
        for group in self.groups:
            self._gradient(group)  # padding is stepped too, and ranks that have nothing else
        while self._held:
            extent, received = self._held.popleft()
            self._deliver(extent, received, add=False)
        self._deliveries.finish()

    def _pack(self, message: Message, values: dict[torch.Tensor, torch.Tensor | None], *, keep: bool) -> torch.Tensor:
        """Return what is sent: gradients, divided as far as they are to be before the reduction."""
        factor = self.rules.gradient_predivide_factor
        first = message.extents[0].member
        is_alone = all(extent.member is first for extent in message.extents)
        alone = values[first.parameter] if is_alone and not keep else None
        if alone is not None and alone.dtype == message.dtype:
            _divide(alone, alone, self._world_size, factor)
            return alone
        wire = self._buffer(message)
        for extent in message.extents:
            into = wire[extent.offset : extent.offset + extent.numel]
            value = values[extent.member.parameter]
            if value is None:
                into.zero_()
            else:
                _divide(value[extent.start : extent.start + extent.numel], into, self._world_size, factor)
        return wire

    def _buffer(self, message: Message) -> torch.Tensor:
        """Return memory for a message; of each kind there are two to take turns with, or one."""
        key = (self._turn, id(message.process_group), message.dtype, message.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < message.numel:
            like = [one.numel for bucket in self._buckets or [] for one in bucket.messages if _is_like(one, message)]
            buffer = torch.empty(max([message.numel, *like]), dtype=message.dtype, device=message.device)
            self._buffers[key] = buffer
        self._deliveries.before_reuse(message.device)
        return buffer[: message.numel]

    def _land(self) -> None:
        """Wait for the oldest bucket and keep what this rank owns of it."""
        flight = self._flights.popleft()
        for handle in flight.handles:
            handle.wait()
        factor = self.rules.gradient_predivide_factor
        for message, wire in flight.sent:
            for extent in message.extents:
                received = wire[extent.offset : extent.offset + extent.numel]
                if extent.owner == message.rank and factor is not None and factor != self._world_size:
                    received.mul_(factor / self._world_size)
                self._receive(message, extent, received)
        self._accumulated |= {member.parameter for member in flight.bucket.members}

    def _receive(self, message: Message, extent: OwnedExtent, received: torch.Tensor) -> None:
        """Keep an average that this rank owns; in memory of its own, where that of the whole comes later."""
        if extent.owner != message.rank:
            return
        if self._held is None or extent.member.group.gradient is not None:
            self._deliver(extent, received, add=extent.member.parameter in self._accumulated)
        else:
            self._held.append((extent, received.clone()))

    def _deliver(self, extent: OwnedExtent, received: torch.Tensor, *, add: bool) -> None:
        """Accumulate what this rank owns."""
        into = self._gradient(extent.member.group)[extent.position : extent.position + extent.numel]
        self._deliveries.deliver(received, into, add=add)

    def _gradient(self, group: FlatGroup) -> torch.Tensor:
        """Return a group's accumulated gradients; padding stays zero."""
        if group.gradient is None:
            dtype = self.rules.accumulation_dtype or group.flat.dtype
            device = self.rules.accumulation_device or group.flat.device
            group.gradient = torch.zeros(group.partition, dtype=dtype, device=device, pin_memory=self.rules.pin)
        return group.gradient


def _is_like(one: Message, other: Message) -> bool:
    return (one.process_group, one.dtype, one.device) == (other.process_group, other.dtype, other.device)


def _send(message: Message, wire: torch.Tensor, *, reduce: bool) -> list[dist.Work]:
    """Begin to sum a message over its ranks: each owner gets its own, or all ranks get all of it."""
    group = message.process_group
    if dist.get_world_size(group) == 1:
        return []
    if not reduce:
        return [dist.all_reduce(wire, group=group, async_op=True)]
    return [
        dist.reduce(wire[offset : offset + numel], dst=dist.get_global_rank(group, owner), group=group, async_op=True)
        for owner, offset, numel in message.owned
    ]


def _divide(value: torch.Tensor, into: torch.Tensor, world_size: int, factor: float | None) -> None:
    """Divide by the world size, or by the factor of it that comes before the reduction."""
    if factor is None and world_size > 1:
        torch.div(value, world_size, out=into)
    elif factor is not None and factor != 1.0:
        torch.mul(value, 1.0 / factor, out=into)
    elif into is not value:
        into.copy_(value)


class Deliveries:
    """Copies of reduced gradients into the partitions they are accumulated in."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._under_way: set[torch.device] = set()

    def deliver(self, received: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """Copy reduced gradients into a partition, or add them there.

        They may be overwritten only after `before_reuse` of their device, or `finish`.
        """
        if received.device == into.device:
            if add:
                into.add_(received.to(into.dtype))
            else:
                into.copy_(received)
            return
        if not add and received.dtype == into.dtype:
            self._copy(received, into)
            return
        staged = torch.empty(received.shape, dtype=received.dtype, pin_memory=True)
        self._copy(received, staged)
        if not add:
            into.zero_()
        self._staged.append((staged, into))

    def _copy(self, received: torch.Tensor, into: torch.Tensor) -> None:
        device = received.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            into.copy_(received, non_blocking=True)
        received.record_stream(stream)
        self._under_way.add(device)

    def before_reuse(self, device: torch.device) -> None:
        """Let a device's current stream wait until what was sent from it has been read."""
        if device in self._under_way:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def finish(self) -> None:
        """Wait for all copies and add what had to be added."""
        for device in self._under_way:
            self._streams[device].synchronize()
        self._under_way.clear()
        for staged, into in self._staged:
            into.add_(staged.to(into.dtype))
        self._staged.clear()
