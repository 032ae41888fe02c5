"""Experts of a checkpoint of another format: their order in DeepSpeed's param groups, and how many a layer has.

Names carry an expert's number over all ranks, and a group its degree in its name (`ep_size_E`), as DeepSpeed gives it.
"""

from __future__ import annotations

from collections.abc import Iterable

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.deepspeed.experts import (
    expert_number,
    experts_per_rank,
    in_order,
    is_expert,
    layer_of,
    named_degree,
    spread_experts,
)
from zckpt.state import Checkpoint, ParamGroup


def of_experts(group: ParamGroup, path: str) -> list[str]:
    """Return the names of a group's parameters in the optimizer's order, expert rank by expert rank.

    Raises
    ------
    UnsupportedError
        The group has experts and other parameters, or not all experts of a layer.
    """
    sparse = [name for name in group.parameters if is_expert(name)]
    if not sparse:
        return list(group.parameters)
    if len(sparse) < len(group.parameters):
        others = [name for name in group.parameters if not is_expert(name)]
        raise UnsupportedError(
            "experts and other parameters in one param group, which DeepSpeed keeps apart",
            path=path,
            found=f"{listed(others, most=4)} with {listed(sparse, most=2)}",
        )
    return [name for one in spread_experts([_by_layer(sparse)], named_degree(group), path) for name in one]


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
