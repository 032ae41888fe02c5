"""What state a live optimizer has, and how it takes state back, whichever optimizer it is.

by_parameter     torch's optimizers, and all with their interface: OptimizerState
flat_parameters  those of which a tensor has elements of many parameters, as in FullyShardedDataParallel
zero             ZeroOptimizer
torchao          torchao's, whose state is codes
deepspeed        those of DeepSpeed's engine, which are only compared
zero_redundancy  ZeroRedundancyOptimizer, zckpt's and torch's; DistributedOptimizer
beside           what an optimizer's state_dict() has beside all that
expected         which state a class of optimizers wants, known before anything is changed
several          optimizers that are saved or loaded together

OptimizerState says who calls what, in which order, on which ranks.

Another optimizer is a module here, and a line in `STATES`.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch.optim import Optimizer

from zckpt.errors import UnsupportedError, UsageError
from zckpt.optim.flat_parameters import Called, Members, check_named
from zckpt.optim.param_groups import parameters_of
from zckpt.optim.states.by_parameter import OptimizerState

STATES = {
    "zckpt.optim.zero.optimizer.ZeroOptimizer": "zero.ZeroState",
    "zckpt.optim.zero_redundancy.optimizer.ZeroRedundancyOptimizer": "zero_redundancy.ZeroRedundancyState",
    "zckpt.optim.distributed.DistributedOptimizer": "zero_redundancy.WorkersState",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "zero_redundancy.TorchState",
    "torchao.optim.adam._AdamBase": "torchao.TorchaoState",
    "schedulefree.wrap_schedulefree.ScheduleFreeWrapper": "by_parameter.OptimizerState",  # no torch.optim.Optimizer
    "schedulefree.wrap_schedulefree_reference.ScheduleFreeWrapperReference": "by_parameter.OptimizerState",
    **{
        f"deepspeed.runtime.{name}": "deepspeed.DeepSpeedState"
        for name in (
            "zero.stage_1_and_2.DeepSpeedZeroOptimizer",
            "zero.stage3.DeepSpeedZeroOptimizer_Stage3",
            "bf16_optimizer.BF16_Optimizer",
            "fp16.fused_optimizer.FP16_Optimizer",
            "fp16.unfused_optimizer.FP16_UnfusedOptimizer",
        )
    },
    "torch.optim.optimizer.Optimizer": "by_parameter.OptimizerState",
}
"""The module and class of the state of each class of optimizers, and of those derived from it."""

WRAPPERS = {"accelerate.optimizer.AcceleratedOptimizer": "optimizer"}
"""Classes that only hold an optimizer, and the attribute that has it."""


def state_class(optimizer: Optimizer) -> type[OptimizerState]:
    """Return the class of an optimizer's state; its class, or else the nearest that it is derived from, decides.

    Raises UsageError: it is no optimizer.
    """
    for base in type(optimizer).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in STATES:
            module, _, cls = STATES[name].partition(".")
            found: type[OptimizerState] = getattr(import_module(f"{__name__}.{module}"), cls)
            return found
    raise UsageError("not an optimizer", expected="a torch.optim.Optimizer", found=torch.typename(optimizer))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a wrapper holds; itself, if it is none."""
    for base in type(optimizer).__mro__:
        held = WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if held is not None:
            return unwrapped(getattr(optimizer, held))
    return optimizer


def state_of(optimizer: Optimizer, known: Called, members: Members) -> OptimizerState:
    """Return the state of an optimizer.

    `known`: names of the model's parameters; `members`: those that FullyShardedDataParallel has. Raises UsageError: a
    parameter has no name, or it is no optimizer; UnsupportedError: the optimizer is not one for
    FullyShardedDataParallel.
    """
    cls = state_class(optimizer)
    parameters = parameters_of(optimizer.param_groups)
    if not any(isinstance(one, torch.Tensor) and one in members.held for one in parameters):
        for one in parameters:
            check_named(one)
        return cls(optimizer, known)
    if cls is not OptimizerState:
        raise UnsupportedError(
            f"{type(optimizer).__name__} with parameters in FullyShardedDataParallel",
            advice="use an optimizer from torch.optim",
        )
    from zckpt.optim.states.flat_parameters import FlatState

    return FlatState(optimizer, known, members)
