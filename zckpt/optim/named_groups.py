"""Param groups of an optimizer and of a checkpoint, which must have the same parameters by name."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zckpt.errors import UsageError
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.wrapped import bare, own_names
from zckpt.state import Scalar

SHOWN = 4

Names = list[list[str]]
"""The names of each param group's parameters, in the optimizer's order."""


def group_names(groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None) -> Names:
    """Return the names of all parameters, as the bare model has them: the model's, or else the optimizer's own.

    Raises
    ------
    UsageError
        Some have neither.
    """
    known = own_names(groups) | ({} if model is None else bare(model).names())
    strange = sum(parameter not in known for group in groups for parameter in group["params"])
    if strange and model is None:
        raise UsageError(
            "the optimizer's parameters have no names",
            advice="give the model, or make the optimizer of (name, parameter) pairs",
        )
    if strange:
        raise UsageError(f"{strange} parameters of the optimizer are not the model's")
    return [[known[parameter] for parameter in group["params"]] for group in groups]


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
    checkpoint: OpenedCheckpoint, names: Names, path: str | os.PathLike[str], *, optional: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the checkpoint's hyperparameters of each group.

    Parameters
    ----------
    checkpoint : OpenedCheckpoint
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
    theirs = [group.parameters for group in checkpoint.param_groups]
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
        for group in checkpoint.param_groups
    ]


def _owner_name(checkpoint: OpenedCheckpoint, name: str) -> str:
    return checkpoint.owner(name).name if name in checkpoint.parameters else name
