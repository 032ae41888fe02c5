"""What a rank saved for itself and cannot be simply carried to other numbers of ranks: named, not guessed.

Under ZeRO-3 every rank has a model file with client state of its own (a random generator, a sampler's position);
under tensor parallelism every model-parallel rank has. A rank that exists in source and target keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.formats.deepspeed.rules_file import INFO_KEY
from zckpt.formats.deepspeed.same_on_ranks import is_same
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.target import Target
from zckpt.torchfile import FromFile

_MADE_ANEW = frozenset({
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", INFO_KEY,
})  # fmt: skip
"""Keys of a model file that the writer makes."""

_OF_THE_RANKS = ("data_sampler", "random_ltd")
"""DeepSpeed's own keys that belong to the number of ranks even where all ranks have the same."""


def notes(target: Target) -> list[str]:
    """Return what became of each key that differs between ranks, or means something at the old number of ranks only."""
    ranks = target.origin.ranks
    old = len(ranks[0].models) if ranks else 1
    found: dict[str, str] = {}
    if len(ranks) not in (0, len(target.ranks)):
        for key in _differing([files.models[0] for files in ranks]):
            found[key] = f"{key} differs between model-parallel ranks: mp_rank 0's is carried to all"
    if old > 1 and not (target.stage == 3 and target.world_size == old):
        kept = len(target.ranks) if len(ranks) == len(target.ranks) else 1
        for key in dict.fromkeys(key for files in ranks[:kept] for key in _differing(files.models)):
            found[key] = f"{key} differs between ranks: {_fate(target, old)}"
    if target.world_size != target.checkpoint.topology.dp or len(target.ranks) != max(len(ranks), 1):
        content = target.origin.model.content
        named = [key for key in content if "rng" in key.lower() or "random" in key.lower()]
        for key in dict.fromkeys([*_OF_THE_RANKS, *named]):
            if content.get(key) is not None and key not in found:
                found[key] = f"{key} is carried over as it was saved at another number of ranks"
    return list(found.values())


def _fate(target: Target, old: int) -> str:
    """Say which ranks keep their own."""
    if target.stage != 3:
        return "rank 0's is carried, the others' are left out, for there is one model file"
    if target.world_size > old:
        return f"ranks below {old} keep theirs, the new ones get rank 0's"
    return f"ranks below {target.world_size} keep theirs, the others' are left out"


def _differing(models: Sequence[ModelShard]) -> list[str]:
    """Return the keys and buffers of which not all of these files have the same value."""
    first = models[0]
    keys = dict.fromkeys(key for model in models for key in model.content if key not in _MADE_ANEW)
    found = [key for key in keys if any(not _same(first, model, key) for model in models[1:])]
    for name in first.module:
        if name in first.buffer_names and any(not _same_buffer(first, model, name) for model in models[1:]):
            found.append(f"buffer {name}")
    return found


def _same(one: ModelShard, other: ModelShard, key: str) -> bool:
    if (key in one.content) != (key in other.content):
        return False
    return is_same(FromFile.of(one.file, one.content[key]), FromFile.of(other.file, other.content[key]))


def _same_buffer(one: ModelShard, other: ModelShard, name: str) -> bool:
    a, b = one.module[name], other.module.get(name)
    return b is not None and is_same(FromFile.of(one.file, a), FromFile.of(other.file, b))
