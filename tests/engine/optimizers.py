"""The optimizers whose state layouts are met in the wild, by short name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """Plain Lion: one moment and no step."""

    def __init__(self, params: Iterable, lr: float = 1e-3, betas=(0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                moment = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((moment * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                moment.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class FusedLayoutAdam(torch.optim.Optimizer):
    """AdamW with the state of DeepSpeed's FusedAdam, which needs a GPU.

    The step is an int of the state; the group has `bias_correction` and its own `step`, which stays 0.
    """

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas,
            "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in (g for g in self.param_groups if g["params"]):
            group.setdefault("step", 0)
            for p in (p for p in group["params"] if p.grad is not None):
                self._step_one(p, group)

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state["step"] = group["step"]
            state["exp_avg"] = torch.zeros_like(p.data)
            state["exp_avg_sq"] = torch.zeros_like(p.data)
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1 ** state["step"]))


def _cpu_adam(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.95))


KINDS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
    "adam_amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgdm": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "lion": lambda groups: Lion(groups, lr=1e-3),
    "fused_layout": lambda groups: FusedLayoutAdam(groups, lr=1e-2, betas=(0.9, 0.95)),
    "cpuadam": _cpu_adam,  # compiles a C++ extension on first use
}
