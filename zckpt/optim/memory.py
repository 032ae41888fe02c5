"""How tensors lie in memory: state as its parameter does, and gradients in DistributedDataParallel's buckets.

A fused optimizer needs state to lie as its parameter does, or steps it out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory, in whatever order of dimensions, such as channels last."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as they lie, without copying."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat tensor that has the shape of another and lies as that does, row-major if it has gaps."""
    if is_dense(like):
        return elements.as_strided(like.shape, like.stride(), elements.storage_offset())
    return elements.view(like.shape)


def copied_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, lying as another does if they have the same shape."""
    if value.shape != like.shape or value.stride() == like.stride():
        return value.detach().clone()
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value.detach())


Future = torch.futures.Future

GradBucket = Any
"""DDP's own class has no type information, and DDP compares what a hook is annotated with to the class itself."""

Hook = Callable[[Any, GradBucket], "Future[torch.Tensor]"]
"""Takes a state and a bucket, and returns the bucket's average over ranks."""


def reduced_gradients(bucket: GradBucket, future: Future[torch.Tensor]) -> list[torch.Tensor]:
    """Wait for a bucket's reduction and return its gradients, wherever the hook has put them.

    In a bucket, a gradient lies as its parameter does. `bucket.gradients()` takes them all to be row-major.
    """
    result = future.wait()
    reduced = result[0] if isinstance(result, (list, tuple)) else result
    found, at = [], 0
    for parameter in bucket.parameters():
        found.append(shaped(reduced[at : at + parameter.numel()], parameter).to(parameter.dtype))
        at += parameter.numel()
    return found
