"""The sharded optimizers that produce sharded state."""

from __future__ import annotations

from zckpt.errors import require_torch

require_torch("zckpt.optim")

from zckpt.optim.distributed import DistributedOptimizer
from zckpt.optim.zero import DynamicLossScaler, LossScaler, ZeroOptimizer
from zckpt.optim.zero_redundancy import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = [
    "DistributedOptimizer",
    "DynamicLossScaler",
    "LossScaler",
    "ZeroOptimizer",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
