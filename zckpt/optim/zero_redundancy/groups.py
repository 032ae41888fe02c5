"""Param groups: those that all ranks know, and the part of each that a rank's local optimizer has."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zckpt.partition import greedy_partition

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


def packed(groups: Sequence[Group]) -> list[Group]:
    """Return groups with numbers for parameters, over all groups; values that could be written to are copied."""
    found = []
    first = 0
    for group in groups:
        made = {key: copied(value) for key, value in group.items() if key != "params"}
        found.append({**made, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return found


def copied(value: object) -> object:
    """Return a value that shares nothing with the one given."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def deal(groups: Sequence[Group], world_size: int) -> list[list[Group]]:
    """Return the groups of each rank, as `zckpt.partition.greedy_partition` deals parameters."""
    numels = [[p.numel() for p in group["params"]] for group in groups]
    return [
        [_part(group, chosen) for group, chosen in zip(groups, indices, strict=True)]
        for indices in greedy_partition(numels, world_size)
    ]


def deal_to(groups: Sequence[Group], shares: Sequence[Sequence[torch.Tensor]]) -> list[list[Group]]:
    """Return the groups of each rank where the ranks' shares are given; parameters in none of them are rank 0's."""
    owner = {parameter: rank for rank, share in enumerate(shares) for parameter in share}
    order = {parameter: position for share in shares for position, parameter in enumerate(share)}
    found: list[list[Group]] = [[] for _ in shares]
    for group in groups:
        members = group["params"]
        indices = sorted(range(len(members)), key=lambda i, members=members: order.get(members[i], len(order)))  # type: ignore[misc]
        for rank, made in enumerate(found):
            made.append(_part(group, [i for i in indices if owner.get(members[i], 0) == rank]))
    return found


def _part(group: Group, chosen: Sequence[int]) -> Group:
    made = {**hyperparameters(group), "params": [group["params"][index] for index in chosen]}
    if "param_names" in group:
        made["param_names"] = [group["param_names"][index] for index in chosen]
    return made
