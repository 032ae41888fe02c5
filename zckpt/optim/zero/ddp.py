"""With DistributedDataParallel: its buckets are reduced to owners, and not to all ranks; all else as without it.

DDP puts this rank's gradients into buckets and hands each to a communication hook, in the same order on all ranks. A
pass that DDP does not synchronise (`model.no_sync()`) has no buckets: its gradients stay in `grad`, and DDP's next
buckets have the sum. What DDP has no bucket for (a parameter outside of the model, or that the model is set to
ignore) is reduced when backward has ended, after all of DDP's own communication. Of a bucket's other parameters,
which are not this optimizer's, the average goes back to DDP, which puts it into their `grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zckpt.optim.param_groups import Group
from zckpt.optim.tensors import Future, GradBucket, Hook, reduced_gradients
from zckpt.optim.zero.backward import BackwardOptimizer
from zckpt.optim.zero.reduction import Bucket, fill


class DdpOptimizer(BackwardOptimizer):
    """Takes gradients from DDP's buckets, if it has been attached to a model, and else from backward."""

    _inner: tuple[Hook, Any] | None = None

    def attach(self, model: DistributedDataParallel, hook: Hook | None = None, *, state: Any = None) -> None:
        """Let DistributedDataParallel's buckets be reduced to owners by this optimizer, and not twice.

        Call it once, between steps. `model.no_sync()` then accumulates, and what the model assumes of its buckets and
        graph holds. Weights that the model has got from its first rank become this optimizer's.

        Parameters
        ----------
        model : DistributedDataParallel
        hook : callable, optional
            A communication hook that averages a bucket over all ranks, such as one that compresses; this optimizer then
            takes what it owns of what that returns.
        state : object
            What the hook is called with.

        Raises
        ------
        ValueError
            The model is of another process group than the optimizer, or has a communication hook already; or a hook is
            given and there are experts, whose ranks it does not know.
        RuntimeError
            Between backward and step.
        """
        if dist.get_process_group_ranks(model.process_group) != dist.get_process_group_ranks(self.process_group):
            raise ValueError("the model and the optimizer must be of the same ranks")
        if model._comm_hooks:
            raise ValueError(
                "the model has a communication hook already, and can have one only: make it without, and give the hook "
                "to the optimizer, as attach(model, hook, state=state)"
            )
        if hook is not None and any(group.is_expert for group in self.groups):
            raise ValueError("a hook averages over all ranks, and experts are averaged over those that share them")
        if self._passes or self._pass is not None:
            raise RuntimeError("attach must not come between backward and step")
        model.register_comm_hook(self, _on_bucket)
        self._inner = None if hook is None else (hook, state)
        self._ddp_buckets: dict[tuple[int, ...], Bucket] = {}
        self._ddp_came = False
        self._ddp_reduced: set[torch.Tensor] = set()
        self._by_hook: list[tuple[GradBucket, Future[torch.Tensor]]] = []
        self.is_attached = True
        for group in self.groups:
            group.take_weights()

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; see `BackwardOptimizer.add_param_group`."""
        super().add_param_group(param_group)
        if self.is_attached:
            self._ddp_buckets.clear()

    # --- one pass

    def _reduce_bucket(self, given: GradBucket) -> Future[torch.Tensor]:
        """Begin to reduce a bucket, if this pass reduces; return what DDP is to put into `grad`."""
        reduces = self._syncs and self._reduces()
        self._ddp_came |= self._syncs
        if self._inner is not None and reduces:
            hook, state = self._inner
            future = hook(state, given)
            self._by_hook.append((given, future))
            self._ddp_reduced |= {parameter for parameter in given.parameters() if parameter in self._place}
            return future
        pairs = list(zip(given.parameters(), given.gradients(), strict=True))
        if reduces:
            self._launch([(p, g) for p, g in pairs if p in self._place])
        _average([g for p, g in pairs if p not in self._place], self.process_group)
        done: Future[torch.Tensor] = Future()
        done.set_result(given.buffer())
        return done

    def _launch(self, ours: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        if not ours:
            return
        parameters = [parameter for parameter, _ in ours]
        key = tuple(map(id, parameters))
        if key not in self._ddp_buckets:
            self._ddp_buckets[key] = self._reducer.bucket_of(parameters)
        self._reducer.launch(self._ddp_buckets[key], [gradient for _, gradient in ours], keep=True)
        self._ddp_reduced |= set(parameters)

    def _reduce_rest(self) -> list[torch.Tensor]:
        """Reduce what DDP had no bucket for, and take all gradients out of `grad`."""
        if not self.is_attached:
            return super()._reduce_rest()
        for bucket, future in self._by_hook:
            found = zip(bucket.parameters(), reduced_gradients(bucket, future), strict=True)
            self._reducer.accept({parameter: gradient for parameter, gradient in found if parameter in self._place})
        self._by_hook.clear()
        rest = [member for member in self._reducer.members if member.parameter not in self._ddp_reduced]
        for members in fill(rest, self.reduce_bucket_size):
            self._launch([(member.parameter, member.parameter.grad) for member in members])
        self._reducer.drain()
        self._ddp_reduced.clear()
        self._local.clear()
        missing = [member.parameter for member in self._reducer.members if member.parameter.grad is None]
        for member in self._reducer.members:
            member.parameter.grad = None
        return missing

    def _is_synchronised(self) -> bool:
        return not self.is_attached or self._ddp_came or self._is_forced

    def _count_pass(self, *, reduced: bool) -> None:
        super()._count_pass(reduced=reduced)
        self._ddp_came = False

    # --- ranks without inputs, and failures

    def _go_along(self) -> bool:
        if not self.is_attached:
            return super()._go_along()
        self._sharded.take_out()
        self._end_pass(has_joined=True)  # DDP has called the hook with zeros, if the others reduced
        steps = self._is_due() and (self._is_reduced or self.gradient_accumulation_steps > 1)
        if steps:
            self._complete_window(has_joined=True)
        return steps

    def _fail_pass(self) -> None:
        """After a failure in a pass with DDP, whose ranks wait for this one, only forget what has been begun."""
        if not self.is_attached:
            super()._fail_pass()
            return
        with contextlib.suppress(Exception):  # the first error is raised
            self._reducer.drain()
        self._by_hook.clear()
        self._ddp_reduced.clear()
        self._ddp_came = False
        self._end_window()
        self._pass = None
        self._failed = True

    def _settle(self) -> None:
        if not self.is_attached:
            super()._settle()
            return
        if self._pass is not None and self._pass >= 0:
            self._fail_pass()
        self._failed = False


def _average(gradients: Sequence[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Average gradients over ranks where they are, as DDP would have."""
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        wire = torch.cat([gradient.reshape(-1) for gradient in alike]).div_(dist.get_world_size(process_group))
        dist.all_reduce(wire, group=process_group)
        for gradient, found in zip(alike, torch.split(wire, [one.numel() for one in alike]), strict=True):
            gradient.copy_(found.view(gradient.shape))


def _on_bucket(optimizer, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # see GradBucket
    return optimizer._reduce_bucket(bucket)
