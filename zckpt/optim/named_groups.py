"""Param groups of an optimizer and of a checkpoint, which must have the same parameters by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zckpt.errors import UsageError
from zckpt.opened import OpenedCheckpoint
from zckpt.state import Scalar

SHOWN = 4

Names = list[list[str]]
"""The names of each param group's parameters, in the optimizer's order."""


def group_names(groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None) -> Names:
    """Return the names of all parameters: the optimizer's own, or the model's. Raises UsageError if there are none."""
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    if model is None:
        raise UsageError(
            "the optimizer's parameters have no names",
            advice="give the model, or make the optimizer of (name, parameter) pairs",
        )
    known = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    strange = sum(parameter not in known for group in groups for parameter in group["params"])
    if strange:
        raise UsageError(f"{strange} parameters of the optimizer are not the model's")
    return [[known[parameter] for parameter in group["params"]] for group in groups]


def group_hyperparameters(
    checkpoint: OpenedCheckpoint, names: Names, path: str | os.PathLike[str]
) -> list[dict[str, Any]]:
    """Return the checkpoint's hyperparameters of each group. Raises UsageError where its groups are others."""
    theirs = [group.parameters for group in checkpoint.param_groups]
    if len(theirs) != len(names):
        raise UsageError("other param groups than the optimizer's", path=path, expected=len(names), found=len(theirs))
    for index, (ours, its) in enumerate(zip(names, theirs, strict=True)):
        only = sorted({checkpoint.owner(n).name if n in checkpoint.parameters else n for n in ours} ^ set(its))
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
