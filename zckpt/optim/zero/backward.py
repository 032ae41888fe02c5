"""Backward: gradients are taken as they become ready, reduced, and accumulated until a step is due.

A window is what lies between two steps: one backward, or `gradient_accumulation_steps` of them. A pass is one backward
that is not under `no_sync`. Stage 2 reduces in every pass; stage 1 in the last of a window.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zckpt.optim.param_groups import Group
from zckpt.optim.zero.buckets import Bucket
from zckpt.optim.zero.flat import FlatOptimizer
from zckpt.optim.zero.loss_scale import Scaler
from zckpt.optim.zero.reduction import Reducer, Rules

SHOWN_NAMES = 4

GradBucket = Any
"""`torch.distributed.GradBucket`, which torch does not type; a hook that DDP takes may not be annotated with it."""


class WindowFailedError(RuntimeError):
    """On all ranks: a window came to nothing, no rank has stepped, and the next window can begin."""


class BackwardOptimizer(FlatOptimizer, Joinable):
    """Takes gradients from backward and keeps this rank's part of their average."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        *,
        stage: int,
        rules: dict[str, Any],
        ignore_unused_parameters: bool,
        gradient_accumulation_steps: int,
        gradient_accumulation_dtype: torch.dtype | None,
        loss_scaler: Scaler,
        **flat: Any,
    ) -> None:
        self.stage = stage
        self.ignore_unused_parameters = ignore_unused_parameters
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.gradient_accumulation_dtype = gradient_accumulation_dtype
        self.loss_scaler = loss_scaler
        self._external_loss_scale: float | None = None
        self._local: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._syncs = True
        self._passes = 0
        self._pass: int | None = None
        self._last_graph = -1
        self._window_is_open = False
        self._failed = False
        self._ddp_buckets: dict[tuple[int, ...], Bucket] | None = None
        Joinable.__init__(self)
        super().__init__(params, optimizer_class, **flat)
        on_gpu = any(group.flat.is_cuda for group in self.groups)
        made = Rules(
            process_group=self.process_group,
            accumulation_dtype=gradient_accumulation_dtype,
            accumulation_device=torch.device("cpu") if self.offload else None,
            pin=self.offload and on_gpu,
            **rules,
        )
        self._reducer = Reducer(
            self.groups,
            made,
            self._take,
            while_backward=stage == 2 or made.overlap_comm,
            whole_till_then=stage == 1 and gradient_accumulation_steps > 1 and not self.offload,
        )
        self._hook_all()

    # --- what users call

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss with. One that is set stays; None lets the loss scaler decide again."""
        return self.loss_scaler.cur_scale if self._external_loss_scale is None else self._external_loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._external_loss_scale = scale

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale the loss, run its backward and reduce the gradients, as far as the stage reduces them then.

        Parameters
        ----------
        loss : Tensor, ()
            Is divided by `gradient_accumulation_steps` and multiplied with `loss_scale`.
        **kwargs
            Passed to `Tensor.backward`.

        Raises
        ------
        Exception
            What backward raises. The other ranks do not wait for this one: their `step` raises, too, and steps nothing.
        """
        self._settle()
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        if self.loss_scale != 1.0:
            loss = loss * self.loss_scale
        if self._ddp_buckets is not None:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        syncs = self._syncs
        if syncs:
            self._begin_pass()
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except Exception:
            self._failed = True
            if syncs:
                self._fail_pass()
            raise
        if not syncs:
            return
        self._end_pass()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, whole; the next backward outside reduces them along with its own."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; see `FlatOptimizer.add_param_group`. Raises RuntimeError between backward and step."""
        if self._is_made and (self._passes or self._pass is not None):
            raise RuntimeError("a param group cannot be added between backward and step")
        super().add_param_group(param_group)
        if self._is_made:
            self._reducer.forget()
            self._hook_all()
            if self._ddp_buckets is not None:
                self._ddp_buckets.clear()

    # --- gradients as they become ready

    def _hook_all(self) -> None:
        if self._ddp_buckets is not None:
            return
        this = weakref.ref(self)  # what hooks hold on to is never collected

        def on_gradient(parameter: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._on_gradient(parameter)

        for group in self.groups:
            for parameter in group.parameters:
                if parameter not in self._hooks:
                    self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            layout, parameter.grad = parameter.grad.layout, None  # what is left of this pass is to be reduced yet
            raise ValueError(
                f"the gradient of {self._name_of(parameter)} is {layout}, and only dense ones can lie "
                f"in a flat buffer; an embedding makes dense ones with sparse=False"
            )
        if not self._syncs:
            self._keep(parameter)
            return
        graph = torch._C._current_graph_task_id()
        if self._pass is None or (self._pass >= 0 and self._pass != graph):
            if graph < self._last_graph:  # it has run since before the last one ended
                self._refuse_nested()
            self._settle()
            self._begin_pass(graph=graph)
        if self.stage == 1:
            self._keep(parameter)
        if self._reduces():
            self._reducer.ready(parameter)

    def _keep(self, parameter: torch.Tensor) -> None:
        """Accumulate a gradient on this rank, in the type wanted for that; autograd does so in the parameter's own."""
        dtype = self.gradient_accumulation_dtype
        if dtype is None or dtype == parameter.dtype or parameter.grad is None:
            return
        known = self._local.get(parameter)
        if known is None:
            self._local[parameter] = parameter.grad.to(dtype)
        else:
            known.add_(parameter.grad)
        parameter.grad = None

    def _take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's gradient of a parameter, and forget it."""
        gradient, parameter.grad = parameter.grad, None
        known = self._local.pop(parameter, None)
        if known is None:
            return gradient
        return known if gradient is None else known.add_(gradient)

    def _reduces(self) -> bool:
        """Tell whether the present pass reduces gradients."""
        return self.stage == 2 or self._passes + 1 >= self.gradient_accumulation_steps

    # --- passes

    def _begin_pass(self, graph: int | None = None) -> None:
        """Begin a pass: of `backward`, or of a backward that somebody else runs, whose end autograd will tell."""
        if not self._window_is_open:
            self._window_is_open = True
            Join.notify_join_context(self)
        self._pass = -1 if graph is None else graph
        if graph is not None:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_graph, graph))

    def _end_graph(self, graph: int) -> None:
        """End the pass of a backward that somebody else runs, unless another has run inside."""
        if self._pass != graph:
            self._refuse_nested()
        self._last_graph = graph
        self._end_pass()

    def _refuse_nested(self) -> NoReturn:
        """Raise RuntimeError. Only `backward` can tell a backward inside of another from one that comes after it."""
        self._failed = True
        raise RuntimeError(
            "a backward has run inside of another, as reentrant checkpoints make it; let the optimizer run the outer "
            "one, by optimizer.backward(loss), or make checkpoints with use_reentrant=False"
        )

    def _end_pass(self, *, has_joined: bool = False) -> None:
        missing = self._reducer.finish() if self._reduces() else []
        self._pass = None
        self._passes += 1
        if not self.ignore_unused_parameters:
            self._refuse_unused([] if has_joined else missing)

    def _fail_pass(self) -> None:
        """Take part in what is left of a pass that failed here, so that no rank waits for this one."""
        self._failed = True
        reduces = self._reduces()
        self._pass = None
        self._passes += 1
        with contextlib.suppress(Exception):  # the first error is told
            if reduces:
                self._reducer.finish()
            if not self.ignore_unused_parameters:
                self._refuse_unused([])

    def _run_empty_passes(self, *, has_joined: bool = False) -> None:
        """Take part in the passes that are left of this window, with what gradients there are."""
        while self._passes < self.gradient_accumulation_steps:
            self._begin_pass()
            self._end_pass(has_joined=has_joined)

    def _settle(self) -> None:
        """After a failure here, go through this window with the other ranks, who learn of it in their step."""
        if self._pass is not None and self._pass >= 0:  # a backward that was not ours has failed
            self._fail_pass()
        while self._failed and self._passes < self.gradient_accumulation_steps:
            self._begin_pass()
            self._fail_pass()
        if self._failed:
            with contextlib.suppress(WindowFailedError):
                self._step_or_fail()

    def _fail_window(self) -> None:
        """Go through this window with the other ranks after a failure here that was not in backward."""
        if self._ddp_buckets is None:  # otherwise DDP makes them wait
            self._failed = True
            self._settle()

    def _step_or_fail(self) -> None:
        raise NotImplementedError

    def _end_window(self) -> None:
        """Forget the gradients of a window and begin the next one."""
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None
        self._local.clear()
        self._reducer.end_window()
        self._passes = 0
        self._window_is_open = False
        self._failed = False

    def _refuse_unused(self, missing: list[torch.Tensor]) -> None:
        """Raise RuntimeError on all ranks if any of them has parameters without gradient."""
        told: list[Any] = [None] * self.world_size
        names = [self._name_of(parameter) for parameter in missing]
        dist.all_gather_object(told, names, group=self.process_group)
        for rank, unused in enumerate(told):
            if unused:
                self._end_window()
                more = f" and {len(unused) - SHOWN_NAMES} more" if len(unused) > SHOWN_NAMES else ""
                raise WindowFailedError(
                    f"no gradient on rank {rank} for {', '.join(unused[:SHOWN_NAMES])}{more}; "
                    f"ignore_unused_parameters=True takes them for zero"
                )

    def _name_of(self, parameter: torch.Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for position, member in enumerate(group["params"]):
                if member is parameter:
                    names = group.get("param_names")
                    return str(names[position]) if names else f"parameter {position} of param group {index}"
        return "a parameter"

    # --- beside DistributedDataParallel

    def attach(self, model: DistributedDataParallel) -> None:
        """Let DistributedDataParallel's buckets be reduced to owners by this optimizer, and not twice.

        Call it once, before the first backward. `model.no_sync()` then accumulates, and whatever the model was told
        of its buckets and graph holds.

        Raises
        ------
        ValueError
            The model is of another process group than the optimizer.
        """
        if dist.get_process_group_ranks(model.process_group) != dist.get_process_group_ranks(self.process_group):
            raise ValueError("the model and the optimizer must be of the same ranks")
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._ddp_buckets = {}
        model.register_comm_hook(self, _on_ddp_bucket)

    def _reduce_ddp_bucket(self, given: GradBucket) -> None:
        assert self._ddp_buckets is not None  # noqa: S101  # attach made it
        if not self._window_is_open:
            self._window_is_open = True
            Join.notify_join_context(self)
        if given.index() == 0:
            self._reducer.end_window()  # gradients are summed up on each rank since the last step
        ours = [(p, g) for p, g in zip(given.parameters(), given.gradients(), strict=True) if p in self._place]
        key = tuple(id(parameter) for parameter, _ in ours)
        if key not in self._ddp_buckets:
            self._ddp_buckets[key] = self._reducer.bucket_of([parameter for parameter, _ in ours])
        if ours:
            self._reducer.launch(self._ddp_buckets[key], [gradient for _, gradient in ours], keep=True)
        if given.is_last():
            self._reducer.drain()
            self._passes = self.gradient_accumulation_steps


def _on_ddp_bucket(optimizer, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # see GradBucket
    optimizer._reduce_ddp_bucket(bucket)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
