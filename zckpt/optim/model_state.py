"""A live model's tensors by the names that it has without wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from zckpt.errors import UnsupportedError
from zckpt.state.names import INNER, bare_names, plain_name

T = TypeVar("T")

PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
"""Wrappers that keep the model as `module`, which only their class tells from a model's own child."""


@dataclass(frozen=True, slots=True)
class Bare:
    """A model's own tensors, not copies, by the names of the bare model.

    Parameters
    ----------
    state : dict
        What `state_dict` has.
    parameters : dict of str to Parameter
        Under all of their names.
    """

    state: dict[str, Any]
    parameters: dict[str, torch.nn.Parameter]

    def names(self) -> dict[torch.Tensor, str]:
        """Return the first name of each parameter."""
        found: dict[torch.Tensor, str] = {}
        for name, parameter in self.parameters.items():
            found.setdefault(parameter, name)
        return found


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the bare model in a module: itself, if it is no wrapper."""
    while True:
        inner = next((one for name in sorted(INNER) if (one := model._modules.get(name)) is not None), None)
        if isinstance(model, PARALLEL):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def bare(model: torch.nn.Module) -> Bare:
    """Return a model's tensors by the names that it has without wrappers, around it or within it.

    Raises
    ------
    UnsupportedError
        Parts are in FullyShardedDataParallel: its tensors lie in a flat one, whose memory comes and goes.
    """
    if any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
        raise UnsupportedError(
            "the model is in FullyShardedDataParallel, whose parameters are parts of a flat one",
            advice="use fully_shard, or zckpt.dcp with torch's get_state_dict and set_state_dict",
        )
    inner = unwrapped(model)
    return Bare(
        _renamed(inner.state_dict(keep_vars=True)), _renamed(dict(inner.named_parameters(remove_duplicate=False)))
    )


def _renamed(found: Mapping[str, T]) -> dict[str, T]:
    names = bare_names(found, front=False)
    return {names[key]: value for key, value in found.items()}


def own_names(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, str]:
    """Return the names that an optimizer was given with its parameters, without what wrappers put there."""
    found = {
        parameter: str(name)
        for group in groups
        for parameter, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }
    names = bare_names(found.values())
    return {parameter: names[name] for parameter, name in found.items()}


EXTRA_STATE = "_extra_state"
"""The end of the key under which a module keeps what is no tensor."""


class Stateful(Protocol):
    """A scheduler or grad scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Continue from a state."""


@dataclass(slots=True)
class ModelState:
    """A model's tensors.

    Parameters
    ----------
    tensors : dict of str to Tensor
        By name: parameters and persistent buffers, each under its first name; a DTensor where it is sharded.
    parameters : set of str
        Which of them are parameters.
    tied : dict of str to str
        Further names of parameters, and the first name of each.
    extra : dict of str to object
        What modules keep beside tensors, by key.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_parameters(cls, parameters: dict[str, torch.Tensor]) -> ModelState:
        """Return the tensors of a model of which there are only an optimizer's parameters."""
        return cls(dict(parameters), set(parameters))

    def names(self) -> dict[torch.Tensor, str]:
        """Return the first name of each parameter."""
        return {self.tensors[name]: name for name in self.tensors if name in self.parameters}


def model_state(model: torch.nn.Module | None) -> ModelState:
    """Return a model's tensors, which are the model's own and not copies."""
    found = ModelState()
    if model is None:
        return found
    its = bare(model)
    owners: dict[torch.Tensor, str] = {}
    for name, parameter in its.parameters.items():
        owner = owners.setdefault(parameter, name)
        if owner == name:
            found.tensors[name] = parameter
            found.parameters.add(name)
        else:
            found.tied[name] = owner
    for key, value in its.state.items():
        if key in found.parameters or key in found.tied:
            continue
        if isinstance(value, torch.Tensor) and not _is_extra(key):
            found.tensors[key] = value
        else:
            found.extra[key] = value
    return found


def set_extra(model: torch.nn.Module, key: str, value: object) -> None:
    """Give a module what it keeps beside tensors."""
    for name, module in _modules(unwrapped(model)):
        if key == (f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE):
            module.set_extra_state(value)


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=False):
        yield plain_name(name), module


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE
