"""Gradients as they become ready: hooks, what is kept on this rank, and what lies in `grad` afterwards.

A parameter has two hooks. One runs before autograd puts a gradient into `grad`, and takes a stand-in out of there; one
runs afterwards, and keeps the gradient or has it reduced.

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
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.utils.hooks import RemovableHandle

from zckpt.optim.param_groups import Group
from zckpt.optim.zero.flat import FlatGroup, FlatOptimizer
from zckpt.optim.zero.reduction import Reducer, Rules
from zckpt.optim.zero.stepping import ModelParallel, Scaler, model_rank

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

    _optimizer: weakref.ref[GradientOptimizer]
    _group: weakref.ref[FlatGroup]
    _position: int

    @staticmethod
    def __new__(
        cls: type[ShardedGradient], optimizer: GradientOptimizer, group: FlatGroup, position: int
    ) -> ShardedGradient:
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

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RuntimeError(_ELSEWHERE)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(_ELSEWHERE)

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
            factor = _number(args[1])
            for elements in mine._owned():
                func(elements, factor)
            return mine
        if func is _ATEN.clamp_.default:
            mine._clamp(*args[1:], **given)
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
        return [group.gradient[f.position : f.position + f.numel] for f in group.own if f.index == self._position]

    def _norm(self, order: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole average, without the loss scale."""
        optimizer, group = self._optimizer(), self._group()
        if optimizer is None or group is None:
            raise RuntimeError(_ELSEWHERE)
        if group.is_expert or optimizer.is_model_parallel:
            raise RuntimeError(
                "the norm of a gradient of which other ranks have parts, or of experts, is not that of this rank's; "
                "clip with ZeroOptimizer(clip_grad=...), which counts each element once"
            )
        order = float(order)
        if order not in (2.0, math.inf, 1.0):
            raise RuntimeError(_ELSEWHERE)
        norms = [torch.linalg.vector_norm(one, ord=order, dtype=torch.float64) for one in self._owned()]
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        found = (mine.max() if math.isinf(order) else mine.pow(order).sum()).to(group.flat.device, torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group.process_group)
        whole: torch.Tensor = found if math.isinf(order) else found.pow(1.0 / order)
        return whole / optimizer.loss_scale

    def _clamp(self, least: float | None = None, most: float | None = None, **given: float | None) -> None:
        optimizer = self._optimizer()
        scale = 1.0 if optimizer is None else optimizer.loss_scale
        bounds = {"min": given.get("min", least), "max": given.get("max", most)}
        for elements in self._owned():
            elements.clamp_(**{key: None if value is None else value * scale for key, value in bounds.items()})


def _number(value: Any) -> Any:
    """Return a factor as a number: a tensor may be on another device than the average."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise RuntimeError(_ELSEWHERE)
        return value.item()
    return value


class ShardedGradients:
    """The stand-ins of an optimizer's parameters, which are put into `grad` and taken out of it together."""

    def __init__(self) -> None:
        self._made: dict[torch.Tensor, ShardedGradient] = {}
        self._are_in = False

    def put(self, optimizer: GradientOptimizer) -> None:
        """Put a stand-in into `grad` of each parameter."""
        for group in optimizer.groups:
            for position, parameter in enumerate(group.parameters):
                if not parameter.numel():
                    continue
                made = self._made.get(parameter)
                if made is None or made.device != parameter.device or made.dtype != parameter.dtype:
                    made = self._made[parameter] = ShardedGradient(optimizer, group, position)
                parameter.grad = made
        self._are_in = True

    def take_out(self) -> None:
        """Take them out of `grad`. An average whose stand-in somebody has taken out is forgotten.

        What somebody has put into `grad` instead is left there: it is a gradient that comes on top.
        """
        if not self._are_in:
            return
        self._are_in = False
        for parameter, made in self._made.items():
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
            elif parameter.grad is None:
                made.forget()

    def clear(self) -> None:
        """Take them out without a look at what has become of them: the window has ended."""
        self._are_in = False
        for parameter in self._made:
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None


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

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss with. One that is set stays; None lets the loss scaler decide again."""
        return self.loss_scaler.cur_scale if self._external_loss_scale is None else self._external_loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._external_loss_scale = scale

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
        """Whether other ranks have other slices of the model."""
        return model_rank(self.model_parallel)[1] > 1

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
        """Accumulate a gradient on this rank, in the type asked for; autograd does so in the parameter's own."""
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
