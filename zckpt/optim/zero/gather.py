"""Weights to all ranks: at the beginning from the first, after each step from the ranks that have stepped them.

After a step they go in pieces, while other groups are stepped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from zckpt.optim.zero.flat_group import FlatGroup


def broadcast(tensors: Iterable[torch.Tensor], process_group: dist.ProcessGroup) -> None:
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


def begin(group: FlatGroup, bucket_size: int) -> list[dist.Work]:
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


def wait(handles: list[dist.Work]) -> None:
    """Wait for what was begun."""
    for handle in handles:
        handle.wait()
    handles.clear()
