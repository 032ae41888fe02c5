"""Mixture-of-experts: local and global numbers of experts, and which ranks share an expert group.

With expert-parallel degree ep, expert parameters are spread over ep ranks and replicated over the rest: which ranks
those are, `expert_ranks` knows. A file names experts by their local number; the global one is e x (experts per rank) +
local, for expert rank e.

Under ZeRO, whose files have the state of experts, DeepSpeed before 0.19 also writes files for the optimizers of expert
ranks (see `expert_optimizers`), with `None`.

Experts of a checkpoint of another format: their order in DeepSpeed's param groups, and how many a layer has.

Names carry an expert's number over all ranks, and a group its degree in its name (`ep_size_E`), as DeepSpeed gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed.origin import Rank
from zckpt.state import Checkpoint, ParamGroup, differ
from zckpt.state.names import natural_order

SLICED_EXPERTS = "sliced_experts"
"""Key of a checkpoint's details: whether tensor-parallel ranks have slices of all experts, or each has some whole."""

_EXPERT = re.compile(r"(?P<before>.*deepspeed_experts\.)(?P<number>\d{1,18})(?P<after>\..*)", re.DOTALL)

_NAMED = re.compile(r"ep_size_(\d{1,6})")


def is_expert(name: str) -> bool:
    """Tell whether a parameter belongs to an expert of DeepSpeed's MoE layer."""
    return _EXPERT.fullmatch(name) is not None


def expert_number(name: str) -> int | None:
    """Return the number of the expert that a parameter belongs to."""
    match = _EXPERT.fullmatch(name)
    return int(match["number"]) if match else None


def layer_of(name: str) -> str:
    """Return the MoE layer of an expert's parameter: the name before the expert's number."""
    match = _EXPERT.fullmatch(name)
    return match["before"] if match else ""


def named_degree(group: ParamGroup) -> int:
    """Return over how many ranks experts are spread as the group's name says; 1 where it does not."""
    name = group.hyperparameters.get("name")
    match = _NAMED.fullmatch(name) if isinstance(name, str) else None
    return max(int(match[1]), 1) if match else 1


def expert_degrees(state: Rank) -> list[int | None]:
    """Return over how many expert ranks each group is spread, None for a dense one; of another format, by its name."""
    if state.degrees:
        return state.degrees
    return [
        named_degree(group) if group.parameters and all(map(is_expert, group.parameters)) else None
        for group in state.param_groups
    ]


def experts_per_rank(names: Iterable[str]) -> dict[str, int]:
    """Return for each MoE layer (the name before the number) how many experts these names speak of."""
    return {layer: len(numbers) for layer, numbers in by_layer(names).items()}


def by_layer(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """Return the names of experts' parameters by layer and number of the expert, in the order in which they come."""
    found: dict[str, dict[int, list[str]]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            found.setdefault(match["before"], {}).setdefault(int(match["number"]), []).append(name)
    return found


def global_name(name: str, expert_rank: int, per_rank: dict[str, int]) -> str:
    """Return the name with the expert's global number; of minus its rank with the number that it has there."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    number = int(match["number"]) + expert_rank * per_rank[match["before"]]
    return f"{match['before']}{number}{match['after']}"


def by_rank(names: Sequence[str], degree: int) -> list[list[str]]:
    """Return the names of experts, which come expert rank by expert rank, for each of so many ranks."""
    count = len(names) // degree
    return [list(names[rank * count : (rank + 1) * count]) for rank in range(degree)]


def check_divides(layer: str, count: int, degree: int) -> None:
    """Raise UsageError where the experts of a layer do not divide among ranks."""
    if count % degree:
        raise UsageError(
            f"{count} experts of {layer.removesuffix('.deepspeed_experts.')} cannot be spread over {degree} ranks",
            expected=f"a divisor of {count}",
            found=degree,
        )


def spread_experts(names: Sequence[Sequence[str]], degree: int) -> list[list[str]]:
    """Return the names of experts, under their global numbers, for each rank of another expert-parallel degree.

    `names`: for each expert rank of the source, in the optimizer's order. Raises UsageError: the experts of a layer do
    not divide among the ranks; UnsupportedError: they are not layer by layer and expert by expert, so that their order
    at another degree is not known.
    """
    every = [name for of_rank in names for name in of_rank if is_expert(name)]
    totals = experts_per_rank(every)
    for layer, count in totals.items():
        check_divides(layer, count, degree)
    if _dealt(every, len(names), totals) != [list(one) for one in names]:
        raise UnsupportedError(
            "the optimizer lists its experts neither layer by layer nor expert by expert: their order for other "
            "ranks is unknown",
            expected="no --expert-parallel-size",
        )
    return _dealt(every, degree, totals)


def _dealt(names: Iterable[str], degree: int, totals: Mapping[str, int]) -> list[list[str]]:
    """Return the names of experts, layer by layer and expert by expert, for each of so many ranks.

    Layers, and an expert's parameters, come as they first do.
    """
    ranks: dict[int, list[str]] = {rank: [] for rank in range(degree)}
    for layer, numbers in by_layer(names).items():
        for number in sorted(numbers):  # one that is none of so many is of no such rank
            ranks.setdefault(number // max(totals[layer] // degree, 1), []).extend(numbers[number])
    return [ranks[rank] for rank in sorted(ranks)]


def of_experts(group: ParamGroup, totals: Mapping[str, int]) -> list[str]:
    """Return the names of a group's parameters in the optimizer's order, expert rank by expert rank.

    Parameters
    ----------
    totals : mapping of str to int
        Experts of each layer. A group may have some of them, or of their parameters, where DeepSpeed split it by size.

    Raises
    ------
    UsageError
        The experts of a layer do not divide among the ranks of the group's name.
    UnsupportedError
        The group has experts and other parameters, or not the same of each rank's experts.
    """
    sparse = [name for name in group.parameters if is_expert(name)]
    if not sparse:
        return list(group.parameters)
    if len(sparse) < len(group.parameters):
        raise mixed([name for name in group.parameters if not is_expert(name)], sparse)
    degree = named_degree(group)
    for layer in dict.fromkeys(map(layer_of, sparse)):
        check_divides(layer, totals[layer], degree)
    ranks = _dealt(sparse, degree, totals)
    every = [name for names in ranks for name in names]
    per_rank = {layer: max(total // degree, 1) for layer, total in totals.items()}
    local = [[global_name(name, -rank, per_rank) for name in names] for rank, names in enumerate(ranks)]
    if differ(local):
        raise UnsupportedError(
            f"a param group does not have the same parameters of the experts on each of {degree} ranks, as in "
            "DeepSpeed",
            found=listed(every, most=4),
        )
    return every


def mixed(others: Sequence[str], experts: Sequence[str]) -> UnsupportedError:
    """Return the error for a param group with experts among others."""
    return UnsupportedError(
        "one param group mixes experts and other parameters, which DeepSpeed separates",
        found=f"{listed(others, most=4)} with {listed(experts, most=2)}",
    )


def check_split(groups: Sequence[ParamGroup]) -> None:
    """Raise UnsupportedError where groups share experts that are not in the order in which DeepSpeed splits them.

    `groups`: as `of_experts` orders them.
    """
    last: dict[tuple[str, str], int] = {}
    for group in groups:
        degree = named_degree(group)
        names = group.parameters[: len(group.parameters) // degree]  # of the first rank, as all others have theirs
        for name in filter(is_expert, names):
            layer, number = layer_of(name), expert_number(name) or 0
            key = layer, name.removeprefix(f"{layer}{number}")
            if last.get(key, -1) > number:
                raise UnsupportedError(
                    f"experts of {layer.removesuffix('.deepspeed_experts.')} are in several param groups, in an "
                    f"order that DeepSpeed does not use on {degree} rank{('s' if degree > 1 else '')}",
                    expected="groups with names that say over how many ranks their experts are spread (ep_size_N)",
                    found=str(group.hyperparameters.get("name"))[:80],
                )
            last[key] = number


def numbers_of_experts(names: Iterable[str]) -> list[int]:
    """Return how many experts each layer has, in the order of the layers' files."""
    found = experts_per_rank(names)
    return [found[layer] for layer in sorted(found, key=natural_order)]


def of_auto_ep(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint was once DeepSpeed's with experts, and has none that are parameters by themselves."""
    return bool(checkpoint.metadata.get("num_experts")) and not any(map(is_expert, checkpoint.parameters))
