"""What some tests of this folder train, and the unsharded training it has to equal: on all ranks' batches at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.live import groups_of
from zckpt.optim import ZeroOptimizer
from zckpt.optim.zero.reduction import ShardedGradient

Optimizer = torch.optim.Optimizer

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
"""Of float32 weights near 1 after a few steps: the joined batch is summed in another order than ranks sum it."""

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
SMALL = 80  # elements in a bucket: the model fills several, and has parameters that are larger than one


class Net(torch.nn.Module):
    """Odd sizes, a scalar, a matrix used twice, and one that only some passes use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(5, 9)
        self.twice = torch.nn.Linear(9, 9, bias=False)
        self.spare = torch.nn.Linear(9, 9)
        self.last = torch.nn.Linear(9, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, x: torch.Tensor, *, spare: bool = True) -> torch.Tensor:
        hidden = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        if spare:
            hidden = hidden + torch.tanh(self.spare(hidden))
        return self.last(hidden) * self.scale


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the batch that this rank, or another, has in a step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)


def loss_of(model: torch.nn.Module, step: int, rank: int | None = None, **options: Any) -> torch.Tensor:
    """Return the loss of the batch of this rank, or another."""
    dtype = next(model.parameters()).dtype
    return (model(batch(step, rank, dtype), **options).float() - 1).pow(2).mean()


def make(model: torch.nn.Module, optimizer_class: type[Optimizer] = torch.optim.SGD, **options: Any) -> ZeroOptimizer:
    """Return the sharded optimizer, by default of SGD with momentum and of several buckets."""
    defaults = {**SGD, **options} if optimizer_class is torch.optim.SGD else {"lr": 0.01, **options}
    return ZeroOptimizer(
        groups_of(model, named=True, frozen=True), optimizer_class, **{"reduce_bucket_size": SMALL, **defaults}
    )


def stepped(ours: ZeroOptimizer, model: torch.nn.Module, step: int, **options: Any) -> None:
    """Step once with this rank's batch."""
    ours.backward(loss_of(model, step, **options))
    ours.step()


def losses(steps: int | range) -> list[Callable[[torch.nn.Module], torch.Tensor]]:
    """Return the losses of all ranks' batches of a step, or of several."""
    its = [steps] if isinstance(steps, int) else steps
    return [partial(loss_of, step=step, rank=rank) for step in its for rank in range(dist.get_world_size())]


class Unsharded:
    """The same model and optimizer in one process, trained on the batches of all ranks.

    As in a flat buffer, a parameter without gradient is stepped with zeros.
    """

    def __init__(self, model: torch.nn.Module, optimizer_class: type[Optimizer] = torch.optim.SGD, **defaults: Any):
        self.model = copy.deepcopy(model)
        its = {**SGD, **defaults} if optimizer_class is torch.optim.SGD else {"lr": 0.01, **defaults}
        self.optimizer = optimizer_class(groups_of(self.model, named=True), **its)

    def train(self, losses: Iterable[Callable[[torch.nn.Module], torch.Tensor]], divisor: float | None = None) -> None:
        """Step once with the gradient of a sum of losses, divided, if nothing else is said by the number of ranks."""
        self.gradients(losses, divisor)
        self.optimizer.step()

    def gradients(
        self, losses: Iterable[Callable[[torch.nn.Module], torch.Tensor]], divisor: float | None = None
    ) -> None:
        """Compute that gradient."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for loss in losses:
            (loss(self.model) / (divisor or dist.get_world_size())).backward()

    def assert_is(self, model: torch.nn.Module) -> None:
        """Fail unless another model has the same parameters, but for rounding."""
        assert_near(model, self.model)


def beside_unsharded(
    optimizer_class: type[Optimizer] = torch.optim.SGD, **options: Any
) -> tuple[Net, Unsharded, ZeroOptimizer]:
    """Return a model, its unsharded training, and the sharded optimizer."""
    model = Net()
    return model, Unsharded(model, optimizer_class), make(model, optimizer_class, **options)


def both_step(ours: ZeroOptimizer, model: torch.nn.Module, twin: Unsharded, steps: Iterable[int]) -> None:
    """Step the sharded optimizer with this rank's batches, and the unsharded training with all ranks': the same."""
    for step in steps:
        stepped(ours, model, step)
        twin.train(losses(step))
    twin.assert_is(model)


class Flat:
    """The plain optimizer of the same model's elements, where and how ZeroOptimizer has them: equal bit for bit.

    A kernel may round the last elements of a tensor otherwise than the first (scalar instructions beside vectors), and
    a matrix product may depend on where its factors lie: bits can only be asked of tensors of the same sizes in the
    same places. Here they lie in a buffer for each group, padded to 2 x parts, and are stepped in as many equal parts.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer_class: type[Optimizer], *, parts: int = 1, **defaults: Any
    ) -> None:
        its = {**SGD, **defaults} if optimizer_class is torch.optim.SGD else {"lr": 0.01, **defaults}
        self.members: list[list[torch.nn.Parameter]] = []
        self.flats: list[torch.Tensor] = []
        given = []
        for group in groups_of(model, named=True, frozen=True):
            members = [parameter for _, parameter in group["params"]]
            numel = sum(parameter.numel() for parameter in members)
            flat = torch.zeros(numel + -numel % (2 * parts), dtype=members[0].dtype)
            at = 0
            for parameter in members:
                view = flat[at : at + parameter.numel()].view(parameter.shape)
                parameter.data = view.copy_(parameter.data)
                at += parameter.numel()
            self.members.append(members)
            self.flats.append(flat)
            masters = [torch.nn.Parameter(part.clone()) for part in flat.chunk(parts)]
            given.append({**group, "params": masters})
        self.optimizer = optimizer_class(given, **its)

    def step(self) -> None:
        """Step with the gradients that the model's parameters have, or with zeros, and forget them."""
        for group, members, flat in zip(self.optimizer.param_groups, self.members, self.flats, strict=True):
            gradient = torch.zeros_like(flat)
            at = 0
            for parameter in members:
                if parameter.grad is not None:
                    gradient[at : at + parameter.numel()] = parameter.grad.reshape(-1)
                at += parameter.numel()
                parameter.grad = None
            for master, part in zip(group["params"], gradient.chunk(len(group["params"])), strict=True):
                master.grad = part.clone()
        self.optimizer.step()
        for group, flat in zip(self.optimizer.param_groups, self.flats, strict=True):
            for master, part in zip(group["params"], flat.chunk(len(group["params"])), strict=True):
                part.copy_(master.detach())


@dataclass
class ModelParallel:
    """Ranks that hold a model together, as Megatron's `mpu` tells them."""

    group: dist.ProcessGroup

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.group)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.group)


def assert_near(model: torch.nn.Module, other: torch.nn.Module, tolerance: dict[str, float] = TOLERANCE) -> None:
    """Fail unless two models have the same parameters, but for rounding."""
    torch.testing.assert_close(bits(model), bits(other), **tolerance)


def assert_alike(model: torch.nn.Module) -> None:
    """Fail unless all ranks have the same parameters, bit for bit."""
    mine = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(its, mine) for its in everyone), "ranks differ"


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a copy of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


class BrokenError(RuntimeError):
    """What tests break backward with."""


def fails(_: torch.Tensor) -> None:
    """Break backward, as a hook of a tensor."""
    raise BrokenError


def has_gradient(parameter: torch.Tensor) -> bool:
    """Tell whether this rank holds a parameter's whole gradient."""
    return parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient)


def is_unchanged(model: torch.nn.Module, before: Sequence[torch.Tensor]) -> bool:
    """Tell whether parameters are what they were, bit for bit."""
    return all(torch.equal(p.detach(), its) for p, its in zip(model.parameters(), before, strict=True))
