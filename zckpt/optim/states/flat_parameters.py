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
from zckpt.engine.tensors import TensorRead
from zckpt.errors import UnsupportedError, UsageError
from zckpt.optim.flat_parameters import Member, Members
from zckpt.optim.param_groups import Group, Names
from zckpt.optim.states import NamedShare, Restoring, Source, Values, is_trained
from zckpt.optim.states.by_parameter import ByParameter, ByParameterRestoring
from zckpt.optim.states.expected import check_keys
from zckpt.optim.states.values import as_stored, as_torch, read_numbers
from zckpt.optim.tensors import Share
from zckpt.state import Parameter, Slot, number_of

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

    def slots(self, name: str) -> dict[str, Share]:
        """Return what this rank has of each slot of a parameter."""
        if name not in self._of:
            return super().slots(name)
        tensor, member = self._of[name]
        found = {}
        for key, value in self._state().get(tensor, {}).items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            if value.numel() != tensor.numel():
                raise UnsupportedError(f"{key} of {name} is not one value for each element")
            if member.extent is not None:
                its = value.detach().reshape(-1)[member.offset : member.offset + member.extent.numel]
                found[key] = Share(tuple(member.shape), member.extent, its, member.ranks)
        return found

    def shares(self) -> Iterator[NamedShare]:
        """Yield every parameter's slots."""
        for name, _ in self.members():
            for slot, share in self.slots(name).items():
                yield name, slot, share

    def values(self) -> Values:
        """Return the state that is no tensor of elements; a rank without elements of a parameter has none of it."""
        found = Values()
        for tensor, state in self._state().items():
            single = {key: as_stored(v) for key, v in state.items() if not isinstance(v, torch.Tensor) or not v.dim()}
            here = tensor.numel() or all(not one.shape.numel() for _, one in self._members.get(tensor, ()))
            if single and here:
                found.parameters.update((name, dict(single)) for name in self._names_of(tensor))
        return found

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
        keys = dict.fromkeys(key for held in values for key in held)
        if keys:
            self.state[number] = {key: self._joined(key, parameter, owners, values) for key in keys}

    def _joined(
        self,
        key: str,
        parameter: torch.Tensor,
        owners: Sequence[Parameter | None],
        values: Sequence[Mapping[str, object]],
    ) -> object:
        """Return state for a tensor of many parameters; zeros where one has none, and as padding."""
        found = [held[key] for held in values if key in held]
        slots = [value for value in found if isinstance(value, Slot)]
        if not slots:
            return self._single(key, found)
        if len({value.dtype for value in slots}) > 1 or len(slots) < len(found):
            raise self._differ(key, [getattr(value, "dtype", value) for value in found])
        into = torch.zeros(parameter.numel(), dtype=getattr(torch, slots[0].dtype), device=parameter.device)
        for (name, member), owner, held in zip(self.members[parameter], owners, values, strict=True):
            slot = held.get(key)
            if owner is None or not isinstance(slot, Slot):
                continue
            if slot.shape != owner.shape:
                raise UnsupportedError(f"{key} of {name} is not one value for each element", path=self.source.path)
            if member.extent is not None and member.extent.numel:
                here = into[member.offset : member.offset + member.extent.numel]
                self.reads.append(TensorRead(slot, member.extent, here))
        return into.view(parameter.shape)

    def _single(self, key: str, found: Sequence[object]) -> object:
        """Return a value that all parameters of a tensor have in common."""
        plain = [number_of(value) for value in found]
        if any(value != plain[0] for value in plain):
            raise self._differ(key, plain)
        return as_torch(found[0])

    def _differ(self, key: str, found: Sequence[object]) -> UsageError:
        return UsageError(
            f"{key} is not the same for all parameters of a unit, whose flat parameter has only one",
            path=self.source.path,
            found=", ".join(sorted({str(one) for one in found})),
            advice="wrap with use_orig_params=True",
        )
