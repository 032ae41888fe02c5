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
from zckpt.formats.deepspeed.auto_ep import AutoLayer, local
from zckpt.formats.deepspeed.experts import (
    expert_degrees,
    experts_per_rank,
    layer_of,
    local_name,
    mixed,
    spread_experts,
)
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import RankState
from zckpt.state import Parameter, ParamGroup
from zckpt.torchfile import Digests

EXPERT_GROUP_NUMEL = 178_956_971
"""Elements of one rank's experts after which DeepSpeed begins another param group (0.4 to 0.19, `moe/utils.py`)."""


class Unit(NamedTuple):
    """A param group of the target: its number, its values, and the parameters of each expert rank; of a dense one once.

    Under ZeRO-3 the two parts of a group that has AutoEP's experts, and others, have one number.
    """

    number: int
    values: ParamGroup
    experts: list[list[Parameter]]
    is_spread: bool


@dataclass(frozen=True, slots=True)
class _Experts:
    """What the two kinds of experts differ in: DeepSpeed's are parameters of their own, AutoEP's rows of one."""

    parameters: Mapping[str, Parameter]
    auto: Mapping[str, AutoLayer]

    def by_rank(self, names: Sequence[str], degree: int) -> list[list[str]]:
        """Return the names that each expert rank has of a group."""
        return [list(names)] * degree if names[0] in self.auto else _by_rank(names, degree)

    def spread(self, ranks: Sequence[Sequence[str]], degree: int) -> list[list[str]]:
        """Return the names for each of other ranks."""
        return self.by_rank(ranks[0], degree) if ranks[0][0] in self.auto else spread_experts(ranks, degree)

    def numels(self, names: Sequence[str], degree: int) -> list[int]:
        """Return how many elements one rank has of each."""
        return [self.parameters[name].numel // (degree if name in self.auto else 1) for name in names]

    def local(self, ranks: Sequence[Sequence[str]]) -> list[list[Parameter]]:
        """Return the parameters of each rank under the names that its files have for them."""
        degree = len(ranks)
        per_rank = {layer: total // degree for layer, total in experts_per_rank(self.parameters).items()}
        return [
            [
                local(self.parameters[name], self.auto[name], degree, rank)
                if name in self.auto
                else replace(self.parameters[name], name=local_name(name, rank, per_rank))
                for name in names
            ]
            for rank, names in enumerate(ranks)
        ]


def units(state: RankState, options: RecutOptions, stage: int, auto: Mapping[str, AutoLayer]) -> list[Unit]:
    """Return the param groups of one model-parallel rank of the target.

    Parameters
    ----------
    stage : {1, 2, 3}
    auto : mapping of str to AutoLayer
        By the names of AutoEP's tensors.

    Raises
    ------
    UsageError
        The experts cannot be spread over that many ranks.
    UnsupportedError
        They are in an order that does not tell how DeepSpeed would have them at another degree.
    """
    found: list[Unit] = []
    experts = _Experts(state.parameters, auto)
    groups = [
        one
        for number, (group, degree) in enumerate(zip(state.groups, expert_degrees(state), strict=True))
        for one in _kinds(group, degree, number, stage, auto)
    ]
    bundles = list(_bundles(groups, apart=options.expert_parallel_size is None))
    _refuse_mixture(bundles)
    for bundle in bundles:
        first, source = bundle[0], bundle[0].degree
        number = first.number if stage == 3 else len(found)
        if source is None:
            names = first.values.parameters
            found.append(Unit(number, first.values, [[state.parameters[name] for name in names]], is_spread=False))
            continue
        degree = source if options.expert_parallel_size is None else options.expert_parallel_size
        _check_degree(options, degree, state.lanes)
        if stage == 3 and degree != source:
            _check_size(experts.numels(first.values.parameters, min(degree, source)))
        for values, ranks in _spread(bundle, degree, experts):
            found.append(Unit(number, values, experts.local(ranks), is_spread=True))
            number += 1
    return found


class _Group(NamedTuple):
    """A param group, over how many expert ranks it is spread, None for a dense one, and its number in the source."""

    values: ParamGroup
    degree: int | None
    number: int = 0

    @property
    def kind(self) -> object:
        """Return what groups have in common that the user made as one."""
        named = {key: value for key, value in self.values.hyperparameters.items() if key != "name"}  # after its degree
        return Digests().of((named, self.values.state))


def _kinds(
    group: ParamGroup, degree: int | None, number: int, stage: int, auto: Mapping[str, AutoLayer]
) -> list[_Group]:
    """Return a group; of one with AutoEP's experts these and what else it has, in the order of their first ones."""
    kinds: dict[int | None, list[str]] = {}
    for name in group.parameters:
        kinds.setdefault(auto[name].degree if name in auto else degree, []).append(name)
    if len(kinds) < 2:
        return [_Group(group, next(iter(kinds), degree), number)]
    if stage != 3:
        raise mixed(*([name for name in group.parameters if (name in auto) == sparse] for sparse in (False, True)))
    return [_Group(replace(group, parameters=names), its, number) for its, names in kinds.items()]


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


def _check_size(numels: Sequence[int]) -> None:
    """Raise where a rank's experts are so large that they may make several groups: with zero.Init they do not."""
    if sum(numels) > EXPERT_GROUP_NUMEL:
        raise UnsupportedError(
            "so large a param group of experts may be several at another expert-parallel size: it depends on how the "
            "model was made",
            expected=f"at most {EXPERT_GROUP_NUMEL} elements of one rank, or --expert-parallel-size left out",
            found=sum(numels),
            advice="`zckpt convert --to dcp` or zckpt keeps them whole",
        )


def _check_degree(options: RecutOptions, degree: int, lanes: int) -> None:
    if options.world_size * lanes % degree:
        over = f", {options.world_size * lanes} with the tensor-parallel ones," if lanes > 1 else ""
        raise UsageError(
            f"experts spread over {degree} ranks cannot be cut for {options.world_size} data-parallel ranks{over}",
            expected="an expert-parallel size that divides the world size",
            found=degree,
            advice="give another --expert-parallel-size",
        )


def _spread(bundle: Sequence[_Group], degree: int, experts: _Experts) -> Iterator[tuple[ParamGroup, list[list[str]]]]:
    """Yield what becomes of groups of experts that differ in their parameters and degrees only, by rank."""
    if all(group.degree == degree for group in bundle):
        yield from ((group.values, experts.by_rank(group.values.parameters, degree)) for group in bundle)
        return
    spread: list[list[str]] = [[] for _ in range(degree)]
    by_size = True
    for _, alike in groupby(bundle, lambda group: group.degree):
        joined, fits = _joined(list(alike), experts)
        by_size = by_size and fits
        for rank, names in enumerate(experts.spread(joined, degree)):
            spread[rank] += names
    if not by_size and len(bundle) > 1:
        if len({group.degree for group in bundle}) > 1:
            raise _refused("groups of experts that are not as DeepSpeed makes them: what it would make is not known")
        for group in bundle:
            yield from _spread([group], degree, experts)
        return
    order: dict[str, int] = {}
    for number, name in enumerate(experts.parameters):
        order.setdefault(layer_of(name) or name, number)
    spread = [sorted(names, key=lambda name: order[layer_of(name) or name]) for names in spread]
    numels = [experts.numels(names, degree) for names in spread]
    if any(one != numels[0] for one in numels):
        raise _refused("experts of different sizes, while DeepSpeed's ranks all have as many elements")
    values = bundle[0].values
    if values.hyperparameters.get("name") == f"ep_size_{bundle[0].degree}":
        values = replace(values, hyperparameters={**values.hyperparameters, "name": f"ep_size_{degree}"})
    for one in expert_groups(numels[0]) if by_size else [list(range(len(spread[0])))]:
        yield values, [[names[i] for i in one] for names in spread]


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(what, expected="--expert-parallel-size left out")


def _joined(groups: Sequence[_Group], experts: _Experts) -> tuple[list[list[str]], bool]:
    """Return each expert rank's parameters of groups of one degree, and whether DeepSpeed would split them so."""
    source = groups[0].degree or 1
    members = [experts.by_rank(group.values.parameters, source) for group in groups]
    joined = [[name for names in members for name in names[rank]] for rank in range(source)]
    split = [len(one) for one in expert_groups(experts.numels(joined[0], source))]
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
        names, fits = _joined(bundle, _Experts(state.parameters, {})) if degree is not None else ([], True)
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
    cuts = expert_groups([parameters[name].numel for name in ranks[0]])
    return [[rank[i] for rank in ranks for i in one] for one in cuts]


def _by_rank(names: Sequence[str], degree: int) -> list[list[str]]:
    count = len(names) // degree
    return [list(names[rank * count : (rank + 1) * count]) for rank in range(degree)]


def expert_groups(numels: Sequence[int]) -> list[list[int]]:
    """Return how DeepSpeed assigns one rank's expert parameters, of so many elements, to param groups.

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
