"""State of a checkpoint on its way into an optimizer: what is wanted is known first, then read, then taken.

Only the last step changes the optimizer, and only it may talk to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.optimizer_values import parameter_values
from zckpt.opened import OpenedCheckpoint
from zckpt.optim.named_groups import Names, group_hyperparameters
from zckpt.optim.param_groups import Group
from zckpt.optim.shares import share_of
from zckpt.optim.zero.flat_group import FlatGroup
from zckpt.optim.zero.loss_scale import adopt
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.parts import experts_of, model_rank
from zckpt.optim.zero_redundancy import ZeroRedundancyOptimizer
from zckpt.state import MASTER, WEIGHT, Extent, Parameter, Scalar, Slot
from zckpt.tensor_reads import Wanted, read_tensors
from zckpt.torchfile import FromFile, plain


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
        """Names of the parameters whose weights `publish` makes of masters."""
        return set()

    def read(self) -> None:
        """Read state into memory of its own. Raises SourceError if it cannot be read."""
        read_tensors(self.wanted)

    def publish(self) -> None:
        """Give the optimizer what was read; on all ranks together."""
        raise NotImplementedError

    def owner(self, parameter: torch.Tensor) -> Parameter | None:
        """Return the checkpoint's parameter for one of the optimizer's; None if there is none and need not be.

        Raises
        ------
        UsageError
            There is none, or it has another shape.
        """
        name, checkpoint = self.names[parameter], self.checkpoint
        there = name in checkpoint.parameters or name in checkpoint.buffers
        found = checkpoint.owner(name) if there else None
        if found is not None and found.shape == tuple(parameter.shape):
            return found
        if not self.strict:
            return None
        if found is None:
            raise UsageError(f"the checkpoint has no parameter {name}", path=self.path)
        raise UsageError(
            f"{name} has another shape", path=self.path, expected=tuple(parameter.shape), found=found.shape
        )

    def hyperparameters(self, names: Names, current: Sequence[Group]) -> list[Group]:
        """Return the hyperparameters of each param group: the checkpoint's, or those that it is not to change.

        Raises
        ------
        UsageError
            The checkpoint has other param groups.
        """
        try:
            found = group_hyperparameters(self.checkpoint, names, self.path)
        except UsageError as error:
            if self.strict:
                raise
            self.notes.append(f"hyperparameters stay as they are: {error}")
            return [{} for _ in names]
        return [
            {key: _like(value, ours.get(key)) for key, value in its.items()}
            for its, ours in zip(found, current, strict=True)
        ]


def restoring_of(
    checkpoint: OpenedCheckpoint,
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    path: str,
    *,
    strict: bool = True,
) -> Restoring:
    """Find out what an optimizer needs of a checkpoint; nothing is read or changed yet.

    Raises
    ------
    UsageError
        The checkpoint has other parameters or param groups than the optimizer.
    UnsupportedError
        State that the optimizer has no way to keep.
    """
    made: Restoring
    if isinstance(optimizer, ZeroOptimizer):
        made = _Flat(checkpoint, optimizer, names, path, strict)
    else:
        made = _ByParameter(checkpoint, optimizer, names, path, strict)
    made.prepare()
    return made


def _like(value: object, current: object) -> Any:
    """Return a hyperparameter as the optimizer keeps it: in a tensor of its own, where it has one."""
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(current, value)
    return value


def _single(value: object) -> object:
    """Return a value that is no tensor of elements; what was a tensor of one number is one."""
    if isinstance(value, Scalar):
        return torch.tensor(value.value, dtype=getattr(torch, value.dtype))
    return value


# --- by parameter


@dataclass(slots=True)
class _ByParameter(Restoring):
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
            return _single(value)
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

    def publish(self) -> None:
        """Give the optimizer what was read."""
        self.optimizer.load_state_dict({"state": self.state, "param_groups": self.groups})


# --- flat groups


@dataclass(slots=True)
class _Flat(Restoring):
    """Of a ZeroOptimizer: this rank's partition of each group's masters and state."""

    masters: list[torch.Tensor] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
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

    def _group_names(self, index: int) -> list[str]:
        """Return the names of a param group's trained parameters; of experts, also those that other ranks have."""
        optimizer, every = self._flat, self.checkpoint.param_groups
        names = [self.names[p] for p in optimizer.param_groups[index]["params"] if p in optimizer._place]
        if optimizer.groups[index].is_expert and index < len(every):
            names += [name for name in every[index].parameters if is_expert(name) and name not in names]
        return names

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
        return _single(found[0])

    @torch.no_grad()
    def publish(self) -> None:
        """Give the optimizer masters and state, and all ranks the weights that the masters stand for."""
        optimizer = self._flat
        optimizer.load_local(self.state, self.groups)
        for group, master in zip(optimizer.groups, self.masters, strict=True):
            group.master.copy_(master)
        found = self.checkpoint.optimizer_metadata.get("loss_scaler")
        node = found.node if isinstance(found, FromFile) else found
        optimizer.loss_scaler = adopt(optimizer.loss_scaler, getattr(node, "state", plain(node)))
        optimizer.publish_masters()


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
