"""Optimizers that keep state by parameter: torch's own, on DTensors too, and all with their interface."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.compare.logical import parameter_values
from zckpt.engine.tensors import TensorRead
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.remainder import BESIDE
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.optim.param_groups import Group, Names, by_tensor, group_names
from zckpt.optim.states import OptimizerState, Restoring, Snapshot, is_trained, stored_groups
from zckpt.optim.states.beside import Beside, Declared, declared
from zckpt.optim.states.expected import STEP, begins_anew, check_keys, keep_types, makes_state, rehearse
from zckpt.optim.states.values import as_stored, as_torch
from zckpt.optim.tensors import Share, room_like, share_of
from zckpt.state import Extent, Parameter, ParamGroup, Slot


class ByParameterRestoring(Restoring):
    """A checkpoint's state on its way into an optimizer that keeps it by parameter."""

    live: ByParameter

    def prepare(self) -> None:
        """Make room for the state."""
        self.state: dict[int, dict[str, Any]] = {}
        self.loaded: Optimizer = self.optimizer
        """Whose `load_state_dict` gets it, by number of its parameters."""

        self.without: list[str] = []
        self.beside = Beside()
        self._find_beside()
        hyperparameters = self.hyperparameters(self.live.names())
        number = 0
        apart = self.beside.groups or [{} for _ in hyperparameters]
        for group, its, odd in zip(self.optimizer.param_groups, hyperparameters, apart, strict=True):
            first = number
            made = {**group, **its, **odd}
            for parameter in group["params"]:
                if self.live.is_here(parameter):
                    self._add(number, parameter, made)
                number += 1
            self.groups.append({**made, "params": list(range(first, number))})
        origin = self.source.checkpoint.details.get("origin")
        as_saved = isinstance(origin, Mapping) and origin.get("optimizer") == type(self.live.local).__name__
        if self.without and self.source.checkpoint.step and not as_saved:
            self.notes.append(begins_anew(self.holder, self.without))

    def _find_beside(self) -> None:
        own, node = declared(self.live.local), self.source.metadata.get(BESIDE)
        self.holder, self.beside.at = own.holder, own.beside.at
        if node is not None and self.live.keeps_beside:
            checkpoint = self.source.checkpoint
            there = {key for one in checkpoint.parameters.values() for key in parameter_values(checkpoint, one)}
            try:
                kept = own.kept(node, self.live.names(), self.source.path)
            except UsageError as error:
                self.leave_out(error)
            else:
                if kept.keys and there.isdisjoint(kept.keys):
                    self.notes.append("what the optimizer kept besides its state is left out, for that was stripped")
                else:
                    self.beside = kept
        elif own.beside.rest:
            cls = type(self.live.local).__name__
            self.notes.append(f"the checkpoint has no {listed([str(key) for key in own.beside.rest])} of {cls}")

    def _add(self, number: int, parameter: torch.Tensor, group: Group) -> None:
        owner = self.owner(parameter)
        if owner is None:
            self.notes.append(f"no state of {self.names[parameter]}")
            return
        values = self.values(owner) | self.beside.parameters.get(self.names[parameter], {})
        check_keys(self.holder, group, owner.name, parameter.dim(), values, path=self.source.path)
        if not values and is_trained(parameter) and makes_state(self.holder, group, parameter.dim()):
            self.without.append(owner.name)
        if values:
            self.state[number] = {key: self._value(key, value, parameter, owner) for key, value in values.items()}

    def values(self, owner: Parameter) -> dict[str, object]:
        """Return what the checkpoint has of a parameter's state."""
        return parameter_values(self.source.checkpoint, owner)

    def _value(self, key: str, value: object, parameter: torch.Tensor, owner: Parameter) -> object:
        if holds_tensors(value):
            raise UnsupportedError(
                f"{key} of {owner.name} is no plain tensor but quantised, say, and cannot be loaded as one",
                path=self.source.path,
                advice="dequantize=True takes the floats that it stands for; or load the model alone",
            )
        if not isinstance(value, Slot):
            return as_torch(value)
        dtype = getattr(torch, value.dtype)
        if not isinstance(parameter, DTensor) or value.shape != owner.shape:
            if isinstance(parameter, DTensor) and value.shape:
                raise UnsupportedError(
                    f"{key} of {owner.name} is not one value for each element", path=self.source.path
                )
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

    def _by_tensor(self) -> dict[torch.Tensor, dict[str, Any]]:
        every = [parameter for group in self.loaded.param_groups for parameter in group["params"]]
        return {every[number]: its for number, its in self.state.items()}

    def read(self) -> None:
        """Read state, and find out whether the optimizer takes it."""
        super().read()
        rehearse(self.live.local, self._by_tensor(), self.groups, self.names, self.source.path, self.beside)

    def take(self) -> None:
        """Give the optimizer what was read."""
        self.loaded.load_state_dict(self.beside.state_dict(self.state, self.groups))
        keep_types(self.holder, self._by_tensor())


class ByParameter(OptimizerState):
    """The state of an optimizer that keeps it by parameter."""

    optimizer: Optimizer
    restoring = ByParameterRestoring

    def __init__(self, optimizer: Optimizer, known: Mapping[torch.Tensor, str]) -> None:
        if not isinstance(getattr(optimizer, "state", None), Mapping):  # torchao's CPUOffloadOptimizer has none
            raise UnsupportedError(
                f"{type(optimizer).__name__} has no `state` by parameter, as optimizers of torch have",
                advice="save the model alone, and the optimizer's state_dict() with torch.save",
            )
        self.optimizer = optimizer
        self._names = group_names(optimizer.param_groups, known)
        self.called = by_tensor(optimizer.param_groups, self._names)

    @property
    def local(self) -> Optimizer:
        """The optimizer that steps this rank's parameters."""
        return self.optimizer

    def _state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """Return the state that this rank has."""
        return self._declared.state

    @cached_property
    def _declared(self) -> Declared:
        return declared(self.local)

    def is_here(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002  # for those that only have some
        """Tell whether this rank has the state of a parameter."""
        return True

    def names(self) -> Names:
        """Return the names of all parameters."""
        return self._names

    def groups(self) -> list[ParamGroup]:
        """Return the param groups with the names of all parameters."""
        if not self.keeps_beside:
            self._declared.refuse(f"{type(self.optimizer).__name__} has no place for that")
        return stored_groups(self.optimizer, self._names, self._declared.beside.groups)

    @cached_property
    def _numbers(self) -> set[str]:
        """The keys of which a parameter has one number: of a parameter that is one, its shape does not say which."""
        every = ((key, v) for p, its in self._state().items() if p.dim() for key, v in its.items())
        return {STEP, *(key for key, value in every if isinstance(value, torch.Tensor) and not value.dim())}

    def _is_slot(self, parameter: torch.Tensor, key: str, value: object) -> bool:
        elementwise = not (parameter.dim() or key in self._numbers or isinstance(parameter, DTensor))
        return isinstance(value, torch.Tensor) and (value.dim() > 0 or elementwise)

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
        found, every = super().snapshot(), self._state()
        for name, parameter in self.members():
            for key, value in every.get(parameter, {}).items():
                if self._is_slot(parameter, key, value):
                    its = self._shares(name, parameter, key, value, found)
                    found.shares += [(name, slot, share) for slot, share in its.items()]
                elif self._has(parameter):
                    found.values.setdefault(name, {})[key] = as_stored(value)
        tree = self._declared.tree(self.called)
        found.metadata = {} if tree is None else {BESIDE: tree}
        return found
