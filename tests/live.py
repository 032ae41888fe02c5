"""Models in training, of whatever optimizer: a step, and all that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zckpt.optim import ZeroOptimizer


def step(model: nn.Module, optimizer: Any, shape: tuple[int, ...]) -> None:
    """Take a step with random inputs."""
    loss = model(torch.randn(shape)).square().sum()
    optimizer.backward(loss) if isinstance(optimizer, ZeroOptimizer) else loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_both(model: nn.Module, optimizer: Any, path: Path) -> Path:
    """Save both as most programs do, in one file."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of all elements of a tensor."""
    value = value.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return weights and the optimizer's state, whole, by `slot/name`."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"weight/{name}"] = whole(parameter)
        found |= {f"{key}/{name}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return copies of what this rank has: parameters first, then masters, state and settings, and random numbers."""
    masters = [group.master for group in optimizer.groups] if isinstance(optimizer, ZeroOptimizer) else []
    slots = getattr(optimizer, "optim", optimizer).state.values()
    pairs = [pair for its in (*slots, *optimizer.param_groups) for pair in sorted(its.items()) if pair[0] != "params"]
    every = [*model.parameters(), *masters, *(one for pair in pairs for one in pair), torch.get_rng_state()]
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in every]


def same(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two lists of `everything` are equal, bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two models have the same parameters, bit for bit."""
    return same([*one.parameters()], [*other.parameters()])
