"""PyTorch's ZeroRedundancyOptimizer: each rank has whole parameters, steps them, and sends them to all others.

optimizer      the class: which rank has which parameter, the step, alone or along with DDP, and state
state_dicts    what a state dict must be: a rank's own, the whole, or torch.distributed.checkpoint's
exchange       what ranks send each other: updated parameters, state, gradients; DDP's buckets, given to ranks
overlap        communication hooks of DDP that step as gradients come in

`_broadcast_object`, `_recursive_copy_to_device` and `_is_trainable` are private names of torch's module
`zero_redundancy_optimizer` that torch's own tests, and programs like them, import (torch 2.13).
"""

from __future__ import annotations

from typing import Any

from zckpt.optim.zero_redundancy.optimizer import ZeroRedundancyOptimizer
from zckpt.optim.zero_redundancy.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]


def __getattr__(name: str) -> Any:
    if name not in ("_broadcast_object", "_recursive_copy_to_device", "_is_trainable"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from torch.distributed.optim import zero_redundancy_optimizer as torchs

    return getattr(torchs, name)
