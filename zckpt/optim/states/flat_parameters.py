"""torch's optimizers, of parameters that FullyShardedDataParallel has cut.

An optimizer steps a unit's flat parameter, which has many of the model's, or views of it that are this rank's elements
of one. Its state is of the same size, and each of the model's parameters has its elements of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from zckpt.compare.logical import parameter_values
from zckpt.errors import UnsupportedError, about
from zckpt.optim.flat_parameters import Member, Members
from zckpt.optim.param_groups import Group, Names
from zckpt.optim.states import Restoring, Source, is_trained
from zckpt.optim.states.by_parameter import ByParameter, ByParameterRestoring
from zckpt.optim.states.expected import check_keys
from zckpt.optim.states.values import flat_state, read_numbers
from zckpt.optim.tensors import Share

Held = Mapping[torch.Tensor, list[tuple[str, Member]]]
"""What each tensor of an optimizer has the elements of."""


class FlatState(ByParameter):
    """The state of an optimizer that has parameters in FullyShardedDataParallel, and maybe others.

    Where one tensor stands for many parameters, those of a param group are in the model's order, as they are in an
    optimizer of the bare model.
    """

    def __init__(self, optimizer: Optimizer, known: Mapping[torch.Tensor, str], members: Members) -> None:
        firsts = {tensor: every[0][0] for tensor, every in members.held.items()}
        super().__init__(optimizer, {**known, **firsts})
        self._members = {one: members.held[one] for one in self._called if one in members.held}
        self._of = {name: (tensor, one) for tensor, every in self._members.items() for name, one in every}
        order = {name: at for at, name in enumerate(members.order)}
        self._names = [self._expanded(group["params"], order) for group in optimizer.param_groups]

    def _expanded(self, tensors: Sequence[torch.Tensor], order: Mapping[str, int]) -> list[str]:
        names = [name for one in tensors for name in self._names_of(one)]
        return names if len(names) == len(tensors) else sorted(names, key=order.__getitem__)

    def _names_of(self, tensor: torch.Tensor) -> list[str]:
        return [name for name, _ in self._members[tensor]] if tensor in self._members else [self._called[tensor]]

    def members(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name, with the tensor that has it."""
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                yield from ((name, tensor) for name in self._names_of(tensor))

    def _tensor_of(self, name: str) -> torch.Tensor:
        return self._of[name][0] if name in self._of else self._parameters[name]

    def _shares_of(self, key: str, value: torch.Tensor, name: str) -> dict[str, Share]:
        if name not in self._of:
            return super()._shares_of(key, value, name)
        tensor, member = self._of[name]
        if value.numel() != tensor.numel():
            raise UnsupportedError(f"{key} of {name} is not one value for each element")
        if member.extent is None:
            return {}
        its = value.detach().reshape(-1)[member.offset : member.offset + member.extent.numel]
        return {key: Share(tuple(member.shape), member.extent, its, member.ranks)}

    def _with_state(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of what has a tensor's state here: a rank without elements of a parameter has none of it."""
        here = parameter.numel() or all(not one.shape.numel() for _, one in self._members.get(parameter, ()))
        return self._names_of(parameter) if here else []

    def restore(self, source: Source) -> Restoring:
        """Find out what the optimizer needs of a checkpoint."""
        return FlatRestoring(
            source, self.optimizer, self._called, is_here=self._is_here, local=self._local(), members=self._members,
            every=self._names,
        )  # fmt: skip


@dataclass(slots=True)
class FlatRestoring(ByParameterRestoring):
    """A checkpoint's state on its way into an optimizer of parameters in FullyShardedDataParallel."""

    members: Held = field(kw_only=True)
    every: Names = field(kw_only=True)

    def group_names(self) -> Names:
        """Return the names of all parameters of each param group."""
        return self.every

    def untrained(self) -> set[str]:
        """Return the names of the parameters that no rank has anything of."""
        plain = {name for tensor, name in self.names.items() if tensor not in self.members and not is_trained(tensor)}
        return plain | {name for every in self.members.values() for name, one in every if not one.is_trained}

    def _add(self, number: int, parameter: torch.Tensor, group: Group) -> None:
        if parameter not in self.members:
            ByParameterRestoring._add(self, number, parameter, group)
            return
        its = self.members[parameter]
        owners = [self.owner_of(name, tuple(one.shape), optional=not one.is_trained) for name, one in its]
        if not parameter.numel() and any(one.shape.numel() for _, one in its):
            return  # other ranks have its elements, and torch has no state of it here
        values = [{} if owner is None else parameter_values(self.source.checkpoint, owner) for owner in owners]
        read_numbers(values, owners)
        for (name, _), held in zip(its, values, strict=True):
            check_keys(self.holder, group, name, parameter.dim(), held, path=self.source.path)
        self.notes += [f"no state of {name}" for (name, _), held in zip(its, values, strict=True) if not held]
        parts = [
            (number, one.extent, one.offset) for number, (_, one) in enumerate(its) if one.extent and one.extent.numel
        ]

        def room(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)

        with about(self.source.path):
            state, reads = flat_state(values, owners, parts, room, "wrap with use_orig_params=True")
        self.reads += reads
        if state:
            self.state[number] = state
