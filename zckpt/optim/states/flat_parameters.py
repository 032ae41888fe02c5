"""Optimizers of which one tensor has elements of many parameters.

FullyShardedDataParallel has a unit's flat parameter, or views of it that are this rank's elements of one; a
ZeroOptimizer has a param group's masters. Their state is of the same size, and each of the model's parameters has its
elements of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.compare.logical import parameter_values
from zckpt.engine.tensors import TensorRead
from zckpt.errors import UnsupportedError, UsageError
from zckpt.optim.flat_parameters import Called, Member, Members
from zckpt.optim.param_groups import Group, parameters_of
from zckpt.optim.states.by_parameter import OptimizerState, Snapshot, is_trained
from zckpt.optim.states.expected import check_keys, makes_state
from zckpt.optim.tensors import Share
from zckpt.optim.values import as_torch, read_numbers
from zckpt.state import Slot, number_of, positions


class OfMembers(OptimizerState):
    """The state of an optimizer that has tensors with elements of many parameters, and maybe others."""

    held: Mapping[torch.Tensor, Sequence[tuple[str, Member]]]
    advice: str | None = None
    """What to do where parameters of one tensor have something else."""

    def _members_of(self, tensor: torch.Tensor) -> Sequence[tuple[str, Any]]:
        return self.held[tensor] if tensor in self.held else [(self.called[tensor], None)]

    @cached_property
    def _by_name(self) -> dict[torch.Tensor, dict[str, Member]]:
        return {tensor: dict(members) for tensor, members in self.held.items()}

    def holding(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name, with the tensor that has it."""
        for tensor in parameters_of(self._loads.param_groups):
            yield from ((name, tensor) for name, _ in self._members_of(tensor))

    def _shares(
        self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor, found: Snapshot
    ) -> dict[str, Share]:
        member = self._by_name.get(parameter, {}).get(name)
        if member is None:
            return super()._shares(name, parameter, key, value, found)
        if value.shape != parameter.shape:
            raise UnsupportedError(f"{key} of {name} does not have one value per element")
        if member.extent is None:
            return {}
        return {key: Share(tuple(member.shape), member.extent, member.within(value.detach()), member.ranks)}

    def is_here(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank has elements of a tensor, or nobody has any: torch has no state of none."""
        return parameter.numel() > 0 or all(not one.shape.numel() for _, one in self.held.get(parameter, ()))

    # --- loading

    def untrained(self) -> set[str]:
        """Return the names of the parameters that no rank has anything of."""
        members = self.held
        plain = {name for tensor, name in self.called.items() if tensor not in members and not is_trained(tensor)}
        return plain | {name for every in members.values() for name, one in every if not one.is_trained}

    @cached_property
    def _number_keys(self) -> frozenset[str]:
        return self.source.checkpoint.number_keys

    def _add(self, number: int, parameter: torch.Tensor, group: Group) -> None:
        if parameter not in self.held:
            super()._add(number, parameter, group)
            return
        # A slot is zeros where a parameter has none, and as padding, in a type that has the values of all; what is no
        # slot is one value for all.
        its = self.held[parameter]
        names = [name for name, _ in its]
        owners = [self.owner(name, tuple(one.shape), optional=not one.is_trained) for name, one in its]
        held = [{} if one is None else parameter_values(self.source.checkpoint, one) for one in owners]
        read_numbers(held, self._number_keys)
        for name, values in zip(names, held, strict=True):
            check_keys(self.holder, group, name, parameter.dim(), values)
        state: dict[str, Any] = {}
        for key in dict.fromkeys(key for values in held for key in values):
            found = [values[key] for values in held if key in values]
            slots = [one for one in found if isinstance(one, Slot)]
            kinds = [one.dtype if isinstance(one, Slot) else number_of(one) for one in found]
            if len(slots) != len(found) and (slots or any(kind != kinds[0] for kind in kinds)):
                raise UsageError(
                    f"{key} differs between parameters of a group or unit, whose flat parameter can have only one "
                    "value",
                    found=", ".join(sorted({str(one) for one in kinds})),
                    advice=self.advice,
                )
            if not slots:
                state[key] = as_torch(found[0], f"{key} of {names[0]}")
                continue
            dtype = reduce(torch.promote_types, (getattr(torch, one.dtype) for one in slots))
            state[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            for values, owner, (_, one) in zip(held, owners, its, strict=True):
                slot = values.get(key)
                if owner is not None and isinstance(slot, Slot) and one.extent and one.extent.numel:
                    if slot.shape != owner.shape:
                        raise UsageError(f"{key} of {owner.name} does not have one value per element")
                    self.reads.append(TensorRead(slot, one.extent, one.within(state[key])))
        if state:
            self.loaded[number] = state
            self.notes += [f"no state of {name}" for name, values in zip(names, held, strict=True) if not values]
        elif parameter.numel() and makes_state(self.holder, group, parameter.dim()):
            self.without += names


class FlatState(OfMembers):
    """The state of an optimizer that has parameters in FullyShardedDataParallel, and maybe others.

    Where one tensor stands for many parameters, those of a param group are in the model's order, as they are in an
    optimizer of the bare model.
    """

    advice = "wrap with use_orig_params=True"

    def __init__(self, optimizer: Optimizer, known: Called, members: Members) -> None:
        firsts = {tensor: every[0][0] for tensor, every in members.held.items()}
        super().__init__(optimizer, {**known, **firsts})
        self.held = {one: members.held[one] for one in self.called if one in members.held}
        order = positions(members.order)
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            every = [name for one in group["params"] for name, _ in self._members_of(one)]
            names[:] = every if len(every) == len(names) else sorted(every, key=order.__getitem__)

    def members(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name, with the tensor that has it."""
        return self.holding()
