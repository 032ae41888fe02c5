"""Which ranks a checkpoint should have files of, and whether those that are there belong together. No layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zckpt.errors import ShardError
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard
from zckpt.formats.jsonable import jsonable
from zckpt.torchfile import plain

SHOWN_RANKS = 16
"""More ranks than this are counted, not listed."""


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text a person can read, however many there are."""
    text = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    return text + (f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else "")


def data_parallel_size(models: Sequence[ModelShard], shards: Sequence[OptimizerShard]) -> int:
    """Return the number of ranks that share the state: what most optimizer files say, the model file breaking a tie."""
    recorded = next((m.content["dp_world_size"] for m in models if type(m.content.get("dp_world_size")) is int), None)
    counts = Counter(max(shard.partition_count, default=1) for shard in shards)
    if not counts:
        return recorded if isinstance(recorded, int) else 1
    if isinstance(recorded, int) and recorded in counts:
        return recorded
    return max(counts, key=lambda size: (counts[size], size))


def select(
    directory: Path, models: Sequence[ModelShard], shards: Sequence[OptimizerShard], mp_rank: int
) -> tuple[list[OptimizerShard], list[str]]:
    """Return one optimizer file for each data-parallel rank, in order, and warnings.

    Files of higher ranks that themselves tell of a larger world are leftovers; they are left aside.

    Raises
    ------
    ShardError
        Ranks are missing, or a file is from another world size, step or run.
    """
    size = data_parallel_size(models, shards)
    by_rank = {shard.rank: shard for shard in shards}
    missing = [rank for rank in range(size) if rank not in by_rank]
    if missing:
        where = f" of mp_rank {mp_rank}" if mp_rank else ""
        raise ShardError(
            f"optimizer files{where} are missing for rank{'s' if len(missing) > 1 else ''} {listed(missing)}",
            path=directory,
            expected=f"{size} ranks",
            found=f"{len(by_rank)} files",
            advice="give each directory that holds some of them with --root",
        )
    members = [by_rank[rank] for rank in range(size)]
    stale = [m.rank for m in members if max(m.partition_count, default=1) != size]
    if stale:
        found = sorted({max(by_rank[r].partition_count, default=1) for r in stale})
        raise ShardError(
            f"rank {listed(stale)} is from a run of another world size",
            path=by_rank[stale[0]].path,
            expected=f"{size} ranks",
            found=listed(found),
            advice="remove or replace it",
        )
    _check_alike(members)
    warnings = []
    extra = sorted(rank for rank in by_rank if rank >= size)
    if extra:
        warnings.append(f"{directory}: files of ranks {listed(extra)} are left over from a larger run; not used")
    return members, warnings


def _check_alike(members: Sequence[OptimizerShard]) -> None:
    """Raise ShardError if some ranks' files differ from the rest in what all ranks have in common."""
    for what, facts in _common_facts(members).items():
        values = Counter(value for value in facts if value is not None)
        if len(values) < 2:
            continue
        usual = values.most_common(1)[0][0]
        odd = [m for m, value in zip(members, facts, strict=True) if value not in (None, usual)]
        first = facts[members.index(odd[0])] or ""
        raise ShardError(
            f"rank {listed([m.rank for m in odd])} is from another step or run: its {what} differs",
            path=odd[0].path,
            expected=_short(usual),
            found=_short(first),
            advice="replace it by the file of this step",
        )


def _common_facts(members: Sequence[OptimizerShard]) -> dict[str, list[str | None]]:
    """Return facts that must be alike on all ranks, as comparable text; None where a rank does not have one."""
    facts: dict[str, list[str | None]] = {
        "ZeRO stage": [str(m.stage) for m in members],
        "form of the optimizer state": ["elastic" if m.elastic else "rigid" for m in members],
        "number of groups": [str(len(m.masters)) for m in members],
    }
    if len(set(facts["number of groups"])) > 1:
        return facts
    for index in range(len(members[0].masters)):
        for key in dict.fromkeys(key for m in members for key in m.scalars[index]):
            facts[f"{key} of group {index}"] = [
                None if key not in m.scalars[index] else repr(m.scalars[index][key]) for m in members
            ]
    facts["param groups"] = [repr([jsonable(group) for group in m.groups]) if m.groups else None for m in members]
    facts["loss scale"] = [repr(plain(m.content.get("loss_scaler"))) for m in members]
    return facts


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
