"""State of a ZeroOptimizer: this rank's partition of each group's masters and slots, and the loss scaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zckpt.compare.optimizer_values import parameter_values
from zckpt.errors import DamagedFileError, UnsupportedError, UsageError
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.operations.tensors import Wanted, read_tensors
from zckpt.optim.param_groups import Group
from zckpt.optim.restoring.restoring import Restoring, single
from zckpt.optim.zero.flat_group import FlatGroup
from zckpt.optim.zero.loss_scale import Scaler, adopt
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.parts import experts_of, model_rank
from zckpt.state import MASTER, WEIGHT, Extent, Parameter, Scalar, Slot
from zckpt.torchfile import FromFile, Object, plain


@dataclass(slots=True)
class Flat(Restoring):
    """Of a ZeroOptimizer: this rank's partition of each group's masters and state."""

    masters: list[torch.Tensor] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    scaler: Scaler | None = None
    own_names: Mapping[torch.Tensor, str] = field(default_factory=dict)

    @property
    def _flat(self) -> ZeroOptimizer:
        assert isinstance(self.optimizer, ZeroOptimizer)  # noqa: S101  # `restoring_of` has seen to it
        return self.optimizer

    @property
    def publishes(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {self.own_names[parameter] for group in self._flat.groups for parameter in group.parameters}

    def prepare(self) -> None:
        """Make room for masters and state. Experts are found by their global numbers."""
        optimizer = self._flat
        if model_rank(optimizer.model_parallel)[1] > 1:
            raise UnsupportedError(
                "a model whose parts lie on several ranks is not loaded by name: "
                "which part of a tensor is this rank's, no name says",
                path=self.path,
                advice="give load_state_dict() what this rank's file holds, at the same degrees",
            )
        self.own_names = self.names
        experts = experts_of(optimizer, self.names)
        self.names = {parameter: experts.named(name) for parameter, name in self.own_names.items()}
        names = [self._group_names(index) for index in range(len(optimizer.groups))]
        known = optimizer.optim.state_dict()["param_groups"]
        hyperparameters = self.hyperparameters(names, optimizer.param_groups)
        self.groups = [
            {**ours, **its, "params": [index]}
            for index, (ours, its) in enumerate(zip(known, hyperparameters, strict=True))
        ]
        for index, group in enumerate(optimizer.groups):
            owners = [self.owner(parameter) for parameter in group.parameters]
            self.masters.append(group.master.detach().clone())
            self.wanted += _partition(group, [_master(owner) for owner in owners], self.masters[-1])
            values = self._state(group, owners)
            if values:
                self.state[index] = values
        self.scaler = self._scaler()

    def _group_names(self, index: int) -> list[str]:
        """Return the names of a param group's trained parameters; of experts, also those that other ranks have."""
        optimizer, every = self._flat, self.checkpoint.param_groups
        names = [self.names[p] for p in optimizer.param_groups[index]["params"] if p in optimizer._place]
        if optimizer.groups[index].is_expert and index < len(every):
            names += [name for name in every[index].parameters if is_expert(name) and name not in names]
        return names

    def _scaler(self) -> Scaler:
        """Return the loss scaler that the checkpoint has, or else the optimizer's.

        Raises
        ------
        DamagedFileError
            It has one that cannot be.
        """
        found = self.checkpoint.optimizer_metadata.get("loss_scaler")
        node = found.node if isinstance(found, FromFile) else found
        values = plain(node)
        if isinstance(node, Object) and isinstance(node.state, dict):
            values = {"dynamic": node.qualified.endswith(".DynamicLossScaler"), **node.state}
        try:
            return adopt(self._flat.loss_scaler, values)
        except ValueError as error:
            raise DamagedFileError(f"unusable loss scaler: {error}", path=self.path) from error

    def _state(self, group: FlatGroup, owners: Sequence[Parameter | None]) -> dict[str, Any]:
        """Return the state of a flat master: room for this rank's part of each slot, and what is one value for all.

        Raises
        ------
        UsageError
            A value is not the same for all parameters, or a tensor not one value for each element.
        """
        every = [{} if owner is None else parameter_values(self.checkpoint, owner) for owner in owners]
        _read_numbers(every, owners)
        having = [values for values in every if values]
        made: dict[str, Any] = {}
        for key in dict.fromkeys(key for values in having for key in values):
            found = [values[key] for values in having if key in values]
            if isinstance(found[0], Slot):
                slots = [self._elementwise(key, owner, values) for owner, values in zip(owners, every, strict=True)]
                dtype = getattr(torch, found[0].dtype)
                made[key] = torch.zeros(group.partition, dtype=dtype, device=group.master.device)
                self.wanted += _partition(group, slots, made[key])
            else:
                made[key] = self._common(key, found)
        return made

    def _elementwise(self, key: str, owner: Parameter | None, values: Mapping[str, object]) -> Slot | None:
        slot = values.get(key)
        if owner is None or not isinstance(slot, Slot):
            return None
        if slot.shape != owner.shape:
            raise UsageError(f"{key} of {owner.name} is not one value for each element", path=self.path)
        return slot

    def _common(self, key: str, found: Sequence[object]) -> object:
        numbers = {value.value if isinstance(value, Scalar) else value for value in found}
        if len(numbers) > 1:
            raise UsageError(
                f"{key} is not the same for all parameters of a group, which a flat group has only one for",
                path=self.path,
                found=", ".join(map(str, sorted(numbers, key=str))),
            )
        return single(found[0])

    @torch.no_grad()
    def take(self) -> None:
        """Give the optimizer masters and state."""
        optimizer = self._flat
        optimizer.load_local(self.state, self.groups)
        for group, master in zip(optimizer.groups, self.masters, strict=True):
            group.master.copy_(master)
        optimizer.loss_scaler = self.scaler or optimizer.loss_scaler

    def share(self) -> None:
        """Give all ranks the weights that the masters stand for."""
        self._flat.publish_masters()


def _read_numbers(every: Sequence[dict[str, object]], owners: Sequence[Parameter | None]) -> None:
    """Put single numbers in the place of tensors that hold one for a whole parameter.

    A parameter that is a single number itself has one of each kind; `step` is none for each element.
    """
    pairs = [(values, owner.shape) for values, owner in zip(every, owners, strict=True) if owner is not None]
    numbers = {"step"} | {
        key
        for values, shape in pairs
        for key, value in values.items()
        if isinstance(value, Slot) and not value.shape and shape
    }
    found = [
        (values, key, value, torch.empty((), dtype=getattr(torch, value.dtype)))
        for values, _ in pairs
        for key, value in values.items()
        if key in numbers and isinstance(value, Slot) and not value.shape
    ]
    read_tensors(Wanted(slot, Extent.whole(()), tensor) for _, _, slot, tensor in found)
    for values, key, slot, tensor in found:
        values[key] = Scalar(tensor.item(), slot.dtype)


def _master(owner: Parameter | None) -> Slot | None:
    """Return what masters are read from: masters, or weights where there are none."""
    return None if owner is None else owner.slots.get(MASTER) or owner.slots.get(WEIGHT)


def _partition(group: FlatGroup, slots: Sequence[Slot | None], into: torch.Tensor) -> Iterator[Wanted]:
    """Yield this rank's part of a slot of each parameter; padding, and what has no such slot, stays as it is."""
    for f in group.own:
        slot = slots[f.index]
        if slot is not None:
            yield Wanted(slot, Extent.flat(slot.shape, f.start, f.numel), into[f.position : f.position + f.numel])
