"""Private names of torch's module `zero_redundancy_optimizer` that torch's own tests, and programs like them, import.

Source: torch 2.13; they have the signatures and results of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def _broadcast_object(
    obj: Any, src_rank: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Any:
    """Return the object that one rank of the world has, on all ranks of a group; what is received is on `device`."""
    told = [obj]
    dist.broadcast_object_list(told, src=src_rank, group=group, device=torch.device(device))
    if dist.get_rank() == src_rank:
        return obj
    return _recursive_copy_to_device(told[0], non_blocking=False, device=torch.device(device))


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
