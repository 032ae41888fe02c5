"""A param group as ZeRO keeps it: one flat buffer, cut in equal partitions, of which each rank steps one.

All ranks have the whole buffer. Its weights come from the first rank at the beginning, and after each step from the
ranks that have stepped them: in pieces, while other groups are stepped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zckpt.state.partition import (
    PARAMETER_ALIGNMENT_NBYTES,
    FlatShare,
    alignment_padding,
    flat_padding,
    flat_partition_numel,
    flat_shares,
    flat_starts,
    round_robin_order,
)

PIECE = 1 << 20  # elements that weights and masters are compared in: at most 4 MiB of what masters round to
PIECE_OF_GPU = 1 << 25  # each of them is waited for


@dataclass(eq=False)
class FlatGroup:
    """One param group's flat buffer, of which the parameters are views, and this rank's part of its masters.

    Parameters
    ----------
    parameters : list of Tensor
        Those that are trained, in the order of the buffer.
    numbers : list of int
        Which of the param group's trained parameters each of these is.
    process_group : ProcessGroup
        The ranks that share the buffer.
    pads : list of int, elements
        After each parameter.
    partition : int, elements
        Of each rank, padding included.
    flat : Tensor, (world size x partition,)
        Of the model's element type.
    master : Parameter, (partition,)
        What the local optimizer steps.
    gradient : Tensor or None, (partition,)
        Averaged gradients of this rank's partition, of the type they are accumulated in; made when they first come.
    """

    parameters: list[torch.Tensor]
    numbers: list[int]
    process_group: dist.ProcessGroup
    rank: int
    world_size: int
    is_expert: bool
    pads: list[int]
    partition: int
    flat: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor | None = None
    shapes: list[torch.Size] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.numels = [shape.numel() for shape in self.shapes]
        self.starts = flat_starts(self.numels, self.pads)
        self.own = self.fragments(self.rank)

    @property
    def total(self) -> int:
        """Elements of the buffer up to the padding at its end."""
        return self.starts[-1]

    @property
    def padding(self) -> int:
        """Elements at the end of this rank's partition that belong to no parameter."""
        return flat_padding(self.total, self.partition, self.rank)

    @property
    def weights(self) -> torch.Tensor:
        """The partition of this rank."""
        return self.weights_of(self.rank)

    def weights_of(self, rank: int) -> torch.Tensor:
        """Return one rank's partition of the buffer."""
        return self.flat[rank * self.partition : (rank + 1) * self.partition]

    def fragments(self, rank: int) -> list[FlatShare]:
        """Return the runs of parameters in one rank's partition."""
        return list(flat_shares(self.numels, self.starts, self.partition, rank))

    def point(self, position: int | None = None) -> None:
        """Make parameters views of the buffer, if something has put them elsewhere; their values go along.

        Parameters
        ----------
        position : int, optional
            Which one; by default all.
        """
        for index in range(len(self.parameters)) if position is None else (position,):
            parameter, start, shape = self.parameters[index], self.starts[index], self.shapes[index]
            view = self.flat[start : start + shape.numel()].view(shape)
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                view.copy_(parameter.detach())
                parameter.data = view

    @torch.no_grad()
    def adopt_weights(self, position: int | None = None) -> None:
        """Take weights that somebody has set since they were made of masters into the masters.

        A master whose weight is what it rounds to is left alone: it has what rounding has lost.

        Parameters
        ----------
        position : int, optional
            Of which parameter; by default of all.
        """
        self.point(position)
        ranges = [(0, self.partition)]
        if position is not None:
            ranges = [(f.position, f.position + f.numel) for f in self.own if f.index == position]
        master = self.master.detach()
        piece = PIECE_OF_GPU if master.is_cuda else PIECE
        for begin, end in ranges:
            for start in range(begin, end, piece):
                where = slice(start, min(start + piece, end))
                kept, found = master[where], self.weights[where].to(master.device)
                rounded = kept.to(found.dtype)
                if not torch.equal(rounded, found):
                    is_set = (rounded != found) & ~(rounded.isnan() & found.isnan())
                    kept.copy_(torch.where(is_set, found.to(kept.dtype), kept))


def make_group(
    trained: Sequence[torch.Tensor],
    process_group: dist.ProcessGroup,
    *,
    is_expert: bool,
    round_robin: bool,
    alignment: bool,
    master_dtype: torch.dtype | None,
    master_device: torch.device | None,
    pin: bool,
    broadcast: bool,
) -> FlatGroup:
    """Move parameters into a flat buffer and make this rank's masters of them.

    Parameters
    ----------
    trained : sequence of Tensor
        Of one element type and device, in the optimizer's order.
    process_group : ProcessGroup
    is_expert, round_robin, alignment : bool
        See `ZeroOptimizer`.
    master_dtype, master_device : optional
        By default those of the parameters.
    pin : bool
        Whether masters lie in pinned memory.
    broadcast : bool
        Whether all ranks get the weights of the first.

    Raises
    ------
    ValueError
        Several element types or devices.
    """
    _check(trained)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    numbers = round_robin_order(len(trained), world_size) if round_robin else list(range(len(trained)))
    parameters = [trained[number] for number in numbers]
    dtype = parameters[0].dtype if parameters else torch.float32
    device = parameters[0].device if parameters else torch.device("cpu")
    multiple = max(PARAMETER_ALIGNMENT_NBYTES // dtype.itemsize, 1) if alignment else 1
    numels = [parameter.numel() for parameter in parameters]
    pads = alignment_padding(numels, multiple)
    partition = flat_partition_numel(sum(numels) + sum(pads), world_size)
    flat = torch.zeros(partition * world_size, dtype=dtype, device=device)
    own = flat[rank * partition : (rank + 1) * partition]
    master = torch.empty(
        partition, dtype=master_dtype or dtype, device=master_device or device, pin_memory=pin and partition > 0
    )
    made = FlatGroup(
        parameters, numbers, process_group, rank, world_size, is_expert, pads, partition, flat,
        torch.nn.Parameter(master),
    )  # fmt: skip
    made.point()
    if broadcast:
        broadcast_first([flat], process_group)
    master.copy_(own)
    return made


def _check(trained: Sequence[torch.Tensor]) -> None:
    dtypes = {str(parameter.dtype) for parameter in trained}
    devices = {str(parameter.device) for parameter in trained}
    for what, found in (("element types", dtypes), ("devices", devices)):
        if len(found) > 1:
            raise ValueError(
                f"a param group of several {what}, {', '.join(sorted(found))}, which one flat buffer cannot hold; "
                f"give each its own group"
            )
    if any(not parameter.dtype.is_floating_point for parameter in trained):
        raise ValueError(f"parameters must be of a floating-point type, not {', '.join(sorted(dtypes))}")


def broadcast_first(tensors: Iterable[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the elements that its first one has, of whatever type. All of them call it together."""
    if dist.get_world_size(process_group) == 1:
        return
    first = dist.get_global_rank(process_group, 0)
    for tensor in tensors:
        if not tensor.numel():
            continue
        here = tensor.detach()
        wire = here.contiguous().view(-1).view(torch.uint8)
        dist.broadcast(wire, src=first, group=process_group)
        if not here.is_contiguous():
            here.copy_(wire.view(here.dtype).view(here.shape))


def begin_gather(group: FlatGroup, bucket_size: int) -> list[dist.Work]:
    """Begin to complete a group's flat buffer from the ranks' partitions. All its ranks call it together.

    Parameters
    ----------
    group : FlatGroup
    bucket_size : int, elements
        Of the buffer that go at once, over all ranks.

    Returns
    -------
    list of Work
        To be waited for before the weights are used.

    Notes
    -----
    Gloo's all-gather copies all that it receives twice; a broadcast by each rank takes a fraction of its time.
    """
    if group.world_size == 1 or not group.partition:
        return []
    piece = max(bucket_size // group.world_size, 1)
    by_broadcast = group.flat.device.type == "cpu"
    if not by_broadcast and piece >= group.partition:
        own = group.weights
        return [_all_gather(group.flat, own, group=group.process_group, async_op=True)]
    handles = []
    for start in range(0, group.partition, piece):
        views = [group.weights_of(rank)[start : start + piece] for rank in range(group.world_size)]
        if by_broadcast:
            handles += [
                dist.broadcast(
                    view, dist.get_global_rank(group.process_group, rank), group.process_group, async_op=True
                )
                for rank, view in enumerate(views)
            ]
        else:
            handles.append(dist.all_gather(views, views[group.rank], group=group.process_group, async_op=True))
    return handles


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Under its name since torch 2.13, or before."""


def wait_for(handles: list[dist.Work]) -> None:
    """Wait for what was begun."""
    for handle in handles:
        handle.wait()
    handles.clear()
