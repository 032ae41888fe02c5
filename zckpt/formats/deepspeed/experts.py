"""Mixture-of-experts: local and global numbers of experts, and which ranks share an expert group.

With expert-parallel degree ep, expert parameters are spread over ep ranks and replicated over the rest: their
group is cut over dp/ep ranks, and ranks e, e + ep, e + 2 ep, ... hold the experts of expert rank e. A file names
experts by their local number; the global one is e x (experts per rank) + local.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zckpt.errors import LayoutError

_EXPERT = re.compile(r"(?P<before>.*deepspeed_experts\.)(?P<number>\d+)(?P<after>\..*)", re.DOTALL)


def is_expert(name: str) -> bool:
    """Tell whether a parameter belongs to an expert of DeepSpeed's MoE layer."""
    return _EXPERT.fullmatch(name) is not None


def expert_number(name: str) -> int | None:
    """Return the number of the expert that a parameter belongs to."""
    match = _EXPERT.fullmatch(name)
    return int(match["number"]) if match else None


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
