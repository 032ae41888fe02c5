"""State of an optimizer that keeps it by parameter: torch's own, on shards too, and ZeroRedundancyOptimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zckpt.compare.optimizer_values import parameter_values
from zckpt.errors import UnsupportedError
from zckpt.operations.tensors import Wanted
from zckpt.optim.param_groups import Group
from zckpt.optim.restoring.restoring import Restoring, single
from zckpt.optim.shares import share_of
from zckpt.optim.zero_redundancy import ZeroRedundancyOptimizer
from zckpt.state import Extent, Parameter, Slot


@dataclass(slots=True)
class ByParameter(Restoring):
    """Of an optimizer that keeps state by parameter: torch's own, on shards too, and ZeroRedundancyOptimizer."""

    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def prepare(self) -> None:
        """Make room for the state."""
        optimizer = self.optimizer
        names = [[self.names[p] for p in group["params"]] for group in optimizer.param_groups]
        hyperparameters = self.hyperparameters(names, optimizer.param_groups)
        number = 0
        for group, its in zip(optimizer.param_groups, hyperparameters, strict=True):
            first = number
            for parameter in group["params"]:
                if self._is_here(parameter):
                    self._add(number, parameter)
                number += 1
            self.groups.append({**group, **its, "params": list(range(first, number))})

    def _is_here(self, parameter: torch.Tensor) -> bool:
        optimizer = self.optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer._param_to_rank[parameter] == optimizer.rank
        return True

    def _add(self, number: int, parameter: torch.Tensor) -> None:
        owner = self.owner(parameter)
        if owner is None:
            self.notes.append(f"no state of {self.names[parameter]}")
            return
        values = parameter_values(self.checkpoint, owner)
        if values:
            self.state[number] = {key: self._value(key, value, parameter, owner) for key, value in values.items()}

    def _value(self, key: str, value: object, parameter: torch.Tensor, owner: Parameter) -> object:
        if not isinstance(value, Slot):
            return single(value)
        dtype = getattr(torch, value.dtype)
        if not isinstance(parameter, DTensor) or value.shape != owner.shape:
            if isinstance(parameter, DTensor) and value.shape:
                raise UnsupportedError(f"{key} of {owner.name} is not one value for each element", path=self.path)
            device = parameter.device if value.shape else "cpu"  # where torch keeps single numbers
            whole = torch.empty(value.shape, dtype=dtype, device=device)
            self.wanted.append(Wanted(value, Extent.whole(value.shape), whole))
            return whole
        local = torch.empty(parameter.to_local().shape, dtype=dtype, device=parameter.device)
        share = share_of(parameter, owner.name)
        if share is not None:
            self.wanted.append(Wanted(value, share.extent, local))
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def take(self) -> None:
        """Give the optimizer what was read."""
        self.optimizer.load_state_dict({"state": self.state, "param_groups": self.groups})
