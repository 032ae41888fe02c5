"""What the tests of this folder train: a small model of odd sizes, step by step, on the ranks that `run` makes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.live import groups_of
from tests.logical import assert_same_tree
from zckpt.optim import ZeroRedundancyOptimizer

Optimizer = torch.optim.Optimizer

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.0}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd_maximize": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "maximize": True, "foreach": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adam_maximize": (torch.optim.Adam, {"lr": 1e-3, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
}


class Net(torch.nn.Module):
    """Odd sizes, buffers, a layer that is not contiguous, one that is large, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32, wide: int = 17, *, strange: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(7, 13)
        self.norm = torch.nn.BatchNorm1d(13)
        self.second = torch.nn.Linear(13, wide)
        if strange:
            self.second.weight = torch.nn.Parameter(torch.randn(13, wide).t())
        self.last = torch.nn.Linear(wide, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5) if strange else torch.tensor([1.5]))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.last(torch.relu(self.second(self.norm(self.first(x)))))


def batch(step: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a batch that depends on nothing but its arguments."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 7, generator=generator).to(dtype)


def backward(model: torch.nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    """Compute gradients from a batch of a step and return the loss."""
    dtype = next(model.parameters()).dtype
    loss = model(batch(step, rank, dtype)).float().tanh().pow(2).mean()  # bounded, for those that maximize
    loss.backward()
    return loss


def groups(model: torch.nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """Return two param groups, of the bare model."""
    return groups_of(model.module if isinstance(model, DistributedDataParallel) else model, named=named)


def train(model: torch.nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Step on the batches of some steps."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def make(kind: str, model: torch.nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    """Return a sharded optimizer of two groups."""
    optimizer_class, defaults = OPTIMIZERS[kind]
    named = options.pop("named", False)
    return ZeroRedundancyOptimizer(groups(model, named=named), optimizer_class, **options, **defaults)


def unsharded(kind: str, model: torch.nn.Module, *, named: bool = False) -> Optimizer:
    """Return the optimizer that `make`'s has to equal."""
    optimizer_class, defaults = OPTIMIZERS[kind]
    return optimizer_class(groups(model, named=named), **defaults)


def assert_same_parameters(one: torch.nn.Module, other: torch.nn.Module, what: str = "") -> None:
    """Fail unless two models have the same parameters and buffers, bit for bit."""
    assert_same_tree(one.state_dict(), other.state_dict(), what)


Twins = tuple[Net, ZeroRedundancyOptimizer, Net, Optimizer]


def twins(kind: str, **options: Any) -> Twins:
    """Return a model with a sharded optimizer and the same model with the unsharded one."""
    model = Net()
    other = copy.deepcopy(model)
    named = bool(options.get("named"))
    return model, make(kind, model, **options), other, unsharded(kind, other, named=named)


def train_twins(pair: Twins, steps: Iterable[int] = range(3), what: str = "") -> None:
    """Train both for some steps, and fail unless they are the same."""
    model, ours, other, theirs = pair
    for step in steps:
        train(model, ours, [step])
        train(other, theirs, [step])
    assert_same_parameters(model, other, what)


def trained_twins(kind: str, **options: Any) -> Twins:
    """Return both after three steps, in which they are the same."""
    pair = twins(kind, **options)
    train_twins(pair)
    return pair
