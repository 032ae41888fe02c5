"""torch's optimizers, of parameters that FullyShardedDataParallel has cut.

An optimizer steps a unit's flat parameter, which has many of the model's, or views of it that are this rank's elements
of one. Its state is of the same size, and each of the model's parameters has its elements of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.errors import UnsupportedError
from zckpt.optim.flat_parameters import Members
from zckpt.optim.param_groups import Group
from zckpt.optim.states import Snapshot, is_trained
from zckpt.optim.states.by_parameter import ByParameter
from zckpt.optim.tensors import Share


class FlatState(ByParameter):
    """The state of an optimizer that has parameters in FullyShardedDataParallel, and maybe others.

    Where one tensor stands for many parameters, those of a param group are in the model's order, as they are in an
    optimizer of the bare model.
    """

    def __init__(self, optimizer: Optimizer, known: Mapping[torch.Tensor, str], members: Members) -> None:
        firsts = {tensor: every[0][0] for tensor, every in members.held.items()}
        super().__init__(optimizer, {**known, **firsts})
        self.held = {one: members.held[one] for one in self.called if one in members.held}
        order = {name: at for at, name in enumerate(members.order)}
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            every = [name for one in group["params"] for name, _ in self._members_of(one)]
            names[:] = every if len(every) == len(names) else sorted(every, key=order.__getitem__)

    def _members_of(self, tensor: torch.Tensor) -> list[tuple[str, Any]]:
        return self.held.get(tensor) or [(self.called[tensor], None)]

    def members(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name, with the tensor that has it."""
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                yield from ((name, tensor) for name, _ in self._members_of(tensor))

    def _shares(
        self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor, found: Snapshot
    ) -> dict[str, Share]:
        member = dict(self._members_of(parameter))[name]
        if member is None:
            return super()._shares(name, parameter, key, value, found)
        if value.numel() != parameter.numel():
            raise UnsupportedError(f"{key} of {name} is not one value for each element")
        if member.extent is None:
            return {}
        its = value.detach().reshape(-1)[member.offset : member.offset + member.extent.numel]
        return {key: Share(tuple(member.shape), member.extent, its, member.ranks)}

    def _has(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() > 0 or all(not one.shape.numel() for _, one in self.held.get(parameter, ()))

    # --- loading

    def untrained(self) -> set[str]:
        """Return the names of the parameters that no rank has anything of."""
        members = self.held
        plain = {name for tensor, name in self.called.items() if tensor not in members and not is_trained(tensor)}
        return plain | {name for every in members.values() for name, one in every if not one.is_trained}

    def _add(self, number: int, parameter: torch.Tensor, group: Group) -> None:
        if parameter not in self.held:
            super()._add(number, parameter, group)
            return
        its = self.held[parameter]
        owners = {name: self.owner(name, tuple(one.shape), optional=not one.is_trained) for name, one in its}
        if not parameter.numel() and any(one.shape.numel() for _, one in its):
            return  # other ranks have its elements, and torch has no state of it here
        parts = [(at, one.extent, one.offset) for at, (_, one) in enumerate(its) if one.extent and one.extent.numel]
        advice = "wrap with use_orig_params=True"
        state, without = self.flat_state(group, owners, parts, parameter, advice)
        self.notes += [f"no state of {name}" for name in without]
        if state:
            self.loaded[number] = state
