"""Mixture-of-experts: local and global numbers of experts, and which ranks share an expert group.

With expert-parallel degree ep, expert parameters are spread over ep ranks and replicated over the rest: their
group is cut over dp/ep ranks, and ranks e, e + ep, e + 2 ep, ... hold the experts of expert rank e. A file names
experts by their local number; the global one is e x (experts per rank) + local.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from zckpt.errors import LayoutError, UnsupportedError, UsageError

_EXPERT = re.compile(r"(?P<before>.*deepspeed_experts\.)(?P<number>\d+)(?P<after>\..*)", re.DOTALL)


def is_expert(name: str) -> bool:
    """Tell whether a parameter belongs to an expert of DeepSpeed's MoE layer."""
    return _EXPERT.fullmatch(name) is not None


def expert_number(name: str) -> int | None:
    """Return the number of the expert that a parameter belongs to."""
    match = _EXPERT.fullmatch(name)
    return int(match["number"]) if match else None


def layer_of(name: str) -> str:
    """Return the part of an expert's name before its number."""
    match = _EXPERT.fullmatch(name)
    return match["before"] if match else ""


def experts_per_rank(names: Iterable[str]) -> dict[str, int]:
    """Return for each MoE layer (the name before the number) how many experts these names speak of."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            numbers.setdefault(match["before"], set()).add(int(match["number"]))
    return {before: len(found) for before, found in numbers.items()}


def global_name(name: str, expert_rank: int, per_rank: dict[str, int]) -> str:
    """Return the name with the expert's global number."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    number = expert_rank * per_rank[match["before"]] + int(match["number"])
    return f"{match['before']}{number}{match['after']}"


def local_name(name: str, expert_rank: int, per_rank: dict[str, int]) -> str:
    """Return the name with the number that the expert has on its expert rank."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    number = int(match["number"]) - expert_rank * per_rank[match["before"]]
    return f"{match['before']}{number}{match['after']}"


def spread_experts(names: Sequence[Sequence[str]], degree: int, path: str) -> list[list[str]]:
    """Return the names of experts, under their global numbers, for each rank of another expert-parallel degree.

    Parameters
    ----------
    names : sequence of sequence of str
        For each expert rank of the source, in the optimizer's order.
    degree : int
    path : str
        For messages.

    Raises
    ------
    UsageError
        The experts of a layer do not divide among the ranks.
    UnsupportedError
        They are not layer by layer and expert by expert, so that their order at another degree cannot be told.
    """
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names[0]:
        match = _EXPERT.fullmatch(name)
        if match:
            layers.setdefault(match["before"], {}).setdefault(int(match["number"]), []).append(match["after"])
    counts = {layer: len(found) * len(names) for layer, found in layers.items()}

    def dealt(ranks: int) -> list[list[str]]:
        return [
            [
                f"{layer}{number}{after}"
                for layer, found in layers.items()
                for number in range(rank * counts[layer] // ranks, (rank + 1) * counts[layer] // ranks)
                for after in found[min(found)]
            ]
            for rank in range(ranks)
        ]

    for layer, count in counts.items():
        if count % degree:
            raise UsageError(
                f"{count} experts of {layer.removesuffix('.deepspeed_experts.')} cannot be spread over {degree} ranks",
                path=path,
                expected=f"a divisor of {count}",
                found=degree,
            )
    if dealt(len(names)) != [list(one) for one in names]:
        raise UnsupportedError("experts in an order that is not the model's are not regrouped", path=path)
    return dealt(degree)


def expert_parallel_size(dp: int, partition_count: int, names: Iterable[str]) -> int:
    """Return over how many expert ranks a group is spread: 1 for a dense group.

    Raises
    ------
    LayoutError
        The group is cut over fewer ranks than there are, and it is no expert group.
    """
    if partition_count == dp:
        return 1
    names = list(names)
    if partition_count < 1 or dp % partition_count or not all(is_expert(name) for name in names):
        raise LayoutError(
            "a param group is cut over fewer ranks than there are",
            expected=f"{dp} ranks, or a group of experts over a divisor of that",
            found=f"{partition_count} ranks for {names[0] if names else 'an empty group'}",
        )
    return dp // partition_count
