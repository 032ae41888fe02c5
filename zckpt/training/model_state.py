"""The tensors of a model by the names that it has without wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zckpt.optim.wrapped import bare, unwrapped
from zckpt.state.names import plain_name

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
