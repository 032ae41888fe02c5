"""What state a live optimizer has, and how it takes state back, whichever optimizer it is.

protocol         OptimizerState and Restoring: who calls what, in which order, on which ranks
by_parameter     torch's optimizers, and all with their face
zero             ZeroOptimizer
zero_redundancy  ZeroRedundancyOptimizer, zckpt's and torch's
workers          DistributedOptimizer
several          optimizers that are saved or loaded together

Another optimizer is a module here, and a line in `STATES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.errors import UsageError
from zckpt.optim.states.protocol import OptimizerState, Restoring, Source, Values

__all__ = ["OptimizerState", "Restoring", "Source", "Values", "state_class", "state_of", "unwrapped"]

STATES = {
    "zckpt.optim.zero.optimizer.ZeroOptimizer": "zero.ZeroState",
    "zckpt.optim.zero_redundancy.optimizer.ZeroRedundancyOptimizer": "zero_redundancy.ZeroRedundancyState",
    "zckpt.optim.distributed.DistributedOptimizer": "workers.WorkersState",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "zero_redundancy.TorchState",
    "torch.optim.optimizer.Optimizer": "by_parameter.ByParameter",
}
"""The module and class of the state of each class of optimizers, and of those derived from it."""

WRAPPERS = {"accelerate.optimizer.AcceleratedOptimizer": "optimizer"}
"""Classes that only hold an optimizer, and the attribute that has it."""


def state_class(optimizer: Optimizer) -> Any:
    """Return the class of an optimizer's state; its class, or else the nearest that it is derived from, decides.

    Raises
    ------
    UsageError
        It is no optimizer.
    """
    for base in type(optimizer).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in STATES:
            module, _, cls = STATES[name].partition(".")
            return getattr(import_module(f"{__name__}.{module}"), cls)
    raise UsageError("not an optimizer", expected="a torch.optim.Optimizer", found=torch.typename(optimizer))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a wrapper holds; itself, if it is none."""
    for base in type(optimizer).__mro__:
        held = WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if held is not None:
            return unwrapped(getattr(optimizer, held))
    return optimizer


def state_of(optimizer: Optimizer, known: Mapping[torch.Tensor, str]) -> OptimizerState:
    """Return the state of an optimizer.

    Parameters
    ----------
    optimizer : Optimizer
    known : mapping
        Names of the model's parameters.

    Raises
    ------
    UsageError
        A parameter has no name, or it is no optimizer.
    """
    made: OptimizerState = state_class(optimizer)(optimizer, known)
    return made
