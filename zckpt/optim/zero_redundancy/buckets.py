"""DDP's buckets, given to ranks: which parameters of which bucket a rank steps, and how far that is settled."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zckpt.optim.zero_redundancy import exchange


class OverlapStatus(enum.IntEnum):
    """How far the preparation is."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


@dataclass(slots=True, eq=False)
class BucketAssignment:
    """Neighbours among a bucket's parameters that one rank steps.

    `offset` is the position of the first among the bucket's parameters, `tensor` flat, and they are views of it.
    """

    parameters: list[torch.Tensor]
    offset: int
    tensor: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
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
        for handle in self.broadcast_handles:
            handle.wait()
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
        while end <= len(numels) - left and left > 1 and size + numels[end] / 2 <= rest / left:
            size += numels[end]
            end += 1
        if left == 1:
            end, size = len(numels), rest
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


def flatten(assignment: BucketAssignment) -> torch.Tensor:
    """Make an assignment's parameters views of its flat tensor, which is made if there is none, and return that."""
    parameters = assignment.parameters
    if assignment.tensor is None or not exchange.is_flat(assignment.tensor, parameters):
        assignment.tensor = parameters[0].detach().new_empty(sum(p.numel() for p in parameters))
        exchange.flatten(assignment.tensor, parameters)
    return assignment.tensor
