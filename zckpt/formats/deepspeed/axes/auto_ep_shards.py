"""AutoEP under ZeRO-3: experts in sub-groups of their own, each cut over the ranks that have the same experts.

    ds_zero_partition_groups  in an optimizer file, for each sub-group: the ranks that share it (`partition_ranks`), and
                              which of them this one is, and whether it has experts (`families`)
    param_shapes              X.experts.w1: (experts of a rank, rows, columns); w2 and w3 alike

A rank's experts follow those of the expert rank before it, so that its tensor is an extent of the whole one,
X.experts.w1: (experts, rows, columns). There are no files of experts, and DeepSpeed has no frozen ones here.

Source: DeepSpeed 0.19.8, `_save_moe_checkpoint`, `checkpoint/autoep_zero3_metadata.py`, `ds_to_universal.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.axes.auto_ep import KEY, auto_experts, check_shapes, of_all
from zckpt.formats.deepspeed.layouts.per_parameter import Cut, ShardedLayout, cut_parameters
from zckpt.formats.deepspeed.shards import GROUPS_KEY, OptimizerShard, Shapes
from zckpt.state import dict_of, list_of, without

if TYPE_CHECKING:
    from zckpt.formats.deepspeed.target import Target, TargetGroup

_EXPERTS = "autoep_expert"


class ExpertShardedLayout(ShardedLayout):
    """That of ZeRO-3 whose sub-groups say which ranks share them."""

    def cut(self, shapes: Shapes, keys: Mapping[int, Set[str]]) -> Cut:
        """Return what the shards of ranks make up where sub-groups may have experts; those without all ranks share.

        Raises LayoutError: files and layers contradict each other; UnsupportedError: a sub-group is shared in another
        way.
        """
        members = self.members
        of_experts, sharing = _sharing(members)
        if not any(of_experts):
            return cut_parameters(shapes, members, keys)
        layers = auto_experts(self.model)
        experts = {name: shape for name, shape in shapes.items() if name in layers}
        check_shapes(experts, layers, len(sharing))
        for expert_rank, ranks in enumerate(sharing):
            for rank in ranks:
                model = self.rank.model_files[rank]
                said = {dict_of(one).get("ep_rank") for one in list_of(model.content.get(KEY))}
                if said != {expert_rank}:
                    raise LayoutError(
                        f"rank {rank} does not have the experts that its position implies",
                        path=model.path, expected=f"ep_rank {expert_rank}", found=str(said)[:80],
                    )  # fmt: skip
        own = [_only(member, of_experts, wanted=False) for member in members]
        found = cut_parameters(without(shapes, *layers), own, keys)
        found.degree, found.shapes = len(sharing), dict(shapes)
        parts = [cut_parameters(experts, [_only(members[rank], of_experts, wanted=True) for rank in ranks], keys)
                 for ranks in sharing]  # fmt: skip
        for part in parts:
            found.sub_groups |= part.sub_groups
            found.padding += part.padding
            found.spans += part.spans
        for name, shape in experts.items():
            found.shapes[name] = (shape[0] * len(sharing), *shape[1:])
            found.slots[name] = of_all([one.slots[name] for one in parts])
        return found


def _sharing(members: Sequence[OptimizerShard]) -> tuple[list[bool], list[list[int]]]:
    """Return which sub-groups have experts, and, of each expert rank, the ranks that share them, in their order."""
    kinds: list[bool] = []
    found: list[list[int]] = []
    every = list(range(len(members)))
    for rank, member in enumerate(members):
        own: list[bool] = []
        groups = list(map(dict_of, list_of(member.content.get(GROUPS_KEY))))
        if len(groups) != len(member.masters):
            raise LayoutError(f"{GROUPS_KEY} does not describe this file's sub-groups", path=member.path,
                              expected=len(member.masters), found=len(groups))  # fmt: skip
        for number, one in enumerate(groups):
            families, ranks = one.get("families"), [n for n in list_of(one.get("partition_ranks")) if type(n) is int]
            if one.get("sub_group") != number or not isinstance(families, list) or not ranks:
                raise LayoutError(f"unreadable {GROUPS_KEY}", path=member.path, found=str(one)[:80],
                                  expected=f"families and ranks for sub-group {number}")  # fmt: skip
            own.append(families == [_EXPERTS])
            if (_EXPERTS in families) != own[-1] or (kinds and kinds[number] != own[-1]):
                raise UnsupportedError("experts and other parameters in one sub-group", path=member.path,
                                       found=str(families)[:80])  # fmt: skip
            if (
                (not own[-1] and ranks != every)
                or rank not in ranks
                or one.get("partition_count") not in (None, len(ranks))
                or one.get("partition_rank") != ranks.index(rank)
            ):
                raise UnsupportedError("other ranks than expected share a sub-group", path=member.path,
                                       found=str(one)[:80])  # fmt: skip
            found += [ranks] if own[-1] and ranks not in found else []
        kinds = kinds or own
    held = sorted(n for ranks in found for n in ranks)
    if found and (held != every or len({len(ranks) for ranks in found}) != 1):
        raise LayoutError("ranks share experts in different ways", found=str(found)[:80])
    return kinds, sorted(found)


def _only(member: OptimizerShard, of_experts: Sequence[bool], *, wanted: bool) -> OptimizerShard:
    """Return a file of which sub-groups of the other kind are empty."""
    masters = [
        master if experts == wanted else replace(master, shape=(0,))
        for master, experts in zip(member.masters, of_experts, strict=True)
    ]
    return replace(member, masters=masters, content={})


def partition_groups(target: Target, groups: Sequence[TargetGroup], rank: int) -> list[object]:
    """Return `ds_zero_partition_groups` as a rank writes it."""
    found: list[object] = []
    layers = auto_experts(target.origin.model)
    for group in groups:
        sparse = any(p.name in layers for p in group.experts[0])
        degree = len(group.experts)
        expert_rank = group.expert_rank(rank)
        for _ in group.parts():
            found.append({
                "sub_group": len(found),
                "partition_count": group.shared_by,
                "partition_rank": group.position(rank),
                "partition_ranks": [group.placement.rank(expert_rank, p, degree) for p in range(group.shared_by)],
                "families": ["autoep_expert" if sparse else "replicated"],
                "group_names": [f"ep_size_{degree}" if sparse else "replicated"],
            })  # fmt: skip
    return found
