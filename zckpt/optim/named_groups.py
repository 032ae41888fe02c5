"""Param groups of an optimizer and of a checkpoint, which must have the same parameters by name."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zckpt.errors import UsageError
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.wrapped import own_names
from zckpt.state import ParamGroup, Scalar

SHOWN = 4

Names = list[list[str]]
"""The names of each param group's parameters, in the optimizer's order."""


def group_names(groups: Sequence[Mapping[str, Any]], known: Mapping[torch.Tensor, str]) -> Names:
    """Return the names of all parameters, as the bare model has them: the model's, or else the optimizer's own.

    Parameters
    ----------
    groups : sequence of mapping
    known : mapping
        The names of the model's parameters.

    Raises
    ------
    UsageError
        Some have neither.
    """
    own = own_names(groups)
    for group in groups:
        for parameter in group["params"]:
            if parameter not in known and parameter not in own:
                raise UsageError(
                    "a parameter of the optimizer has no name",
                    found=f"shape {tuple(parameter.shape)}",
                    advice="give the model that it belongs to, or make the optimizer of (name, parameter) pairs",
                )
    return [[known[p] if p in known else own[p] for p in group["params"]] for group in groups]


def by_tensor(groups: Sequence[Mapping[str, Any]], names: Names) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of param groups."""
    pairs = zip(groups, names, strict=True)
    return {parameter: name for group, its in pairs for parameter, name in zip(group["params"], its, strict=True)}


def remote_names(groups: Sequence[Mapping[str, Any]]) -> Names:
    """Return the names that a DistributedOptimizer was given: those that its workers know.

    Raises
    ------
    UsageError
        It was given none.
    """
    if not all("param_names" in group for group in groups):
        raise UsageError("the optimizer's parameters have no names", advice="make the optimizer of (name, RRef) pairs")
    return [list(group["param_names"]) for group in groups]


def group_hyperparameters(
    checkpoint: OpenedCheckpoint,
    groups: Sequence[ParamGroup],
    names: Names,
    path: str | os.PathLike[str],
    *,
    optional: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the checkpoint's hyperparameters of each group.

    Parameters
    ----------
    checkpoint : OpenedCheckpoint
    groups : sequence of ParamGroup
        Its groups of this optimizer.
    names : list of list of str
        Of the optimizer's parameters that are trained.
    path : path-like
        For messages.
    optional : collection of str
        Parameters of the optimizer that may be missing on either side, since they have no state.

    Raises
    ------
    UsageError
        The checkpoint has other param groups.
    """
    theirs = [group.parameters for group in groups]
    if len(theirs) != len(names):
        raise UsageError("other param groups than the optimizer's", path=path, expected=len(names), found=len(theirs))
    for index, (ours, its) in enumerate(zip(names, theirs, strict=True)):
        mine = {_owner_name(checkpoint, name) for name in ours}
        only = sorted((mine ^ set(its)) - {_owner_name(checkpoint, name) for name in optional})
        if only:
            raise UsageError(
                f"param group {index} has other parameters than the optimizer's",
                path=path,
                found=", ".join(only[:SHOWN]),
            )
    return [
        {key: value.value if isinstance(value, Scalar) else value for key, value in group.hyperparameters.items()}
        for group in groups
    ]


def _owner_name(checkpoint: OpenedCheckpoint, name: str) -> str:
    return checkpoint.owner(name).name if name in checkpoint.parameters else name
