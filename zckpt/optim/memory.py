"""How a tensor lies in memory. A fused optimizer needs state to lie as its parameter does, or steps it out of order."""

from __future__ import annotations

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
