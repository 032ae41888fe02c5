"""One order for the param groups of ranks that have them in several.

DeepSpeed goes through a set of names where it makes groups of experts over several numbers of ranks (`ep_size_1`,
`ep_size_2`), so that their order is that of a process's hash seed, and each rank's is its own. Groups are told by what
they say: their names and hyperparameters. Of those that say the same, all have the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.torchfile import Digests


def in_one_order(optimizers: Sequence[OptimizerShard]) -> list[OptimizerShard]:
    """Return optimizer files with their groups as the first one of their model-parallel rank has them.

    Those whose groups are others stay as they are, and are found to be different later.
    """
    first: dict[int | None, OptimizerShard] = {}
    return [_like(one, first.setdefault(one.mp_rank, one)) for one in optimizers]


def order_like(wanted: Sequence[dict[str, object]], own: Sequence[dict[str, object]]) -> list[int] | None:
    """Return the places of the same groups among a rank's own; None if it has others."""
    digests = Digests()
    keys, left = (
        [digests.of({key: value for key, value in group.items() if key != "params"}) for group in groups]
        for groups in (wanted, own)
    )
    found: list[int] = []
    for key in keys:
        at = next((at for at, other in enumerate(left) if other == key and at not in found), None)
        if at is None:
            return None
        found.append(at)
    return found if len(found) == len(own) else None


def _like(one: OptimizerShard, first: OptimizerShard) -> OptimizerShard:
    several = {group.get("name") for group in one.groups if group.get("moe") is True}
    if one is first or len(several) < 2 or len(one.groups) != len(one.masters):
        return one
    order = order_like(first.groups, one.groups)
    if order is None or order == list(range(len(order))):
        return one
    by_group = ("masters", "tensors", "scalars", "partition_count", "paddings", "alignment_paddings", "mappings")
    held: dict[str, Any] = {name: getattr(one, name) for name in by_group}
    moved: dict[str, Any] = {name: None if its is None else [its[at] for at in order] for name, its in held.items()}
    groups = [{**one.groups[at], "params": first.groups[index].get("params")} for index, at in enumerate(order)]
    return replace(one, **moved, groups=groups, order=tuple(order))
