"""What this rank has of an optimizer's state, by parameter and slot, whichever optimizer it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.errors import UnsupportedError, UsageError
from zckpt.operations.tensors import dtype_name
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer, param_groups
from zckpt.optim.shares import Share, share_of, world_rank
from zckpt.optim.wrapped import own_names
from zckpt.optim.zero.deepspeed_objects import scaler_object
from zckpt.optim.zero.files import refuse_parts
from zckpt.state import MASTER, Extent, Scalar
from zckpt.training.model_state import ModelState


@dataclass(slots=True)
class OptimizerState:
    """What this rank has of an optimizer.

    Parameters
    ----------
    names : list of list of str
        Of each param group's parameters that have state, in the optimizer's order.
    hyperparameters : list of dict
        Of each param group.
    shares : list of (str, str, Share)
        Parameter, slot, and what this rank has of it.
    values : dict
        State that is no tensor, by parameter and key; of this rank's parameters.
    group_values : list of dict
        State that is one value for a param group.
    metadata : dict
        What the optimizer keeps beside that.
    """

    names: list[list[str]] = field(default_factory=list)
    hyperparameters: list[dict[str, Any]] = field(default_factory=list)
    shares: list[tuple[str, str, Share]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_values: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


def optimizer_state(optimizer: Optimizer | None, known: Mapping[torch.Tensor, str]) -> OptimizerState:
    """Return what this rank has of an optimizer's state.

    Parameters
    ----------
    optimizer : Optimizer, optional
    known : mapping
        Names of the model's parameters.

    Raises
    ------
    UsageError
        A parameter has no name.
    UnsupportedError
        State that cannot be told by parameter.
    """
    found = OptimizerState()
    if optimizer is None:
        return found
    names = parameter_names(optimizer, known)
    for group in optimizer.param_groups:
        found.hyperparameters.append({k: _value(v) for k, v in param_groups.hyperparameters(group).items()})
        found.group_values.append({})
    if isinstance(optimizer, ZeroOptimizer):
        _of_flat_groups(optimizer, names, found)
        return found
    found.names = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    mine = (world_rank(),) if isinstance(optimizer, ZeroRedundancyOptimizer) else None
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for parameter, state in inner.state.items():
        _of_parameter(names[parameter], parameter, state, mine, found)
    return found


def parameter_names(optimizer: Optimizer, known: Mapping[torch.Tensor, str]) -> dict[torch.Tensor, str]:
    """Return the name of each parameter: the model's, or else the optimizer's own.

    Raises
    ------
    UsageError
        Some have neither.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = own_names(optimizer.param_groups)
    for parameter in every:
        if parameter not in known and parameter not in own:
            raise UsageError(
                "a parameter of the optimizer has no name",
                found=f"shape {tuple(parameter.shape)}",
                advice="give the model that it belongs to, or make the optimizer of (name, parameter) pairs",
            )
    return {parameter: known[parameter] if parameter in known else own[parameter] for parameter in every}


def parameters_of(optimizer: Optimizer | None) -> ModelState:
    """Return the tensors of a model of which there are only the optimizer's parameters."""
    found = ModelState()
    if optimizer is not None:
        names = parameter_names(optimizer, {})
        found.tensors = {name: parameter for parameter, name in names.items()}
        found.parameters = set(found.tensors)
    return found


def _of_parameter(
    name: str, parameter: torch.Tensor, state: Mapping[str, Any], ranks: tuple[int, ...] | None, found: OptimizerState
) -> None:
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            found.values.setdefault(name, {})[key] = _value(value)
            continue
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            raise UnsupportedError(f"{key} of {name} is a plain tensor, and the parameter is sharded")
        share = share_of(value, f"{key} of {name}")
        if share is not None:
            held = share if ranks is None else Share(share.shape, share.extent, share.tensor, ranks)
            found.shares.append((name, key, held))


def _of_flat_groups(optimizer: ZeroOptimizer, names: Mapping[torch.Tensor, str], found: OptimizerState) -> None:
    refuse_parts(optimizer)
    optimizer.adopt_weights()
    mine = (world_rank(),)
    has_masters = not _are_weights(optimizer)
    for group, flat, values in zip(optimizer.param_groups, optimizer.groups, found.group_values, strict=True):
        found.names.append([names[p] for p in group["params"] if p in optimizer._place])
        slots = {MASTER: flat.master.detach()} if has_masters else {}
        for key, value in optimizer.optim.state.get(flat.master, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == flat.master.shape:
                slots[key] = value.detach()
            elif isinstance(value, torch.Tensor) and value.dim():
                raise UnsupportedError(f"{key} is a tensor for a whole param group, which no parameter has a part of")
            else:
                values[key] = _value(value)
        for fragment in flat.own:
            parameter = flat.parameters[fragment.index]
            shape = tuple(parameter.shape)
            extent = Extent.flat(shape, fragment.start, fragment.numel)
            for key, tensor in slots.items():
                part = tensor[fragment.position : fragment.position + fragment.numel]
                found.shares.append((names[parameter], key, Share(shape, extent, part, mine)))
    found.metadata = {
        "loss_scaler": scaler_object(optimizer.loss_scaler),
        "dynamic_loss_scale": bool(getattr(optimizer.loss_scaler, "dynamic", False)),
        "overflow": optimizer.overflow,
        "clip_grad": optimizer.clip_grad,
    }


def _are_weights(optimizer: ZeroOptimizer) -> bool:
    """Tell whether the masters say nothing that the weights do not: on all ranks they have the same bits."""
    same = all(
        flat.master.dtype == flat.flat.dtype
        and flat.master.device == flat.flat.device
        and torch.equal(flat.master.detach().view(torch.uint8), flat.weights.view(torch.uint8))
        for flat in optimizer.groups
    )
    told = torch.tensor([same], dtype=torch.int32, device=optimizer.groups[0].flat.device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN, group=optimizer.process_group)
    return bool(told.item())


def _value(value: object) -> object:
    """Return a value that a file can hold; a tensor of one element as its number and type."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise UnsupportedError("a hyperparameter is a tensor of several elements", found=tuple(value.shape))
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return Scalar(whole.item(), dtype_name(value.dtype))
    return value


def order_of(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the param group of each parameter."""
    return {name: index for index, group in enumerate(names) for name in group}
