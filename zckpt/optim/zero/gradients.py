"""Gradients as they become ready: hooks that hand them on, and what is kept of them on this rank.

A parameter has two hooks. One runs before autograd puts a gradient into `grad`, and takes a stand-in out of there; one
runs afterwards, and keeps the gradient or has it reduced.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms.join import Joinable
from torch.utils.hooks import RemovableHandle

from zckpt.optim.param_groups import Group
from zckpt.optim.zero.flat import FlatOptimizer
from zckpt.optim.zero.loss_scale import Scaler
from zckpt.optim.zero.reduction import Reducer, Rules
from zckpt.optim.zero.sharded_gradient import ShardedGradient, ShardedGradients
from zckpt.optim.zero.stepping import ModelParallel


class GradientOptimizer(FlatOptimizer, Joinable):
    """Takes gradients from autograd."""

    model_parallel: ModelParallel | None = None

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
        self._hooks: dict[torch.Tensor, list[RemovableHandle]] = {}
        self._sharded = ShardedGradients()
        self._syncs = True
        self._passes = 0
        self._pass: int | None = None
        self._last_graph = -1
        self._is_fresh = False
        self._is_complete = False
        self._is_reduced = True
        self._is_forced = False
        self._boundary: bool | None = None
        self._window_is_open = False
        self._failed = False
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

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; see `FlatOptimizer.add_param_group`. Raises RuntimeError between backward and step."""
        if self._is_made and (self._passes or self._pass is not None):
            raise RuntimeError("a param group cannot be added between backward and step")
        super().add_param_group(param_group)
        if self._is_made:
            self._reducer.forget()
            self._hook_all()

    # --- gradients as they become ready

    @property
    def is_model_parallel(self) -> bool:
        """Whether other ranks have other parts of the model."""
        return self.model_parallel is not None and self.model_parallel.get_model_parallel_world_size() > 1

    def _hook_all(self) -> None:
        this = weakref.ref(self)  # what hooks hold on to is never collected

        def before_gradient(parameter: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
            optimizer, its = this(), parameter()
            if optimizer is not None:
                optimizer._sharded.take_out()
            if its is not None and isinstance(its.grad, ShardedGradient):  # of an optimizer that is no more
                its.grad = None

        def on_gradient(parameter: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._on_gradient(parameter)

        for group in self.groups:
            for parameter in group.parameters:
                if parameter not in self._hooks:
                    self._hooks[parameter] = [
                        parameter.register_hook(partial(before_gradient, weakref.ref(parameter))),  # type: ignore[no-untyped-call]
                        parameter.register_post_accumulate_grad_hook(on_gradient),  # type: ignore[no-untyped-call]
                    ]

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
        self._take_note(parameter)

    def _take_note(self, parameter: torch.Tensor) -> None:
        """Keep or reduce a gradient that has become ready."""
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

    def _name_of(self, parameter: torch.Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for position, member in enumerate(group["params"]):
                if member is parameter:
                    names = group.get("param_names")
                    return str(names[position]) if names else f"parameter {position} of param group {index}"
        return "a parameter"

    # --- what passes know

    @abstractmethod
    def _begin_pass(self, graph: int | None = None) -> None:
        """Begin a pass: of `backward`, or of a backward that somebody else runs, whose end autograd will tell."""

    @abstractmethod
    def _settle(self) -> None:
        """After a failure here, go through this window with the other ranks."""

    @abstractmethod
    def _refuse_nested(self) -> NoReturn:
        """Raise RuntimeError: a backward has run inside of another."""

    @abstractmethod
    def _reduces(self) -> bool:
        """Tell whether the present pass reduces gradients."""
