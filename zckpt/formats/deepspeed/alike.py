"""Whether a target is cut as its source is, so that what belongs to a rank as a whole can go along. Pure."""

from __future__ import annotations

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.formats.deepspeed.target import Target, TargetRank
from zckpt.state.partition import flat_padding, shard_numel
from zckpt.state.rank_values import listed


def refuse_to_cut(target: Target) -> None:
    """Raise UnsupportedError where state that is each rank's own would have to be cut for other ranks."""
    checkpoint, first = target.checkpoint, target.origin.members[0]
    if not checkpoint.per_rank or is_cut_alike(target):
        return
    dp = checkpoint.topology.dp
    raise UnsupportedError(
        f"{listed(checkpoint.per_rank)}: each rank has its own, of the elements that it holds, and that cannot be cut "
        f"for other ranks",
        path=checkpoint.source,
        expected=f"{dp} ranks of ZeRO-{first.stage}{', elastic' if first.elastic else ''}, all cut as it is",
        found=f"{target.world_size} ranks of ZeRO-{target.stage}{', elastic' if target.elastic else ''}",
    )


def is_cut_alike(target: Target) -> bool:
    """Tell whether each rank of a target holds the same elements in the same order as in the source."""
    details, first = target.checkpoint.details, target.origin.members[0]
    same = (
        len(target.ranks) == len(target.origin.ranks)
        and (target.stage == 3) == (first.stage == 3)
        and target.elastic == first.elastic
        and target.round_robin == (bool(details.get("round_robin_gradients")) and first.stage != 3)
        and target.alignment == (bool(details.get("parameter_alignment")) and first.stage != 3)
    )
    return same and all(
        len(rank.members) == target.world_size
        and all(_holds(target, rank, number, member) for number, member in enumerate(rank.members))
        for rank in target.ranks
    )


def _holds(target: Target, rank: TargetRank, number: int, member: OptimizerShard) -> bool:
    """Tell whether a data-parallel rank's partitions are those of its file."""
    found = [master.numel for master in member.masters]
    if target.stage == 3:
        cut = [sub_group for group in rank.groups for sub_group in target.sub_groups(group)]
        return found == [sum(shard_numel(p.numel, target.world_size) for p in one) for one in cut]
    if len(found) != len(rank.groups):
        return False
    for numel, group, count in zip(found, rank.groups, member.partition_count, strict=True):
        padding = flat_padding(group.starts[-1], group.partition, group.position(number))
        if count != group.shared_by or not group.partition - padding <= numel <= group.partition:
            return False
    return True
