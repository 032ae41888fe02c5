"""Optimizers that keep state by parameter: torch's own, on DTensors too, and all with their interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.compare.logical import parameter_values
from zckpt.engine.tensors import TensorRead
from zckpt.errors import UnsupportedError, UsageError, about, listed
from zckpt.formats.remainder import BESIDE
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.optim.param_groups import Group, Names, by_tensor, group_names
from zckpt.optim.states import OptimizerState, Snapshot, is_trained, stored_groups
from zckpt.optim.states.beside import Beside, Declared, declared
from zckpt.optim.states.expected import STEP, begins_anew, check_keys, keep_types, makes_state, rehearse
from zckpt.optim.tensors import Share, room_like, share_of
from zckpt.optim.values import as_stored, as_torch, read_numbers
from zckpt.state import Extent, Parameter, ParamGroup, Slot, number_of


class ByParameter(OptimizerState):
    """The state of an optimizer that keeps it by parameter."""

    optimizer: Optimizer
    beside: Beside
    """What is loaded besides state."""

    def __init__(self, optimizer: Optimizer, known: Mapping[torch.Tensor, str]) -> None:
        if not isinstance(getattr(optimizer, "state", None), Mapping):  # torchao's CPUOffloadOptimizer has none
            raise UnsupportedError(
                f"{type(optimizer).__name__} has no `state` by parameter, as optimizers of torch have",
                advice="save the model alone, and the optimizer's state_dict() with torch.save",
            )
        self.optimizer = optimizer
        self._names = group_names(optimizer.param_groups, known)
        self.called = by_tensor(optimizer.param_groups, self._names)
        self.loaded: dict[int, dict[str, Any]] = {}
        """State that is loaded, by the number of its parameter in `_loads`."""

    @property
    def local(self) -> Optimizer:
        """The optimizer that steps this rank's parameters."""
        return self.optimizer

    @property
    def _loads(self) -> Optimizer:
        """The optimizer whose `load_state_dict` gets what is loaded."""
        return self.optimizer

    @cached_property
    def _declared(self) -> Declared:
        return declared(self.local)

    @property
    def holder(self) -> Optimizer:
        """The optimizer that has the state: `local`, or one that it holds."""
        return self._declared.holder

    def is_here(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002  # for those that only have some
        """Tell whether this rank has the state of a parameter."""
        return True

    def names(self) -> Names:
        """Return the names of all parameters."""
        return self._names

    # --- saving

    def groups(self) -> list[ParamGroup]:
        """Return the param groups with the names of all parameters."""
        if not self.keeps_beside:
            self._declared.refuse(f"{type(self.optimizer).__name__} has no place for that")
        return stored_groups(self.optimizer, self._names, self._declared.beside.groups)

    @cached_property
    def _numbers(self) -> set[str]:
        """The keys of which a parameter has one number: of a parameter that is one, its shape does not say which."""
        every = ((key, v) for p, its in self._declared.state.items() if p.dim() for key, v in its.items())
        return {STEP, *(key for key, value in every if isinstance(value, torch.Tensor) and not value.dim())}

    def _shares(
        self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor, found: Snapshot
    ) -> dict[str, Share]:
        """Return what this rank has of a slot, or of what that consists of; note what else is to be known of it."""
        del found  # for those that note something
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            raise UnsupportedError(f"{key} of {name} is a plain tensor, and the parameter is sharded")
        share = share_of(value, f"{key} of {name}")
        return {} if share is None else {key: share}

    def _has(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002  # all have, but of flat ones
        """Tell whether this rank has elements of what has a parameter's state, or nobody has any."""
        return True

    @property
    def keeps_beside(self) -> bool:
        """Whether the optimizer may keep more: its state is not divided among ranks, or made of other things."""
        return type(self) is ByParameter

    def snapshot(self) -> Snapshot:
        """Return what this rank has. All ranks call it together."""
        found = super().snapshot()
        for name, parameter in self.members():
            for key, value in self._declared.state.get(parameter, {}).items():
                elementwise = not (parameter.dim() or key in self._numbers or isinstance(parameter, DTensor))
                if isinstance(value, torch.Tensor) and (value.dim() > 0 or elementwise):
                    its = self._shares(name, parameter, key, value, found)
                    found.shares += [(name, slot, share) for slot, share in its.items()]
                elif self._has(parameter):
                    found.values.setdefault(name, {})[key] = as_stored(value)
        tree = self._declared.tree(self.called)
        found.metadata = {} if tree is None else {BESIDE: tree}
        return found

    # --- loading

    def prepare(self) -> None:
        """Make room for the state."""
        self.without: list[str] = []
        self._find_beside()
        number = 0
        hyperparameters = self.hyperparameters(self.names())
        apart = self.beside.groups or [{} for _ in hyperparameters]
        for group, its, odd in zip(self.optimizer.param_groups, hyperparameters, apart, strict=True):
            first = number
            made = {**group, **its, **odd}
            for parameter in group["params"]:
                if self.is_here(parameter):
                    self._add(number, parameter, made)
                number += 1
            self.settings.append({**made, "params": list(range(first, number))})
        origin = self.source.checkpoint.details.get("origin")
        as_saved = isinstance(origin, Mapping) and origin.get("optimizer") == type(self.local).__name__
        if self.without and self.source.checkpoint.step and not as_saved:
            self.notes.append(begins_anew(self.holder, self.without))

    def _find_beside(self) -> None:
        own, node = self._declared, self.source.metadata.get(BESIDE)
        self.beside = Beside(own.beside.at)
        if node is not None and self.keeps_beside:
            checkpoint = self.source.checkpoint
            there = {key for one in checkpoint.parameters.values() for key in parameter_values(checkpoint, one)}
            try:
                kept = own.kept(node, self.names())
            except UsageError as error:
                self.leave_out(error)
            else:
                if kept.keys and there.isdisjoint(kept.keys):
                    self.notes.append("what the optimizer kept besides its state is left out, for that was stripped")
                else:
                    self.beside = kept
        elif own.beside.rest:
            cls = type(self.local).__name__
            self.notes.append(f"the checkpoint has no {listed([str(key) for key in own.beside.rest])} of {cls}")

    def _add(self, number: int, parameter: torch.Tensor, group: Group) -> None:
        name, holder = self.called[parameter], self.holder
        owner = self.owner(name, tuple(parameter.shape), optional=not is_trained(parameter))
        if owner is None:
            self.notes.append(f"no state of {name}")
            return
        values = self.values(owner) | self.beside.parameters.get(name, {})
        check_keys(holder, group, owner.name, parameter.dim(), values)
        if not values and is_trained(parameter) and makes_state(holder, group, parameter.dim()):
            self.without.append(owner.name)
        if values:
            self.loaded[number] = {key: self._value(key, value, parameter, owner) for key, value in values.items()}

    def values(self, owner: Parameter) -> dict[str, object]:
        """Return what the checkpoint has of a parameter's state."""
        return parameter_values(self.source.checkpoint, owner)

    def _value(self, key: str, value: object, parameter: torch.Tensor, owner: Parameter) -> object:
        if holds_tensors(value):
            raise UnsupportedError(
                f"{key} of {owner.name} is no plain tensor but quantised, say, and cannot be loaded as one",
                advice="dequantize=True takes the floats that it stands for; or load the model alone",
            )
        if not isinstance(value, Slot):
            return as_torch(value)
        dtype = getattr(torch, value.dtype)
        if not isinstance(parameter, DTensor) or value.shape != owner.shape:
            if isinstance(parameter, DTensor) and value.shape:
                raise UnsupportedError(f"{key} of {owner.name} is not one value for each element")
            if value.shape and value.shape == tuple(parameter.shape):
                whole = room_like(parameter, dtype)
            else:
                device = parameter.device if value.shape else "cpu"  # where torch keeps single numbers
                whole = torch.empty(value.shape, dtype=dtype, device=device)
            self.reads.append(TensorRead(value, Extent.whole(value.shape), whole))
            return whole
        local = room_like(parameter.to_local(), dtype)
        share = share_of(parameter, owner.name)
        if share is not None:
            self.reads.append(TensorRead(value, share.extent, local))
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def flat_state(
        self,
        group: Group,
        owners: Mapping[str, Parameter | None],
        parts: Sequence[tuple[int, Extent, int]],
        of: torch.Tensor,
        advice: str | None = None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Return room for the state of a flat tensor with elements of many parameters, and names of those without.

        A slot is zeros where a parameter has none, and as padding, in a type that has the values of all; what is no
        slot is one value for all. `group`: the settings that the optimizer will have; `parts` say which extent of which
        parameter begins at which element. Raises UsageError: it cannot be one's.
        """
        every = list(owners.values())
        held = [{} if one is None else parameter_values(self.source.checkpoint, one) for one in every]
        read_numbers(held, every)
        for name, values in zip(owners, held, strict=True):
            check_keys(self.holder, group, name, of.dim(), values)
        state: dict[str, Any] = {}
        for key in dict.fromkeys(key for values in held for key in values):
            found = [values[key] for values in held if key in values]
            slots = [one for one in found if isinstance(one, Slot)]
            kinds = [one.dtype if isinstance(one, Slot) else number_of(one) for one in found]
            if len(slots) != len(found) and (slots or any(kind != kinds[0] for kind in kinds)):
                raise UsageError(
                    f"{key} is not the same for all parameters of a group or unit, whose flat parameter has only one",
                    found=", ".join(sorted({str(one) for one in kinds})),
                    advice=advice,
                )
            if not slots:
                state[key] = as_torch(found[0])
                continue
            dtype = reduce(torch.promote_types, (getattr(torch, one.dtype) for one in slots))
            state[key] = torch.zeros(of.shape, dtype=dtype, device=of.device)
            for number, extent, start in parts:
                slot, owner = held[number].get(key), every[number]
                if owner is not None and isinstance(slot, Slot):
                    if slot.shape != owner.shape:
                        raise UsageError(f"{key} of {owner.name} is not one value for each element")
                    self.reads.append(TensorRead(slot, extent, state[key].view(-1)[start : start + extent.numel]))
        return state, [name for name, values in zip(owners, held, strict=True) if not values]

    def _by_tensor(self) -> dict[torch.Tensor, dict[str, Any]]:
        every = [parameter for group in self._loads.param_groups for parameter in group["params"]]
        return {every[number]: its for number, its in self.loaded.items()}

    def read(self) -> None:
        """Read state, and find out whether the optimizer takes it."""
        super().read()
        with about(self.source.path):
            rehearse(self.local, self._by_tensor(), self.settings, self.called, self.beside)

    def take(self) -> None:
        """Give the optimizer what was read."""
        self._loads.load_state_dict(self.beside.state_dict(self.loaded, self.settings))
        keep_types(self.holder, self._by_tensor())
