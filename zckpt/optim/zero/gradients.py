"""What lies in `grad` once a gradient has been reduced.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zckpt.optim.zero.flat import FlatGroup

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

    _optimizer: weakref.ref[Any]
    _group: weakref.ref[FlatGroup]
    _position: int

    @staticmethod
    def __new__(cls: type[ShardedGradient], optimizer: object, group: FlatGroup, position: int) -> ShardedGradient:
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

    def __deepcopy__(self, _: object) -> NoReturn:
        raise RuntimeError(_ELSEWHERE)

    __reduce_ex__ = __deepcopy__

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
            factor = args[1]
            if isinstance(factor, torch.Tensor):  # which may be on another device than the average
                if factor.numel() != 1:
                    raise RuntimeError(_ELSEWHERE)
                factor = factor.item()
            for elements in mine._owned():
                func(elements, factor)
            return mine
        if func is _ATEN.clamp_.default:
            optimizer = mine._optimizer()
            scale = 1.0 if optimizer is None else optimizer.loss_scale
            bounds = {**dict(zip(("min", "max"), args[1:], strict=False)), **given}
            for elements in mine._owned():
                elements.clamp_(**{key: None if value is None else value * scale for key, value in bounds.items()})
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
        return [group.gradient[one.of_partition] for one in group.own if one.index == self._position]

    def _norm(self, order: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole average, without the loss scale."""
        optimizer, group = self._optimizer(), self._group()
        if optimizer is None or group is None:
            raise RuntimeError(_ELSEWHERE)
        if group.is_expert or optimizer.is_model_parallel:
            raise RuntimeError(
                "this rank cannot compute the norm of a gradient that other ranks share, or of experts; clip with "
                "ZeroOptimizer(clip_grad=...), which counts each element once"
            )
        order = float(order)
        if order not in (2.0, math.inf, 1.0):
            raise RuntimeError(_ELSEWHERE)
        norms = [torch.linalg.vector_norm(one, ord=order, dtype=torch.float64) for one in self._owned()]
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        found = (mine.max() if math.isinf(order) else mine.pow(order).sum()).to(group.flat.device, torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group.process_group)
        whole: torch.Tensor = (found if math.isinf(order) else found.pow(1.0 / order)) / optimizer.loss_scale
        return whole


class ShardedGradients:
    """The stand-ins of an optimizer's parameters, which are put into `grad` and taken out of it together."""

    def __init__(self) -> None:
        self._made: dict[torch.Tensor, ShardedGradient] = {}
        self.are_in = False

    def put(self, optimizer: object, groups: Iterable[FlatGroup]) -> None:
        """Put a stand-in into `grad` of each parameter."""
        for group in groups:
            for position, parameter in enumerate(group.parameters):
                if not parameter.numel():
                    continue
                made = self._made.get(parameter)
                if made is None or made.device != parameter.device or made.dtype != parameter.dtype:
                    made = self._made[parameter] = ShardedGradient(optimizer, group, position)
                parameter.grad = made
        self.are_in = True

    def take_out(self) -> None:
        """Take them out of `grad`. An average whose stand-in somebody has taken out is forgotten.

        What somebody has put into `grad` instead is left there: it is a gradient that comes on top.
        """
        if not self.are_in:
            return
        self.are_in = False
        for parameter, made in self._made.items():
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
            elif parameter.grad is None:
                made.forget()
