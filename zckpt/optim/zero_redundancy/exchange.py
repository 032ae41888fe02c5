"""How updated parameters get from the rank that steps them to all others.

Parameters that are large go as they are. Small ones of a rank, of one device and element type, go together in a
bucket. Where parameters are views of buckets (`parameters_as_bucket_view`), a bucket goes as it is, and on GPUs, if the
ranks' shares are nearly equal, the buckets of all ranks are one buffer that a single all-gather completes. (Gloo's
all-gather copies the whole buffer twice; it takes twice as long as gloo's broadcasts.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zckpt.optim import memory

DIRECT_NBYTES = 1 << 20
"""A contiguous parameter of this size is sent by itself: packing it would cost more than a message."""

BUCKET_NBYTES = 8 << 20
"""Small parameters are packed up to this size."""

EVEN = 1.1
"""One all-gather serves where padding all shares to the largest one costs at most this factor."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Under its name since torch 2.13, or before."""

Kind = tuple[torch.device, torch.dtype]


@dataclass(slots=True)
class Bucket:
    """Parameters that one rank sends together.

    Parameters
    ----------
    rank : int
        In the process group.
    tensor : Tensor or None
        Flat, of which the parameters are views; None: packed when it is sent.
    parameters : list of Tensor
    """

    rank: int
    parameters: list[torch.Tensor]
    tensor: torch.Tensor | None = None


@dataclass(slots=True)
class Gathered:
    """A buffer of equal shares, [world size x width], that an all-gather completes.

    Parameters
    ----------
    tensor : Tensor
    width : int, elements
    shares : list of Bucket
        The parameters in it, by rank.
    """

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
    """Return the exchange of parameters that become views of buckets; their `data` is moved there.

    Parameters
    ----------
    shares : sequence of sequence of Tensor
        By rank.
    gather : bool
        Whether to gather shares at once that are nearly equal.
    """
    exchange = Exchange()
    for (device, dtype), ranks in by_kind(shares).items():
        numels = [sum(p.numel() for p in parameters) for parameters in ranks]
        width = max(numels)
        if not width:
            continue
        if gather and width * len(ranks) <= EVEN * sum(numels):
            whole = torch.zeros(width * len(ranks), dtype=dtype, device=device)
            views = [
                Bucket(rank, parameters, whole[rank * width : (rank + 1) * width])
                for rank, parameters in enumerate(ranks)
            ]
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
        view = memory.shaped(tensor[at : at + parameter.numel()], parameter)
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
        handles.append(_all_gather(gathered.tensor, own, group=group, async_op=True))
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
