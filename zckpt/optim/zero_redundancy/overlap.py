"""Stepping while DistributedDataParallel still reduces: communication hooks that step as gradients come in.

    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))

DDP settles on its buckets after the first iterations. Until then parameters belong to ranks as they do without
overlap; then every bucket, or every share of one (`shard_buckets`), is given to a rank, its parameters become views of
one flat tensor that is sent whole, and state that exists by then moves to its new rank.

All collectives are started by the thread that runs backward, bucket by bucket: in the same order on every rank,
whichever reduction ends first, so that neither backend waits for what another rank has not begun.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zckpt.optim.ranks import broadcast
from zckpt.optim.tensors import Future, GradBucket, Hook, reduced_gradients
from zckpt.optim.zero_redundancy.exchange import OverlapStatus

if TYPE_CHECKING:
    from zckpt.optim.zero_redundancy.optimizer import ZeroRedundancyOptimizer


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    from_first_iteration: bool = False,
) -> Hook:
    """Return a hook that reduces like `hook`, and steps when backward has reached its last bucket.

    Each rank steps its buckets while later ones are reduced and parameters of earlier ones are sent.

    Parameters
    ----------
    hook : callable
        Reduces a bucket; for example `allreduce_hook`, or one that compresses.
    ddp : DistributedDataParallel
    zero : ZeroRedundancyOptimizer
        Created with `overlap_with_ddp=True`.
    shard_buckets : bool
        Cut each bucket for several ranks, instead of giving it to one.
    from_first_iteration : bool
        Also step in the iterations before DDP has fixed its buckets (two, or three with `static_graph`), after backward
        instead of during it. False, as in torch: these iterations change nothing.

    Raises
    ------
    ValueError
        The optimizer was not created for it.
    """
    return _Steps(hook, ddp, zero, shard_buckets, from_first_iteration, interleaved=False).as_hook()


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    from_first_iteration: bool = False,
) -> Hook:
    """Return a hook that reduces like `hook`, and steps each bucket while the next one is reduced.

    Parameters and errors are those of `hook_with_zero_step`. Prefer this one if reducing is fast compared with
    backward.
    """
    return _Steps(hook, ddp, zero, shard_buckets, from_first_iteration, interleaved=True).as_hook()


class _Steps:
    """The buckets of one iteration, and what has been done with them."""

    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        shard: bool,
        first: bool,
        *,
        interleaved: bool,
    ) -> None:
        if not zero._overlap_with_ddp:
            raise ValueError("this hook needs an optimizer with overlap_with_ddp=True")
        self.hook, self.zero, self.first, self.interleaved = hook, zero, first, interleaved
        self.ddp = weakref.ref(ddp)
        self.iterations = 0
        self.waiting: dict[int, tuple[GradBucket, Future[torch.Tensor]]] = {}
        zero._overlap_info.shard_buckets = shard

    def as_hook(self) -> Hook:
        """Return what DDP calls with each bucket."""

        def hook_with_step(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # see GradBucket
            return self.take(state, bucket)

        return hook_with_step

    def take(self, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        """Begin to reduce a bucket, and step what can be; or do what the preparation asks for."""
        info, index, is_last = self.zero._overlap_info, bucket.index(), bucket.is_last()
        if index == 0:  # whether or not the iteration before was gone through to its end
            self.waiting.clear()
            info.wait_for_broadcasts()
            if info.status == OverlapStatus.DDP_HAS_REBUILT_BUCKETS:
                self.zero._init_zero_for_overlap()
        future = self.hook(state, bucket)
        self.waiting[index] = (bucket, future)
        if info.status == OverlapStatus.INITIALIZED:
            if [*map(id, bucket.parameters())] != [*map(id, info.params_per_bucket[index])]:
                raise RuntimeError(f"DDP has changed bucket {index} after its parameters were assigned to ranks")
            for earlier in sorted(self.waiting):  # reductions began earlier
                if is_last or (self.interleaved and earlier < index):
                    self._step(earlier)
            if is_last:
                self.zero._end_step()
                info.wait_for_broadcasts()
                info.clear_per_iter_info()
            return future
        if self._is_settled():
            info.params_per_bucket[index:] = [bucket.parameters()]
            if is_last:
                info.status = OverlapStatus.DDP_HAS_REBUILT_BUCKETS
        self.iterations += is_last
        if is_last and self.first:  # as without overlap, with the gradients of all buckets
            gradients: dict[torch.Tensor, torch.Tensor] = {}
            for number in sorted(self.waiting):
                came, reduced = self.waiting[number]
                gradients.update(zip(came.parameters(), reduced_gradients(came, reduced), strict=True))
            self.waiting.clear()
            self.zero._step_gradients(gradients)
            self.zero._end_step()
            self.zero._sync_params()
        return future

    def _is_settled(self) -> bool:
        """Tell whether DDP will keep the buckets it has; with unused parameters to find, it never changes them."""
        ddp = self.ddp()
        if ddp is None:
            return False
        if ddp._has_rebuilt_buckets or (ddp.find_unused_parameters and not ddp.static_graph):
            return True
        # A rank that has run out of inputs rebuilds its buckets with the others, in DDP's join hook, and notes nothing.
        return bool(ddp._join_config.enable and self.iterations >= (2 if ddp.static_graph else 1))

    def _step(self, index: int) -> None:
        """Step this rank's share of a bucket and begin to exchange all shares."""
        bucket, future = self.waiting.pop(index)
        zero = self.zero
        assignments = zero._bucket_assignments_per_rank
        ranks = sorted(zero._overlap_info.assigned_ranks_per_bucket[index])
        tensors = {rank: assignments[rank][index].flattened() for rank in ranks}
        mine = assignments[zero.rank].get(index)
        if mine is not None:
            found = reduced_gradients(bucket, future)[mine.offset : mine.offset + len(mine.parameters)]
            zero._step_gradients(dict(zip(mine.parameters, found, strict=True)))
        if zero.world_size == 1:
            return
        handles = [broadcast(tensor, rank, zero.process_group) for rank, tensor in tensors.items()]
        zero._overlap_info.broadcast_handles += handles
