"""Gradients averaged over ranks, bucket by bucket, while backward makes them, and what lies in `grad` afterwards.

Each rank keeps its own partition. All ranks reduce the same buckets in the same order, whatever the order in which
gradients become ready on each, and whether all do: a parameter without gradient on a rank adds zeros there. So no rank
waits for another for ever. Averages are accumulated in place, or in pinned memory of the host: copies off a GPU run on
a stream of their own, while backward goes on.

A bucket is filled with whole parameters in the order in which their gradients become ready. Of each process group and
element type that it has parameters of, it has a message: a contiguous range of elements. Where owners get what they own
and nobody the rest, a message has the extents of one owner after those of another.

    by parameter   | a0 a0 | b0 b1 | c1 c1 |       for all-reduce     (a0: of parameter a, owned by rank 0)
    by owner       | a0 a0 b0 | b1 c1 c1 |         for a reduction to each owner

Once a gradient has been reduced, its average lies in partitions, with its owners. Without anything in `grad`, whoever
clips, scales or logs gradients between backward and step would do it to nothing and never learn of it. So a stand-in
lies there, without memory of its own. What can be done to the average by its owners is done there; whatever else is
asked of it is an error that says what to do.

    torch.linalg.vector_norm(p.grad)      the norm of the whole average; all ranks ask together
    p.grad.mul_(x), div_, clamp_, zero_   on the average, by its owners
    p.grad = None                         the average is forgotten: its elements become zero
    anything else                         RuntimeError
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from zckpt.engine.workers import batched
from zckpt.optim.ranks import broadcast, wait_for
from zckpt.optim.zero.flat import FlatGroup, FlatOptimizer, Member
from zckpt.optim.zero.stepping import combined, powers
from zckpt.state import by_key, positions
from zckpt.state.partition import FlatShare

_ATEN = torch.ops.aten
_NORM = _ATEN.linalg_vector_norm.default
_SCALED = (_ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.div_.Tensor, _ATEN.div_.Scalar)
_SAME = (_ATEN.detach.default, _ATEN.detach_.default, _ATEN.alias.default)
_UNSCALE = _ATEN._amp_foreach_non_finite_check_and_unscale_.default

_ELSEWHERE = (
    "the gradients of a ZeroOptimizer's parameters lie in partitions, with the ranks that step them, and not in grad: "
    "clip them with ZeroOptimizer(clip_grad=...), look at them with optimizer.full_state(name, 'gradient') or, after "
    "the step, at optimizer.last_grad_norm"
)
_GRAD_SCALER = (
    "a torch.amp.GradScaler cannot unscale gradients that lie with the ranks that step them: leave it out, make the "
    "optimizer with loss_scale=DynamicLossScaler(), and call optimizer.backward(loss)"
)


class ShardedGradient(torch.Tensor):
    """Stands in `grad` for an average that its owners have; of the parameter's shape, type and device."""

    _optimizer: weakref.ref[Any]
    _group: weakref.ref[FlatGroup]
    _position: int

    @staticmethod
    def __new__(cls: type[ShardedGradient], optimizer: object, group: FlatGroup, position: int) -> ShardedGradient:
        """Make one for a parameter of a group, by its position there."""
        parameter = group.parameters[position]
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._optimizer, made._group, made._position = weakref.ref(optimizer), weakref.ref(group), position
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # as torch
        return f"ShardedGradient(shape={tuple(self.shape)}; the gradient lies with the ranks that step it)"

    def __deepcopy__(self, _: object) -> NoReturn:
        raise RuntimeError(_ELSEWHERE)

    __reduce_ex__ = __deepcopy__

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types what it has instead of one
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do to the average what is asked of its stand-in."""
        mine = args[0] if args else None
        given = dict(kwargs or {})
        if func is _UNSCALE:
            raise RuntimeError(_GRAD_SCALER)
        if not isinstance(mine, ShardedGradient) or any(isinstance(one, ShardedGradient) for one in args[1:]):
            raise RuntimeError(_ELSEWHERE)
        if func in _SAME:
            return mine
        if func is _NORM and not given and len(args) <= 2:
            return mine._norm(*args[1:])
        if func in _SCALED and not given:
            factor = args[1]
            if isinstance(factor, torch.Tensor):  # which may be on another device than the average
                if factor.numel() != 1:
                    raise RuntimeError(_ELSEWHERE)
                factor = factor.item()
            for elements in mine._owned():
                func(elements, factor)
            return mine
        if func is _ATEN.clamp_.default:
            optimizer = mine._optimizer()
            scale = 1.0 if optimizer is None else optimizer.loss_scale
            bounds = {**dict(zip(("min", "max"), args[1:], strict=False)), **given}
            for elements in mine._owned():
                elements.clamp_(**{key: None if value is None else value * scale for key, value in bounds.items()})
            return mine
        if func is _ATEN.zero_.default:
            mine.forget()
            return mine
        raise RuntimeError(_ELSEWHERE)

    def forget(self) -> None:
        """Make the average zero."""
        for elements in self._owned():
            elements.zero_()

    def _owned(self) -> list[torch.Tensor]:
        """Return what this rank owns of the average; it is multiplied with the loss scale."""
        group = self._group()
        if group is None or group.gradient is None:
            return []
        return [group.gradient[one.of_partition] for one in group.own if one.index == self._position]

    def _norm(self, order: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole average, without the loss scale."""
        optimizer, group = self._optimizer(), self._group()
        if optimizer is None or group is None:
            raise RuntimeError(_ELSEWHERE)
        if group.is_expert or optimizer.is_model_parallel:
            raise RuntimeError(
                "this rank cannot compute the norm of a gradient that other ranks share, or of experts; clip with "
                "ZeroOptimizer(clip_grad=...), which counts each element once"
            )
        order = float(order)
        if order not in (2.0, math.inf, 1.0):
            raise RuntimeError(_ELSEWHERE)
        found = powers(self._owned(), order).to(group.flat.device, torch.float32)
        dist.all_reduce(found, combined(order), group.process_group)
        whole: torch.Tensor = (found if math.isinf(order) else found.pow(1.0 / order)) / optimizer.loss_scale
        return whole


class ShardedGradients:
    """The stand-ins of an optimizer's parameters, which are put into `grad` and taken out of it together."""

    def __init__(self) -> None:
        self._made: dict[torch.Tensor, ShardedGradient] = {}
        self.are_in = False

    def put(self, optimizer: FlatOptimizer) -> None:
        """Put a stand-in into `grad` of each parameter."""
        for group in optimizer.groups:
            for position, parameter in enumerate(group.parameters):
                if not parameter.numel():
                    continue
                made = self._made.get(parameter)
                if made is None or made.device != parameter.device or made.dtype != parameter.dtype:
                    made = self._made[parameter] = ShardedGradient(optimizer, group, position)
                parameter.grad = made
        self.are_in = True

    def take_out(self) -> None:
        """Take them out of `grad`. An average whose stand-in somebody has taken out is forgotten.

        What somebody has put into `grad` instead is left there: it is a gradient that comes on top.
        """
        if not self.are_in:
            return
        self.are_in = False
        for parameter, made in self._made.items():
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
            elif parameter.grad is None:
                made.forget()


class Extent(NamedTuple):
    """A range of one parameter's gradient that one rank of its process group owns; `offset`: in a message."""

    member: Member
    owner: int
    share: FlatShare
    offset: int


class Kind(NamedTuple):
    """What messages have in common that can be sent from the same memory; `group`: the id of a process group."""

    group: int
    dtype: torch.dtype
    device: torch.device


class Message:
    """What one process group reduces of a bucket, as one range of elements of one type.

    Parameters
    ----------
    members : sequence of Member
        Of groups that have the same ranks.
    kind : Kind
        What is sent.
    by_owner : bool
        Whether only owners get the result, and not all ranks.

    Attributes
    ----------
    extents : list of Extent
        By their offset.
    own : list of Extent
        Those of this rank.
    owned : dict of int to (int, int)
        For each owner its offset and number of elements, where they are by owner.
    """

    def __init__(self, members: Sequence[Member], kind: Kind, *, by_owner: bool) -> None:
        self.members, self.kind, self.by_owner, self.group = members, kind, by_owner, members[0].group
        every = [(owner, share, one) for one in members for owner, share in one.group.extents[one.position]]
        if by_owner:
            every.sort(key=itemgetter(0))  # stable
        self.extents: list[Extent] = []
        self.owned: dict[int, tuple[int, int]] = {}
        self.numel = 0
        for owner, share, member in every:
            offset, numel = self.owned.get(owner, (self.numel, 0))
            self.owned[owner] = offset, numel + share.numel
            self.extents.append(Extent(member, owner, share, self.numel))
            self.numel += share.numel
        self.own = [one for one in self.extents if one.owner == self.group.rank]

    def send(self, wire: torch.Tensor) -> list[dist.Work]:
        """Begin to sum it over its ranks: each owner gets its own, or all ranks get all of it."""
        group = self.group.process_group
        if self.group.world_size == 1:
            return []
        if not self.by_owner:
            return [dist.all_reduce(wire, group=group, async_op=True)]
        return [
            dist.reduce(wire[at : at + numel], dst=dist.get_global_rank(group, owner), group=group, async_op=True)
            for owner, (at, numel) in self.owned.items()
        ]


class Bucket(NamedTuple):
    """Parameters that are reduced together."""

    members: Sequence[Member]
    messages: list[Message]


def fill(members: Sequence[Member], size: int) -> Iterator[Sequence[Member]]:
    """Yield the members of each bucket: at most `size` elements, or one parameter that is larger."""
    return batched((one for one in members if one.numel), lambda one: one.numel, size, count=None)


class Reducer:
    """Takes gradients as they become ready and accumulates their averages over ranks in the owners' partitions.

    Parameters
    ----------
    optimizer : FlatOptimizer
        Whose options say how gradients are averaged.
    take : callable
        Gives this rank's gradient of a parameter, or None, and frees it.
    """

    def __init__(self, optimizer: FlatOptimizer, take: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self.optimizer, self.groups = optimizer, optimizer.groups
        self._take = take
        self._while_backward = optimizer.stage == 2 or optimizer.overlap_comm  # and not in the order of parameters
        # Stage 1 has all gradients, whole, when the first are reduced: what this rank owns gets memory as those go.
        whole_till_then = optimizer.stage == 1 and optimizer.gradient_accumulation_steps > 1 and not optimizer.offload
        self._held: deque[tuple[Extent, torch.Tensor]] | None = deque() if whole_till_then else None
        self._pins = optimizer.offload and any(group.flat.is_cuda for group in self.groups)
        self._buffers: dict[tuple[int, Kind], torch.Tensor] = {}
        self._deliveries = Deliveries()
        self._accumulated: set[torch.Tensor] = set()
        self._flights: deque[tuple[Bucket, list[tuple[Message, torch.Tensor]], list[dist.Work]]] = deque()
        self._turn = 0
        self.forget()

    def forget(self) -> None:
        """Forget the order of gradients: param groups have changed."""
        self.members = list(self.optimizer._place.values())
        self._buckets: list[Bucket] = []
        """In the order in which all ranks reduce them; empty before that is known."""
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
        if not self._buckets:
            self._times[parameter] = self._times.get(parameter, 0) + 1
            return
        if not self._while_backward or parameter in self._late or not parameter.numel():
            self._ready.add(parameter)
            return
        if self._next > self._bucket_of[parameter]:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after the first was reduced; in the very first "
                "backward it got only one. Run such a backward under no_sync(), or run it first"
            )
        self._ready.add(parameter)
        while self._next < len(self._buckets) and all(
            member.parameter in self._ready for member in self._buckets[self._next].members
        ):
            self._launch_next()

    def finish(self) -> list[torch.Tensor]:
        """Reduce what is left and wait for all of it; return the parameters that had no gradient on this rank."""
        if not self._buckets:
            # All ranks fill them as the gradients of this backward became ready on the first; the rest come last. What
            # came last, or twice, is reduced when backward has ended.
            early = [number for number, member in enumerate(self.members) if self._times.get(member.parameter) == 1]
            if self._while_backward:
                turn = positions(self._times)
                early.sort(key=lambda number: turn[self.members[number].parameter])
            count, order = len(early), [*early, *sorted(set(range(len(self.members))) - set(early))]
            if order:
                agreed = torch.tensor([count, *order], device=self.members[0].parameter.device)
                broadcast(agreed, 0, self.optimizer.process_group).wait()
                count, *order = agreed.tolist()
            members, size = [self.members[number] for number in order], self.optimizer.reduce_bucket_size
            self._late = {member.parameter for member in members[count:]}
            parts = members[:count], members[count:]
            self._buckets = [self.bucket_of(its) for some in parts for its in fill(some, size)]
            self._bucket_of = {one.parameter: at for at, bucket in enumerate(self._buckets) for one in bucket.members}
            self._ready |= self._times.keys()
            self._times.clear()
        while self._next < len(self._buckets):
            self._launch_next()
        self.drain()
        missing, self._missing = self._missing, []
        self._ready.clear()
        self._next = 0
        if len(self._late) == len(self.members):  # no backward has been seen
            self._buckets = []
        return missing

    def end_window(self) -> None:
        """Begin again: the next gradients take the place of those accumulated."""
        self._accumulated.clear()
        if self._held is not None:
            self._held.clear()
            for group in self.groups:
                group.gradient = None

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        values = [self._take(member.parameter) for member in bucket.members]
        self._missing += [m.parameter for m, value in zip(bucket.members, values, strict=True) if value is None]
        first = bucket.members[0].parameter  # one that is alone is sent from where it is, if backward has made it
        self.launch(bucket, values, keep=first not in self._ready)

    # --- one bucket

    def bucket_of(self, members: Sequence[Member]) -> Bucket:
        """Return a bucket of these parameters."""
        by_owner, sent = self.optimizer.reduce_scatter, self.optimizer.communication_data_type
        kinds = by_key(
            (Kind(id(one.group.process_group), sent or one.parameter.dtype, one.parameter.device), one)
            for one in members
        )
        return Bucket(members, [Message(its, kind, by_owner=by_owner) for kind, its in kinds.items()])

    def launch(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None], *, keep: bool) -> None:
        """Send gradients of a bucket's members; `drain` waits for the result. They are overwritten, or kept."""
        overlap = self.optimizer.overlap_comm
        while len(self._flights) >= (2 if overlap else 1):
            self._land()
        self._turn = 1 - self._turn if overlap else 0
        values = {
            member.parameter: None if gradient is None else gradient.detach().reshape(-1)
            for member, gradient in zip(bucket.members, gradients, strict=True)
        }
        sent = [(message, self._pack(message, values, keep=keep)) for message in bucket.messages]
        handles = [one for message, wire in sent for one in message.send(wire)]
        self._flights.append((bucket, sent, handles))
        if not overlap:
            self._land()

    def accept(self, averages: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Keep what this rank owns of gradients, by parameter, that have been averaged already."""
        for message in self.bucket_of([self.optimizer._place[parameter] for parameter in averages]).messages:
            for extent in message.own:
                self._receive(extent, averages[extent.member.parameter].detach().reshape(-1)[extent.share.of_parameter])
        self._accumulated |= averages.keys()

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
        alone = values[message.members[0].parameter] if len(message.members) == 1 and not keep else None
        if alone is not None and alone.dtype == message.kind.dtype:
            self._divide(alone, alone)
            return alone
        wire = self._buffer(message)
        for extent in message.extents:
            into = wire[extent.offset : extent.offset + extent.share.numel]
            value = values[extent.member.parameter]
            if value is None:
                into.zero_()
            else:
                self._divide(value[extent.share.of_parameter], into)
        return wire

    def _divide(self, value: torch.Tensor, into: torch.Tensor) -> None:
        """Divide by the world size, or by the factor of it that comes before the reduction."""
        factor, world_size = self.optimizer.gradient_predivide_factor, self.optimizer.world_size
        if factor is None and world_size > 1:
            torch.div(value, world_size, out=into)
        elif factor is not None and factor != 1.0:
            torch.mul(value, 1.0 / factor, out=into)
        elif into is not value:
            into.copy_(value)

    def _buffer(self, message: Message) -> torch.Tensor:
        """Return memory for a message; of each kind there are two to take turns with, or one."""
        key = (self._turn, message.kind)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < message.numel:
            every = [message, *(one for bucket in self._buckets for one in bucket.messages)]
            numel = max(one.numel for one in every if one.kind == message.kind)
            buffer = self._buffers[key] = torch.empty(numel, dtype=message.kind.dtype, device=message.kind.device)
        self._deliveries.before_reuse(message.kind.device)
        return buffer[: message.numel]

    def _land(self) -> None:
        """Wait for the oldest bucket and keep what this rank owns of it."""
        bucket, sent, handles = self._flights.popleft()
        wait_for(handles)
        factor, world_size = self.optimizer.gradient_predivide_factor, self.optimizer.world_size
        for message, wire in sent:
            for extent in message.own:
                received = wire[extent.offset : extent.offset + extent.share.numel]
                if factor is not None and factor != world_size:
                    received.mul_(factor / world_size)
                self._receive(extent, received)
        self._accumulated |= {member.parameter for member in bucket.members}

    def _receive(self, extent: Extent, received: torch.Tensor) -> None:
        """Keep an average that this rank owns; in memory of its own, where that of the whole comes later."""
        if self._held is None or extent.member.group.gradient is not None:
            self._deliver(extent, received, add=extent.member.parameter in self._accumulated)
        else:
            self._held.append((extent, received.clone()))

    def _deliver(self, extent: Extent, received: torch.Tensor, *, add: bool) -> None:
        """Accumulate what this rank owns."""
        into = self._gradient(extent.member.group)[extent.share.of_partition]
        self._deliveries.deliver(received, into, add=add)

    def _gradient(self, group: FlatGroup) -> torch.Tensor:
        """Return a group's accumulated gradients; padding stays zero."""
        if group.gradient is None:
            dtype = self.optimizer.gradient_accumulation_dtype or group.flat.dtype
            device = "cpu" if self.optimizer.offload else group.flat.device
            group.gradient = torch.zeros(group.partition, dtype=dtype, device=device, pin_memory=self._pins)
        return group.gradient


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
        staged = torch.empty(received.shape, dtype=received.dtype, device="cpu", pin_memory=True)
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
