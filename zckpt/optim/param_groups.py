"""Param groups: what they say of their parameters, and what they say beside that."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Group = dict[str, Any]

OWN_KEYS = ("params", "param_names")
"""What a param group says of its parameters, which each rank's groups have a part of."""


def hyperparameters(group: Mapping[str, Any]) -> Group:
    """Return what a group says beside its parameters."""
    return {key: value for key, value in group.items() if key not in OWN_KEYS}


def plain(group: Mapping[str, Any]) -> Group:
    """Return those hyperparameters that are no tensors; tensors are given by the user, on all ranks."""
    return {key: value for key, value in hyperparameters(group).items() if not isinstance(value, torch.Tensor)}


def sync(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Give groups the hyperparameters of others."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(hyperparameters(theirs))


def copied(value: object) -> object:
    """Return a value that shares nothing with the one given."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
