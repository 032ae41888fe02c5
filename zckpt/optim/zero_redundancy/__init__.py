"""PyTorch's ZeroRedundancyOptimizer: each rank has whole parameters, steps them, and sends them to all others.

partitioned    which rank has which parameter, its groups, and its local optimizer
optimizer      the class: the step, alone or along with DDP, and state
state_dicts    what a state dict must be: a rank's own, the whole, or torch.distributed.checkpoint's
exchange       what ranks send each other: updated parameters, state, gradients
buckets        which rank steps which part of which of DDP's buckets
overlap        communication hooks of DDP that step as gradients come in

`_broadcast_object`, `_recursive_copy_to_device` and `_is_trainable` are private names of torch's module
`zero_redundancy_optimizer` that torch's own tests, and programs like them, import (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zckpt.optim.zero_redundancy.optimizer import ZeroRedundancyOptimizer
from zckpt.optim.zero_redundancy.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]


def _broadcast_object(
    obj: Any, src_rank: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Any:
    """Return the object that one rank of the world has, on all ranks of a group; what is received is on `device`."""
    gathered = [obj]
    dist.broadcast_object_list(gathered, src=src_rank, group=group, device=torch.device(device))
    if dist.get_rank() == src_rank:
        return obj
    return _recursive_copy_to_device(gathered[0], non_blocking=False, device=torch.device(device))


def _recursive_copy_to_device(value: Any, non_blocking: bool, device: torch.device) -> Any:
    """Return a tree of lists, tuples and mappings with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, (list, tuple)):
        made = [_recursive_copy_to_device(one, non_blocking, device) for one in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, Mapping):
        return {key: _recursive_copy_to_device(one, non_blocking, device) for key, one in value.items()}
    return value


def _is_trainable(param: torch.Tensor) -> bool:
    """Tell whether a parameter is trained."""
    return param.requires_grad
