"""Param groups: those that all ranks know, and the part of each that a rank's local optimizer has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zckpt.optim.param_groups import Group, copied, hyperparameters
from zckpt.state.partition import greedy_partition


def packed(groups: Sequence[Group]) -> list[Group]:
    """Return groups with numbers for parameters, over all groups; values that could be written to are copied."""
    found = []
    first = 0
    for group in groups:
        made = {key: copied(value) for key, value in group.items() if key != "params"}
        found.append({**made, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return found


def deal(groups: Sequence[Group], world_size: int) -> list[list[Group]]:
    """Return the groups of each rank, as `zckpt.state.partition.greedy_partition` deals parameters."""
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
