"""ZeRO-1 and ZeRO-2 as a `torch.optim.Optimizer`."""

from __future__ import annotations

from zckpt.optim.zero.loss_scale import DynamicLossScaler, LossScaler
from zckpt.optim.zero.optimizer import ZeroOptimizer

__all__ = ["DynamicLossScaler", "LossScaler", "ZeroOptimizer"]
