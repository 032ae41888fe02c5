"""What every kind of optimizer needs to get its state of a checkpoint: parameters by name, and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.errors import UsageError
from zckpt.operations.open import OpenedCheckpoint
from zckpt.operations.tensors import Wanted, check_tensors, read_tensors
from zckpt.optim.named_groups import Names, group_hyperparameters
from zckpt.optim.param_groups import Group
from zckpt.state import Parameter, Scalar


@dataclass(slots=True)
class Restoring:
    """A checkpoint's state for one optimizer.

    Parameters
    ----------
    checkpoint : OpenedCheckpoint
    optimizer : Optimizer
    names : mapping
        Of all its parameters.
    path : str
        For messages.
    strict : bool
        Whether all parameters must be there.
    wanted : list of Wanted
        What will be read.
    notes : list of str
        What the checkpoint has not.
    """

    checkpoint: OpenedCheckpoint
    optimizer: Optimizer
    names: Mapping[torch.Tensor, str]
    path: str
    strict: bool
    wanted: list[Wanted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters whose weights `share` makes of masters."""
        return set()

    def prepare(self) -> None:
        """Find out what is wanted, and make room for it."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise SourceError unless all that is wanted is there to be read, as far as can be known before."""
        check_tensors(self.wanted)

    def read(self) -> None:
        """Read state into memory of its own. Raises SourceError if it cannot be read."""
        read_tensors(self.wanted)

    def take(self) -> None:
        """Give the optimizer what was read, on this rank."""
        raise NotImplementedError

    def share(self) -> None:
        """Bring what follows from it to all ranks, which call this together, when all have taken theirs."""

    def owner(self, parameter: torch.Tensor) -> Parameter | None:
        """Return the checkpoint's parameter for one of the optimizer's; None if there is none and need not be.

        Raises
        ------
        UsageError
            There is none, or it has another shape.
        """
        name, checkpoint = self.names[parameter], self.checkpoint
        there = name in checkpoint.parameters or name in checkpoint.buffers
        found = checkpoint.owner(name) if there else checkpoint.unnamed.get(name)
        if found is not None and found.shape == tuple(parameter.shape):
            return found
        if not self.strict or (found is None and self._may_be_missing(parameter)):
            return None
        if found is None:
            raise UsageError(f"the checkpoint has no parameter {name}", path=self.path)
        raise UsageError(
            f"{name} has another shape", path=self.path, expected=tuple(parameter.shape), found=found.shape
        )

    def _may_be_missing(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter need not be there: it has nothing that is trained, or no step had reached it."""
        listed = any(self.names[parameter] in group.parameters for group in self.checkpoint.param_groups)
        return listed or not is_trained(parameter)

    def hyperparameters(self, names: Names, current: Sequence[Group]) -> list[Group]:
        """Return the hyperparameters of each param group: the checkpoint's, or those that it is not to change.

        Raises
        ------
        UsageError
            The checkpoint has other param groups.
        """
        try:
            without = {name for parameter, name in self.names.items() if not is_trained(parameter)}
            found = group_hyperparameters(self.checkpoint, names, self.path, optional=without)
        except UsageError as error:
            if self.strict:
                raise
            self.notes.append(f"hyperparameters stay as they are: {error}")
            return [{} for _ in names]
        return [
            {key: _like(value, ours.get(key)) for key, value in its.items()}
            for its, ours in zip(found, current, strict=True)
        ]


def is_trained(parameter: torch.Tensor) -> bool:
    """Tell whether an optimizer has anything of a parameter."""
    return parameter.requires_grad and parameter.numel() > 0


def _like(value: object, current: object) -> Any:
    """Return a hyperparameter as the optimizer keeps it: in a tensor of its own, where it has one."""
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(current, value)
    return value


def single(value: object) -> object:
    """Return a value that is no tensor of elements; what was a tensor of one number is one."""
    if isinstance(value, Scalar):
        return torch.tensor(value.value, dtype=getattr(torch, value.dtype))
    return value
