"""DeepSpeed's optimizers on the CPU without their C++ extension, which takes minutes to compile.

Knows what of the extension they call when they step; everything else is the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.deepspeed_engine.optimizers import adamw


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
        if step == 0:  # 0.18 makes state so, of gradients that are zero
            return
        adamw(
            parameter, gradient, exp_avg, exp_avg_sq, step, lr=lr, betas=(beta1, beta2), eps=eps,
            weight_decay=weight_decay, bias_correction=bias_correction,
        )  # fmt: skip


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
