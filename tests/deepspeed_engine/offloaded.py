"""DeepSpeed's optimizers on the CPU without their C++ extension, which takes minutes to compile.

Knows what of the extension they call when they step; everything else is the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CPUAdamOperations:
    """AdamW as `DeepSpeedCPUAdam` and `ZenFlowCPUAdam` call it."""

    def create_adam(self, *settings: Any) -> None:
        """Take note of an optimizer, which here needs nothing."""

    def destroy_adam(self, number: int) -> None:
        """Forget it."""

    @torch.no_grad()
    def adam_update(
        self, number: int, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
        bias_correction: bool, parameter: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:  # fmt: skip
        """Step one tensor, in place."""
        gradient = gradient.to(exp_avg.dtype)
        exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if step == 0:  # 0.18 makes state so, of gradients that are zero
            return
        first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        parameter.mul_(1 - lr * weight_decay)
        parameter.addcdiv_(exp_avg, (exp_avg_sq / second).sqrt_().add_(eps), value=-lr / first)


@contextmanager
def without_extension() -> Iterator[None]:
    """Let DeepSpeed make an optimizer of this in a `with` block."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    load = CPUAdamBuilder.load
    CPUAdamBuilder.load = lambda *_args, **_kwargs: CPUAdamOperations()
    try:
        yield
    finally:
        CPUAdamBuilder.load = load
