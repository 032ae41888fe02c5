"""The sharded optimizers that produce sharded state, and what state each kind of optimizer has.

zero             ZeRO-1 and 2: one flat buffer for each param group
zero_redundancy  whole parameters assigned to ranks
sharded          what these two have in common
distributed      parameters that live on RPC workers
states           what state any optimizer has on this rank, and how it is loaded again
files            sharded optimizers in files; a checkpoint opened for a live model and optimizer
param_groups     what param groups are made of, and their names
tensors          a live model's tensors: bare names, this rank's elements, their order in memory
ranks            who saves or loads together, and how failures are shared
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zckpt.errors import require_torch

require_torch("zckpt.optim")

if TYPE_CHECKING:
    from zckpt.optim.distributed import DistributedOptimizer
    from zckpt.optim.zero import DynamicLossScaler, LossScaler, ZeroOptimizer
    from zckpt.optim.zero_redundancy import (
        ZeroRedundancyOptimizer,
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )

_HOMES = {
    "DistributedOptimizer": "distributed",
    "DynamicLossScaler": "zero",
    "LossScaler": "zero",
    "ZeroOptimizer": "zero",
    "ZeroRedundancyOptimizer": "zero_redundancy",
    "hook_with_zero_step": "zero_redundancy",
    "hook_with_zero_step_interleaved": "zero_redundancy",
}
"""The module of each name that is loaded when it is first used: who saves or loads has other optimizers, as a rule."""

__all__ = [
    "DistributedOptimizer",
    "DynamicLossScaler",
    "LossScaler",
    "ZeroOptimizer",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]


def __getattr__(name: str) -> object:
    if name == "files":  # which is there without a further import
        return import_module(f"{__name__}.files")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
