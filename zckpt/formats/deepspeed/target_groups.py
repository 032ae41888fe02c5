"""What each rank of the target has: its param groups, and its parameters, whole or sliced.

At an unchanged tensor-parallel degree nothing is put together: every rank's values stay what they are, also those
that drift apart and the padding rows of a vocabulary. Dense groups stay as they are, those of experts are split again
for another number of expert ranks.

DeepSpeed splits experts off each param group that the user makes, in the model's order, names the new group after
its degree, and begins another one where a rank's share would become too large. So the number of groups may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed import RecutOptions
from zckpt.formats.deepspeed.auto_ep import indivisible
from zckpt.formats.deepspeed.experts import (
    experts_per_rank,
    is_expert,
    layer_of,
    local_name,
    named_degree,
    spread_experts,
)
from zckpt.formats.deepspeed.gpt_model import check_degree
from zckpt.formats.deepspeed.origin import Origin, RankFiles, RankState
from zckpt.formats.deepspeed.tensor_parallel import complete_aliases, cut, merge, without_rules
from zckpt.formats.deepspeed.tp_rules import REPLICATED_KEY, Rules
from zckpt.formats.deepspeed.tp_shares import REPLICATED
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


def units(checkpoint: Checkpoint, state: RankState, options: RecutOptions) -> list[Unit]:
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
    _refuse_mixture(bundles, checkpoint.source)
    for bundle in bundles:
        source = bundle[0].degree
        if source is None:
            found.append(Unit(bundle[0].values, [bundle[0].values.parameters], {}))
            continue
        degree = source if options.expert_parallel_size is None else options.expert_parallel_size
        _check_degree(checkpoint, options, degree, state.lanes)
        found += _expert_units(bundle, degree, state.parameters, checkpoint.source)
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

    Parameters
    ----------
    apart : bool
        Whether groups of different degrees stay apart.
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


def _refuse_mixture(bundles: Sequence[Sequence[_Group]], path: str) -> None:
    """Raise where several groups of the user's are alike, and which experts belong to which of them is not known."""
    degrees: dict[object, frozenset[int | None]] = {}
    for bundle in bundles:
        own = frozenset(group.degree for group in bundle)
        known = own if None in own else degrees.setdefault(bundle[0].kind, own)
        if own != known and max(len(own), len(known)) > 1:
            raise _refused("param groups with equal hyperparameters and experts over different numbers of "
                           "ranks: which of them make one group is not known", path)  # fmt: skip


def _check_degree(checkpoint: Checkpoint, options: RecutOptions, degree: int, lanes: int) -> None:
    if options.world_size * lanes % degree:
        over = f", {options.world_size * lanes} with the tensor-parallel ones," if lanes > 1 else ""
        raise UsageError(
            f"experts spread over {degree} ranks cannot be cut for {options.world_size} data-parallel ranks{over}",
            path=checkpoint.source,
            expected="an expert-parallel size that divides the world size",
            found=degree,
            advice="give another --expert-parallel-size",
        )


def _expert_units(bundle: Sequence[_Group], degree: int, parameters: Mapping[str, Parameter], path: str) -> list[Unit]:
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
        for rank, names in enumerate(spread_experts(joined, degree, path)):
            spread[rank] += names
    if not by_size and len(bundle) > 1:
        if len({group.degree for group in bundle}) > 1:
            raise _refused(
                "groups of experts that are not as DeepSpeed makes them: what it would make is not known", path
            )
        return [unit for group in bundle for unit in _expert_units([group], degree, parameters, path)]
    order = {layer: number for number, layer in enumerate(totals)}
    spread = [sorted(names, key=lambda name: order[layer_of(name)]) for names in spread]
    numels = [[parameters[name].numel for name in names] for names in spread]
    if any(one != numels[0] for one in numels):
        raise _refused("experts of different sizes, while DeepSpeed's ranks all have as many elements", path)
    cut = expert_groups(numels[0], indivisible(spread[0])) if by_size else [list(range(len(spread[0])))]
    values = _renamed(bundle[0], degree)
    return [Unit(values, [[names[i] for i in one] for names in spread], per_rank) for one in cut]


def _refused(what: str, path: str) -> UnsupportedError:
    return UnsupportedError(what, path=path, expected="--expert-parallel-size left out")


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


def joined_experts(state: RankState, path: str) -> JoinedGroups:
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
                path=path,
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


def local_states(
    checkpoint: Checkpoint, origin: Origin, degree: int, rows: int | None, ranks: Sequence[RankFiles] = ()
) -> list[RankFiles]:
    """Return the state of each tensor-parallel rank of the target, with the source's files to carry the rest from.

    Parameters
    ----------
    degree : int
        Tensor-parallel ranks of the target.
    rows : int or None
        Rows of vocabulary parameters in the target, padding included; by default as many as the source has, or the
        next number that divides by `degree`.
    ranks : sequence of RankFiles
        Those of one stage of a pipeline; by default all.

    Raises
    ------
    UnsupportedError
        There are no rules that tell how to cut.
    UsageError
        `rows` cannot be.
    LayoutError
        A parameter does not divide among the ranks.
    """
    whole = RankState(0, checkpoint.parameters, checkpoint.buffers, checkpoint.param_groups)
    path = origin.rules_path or (origin.model.shard.path if origin.ranks else checkpoint.source)
    ranks = ranks or origin.ranks or [RankFiles([origin.model], origin.members, whole)]
    if degree == len(ranks) and rows is None:
        return list(ranks)
    largest = max((p.numel for p in checkpoint.parameters.values()), default=1)
    if degree > largest:
        raise UsageError("unusable tensor-parallel size", expected=f"at most {largest}, elements of the largest "
                         f"parameter", found=degree)  # fmt: skip
    rules = _rules(origin, ranks, degree, path)
    if rows is not None and not any(rules.is_vocabulary(name) for name in checkpoint.parameters):
        raise UsageError("no rule names a vocabulary, so a padded size does not apply", path=path)
    merged = merge([files.state for files in ranks], rules, path, padded=True)
    experts = merged.whole
    if len(ranks) == 1:  # DeepSpeed slices experts on demand only
        experts = frozenset(n for n in merged.parameters if is_expert(n) and rules.matching(n) in (None, REPLICATED))
    lanes = degree if experts else 1
    like = list(ranks) if degree == len(ranks) else [ranks[0]] * degree
    states = [
        RankState(mp_rank, {}, files.state.buffers, files.state.groups, degrees=expert_degrees(merged), lanes=lanes,
                  whole=experts)
        for mp_rank, files in enumerate(like)
    ]  # fmt: skip
    for name, parameter in merged.parameters.items():
        if name in experts:
            slices = [replace(parameter) for _ in states]
        elif degree == len(ranks) and not rules.is_vocabulary(name):
            slices = [replace(files.state.parameters[name]) for files in ranks]
        else:
            slices = _cut(parameter, rules, degree, rows)
        for state, one in zip(states, slices, strict=True):
            state.parameters[name] = one
    for state in states:
        complete_aliases(state.parameters)
    return [replace(files, state=state) for files, state in zip(like, states, strict=True)]


def _rules(origin: Origin, ranks: Sequence[RankFiles], degree: int, path: str) -> Rules:
    """Return the rules to cut by.

    A checkpoint that is not sliced may carry rules that nobody ever needed. To cut by them, they must at least say
    what is not to be cut.
    """
    names = list(ranks[0].state.parameters)
    if origin.rules is None:
        raise without_rules(names, path, "how to cut them")
    if len(ranks) == 1 < degree and REPLICATED_KEY not in origin.rules:
        raise UnsupportedError(
            "the tensor-parallel rules do not say which parameters every rank has whole",
            path=path,
            expected=f"{REPLICATED_KEY}, be it empty",
            advice="give rules with --tp-rules FILE",
        )
    if origin.rules_path is None and degree != len(ranks):
        check_degree(origin.model.content, origin.rules, names, degree, path)
    return Rules(origin.rules, path)


def _cut(parameter: Parameter, rules: Rules, degree: int, rows: int | None) -> list[Parameter]:
    """Return each rank's slice of a whole parameter."""
    if parameter.tied_to is not None:
        return [replace(parameter) for _ in range(degree)]
    if rules.is_vocabulary(parameter.name):
        parameter = _padded(parameter, rules, degree, rows)
    rule = rules.cut(parameter.name, parameter.shape, degree)
    return [cut(parameter, rule, rank) for rank in range(degree)]


def _padded(parameter: Parameter, rules: Rules, degree: int, rows: int | None) -> Parameter:
    """Return a vocabulary with as many rows as the target has; rows that the source does not have are in no slot."""
    present = parameter.shape[0] if parameter.shape else 0
    padded = -(-present // degree) * degree if rows is None else rows
    least = min(rules.vocabulary_size or 0, present)
    if padded < least or padded % degree:
        raise UsageError(
            f"unusable padded size of vocabulary {parameter.name}",
            expected=f"at least {least} rows and a multiple of {degree}",
            found=padded,
        )
    kept = min(padded, present)
    # Spans may reach over the end of a slot with fewer rows; what is not there is not read.
    slots = {
        key: replace(slot, shape=(kept, *slot.shape[1:])) if slot.shape else slot
        for key, slot in parameter.slots.items()
    }
    return replace(parameter, shape=(padded, *parameter.shape[1:]), slots=slots)
