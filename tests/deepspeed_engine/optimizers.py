"""The optimizers whose state layouts are met in the wild, by short name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Groups = list[dict[str, Any]]


class _ForEach(torch.optim.Optimizer):
    """An optimizer that steps parameters one by one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step_one(p, group)

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def adamw(
    p: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, step: int, *, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float, bias_correction: bool = True,
) -> None:  # fmt: skip
    """Step one parameter and its two moments, in place."""
    beta1, beta2 = betas
    p.mul_(1 - lr * weight_decay)
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (second / (1 - beta2**step if bias_correction else 1)).sqrt_().add_(eps)
    p.addcdiv_(first, scale, value=-lr / (1 - beta1**step if bias_correction else 1))


class Lion(_ForEach):
    """Plain Lion: one moment and no step."""

    def __init__(self, params: Iterable, lr: float = 1e-3, betas=(0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        moment = state["exp_avg"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((moment * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
        moment.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class FusedLayoutAdam(_ForEach):
    """AdamW with the state of DeepSpeed's FusedAdam, which needs a GPU.

    The step is an int of the state; the group has `bias_correction` and its own `step`, which stays 0.
    """

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas,
            "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def step(self, closure=None):
        for group in (g for g in self.param_groups if g["params"]):
            group.setdefault("step", 0)
        super().step(closure)

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=group["step"], exp_avg=torch.zeros_like(p.data), exp_avg_sq=torch.zeros_like(p.data))
        state["step"] += 1
        settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        adamw(p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], **settings)


class Lamb(_ForEach):
    """LAMB, which keeps norms and the trust ratio of its last step: under ZeRO of a rank's whole partition."""

    def __init__(self, params: Iterable, lr: float = 1e-2, betas=(0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + group["weight_decay"] * p
        state["weight_norm"], state["adam_norm"] = p.norm().clamp(0, 10), update.norm()
        known = state["weight_norm"] > 0 and state["adam_norm"] > 0
        state["trust_ratio"] = float(state["weight_norm"] / state["adam_norm"]) if known else 1.0
        p.add_(update, alpha=-group["lr"] * state["trust_ratio"])


class BlockwiseAdam(_ForEach):
    """Adam with the state of bitsandbytes' 8-bit optimizers, which need a GPU in older versions.

    Each moment is a code of 8 bits for each element and a scale for each 256 elements, counted from the start of the
    tensor; small tensors keep theirs in float32. `state_dict` has them in a dict of their own.
    """

    BLOCK = 256
    NESTED = "__bnb_optimizer_quant_state__"

    def __init__(self, params: Iterable, lr: float = 1e-2, betas=(0.9, 0.95), eps: float = 1e-8, smallest: int = 64):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.smallest = smallest
        self.maps = {"1": torch.linspace(-1, 1, 256), "2": torch.linspace(0, 1, 256)}

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = 0
            for which in self.maps:
                self._store(state, which, torch.zeros_like(p), p.numel() < self.smallest)
        state["step"] += 1
        small = p.numel() < self.smallest
        first = self._value(state, "1").mul(beta1).add(p.grad, alpha=1 - beta1)
        second = self._value(state, "2").mul(beta2).addcmul(p.grad, p.grad, value=1 - beta2)
        self._store(state, "1", first, small)
        self._store(state, "2", second, small)
        scale = (second / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
        p.addcdiv_(first, scale, value=-group["lr"] / (1 - beta1 ** state["step"]))

    def _value(self, state: dict[str, Any], which: str) -> torch.Tensor:
        codes = state[f"state{which}"]
        if codes.dtype == torch.float32:
            return codes
        scales = state[f"absmax{which}"].repeat_interleave(self.BLOCK)[: codes.numel()]
        return state[f"qmap{which}"][codes.long()] * scales

    def _store(self, state: dict[str, Any], which: str, value: torch.Tensor, small: bool) -> None:
        if small:
            state[f"state{which}"] = value
            return
        blocks = value.split(self.BLOCK)
        scales = torch.stack([block.abs().max() for block in blocks])
        whole = scales.clamp_min(1e-30).repeat_interleave(self.BLOCK)[: value.numel()]
        edges = (self.maps[which][1:] + self.maps[which][:-1]) / 2
        state[f"state{which}"] = torch.bucketize(value / whole, edges).to(torch.uint8)
        state[f"qmap{which}"], state[f"absmax{which}"] = self.maps[which].clone(), scales

    def state_dict(self):
        found = super().state_dict()
        found["state"] = {
            number: {
                "step": state["step"],
                self.NESTED: {key: value for key, value in state.items() if key != "step"},
            }
            for number, state in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            nested = {key: value.clone() for key, value in state[self.NESTED].items()}
            self.state[parameters[number]] = {"step": state["step"], **nested}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def _adafactor(groups: Groups) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False)


def _fused_adam(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95))


def _cpu_adam(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.95))


def _prodigy(groups: Groups) -> torch.optim.Optimizer:
    from prodigyopt import Prodigy

    return Prodigy([{**group, "lr": 1.0} for group in groups], d0=1e-3)


BY_CONFIGURATION = {
    "muon": {"type": "Muon", "params": {"lr": 2e-2, "momentum": 0.9, "weight_decay": 0.01}},
    "adamw_offloaded": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}
"""Optimizers that DeepSpeed makes itself, as its configuration names them."""

KINDS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
    "adam_amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgdm": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "lion": lambda groups: Lion(groups, lr=1e-3),
    "fused_layout": lambda groups: FusedLayoutAdam(groups, lr=1e-2, betas=(0.9, 0.95)),
    "fused": _fused_adam,  # at stage 0 it gets flat masters
    "lamb": Lamb,
    "blockwise": BlockwiseAdam,
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "adafactor": _adafactor,
    "prodigy": _prodigy,
    "cpuadam": _cpu_adam,  # compiles a C++ extension on first use
}
