"""A live model without its wrappers: which module it is, and what the bare model calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from zckpt.errors import UnsupportedError
from zckpt.state.names import INNER, bare_names

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
