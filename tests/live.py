"""Models in training, of whatever optimizer: a step, and all that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zckpt.optim import ZeroOptimizer

Shape = tuple[int, ...]
WORDS = 11


def step(model: nn.Module, optimizer: Any, shape: tuple[int, ...]) -> None:
    """Take a step with random inputs."""
    loss = model(torch.randn(shape)).square().sum()
    optimizer.backward(loss) if isinstance(optimizer, ZeroOptimizer) else loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    model: nn.Module, optimizer: Any = torch.optim.AdamW, *, steps: int = 1, **options: Any
) -> tuple[nn.Module, Any]:
    """Return a model after some steps, and its optimizer, which is given, or its class and options are."""
    if isinstance(optimizer, type):
        optimizer = optimizer(model.parameters(), **options)
    for _ in range(steps):
        step(model, optimizer, (2, next(model.parameters()).shape[-1]))
    return model, optimizer


def both(model: nn.Module, optimizer: Any, **more: Any) -> dict[str, Any]:
    """Return what most programs save of both."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def save_both(model: nn.Module, optimizer: Any, path: Path) -> Path:
    """Save both as most programs do, in one file."""
    torch.save(both(model, optimizer), path)
    return Path(path)


class Words(nn.Module):
    """A tied head, a gain, a frozen parameter and a buffer, and, if that is asked for, what no pass uses."""

    def __init__(self, width: int, inner: int, *, gain: Shape = (), beside: Shape = (), unused: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full(gain, 1.5))
        self.embed = nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.register_buffer("scale", torch.rand(*beside, width))
        self.frozen = nn.Parameter(torch.rand(*beside, width), requires_grad=False)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        if unused:
            self.unused = nn.Linear(3, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scale, frozen = (one.reshape(-1, one.shape[-1]).mean(0) for one in (self.scale, self.frozen))
        x = self.norm(self.embed(tokens)) * scale * self.gain
        return self.head(x + self.down(self.up(x).relu()) + frozen)


def groups_of(model: nn.Module, *, named: bool = False, frozen: bool = False) -> list[dict[str, Any]]:
    """Return two param groups: matrices, which decay, and the others at a rate of their own."""
    every = [(name, one) for name, one in model.named_parameters() if frozen or one.requires_grad]
    made: list[dict[str, Any]] = [
        {"params": [pair for pair in every if pair[1].dim() > 1], "weight_decay": 0.1},
        {"params": [pair for pair in every if pair[1].dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return made if named else [{**group, "params": [one for _, one in group["params"]]} for group in made]


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Take steps with words that are the same on every rank; return the losses."""
    losses = []
    for number in steps:
        tokens = torch.randint(0, WORDS, (6, 5), generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(value: Any) -> Any:
    """Return a copy of a tensor, or of all in a tree, with all elements."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
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


def of_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what each rank has."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group)
    return told


def same(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two lists of `everything` are equal, bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two models have the same parameters, bit for bit."""
    return same([*one.parameters()], [*other.parameters()])
