"""The param groups of each rank of the target, and its names for their parameters.

Dense groups stay as they are, those of experts are split again for another number of expert ranks. DeepSpeed splits
experts off each param group that the user makes, in the model's order, names the new group after its degree, and begins
another one where a rank's share would become too large. So the number of groups may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.auto_ep import indivisible
from zckpt.formats.deepspeed.experts import (
    experts_per_rank,
    is_expert,
    layer_of,
    local_name,
    named_degree,
    spread_experts,
)
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import RankState
from zckpt.state import Parameter, ParamGroup
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


def units(state: RankState, options: RecutOptions) -> list[Unit]:
    """Return the param groups of one model-parallel rank of the target.

    Raises
    ------
    UsageError
        The experts cannot be spread over that many ranks.
    UnsupportedError
        They are in an order that does not tell how DeepSpeed would have them at another degree.
    """
    found: list[Unit] = []
    groups = [_Group(group, degree) for group, degree in zip(state.groups, expert_degrees(state), strict=True)]
    bundles = list(_bundles(groups, apart=options.expert_parallel_size is None))
    _refuse_mixture(bundles)
    for bundle in bundles:
        source = bundle[0].degree
        if source is None:
            found.append(Unit(bundle[0].values, [bundle[0].values.parameters], {}))
            continue
        degree = source if options.expert_parallel_size is None else options.expert_parallel_size
        _check_degree(options, degree, state.lanes)
        found += _expert_units(bundle, degree, state.parameters)
    return found


class _Group(NamedTuple):
    """A param group and over how many expert ranks it is spread; None for a dense one."""

    values: ParamGroup
    degree: int | None

    @property
    def kind(self) -> object:
        """Return what groups have in common that the user made as one."""
        return Digests().of((unnamed(self.values), self.values.state))


def expert_degrees(state: RankState) -> list[int | None]:
    """Return over how many expert ranks each group is spread, None for a dense one; of another format, by its name."""
    if state.degrees:
        return state.degrees
    sparse = [bool(g.parameters) and all(is_expert(name) for name in g.parameters) for g in state.groups]
    return [named_degree(g) if one else None for g, one in zip(state.groups, sparse, strict=True)]


def unnamed(group: ParamGroup) -> dict[str, object]:
    """Return a group's hyperparameters without its name, which says its degree."""
    return {key: value for key, value in group.hyperparameters.items() if key != "name"}


def _bundles(groups: Sequence[_Group], *, apart: bool) -> Iterator[list[_Group]]:
    """Yield the groups that may have been one: a dense one, or those of experts that differ in parameters and degree.

    Groups of one degree follow each other. A degree that comes again belongs to another group of the user's.
    """
    bundle: list[_Group] = []
    for group in groups:
        new = not bundle or group.degree is None or bundle[-1].degree is None or group.kind != bundle[-1].kind
        if not new and group.degree != bundle[-1].degree:
            new = apart or group.degree in {one.degree for one in bundle}
        if new and bundle:
            yield bundle
            bundle = []
        bundle.append(group)
    if bundle:
        yield bundle


def _refuse_mixture(bundles: Sequence[Sequence[_Group]]) -> None:
    """Raise where several groups of the user's are alike, and which experts belong to which of them is not known."""
    degrees: dict[object, frozenset[int | None]] = {}
    for bundle in bundles:
        own = frozenset(group.degree for group in bundle)
        known = own if None in own else degrees.setdefault(bundle[0].kind, own)
        if own != known and max(len(own), len(known)) > 1:
            raise _refused("param groups with equal hyperparameters and experts over different numbers of "
                           "ranks: which of them make one group is not known")  # fmt: skip


def _check_degree(options: RecutOptions, degree: int, lanes: int) -> None:
    if options.world_size * lanes % degree:
        over = f", {options.world_size * lanes} with the tensor-parallel ones," if lanes > 1 else ""
        raise UsageError(
            f"experts spread over {degree} ranks cannot be cut for {options.world_size} data-parallel ranks{over}",
            expected="an expert-parallel size that divides the world size",
            found=degree,
            advice="give another --expert-parallel-size",
        )


def _expert_units(bundle: Sequence[_Group], degree: int, parameters: Mapping[str, Parameter]) -> list[Unit]:
    """Return what becomes of groups of experts that differ in their parameters and degrees only."""
    totals = experts_per_rank(parameters)
    per_rank = {layer: total // degree for layer, total in totals.items()}
    if all(group.degree == degree for group in bundle):
        return [Unit(group.values, _by_rank(group.values.parameters, degree), per_rank) for group in bundle]
    spread: list[list[str]] = [[] for _ in range(degree)]
    by_size = True
    for _, alike in groupby(bundle, lambda group: group.degree):
        same = list(alike)
        joined, fits = _joined(same, parameters)
        by_size = by_size and fits
        for rank, names in enumerate(spread_experts(joined, degree)):
            spread[rank] += names
    if not by_size and len(bundle) > 1:
        if len({group.degree for group in bundle}) > 1:
            raise _refused("groups of experts that are not as DeepSpeed makes them: what it would make is not known")
        return [unit for group in bundle for unit in _expert_units([group], degree, parameters)]
    order = {layer: number for number, layer in enumerate(totals)}
    spread = [sorted(names, key=lambda name: order[layer_of(name)]) for names in spread]
    numels = [[parameters[name].numel for name in names] for names in spread]
    if any(one != numels[0] for one in numels):
        raise _refused("experts of different sizes, while DeepSpeed's ranks all have as many elements")
    cut = expert_groups(numels[0], indivisible(spread[0])) if by_size else [list(range(len(spread[0])))]
    values = _renamed(bundle[0], degree)
    return [Unit(values, [[names[i] for i in one] for names in spread], per_rank) for one in cut]


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(what, expected="--expert-parallel-size left out")


def _joined(groups: Sequence[_Group], parameters: Mapping[str, Parameter]) -> tuple[list[list[str]], bool]:
    """Return each expert rank's parameters of groups of one degree, and whether DeepSpeed would split them so."""
    source = groups[0].degree or 1
    members = [_by_rank(group.values.parameters, source) for group in groups]
    joined = [[name for names in members for name in names[rank]] for rank in range(source)]
    numels = [parameters[name].numel for name in joined[0]]
    split = [len(one) for one in expert_groups(numels, indivisible(joined[0]))]
    return joined, split == [len(names[0]) for names in members]


class JoinedGroups(NamedTuple):
    """Groups and their degrees, those of experts joined that DeepSpeed had split by size, and whether all were so."""

    groups: list[ParamGroup]
    degrees: list[int | None]
    by_size: bool


def joined_experts(state: RankState) -> JoinedGroups:
    """Return a stage's groups with those of experts as they were before DeepSpeed split them by size.

    Raises
    ------
    UnsupportedError
        They are too large for one group, and not split as DeepSpeed does it.
    """
    found = JoinedGroups([], [], by_size=True)
    by_size = True
    groups = [_Group(group, degree) for group, degree in zip(state.groups, expert_degrees(state), strict=True)]
    for bundle in _bundles(groups, apart=True):
        degree = bundle[0].degree
        names, fits = _joined(bundle, state.parameters) if degree is not None else ([], True)
        by_size = by_size and fits
        if fits and len(bundle) > 1:
            values = bundle[0].values
            found.groups.append(replace(values, parameters=[name for one in names for name in one]))
            found.degrees.append(degree)
            continue
        if len(bundle) > 1 and sum(state.parameters[name].numel for name in names[0]) > EXPERT_GROUP_NUMEL:
            raise UnsupportedError(
                "groups of experts that are not as DeepSpeed splits them by size: what it would make of other stages "
                "is not known",
            )
        found.groups.extend(group.values for group in bundle)
        found.degrees.extend(group.degree for group in bundle)
    return found._replace(by_size=by_size)


def split_experts(names: Sequence[str], degree: int, parameters: Mapping[str, Parameter]) -> list[list[str]]:
    """Return the groups that DeepSpeed makes of a stage's experts, which are given expert rank by expert rank."""
    ranks = _by_rank(names, degree)
    cuts = expert_groups([parameters[name].numel for name in ranks[0]], indivisible(ranks[0]))
    return [[rank[i] for rank in ranks for i in one] for one in cuts]


def _by_rank(names: Sequence[str], degree: int) -> list[list[str]]:
    count = len(names) // degree
    return [list(names[rank * count : (rank + 1) * count]) for rank in range(degree)]


def _renamed(group: _Group, degree: int) -> ParamGroup:
    """Return a group under the name that DeepSpeed gives it at its new degree."""
    if group.values.hyperparameters.get("name") != f"ep_size_{group.degree}":
        return group.values
    return replace(group.values, hyperparameters={**group.values.hyperparameters, "name": f"ep_size_{degree}"})


def expert_groups(numels: Sequence[int], units: Sequence[str] = ()) -> list[list[int]]:
    """Return how DeepSpeed assigns one rank's expert parameters to param groups.

    Parameters
    ----------
    numels : sequence of int, elements
    units : sequence of str
        What is assigned as one: parameters that follow each other and have the same; by default each.

    Notes
    -----
    Source: `split_params_into_different_moe_groups_for_optimizer` with its default `max_group_size`.
    """
    found: list[list[int]] = [[]]
    size = 0
    for _, unit in groupby(range(len(numels)), lambda index: units[index] if units else index):
        indices = list(unit)
        numel = sum(numels[index] for index in indices)
        if size + numel > EXPERT_GROUP_NUMEL:
            found.append([])
            size = 0
        found[-1] += indices
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
