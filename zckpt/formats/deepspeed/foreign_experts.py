"""Experts of a checkpoint of another format: their order in DeepSpeed's param groups, and how many a layer has.

Names carry an expert's number over all ranks, and a group its degree in its name (`ep_size_E`), as DeepSpeed gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.deepspeed.experts import (
    check_divides,
    expert_number,
    experts_per_rank,
    in_order,
    is_expert,
    layer_of,
    local_name,
    named_degree,
)
from zckpt.state import Checkpoint, ParamGroup


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
    every = _by_layer(sparse)
    per_rank = {layer: max(total // degree, 1) for layer, total in totals.items()}
    ranks: list[list[str]] = [[] for _ in range(degree)]
    for name in every:
        ranks[(expert_number(name) or 0) // per_rank[layer_of(name)]].append(name)
    local = [[local_name(name, rank, per_rank) for name in names] for rank, names in enumerate(ranks)]
    if any(one != local[0] for one in local):
        raise UnsupportedError(
            f"a param group that does not have the same of the experts of each of {degree} ranks, as DeepSpeed's has",
            found=listed(every, most=4),
        )
    return [name for names in ranks for name in names]


def mixed(others: Sequence[str], experts: Sequence[str]) -> UnsupportedError:
    """Return the error for a param group with experts among others."""
    return UnsupportedError(
        "experts and other parameters in one param group, which DeepSpeed keeps apart",
        found=f"{listed(others, most=4)} with {listed(experts, most=2)}",
    )


def check_split(groups: Sequence[ParamGroup]) -> None:
    """Raise UnsupportedError where groups share experts that are not in the order in which DeepSpeed splits them.

    Parameters
    ----------
    groups : sequence of ParamGroup
        As `of_experts` orders them.
    """
    last: dict[tuple[str, str], int] = {}
    for group in groups:
        degree = named_degree(group)
        names = group.parameters[: len(group.parameters) // degree] if any(map(is_expert, group.parameters)) else []
        for name in names:  # of the first rank, as all others have theirs
            layer, number = layer_of(name), expert_number(name) or 0
            key = layer, name.removeprefix(f"{layer}{number}")
            if last.get(key, -1) > number:
                raise UnsupportedError(
                    f"experts of {layer.removesuffix('.deepspeed_experts.')} in several param groups, in an order that "
                    f"DeepSpeed does not have over {degree} rank{'s' if degree > 1 else ''}",
                    expected="groups whose names say over how many ranks their experts are spread (ep_size_N)",
                    found=str(group.hyperparameters.get("name"))[:80],
                )
            last[key] = number


def _by_layer(names: Iterable[str]) -> list[str]:
    """Return names layer by layer and expert by expert; layers and an expert's parameters come as they first do."""
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names:
        layers.setdefault(layer_of(name), {}).setdefault(expert_number(name) or 0, []).append(name)
    return [name for numbers in layers.values() for number in sorted(numbers) for name in numbers[number]]


def numbers_of_experts(names: Iterable[str]) -> list[int]:
    """Return how many experts each layer has, in the order of the layers' files."""
    found = experts_per_rank(names)
    return [found[layer] for layer in sorted(found, key=in_order)]


def of_auto_ep(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint was once DeepSpeed's with experts, and has none that are parameters by themselves."""
    return bool(checkpoint.metadata.get("num_experts")) and not any(is_expert(name) for name in checkpoint.parameters)
