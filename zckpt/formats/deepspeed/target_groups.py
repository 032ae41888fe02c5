"""The param groups of each rank of the target, and its names for their parameters.

Dense groups stay as they are, those of experts are split again for another number of expert ranks. DeepSpeed splits
experts off each param group that the user makes, in the model's order, names the new group after its degree, and begins
another one where a rank's share would become too large. So the number of groups may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.axes.auto_ep import local
from zckpt.formats.deepspeed.axes.expert_ranks import Placement, is_data_first
from zckpt.formats.deepspeed.axes.experts import (
    by_rank,
    expert_degrees,
    experts_per_rank,
    global_name,
    layer_of,
    mixed,
    spread_experts,
)
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.rare.zenflow import transposed
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.state import ParamGroup, by_key, differ, without
from zckpt.state.dtypes import itemsize
from zckpt.state.partition import PARAMETER_ALIGNMENT_NBYTES, alignment_padding, round_robin_order
from zckpt.torchfile import Digests

EXPERT_GROUP_NUMEL = 178_956_971
"""Elements of one rank's experts after which DeepSpeed begins another param group (0.4 to 0.19, `moe/utils.py`)."""


class _Group(NamedTuple):
    """A param group of the source: over how many expert ranks it is spread, None for a dense one, and its number.

    `ranks`: the names of each expert rank; of a dense one once.
    """

    values: ParamGroup
    degree: int | None
    number: int
    ranks: list[list[str]]

    @property
    def kind(self) -> object:
        """Return what groups have in common that the user made as one."""
        named = without(self.values.hyperparameters, "name")  # after its degree
        return Digests().of((named, self.values.state))


def target_groups(target: Target, state: Rank, options: RecutOptions) -> list[TargetGroup]:
    """Return the param groups of one model-parallel rank of the target, each in the order in which it is stored.

    Errors are those of `dealt`.
    """
    found: list[TargetGroup] = []
    per_layer = experts_per_rank(state.parameters)
    data_first = is_data_first(target.origin.model)
    for number, values, ranks, degree in dealt(state, options, target.stage):
        experts = [[state.parameters[name] for name in names] for names in ranks]
        lanes = 1 if degree is None else state.lanes
        if degree is not None:
            per_rank = {layer: total // degree for layer, total in per_layer.items()}
            experts = [
                [
                    local(one, state.auto[one.name], degree, rank)
                    if one.name in state.auto
                    else replace(one, name=global_name(one.name, -rank, per_rank))
                    for one in own
                ]
                for rank, own in enumerate(experts)
            ]
        placement = Placement(target.world_size * lanes, data_first)
        if target.round_robin and target.stage and not target.bf16_optimizer:  # which reorders and pads nothing
            order = round_robin_order(len(experts[0]), placement.ranks // len(experts))
            experts = [[own[i] for i in order] for own in experts]
        if target.transposed:
            experts = [[transposed(p) for p in own] for own in experts]
        pads = [0] * len(experts[0])
        if target.alignment and experts[0] and not target.bf16_optimizer:
            multiple = max(PARAMETER_ALIGNMENT_NBYTES // itemsize(experts[0][0].dtype), 1)
            pads = alignment_padding([p.numel for p in experts[0]], multiple)
        lane = state.mp_rank % target.tp if lanes > 1 else 0
        found.append(TargetGroup(number, values, experts, pads, placement, lane, lanes, target.sub_group_size))
    return found


def dealt(
    state: Rank, options: RecutOptions, stage: int
) -> Iterator[tuple[int, ParamGroup, list[list[str]], int | None]]:
    """Yield each group's number, values and names by expert rank, and over how many of these it is spread, if at all.

    Under ZeRO-3 the two parts of a group that has AutoEP's experts, and others, have one number.

    Raises UsageError: the experts cannot be spread over that many ranks; UnsupportedError: they are in an order that
    does not tell how DeepSpeed would have them at another degree.
    """
    bundles = list(_bundles(_groups(state, stage), apart=options.expert_parallel_size is None))
    degrees: dict[object, frozenset[int | None]] = {}
    for bundle in bundles:
        own = frozenset(group.degree for group in bundle)
        known = own if None in own else degrees.setdefault(bundle[0].kind, own)
        if own != known and max(len(own), len(known)) > 1:
            raise _refused("param groups have equal hyperparameters, but experts over different numbers of ranks: "
                "it is unknown which of them form one group")  # fmt: skip
    count = 0
    for bundle in bundles:
        source, number = bundle[0].degree, bundle[0].number if stage == 3 else count
        degree = source if source is None else options.expert_parallel_size or source
        if source and degree:
            if options.world_size * state.lanes % degree:
                over = f", {options.world_size * state.lanes} with the tensor-parallel ones,"
                raise UsageError(
                    f"experts spread over {degree} ranks cannot be cut for {options.world_size} data-parallel ranks"
                    f"{over if state.lanes > 1 else ''}",
                    expected="an expert-parallel size that divides the world size",
                    found=degree,
                    advice="choose another --expert-parallel-size",
                )
            numels = _numels(state, bundle[0].values.parameters, min(degree, source))
            if stage == 3 and degree != source and sum(numels) > EXPERT_GROUP_NUMEL:  # with zero.Init it stays one
                raise UnsupportedError(
                    "at another expert-parallel size, a param group of experts this large may become several, "
                    "depending on how the model was created",
                    expected=f"at most {EXPERT_GROUP_NUMEL} elements of one rank, or no --expert-parallel-size",
                    found=sum(numels),
                    advice="`zckpt convert --to dcp` or zckpt keeps them whole",
                )
        for values, ranks in _spread(bundle, degree, state):
            yield number, values, ranks, degree
            number += 1
            count += 1


def _numels(state: Rank, names: Sequence[str], degree: int) -> list[int]:
    """Return how many elements one of so many ranks has of each parameter."""
    return [state.parameters[name].numel // (degree if name in state.auto else 1) for name in names]


def _groups(state: Rank, stage: int) -> Iterator[_Group]:
    """Yield groups; of one with AutoEP's experts these and what else it has, in the order of their first ones."""
    for number, (group, degree) in enumerate(zip(state.param_groups, expert_degrees(state), strict=True)):
        kinds = by_key((state.auto[name].degree if name in state.auto else degree, name) for name in group.parameters)
        if len(kinds) > 1 and stage != 3:
            raise mixed(
                *([name for name in group.parameters if (name in state.auto) == sparse] for sparse in (False, True))
            )
        for its, names in (kinds or {degree: []}).items():
            same = its is None or names[0] in state.auto  # AutoEP's ranks have rows of the same tensors
            ranks = [names] * (its or 1) if same else by_rank(names, its or 1)
            yield _Group(replace(group, parameters=names), its, number, ranks)


def _bundles(groups: Iterable[_Group], *, apart: bool) -> Iterator[list[_Group]]:
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


def _spread(bundle: Sequence[_Group], degree: int | None, state: Rank) -> Iterator[tuple[ParamGroup, list[list[str]]]]:
    """Yield what becomes of groups of experts that differ in their parameters and degrees only, by rank."""
    if degree is None or all(group.degree == degree for group in bundle):
        yield from ((group.values, group.ranks) for group in bundle)
        return
    spread: list[list[str]] = [[] for _ in range(degree)]
    by_size = True
    for _, alike in groupby(bundle, lambda group: group.degree):
        joined, fits = _joined(list(alike), state)
        by_size = by_size and fits
        same = joined[0][0] in state.auto
        for rank, names in enumerate(joined[:1] * degree if same else spread_experts(joined, degree)):
            spread[rank] += names
    if not by_size and len(bundle) > 1:
        if differ([group.degree for group in bundle]):
            raise _refused("the groups of experts differ from DeepSpeed's own: it is unknown what it would create")
        for group in bundle:
            yield from _spread([group], degree, state)
        return
    order: dict[str, int] = {}
    for number, name in enumerate(state.parameters):
        order.setdefault(layer_of(name) or name, number)
    spread = [sorted(names, key=lambda name: order[layer_of(name) or name]) for names in spread]
    sizes = [_numels(state, names, degree) for names in spread]
    if differ(sizes):
        raise _refused("experts have different sizes, but DeepSpeed's ranks all have the same number of elements")
    values = bundle[0].values
    if values.hyperparameters.get("name") == f"ep_size_{bundle[0].degree}":
        values = replace(values, hyperparameters={**values.hyperparameters, "name": f"ep_size_{degree}"})
    for one in expert_groups(sizes[0]) if by_size else [list(range(len(spread[0])))]:
        yield values, [[names[i] for i in one] for names in spread]


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(what, expected="no --expert-parallel-size")


def _joined(groups: Sequence[_Group], state: Rank) -> tuple[list[list[str]], bool]:
    """Return each expert rank's parameters of groups of one degree, and whether DeepSpeed would split them so."""
    joined = [[name for names in of_rank for name in names] for of_rank in zip(*(g.ranks for g in groups), strict=True)]
    split = [len(one) for one in expert_groups(_numels(state, joined[0], len(joined)))]
    return joined, split == [len(group.ranks[0]) for group in groups]


def joined_experts(state: Rank) -> tuple[list[ParamGroup], list[int | None], bool]:
    """Return a stage's groups with those of experts as they were before DeepSpeed split them by size.

    Their degrees come with them, and whether all were split so.

    Raises UnsupportedError: they are too large for one group, and not split as DeepSpeed does it.
    """
    found: list[ParamGroup] = []
    degrees: list[int | None] = []
    by_size = True
    for bundle in _bundles(_groups(state, 1), apart=True):
        values, degree = [group.values for group in bundle], bundle[0].degree
        names, fits = _joined(bundle, state) if degree is not None else ([], True)
        by_size = by_size and fits
        if fits and len(bundle) > 1:
            values = [replace(values[0], parameters=[name for one in names for name in one])]
        elif len(bundle) > 1 and sum(_numels(state, names[0], 1)) > EXPERT_GROUP_NUMEL:
            raise UnsupportedError(
                "the groups of experts differ from DeepSpeed's split by size: it is unknown how it would split them "
                "for other stages",
            )
        found += values
        degrees += [degree] * len(values)
    return found, degrees, by_size


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
