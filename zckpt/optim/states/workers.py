"""DistributedOptimizer: its parameters live on RPC workers, each of which has and takes the state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zckpt.compare.optimizer_values import parameter_values
from zckpt.errors import UsageError
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.distributed import DistributedOptimizer, LocalOptimizer
from zckpt.optim.opening import open_for
from zckpt.optim.param_groups import Group, Names, group_hyperparameters, remote_names
from zckpt.optim.shares import Share
from zckpt.optim.states.protocol import NamedShare, Restoring, Source, Target, Values, as_torch, stored_hyperparameters
from zckpt.optim.zero_redundancy import files
from zckpt.state import ParamGroup, Slot


class WorkersState:
    """The state of an optimizer whose workers have it all."""

    is_remote = True
    process_group = None
    writes: str | None = "zero-redundancy"

    def __init__(self, optimizer: DistributedOptimizer, known: Mapping[torch.Tensor, str]) -> None:
        del known  # of tensors of this process
        self.optimizer = optimizer

    def names(self) -> Names:
        """Return the names that the optimizer was given, which its workers know."""
        return remote_names(self.optimizer.param_groups)

    def groups(self) -> list[ParamGroup]:
        """Return the param groups with the names of all parameters."""
        hyperparameters = stored_hyperparameters(self.optimizer)
        return [ParamGroup(its, list(names)) for its, names in zip(hyperparameters, self.names(), strict=True)]

    def slots(self, name: str) -> dict[str, Share]:
        """Return nothing: a worker has it."""
        del name
        return {}

    def shares(self) -> Iterator[NamedShare]:
        """Yield nothing: workers have them."""
        return iter(())

    def values(self) -> Values:
        """Return nothing: workers have them."""
        return Values()

    def restore(self, source: Source) -> Restoring:
        """Find out what the optimizer needs of a checkpoint."""
        return WorkersRestoring(source, self.optimizer, {})

    def write(self, target: Target) -> None:
        """Write a directory of each worker's part; the caller calls it."""
        files.save_workers(self.optimizer, target)


@dataclass(slots=True)
class WorkersRestoring(Restoring):
    """A checkpoint's state on its way into the workers of an optimizer."""

    optimizer: DistributedOptimizer
    order: Names = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    def prepare(self) -> None:
        """Hold the param groups against the checkpoint's."""
        source = self.source
        self.order = remote_names(self.optimizer.param_groups)
        self.groups = group_hyperparameters(source.checkpoint, source.param_groups, self.order, source.path)

    def read(self) -> None:
        """Let each worker read the state of its parameters into memory of its own."""
        self.optimizer.call(_read, self.source.path, self.order, self.source.tag, self.source.listed)

    def take(self) -> None:
        """Let each worker take what it has read, and take the hyperparameters here."""
        self.optimizer.call(_take, self.groups)
        for group, its in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(its)


def _read(local: LocalOptimizer, path: str, order: Names, tag: str | None, listed: Sequence[str] | None) -> None:
    """Read the state of a worker's parameters, which `_take` takes when all workers have read theirs."""
    checkpoint = open_for(path, (), order, tag=tag, names=listed)
    names = [name for group in local.optimizer.param_groups for name in group["param_names"]]
    state: dict[int, dict[str, Any]] = {}
    for (number, parameter), name in zip(local.by_number().items(), names, strict=True):
        if name not in checkpoint.parameters:
            raise UsageError(f"the checkpoint has no parameter {name}", path=path)
        shape = checkpoint.owner(name).shape
        if shape != tuple(parameter.shape):
            raise UsageError(f"{name} has another shape", path=path, expected=tuple(parameter.shape), found=shape)
        state[number] = _state(checkpoint, name)
    local.waiting = {number: values for number, values in state.items() if values}


def _state(checkpoint: OpenedCheckpoint, name: str) -> dict[str, Any]:
    """Return the state of one parameter as `torch.optim` keeps it."""
    owner = checkpoint.owner(name)
    return {
        key: checkpoint.read(owner.name, key) if isinstance(value, Slot) else as_torch(value)
        for key, value in parameter_values(checkpoint, owner).items()
    }


def _take(local: LocalOptimizer, hyperparameters: list[dict[str, Any]]) -> None:
    waiting, local.waiting = local.waiting, {}
    local.load(waiting, hyperparameters)
