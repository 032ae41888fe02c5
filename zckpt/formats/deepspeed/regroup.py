"""The param groups of the target: dense ones as they are, those of experts over another number of expert ranks.

DeepSpeed splits experts off each param group that the user makes, in the model's order, names the new group after
its degree, and begins another one where a rank's share would become too large. So the number of groups may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.experts import (
    expert_parallel_size,
    experts_per_rank,
    is_expert,
    local_name,
    spread_experts,
)
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Origin
from zckpt.state import Checkpoint, Parameter, ParamGroup
from zckpt.torchfile import Digests

EXPERT_GROUP_NUMEL = 178_956_971
"""Elements of one rank's experts after which DeepSpeed begins another param group (0.4 to 0.19, `moe/utils.py`)."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A param group of the target.

    Parameters
    ----------
    values : ParamGroup
        Its hyperparameters and single values.
    names : list of list of str
        The parameters of each expert rank in the optimizer's order; of a dense group one list.
    per_rank : dict of str to int
        Experts of each layer on one expert rank, by the name before the expert's number.
    """

    values: ParamGroup
    names: list[list[str]]
    per_rank: dict[str, int]


def units(
    checkpoint: Checkpoint,
    origin: Origin,
    groups: Sequence[ParamGroup],
    parameters: Mapping[str, Parameter],
    options: RecutOptions,
) -> list[Unit]:
    """Return the param groups of one model-parallel rank of the target.

    Raises
    ------
    UsageError
        The experts cannot be spread over that many ranks.
    UnsupportedError
        They are in an order that does not tell how DeepSpeed would have them at another degree.
    """
    found: list[Unit] = []
    degrees = {_kind(origin, index, group)[0] for index, group in enumerate(groups)} - {None}
    if options.expert_parallel_size is not None and len(degrees) > 1:
        raise UnsupportedError(
            "experts spread over different numbers of ranks are not regrouped",
            path=checkpoint.source,
            found=", ".join(map(str, degrees)),
        )
    for (source, _), run in groupby(enumerate(groups), lambda item: _kind(origin, *item)):
        alike = [group for _, group in run]
        if source is None:
            found += [Unit(group, [group.parameters], {}) for group in alike]
            continue
        degree = source if options.expert_parallel_size is None else options.expert_parallel_size
        _check_degree(checkpoint, options, degree)
        found += _expert_units(alike, source, degree, parameters, checkpoint.source)
    return found


def _kind(origin: Origin, index: int, group: ParamGroup) -> tuple[int | None, object]:
    """Return over how many expert ranks a group is spread, None for a dense one, and what its neighbours may share."""
    names = group.parameters
    if not names or not all(is_expert(name) for name in names):
        return None, index
    first = origin.members[0]
    degree = expert_parallel_size(len(origin.members), first.partition_count[index], names)
    return degree, Digests().of((group.hyperparameters, group.state))


def _check_degree(checkpoint: Checkpoint, options: RecutOptions, degree: int) -> None:
    if options.world_size % degree:
        raise UsageError(
            f"experts spread over {degree} ranks cannot be cut for {options.world_size} data-parallel ranks",
            path=checkpoint.source,
            expected="an expert-parallel size that divides the world size",
            found=degree,
            advice="give another --expert-parallel-size",
        )


def _expert_units(
    groups: Sequence[ParamGroup], source: int, degree: int, parameters: Mapping[str, Parameter], path: str
) -> list[Unit]:
    """Return what becomes of groups of experts that follow each other and differ in their parameters only."""
    parts = [_by_rank(group.parameters, source) for group in groups]
    totals = experts_per_rank(parameters)
    per_rank = {layer: total // degree for layer, total in totals.items()}
    if degree == source:
        return [Unit(group, part, per_rank) for group, part in zip(groups, parts, strict=True)]
    joined = [[name for part in parts for name in part[rank]] for rank in range(source)]
    split = [len(one) for one in expert_groups([parameters[name].numel for name in joined[0]])]
    by_size = split == [len(part[0]) for part in parts]
    if len(groups) > 1 and not by_size:
        return [unit for group in groups for unit in _expert_units([group], source, degree, parameters, path)]
    spread = spread_experts(joined, degree, path)
    values = _renamed(groups[0], source, degree)
    numels = [[parameters[name].numel for name in names] for names in spread]
    if any(one != numels[0] for one in numels):
        raise UnsupportedError("experts of different sizes are not regrouped", path=path)
    cut = expert_groups(numels[0]) if by_size else [list(range(len(spread[0])))]
    return [Unit(values, [[names[i] for i in one] for names in spread], per_rank) for one in cut]


def _by_rank(names: Sequence[str], degree: int) -> list[list[str]]:
    count = len(names) // degree
    return [list(names[rank * count : (rank + 1) * count]) for rank in range(degree)]


def _renamed(group: ParamGroup, source: int, degree: int) -> ParamGroup:
    """Return a group under the name that DeepSpeed gives it at its new degree."""
    if group.hyperparameters.get("name") != f"ep_size_{source}":
        return group
    return replace(group, hyperparameters={**group.hyperparameters, "name": f"ep_size_{degree}"})


def expert_groups(numels: Sequence[int]) -> list[list[int]]:
    """Return how DeepSpeed deals one rank's expert parameters to param groups.

    Notes
    -----
    Source: `split_params_into_different_moe_groups_for_optimizer` with its default `max_group_size`.
    """
    found: list[list[int]] = [[]]
    size = 0
    for index, numel in enumerate(numels):
        if size + numel > EXPERT_GROUP_NUMEL:
            found.append([])
            size = 0
        found[-1].append(index)
        size += numel
    return found


def local_parameters(unit: Unit, known: Mapping[str, Parameter]) -> list[list[Parameter]]:
    """Return a group's parameters for each expert rank under the names that the rank's files have for them."""
    if not unit.per_rank:
        return [[known[name] for name in names] for names in unit.names]
    return [
        [replace(known[name], name=local_name(name, rank, unit.per_rank)) for name in names]
        for rank, names in enumerate(unit.names)
    ]
