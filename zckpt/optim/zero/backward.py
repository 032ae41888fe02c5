"""Backward: gradients are taken as they become ready, reduced, and accumulated until a step is due.

A window is what lies between two steps: one backward, or `gradient_accumulation_steps` of them, or what somebody says
is one. A pass is one backward that is not under `no_sync`. Stage 2 reduces in every pass; stage 1 in the last of a
window. What no pass has reduced when a step is due, is reduced then.

A parameter has two hooks. One runs before autograd puts a gradient into `grad`, and takes a stand-in out of there; one
runs afterwards, and keeps the gradient or has it reduced.

With DistributedDataParallel, its buckets are reduced to owners, and not to all ranks; all else is as without it. DDP
puts this rank's gradients into buckets and hands each to a communication hook, in the same order on all ranks. A pass
that DDP does not synchronise (`model.no_sync()`) has no buckets: its gradients stay in `grad`, and DDP's next buckets
have the sum. What DDP has no bucket for (a parameter outside of the model, or that the model is set to ignore) is
reduced when backward has ended, after all of DDP's own communication. Of a bucket's other parameters, which are not
this optimizer's, the average goes back to DDP, which puts it into their `grad`.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zckpt.optim.param_groups import SHOWN, Group
from zckpt.optim.tensors import Future, GradBucket, Hook, end_to_end, reduced_gradients
from zckpt.optim.zero.flat import FlatOptimizer
from zckpt.optim.zero.reduction import Bucket, Reducer, ShardedGradient, ShardedGradients, fill
from zckpt.optim.zero.stepping import Scaler, model_rank
from zckpt.state import by_key


class WindowFailedError(RuntimeError):
    """On all ranks: a window came to nothing, no rank has stepped, and the next window can begin."""


class BackwardOptimizer(FlatOptimizer):
    """Takes gradients from backward and keeps this rank's partition of their average."""

    ignore_unused_parameters: bool
    loss_scaler: Scaler

    is_attached = False
    """Whether gradients come in DDP's buckets."""

    def __init__(self, *given: Any) -> None:  # what ShardedOptimizer is given
        self._external_loss_scale: float | None = None
        self._local: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks: dict[torch.Tensor, list[RemovableHandle]] = {}
        self._sharded = ShardedGradients()
        self._syncs = True
        self._pass: int | None = None
        self._last_graph = -1
        self._is_forced = False
        self._boundary: bool | None = None
        self._begin_window()
        self._inner: tuple[Hook, Any] | None = None
        self._ddp_buckets: dict[tuple[int, ...], Bucket] = {}
        self._ddp_came = False
        self._ddp_reduced: set[torch.Tensor] = set()
        self._by_hook: list[tuple[GradBucket, Future[torch.Tensor]]] = []
        super().__init__(*given)
        self._reducer = Reducer(self, self._take)
        self._hook_all()

    def _begin_window(self) -> None:
        self._passes = 0
        self._is_complete = False
        self._is_fresh = False
        self._is_reduced = True
        self._window_is_open = False
        self._failed = False

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss with. One that is set stays; None lets the loss scaler decide again."""
        return self.loss_scaler.cur_scale if self._external_loss_scale is None else self._external_loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._external_loss_scale = scale

    @property
    def is_model_parallel(self) -> bool:
        """Whether other ranks have other slices of the model."""
        return model_rank(self.model_parallel)[1] > 1

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; see `FlatOptimizer.add_param_group`. Raises RuntimeError between backward and step."""
        if self._is_made and (self._passes or self._pass is not None):
            raise RuntimeError("a param group cannot be added between backward and step")
        super().add_param_group(param_group)
        if self._is_made:
            self._reducer.forget()
            self._ddp_buckets.clear()
            self._hook_all()

    # --- what users call

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
            raise ValueError("the model and the optimizer must have the same ranks")
        if model._comm_hooks:
            raise ValueError(
                "the model already has its only communication hook: create it without one, and give the hook to the "
                "optimizer: attach(model, hook, state=state)"
            )
        if hook is not None and any(group.is_expert for group in self.groups):
            raise ValueError(
                "a hook averages over all ranks, but experts must be averaged over the ranks that share them"
            )
        if self._passes or self._pass is not None:
            raise RuntimeError("attach cannot be called between backward and step")
        model.register_comm_hook(self, _on_bucket)
        self._inner = None if hook is None else (hook, state)
        self.is_attached = True
        self.adopt_weights()

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
        if syncs:
            self._end_pass()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the window ends with the backward that ran since `step` was last called, or else with the next.

        Notes
        -----
        Source: the method of this name of DeepSpeed's engine, 0.19, whose `step` is called after each backward, too.
        """
        if self._boundary is not None:
            return self._boundary
        return self._passes + (not self._is_fresh) >= self.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backward is the last of its window, whatever `gradient_accumulation_steps` says.

        With False, `step` does nothing. With True, the backward that comes ends the window, and `step` steps: with
        what the data's end has left, for example. It stays until it is set again; None lets the count decide. All
        ranks say the same. Losses are divided by `gradient_accumulation_steps` all the same.

        Raises
        ------
        RuntimeError
            In a `Join`, whose ranks without inputs could not know.

        Notes
        -----
        Source: the method of this name of DeepSpeed's engine, 0.19.
        """
        if is_boundary is not None and self._join_config.enable:
            raise RuntimeError(
                "ranks that have joined without inputs cannot know where a window ends: let the optimizer count "
                "passes instead"
            )
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, whole.

        The next backward outside reduces them along with its own; or else the step does.
        """
        before, self._syncs = self._syncs, False
        self._is_reduced = False
        try:
            yield
        finally:
            self._syncs = before

    def _reduces(self) -> bool:
        return self.stage == 2 or self._is_last()

    def _is_last(self) -> bool:
        """Tell whether the present pass is the last of its window, or the next one if there is none."""
        if self._is_forced or self._boundary is not None:
            return self._is_forced or bool(self._boundary)
        return self._passes + 1 >= self.gradient_accumulation_steps

    def _is_due(self) -> bool:
        """Tell whether the window has come to its end, where `step` steps; so it has where nothing has begun."""
        if self._boundary is not None:
            return self._boundary
        return not 0 < self._passes < self.gradient_accumulation_steps

    # --- gradients as they become ready

    def _hook_all(self) -> None:
        this = weakref.ref(self)  # what hooks hold on to is never collected

        def before_gradient(parameter: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
            optimizer, its = this(), parameter()
            if its is not None and isinstance(its.grad, ShardedGradient) and not _accumulates(its):
                return
            if optimizer is not None:
                optimizer._sharded.take_out()
            if its is not None and isinstance(its.grad, ShardedGradient):  # of an optimizer that is no more
                its.grad = None

        def on_gradient(parameter: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._on_gradient(parameter)

        for parameter in self._place.keys() - self._hooks.keys():
            self._hooks[parameter] = [
                parameter.register_hook(partial(before_gradient, weakref.ref(parameter))),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(on_gradient),  # type: ignore[no-untyped-call]
            ]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            layout, parameter.grad = parameter.grad.layout, None  # what is left of this pass is to be reduced yet
            raise ValueError(
                f"the gradient of {self._name_of(parameter)} is {layout}, but a flat buffer can only hold dense "
                "ones; create the embedding with sparse=False"
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
        if self._reduces() and not self.is_attached:
            self._reducer.ready(parameter)

    def _keep(self, parameter: torch.Tensor) -> None:
        """Accumulate a gradient on this rank, in the type asked for; autograd does so in the parameter's own."""
        dtype = self.gradient_accumulation_dtype
        if dtype is None or dtype == parameter.dtype or parameter.grad is None or self.is_attached:
            return  # DDP looks for it in `grad`
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

    def _name_of(self, parameter: torch.Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for position, member in enumerate(group["params"]):
                if member is parameter:
                    names = group.get("param_names")
                    return str(names[position]) if names else f"parameter {position} of param group {index}"
        return "a parameter"

    # --- passes

    def _begin_pass(self, graph: int | None = None) -> None:
        self._sharded.take_out()
        if not self._window_is_open:
            self._window_is_open = True
            Join.notify_join_context(self)
        self._pass = -1 if graph is None else graph
        if graph is not None:  # its end comes after all that is to be done then: DDP's, too
            at_end = torch.autograd.Variable._execution_engine.queue_callback
            at_end(partial(at_end, partial(self._end_own, graph)))

    def _end_own(self, graph: int) -> None:
        """End the pass of a backward that somebody else runs, unless another has run inside."""
        if self._pass != graph:
            self._refuse_nested()
        self._last_graph = graph
        self._end_pass()

    def _refuse_nested(self) -> NoReturn:
        """Raise RuntimeError. Only `backward` knows whether a backward is inside of another or after it."""
        self._failed = True
        raise RuntimeError(
            "a backward ran inside another, as with reentrant checkpoints; run the outer one with "
            "optimizer.backward(loss), or use checkpoints with use_reentrant=False"
        )

    def _end_pass(self, *, has_joined: bool = False) -> None:
        missing: list[torch.Tensor] = []
        reduces = self._reduces() and (not self.is_attached or self._ddp_came or self._is_forced)
        if reduces:
            missing = self._reduce_rest_of_ddp() if self.is_attached else self._reducer.finish()
            self._sharded.put(self)
        self._count_pass(reduced=reduces)
        if not self.ignore_unused_parameters:
            self._refuse_unused([] if has_joined else missing)

    def _count_pass(self, *, reduced: bool) -> None:
        self._is_complete = self._is_last()
        self._is_reduced = reduced
        self._is_fresh = True
        self._pass = None
        self._passes += 1
        self._ddp_came = False

    def _fail_pass(self) -> None:
        """Take part in what is left of a pass that failed here, so that no rank waits for this one.

        With DDP, whose ranks wait for this one, only forget what has been begun.
        """
        if self.is_attached:
            with contextlib.suppress(Exception):  # the first error is raised
                self._reducer.drain()
            self._by_hook.clear()
            self._ddp_reduced.clear()
            self._ddp_came = False
            self._end_window()
            self._pass = None
            self._failed = True
            return
        self._failed = True
        reduces = self._reduces()
        self._count_pass(reduced=reduces)
        with contextlib.suppress(Exception):  # the first error is raised
            if reduces:
                self._reducer.finish()
            if not self.ignore_unused_parameters:
                self._refuse_unused([])

    def _complete_window(self, *, has_joined: bool = False) -> None:
        """Take part in the passes that are left of this window, and reduce what gradients are left on this rank."""
        self._sharded.take_out()
        if self._boundary is None:
            while self._passes < self.gradient_accumulation_steps:
                self._begin_pass()
                self._end_pass(has_joined=has_joined)
        by_hand = any(  # since the last pass
            p.grad is not None and not isinstance(p.grad, ShardedGradient) and p.numel() for p in self._place
        )
        if self._passes == 0 or not self._is_reduced or by_hand:
            self._is_forced = True
            try:
                self._begin_pass()
                self._end_pass(has_joined=has_joined)
            finally:
                self._is_forced = False
        self._sharded.take_out()

    def _settle(self) -> None:
        """After a failure here, go through this window with the other ranks, who learn of it in their step."""
        if self._pass is not None and self._pass >= 0:  # a backward that was not ours has failed
            self._fail_pass()
        if self.is_attached:
            self._failed = False
        while self._failed and self._boundary is None and self._passes < self.gradient_accumulation_steps:
            self._begin_pass()
            self._fail_pass()
        if self._failed and (self._is_complete or self._boundary is None):
            with contextlib.suppress(WindowFailedError):
                self._step_or_fail()

    def _end_failed_window(self) -> None:
        """Step, which fails, with ranks that know that the window ends with the pass that failed here."""
        if self._failed and self._boundary:
            if not self._is_reduced:
                self._begin_pass()
                self._fail_pass()
            with contextlib.suppress(WindowFailedError):
                self._step_or_fail()

    def main_hook(self) -> None:
        """Take part in one window and its step, without inputs."""
        self._window_is_open = True  # the others have said so
        with contextlib.suppress(WindowFailedError):  # those that train raise it
            if self.is_attached:
                self._sharded.take_out()
                self._end_pass(has_joined=True)  # DDP has called the hook with zeros, if the others reduced
                if not self._is_due() or not (self._is_reduced or self.gradient_accumulation_steps > 1):
                    return
            else:
                self._passes = 0
            self._complete_window(has_joined=True)
            self._step_or_fail()

    @abstractmethod
    def _step_or_fail(self) -> None:
        """Step with the gradients of a window that has ended; raise WindowFailedError if some rank has failed."""

    def _end_window(self) -> None:
        """Forget the gradients of a window and begin the next one."""
        self._sharded.are_in = False
        for parameter in self._place:
            parameter.grad = None
        self._local.clear()
        self._reducer.end_window()
        self._begin_window()

    def _refuse_unused(self, missing: list[torch.Tensor]) -> None:
        """Raise RuntimeError on all ranks if any of them has parameters without gradient."""
        gathered: list[Any] = [None] * self.world_size
        names = [self._name_of(parameter) for parameter in missing]
        dist.all_gather_object(gathered, names, group=self.process_group)
        for rank, unused in enumerate(gathered):
            if unused:
                self._end_window()
                more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
                raise WindowFailedError(
                    f"no gradient on rank {rank} for {', '.join(unused[:SHOWN])}{more}; "
                    "ignore_unused_parameters=True treats them as zero"
                )

    # --- buckets of DDP

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
        others = by_key((str(g.dtype), g) for p, g in pairs if p not in self._place)
        for _, alike in sorted(others.items()):  # averaged in place, as DDP would
            wire = torch.cat([gradient.reshape(-1) for gradient in alike]).div_(dist.get_world_size(self.process_group))
            dist.all_reduce(wire, group=self.process_group)
            for gradient, found in end_to_end(wire, alike):
                gradient.copy_(found.view(gradient.shape))
        done: Future[torch.Tensor] = Future()
        done.set_result(given.buffer())
        return done

    def _launch(self, ours: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        if not ours:
            return
        parameters = [parameter for parameter, _ in ours]
        key = tuple(map(id, parameters))
        if key not in self._ddp_buckets:
            self._ddp_buckets[key] = self._reducer.bucket_of([self._place[parameter] for parameter in parameters])
        self._reducer.launch(self._ddp_buckets[key], [gradient for _, gradient in ours], keep=True)
        self._ddp_reduced |= set(parameters)

    def _reduce_rest_of_ddp(self) -> list[torch.Tensor]:
        """Reduce what DDP had no bucket for, and take all gradients out of `grad`."""
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


def _accumulates(parameter: torch.Tensor) -> bool:
    """Tell whether the backward that runs puts a gradient into `grad`; `torch.autograd.grad` does not."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch says of a leaf whose gradient is returned
        return False


def _on_bucket(optimizer, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # see GradBucket
    return optimizer._reduce_bucket(bucket)
