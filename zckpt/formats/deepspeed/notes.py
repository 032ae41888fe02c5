"""What is said of a target: how layers were dealt anew, and what became of what differs between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from zckpt.errors import listed
from zckpt.formats.deepspeed.axes.pipeline import TIED
from zckpt.formats.deepspeed.axes.tp_rules import AFFINE_KEY, INFO_KEY
from zckpt.formats.deepspeed.shards import STRUCTURE_KEYS, ModelShard
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.deepspeed.values import is_same
from zckpt.torchfile import FromFile

_WRITTEN = STRUCTURE_KEYS.union(["ds_config", "num_experts", INFO_KEY])
"""Keys of a model file that are not carried."""

_OF_THE_RANKS = ("data_sampler", "random_ltd")
"""DeepSpeed's own keys that belong to the number of ranks even where all ranks have the same."""


def alone_among_frozen(target: Target) -> list[str]:
    """Return frozen parameters for which a target of ZeRO-3 has no place, for others of the model are not there."""
    if target.stage != 3 or target.lists_frozen:
        return []
    return [p.name for mp in target.ranks for p in mp.parameters.values() if p.frozen and p.slots]


def rank_notes(target: Target) -> list[str]:
    """Return what became of each key that differs between ranks, or means something at the old number of ranks only."""
    ranks = target.origin.ranks
    old = len(ranks[0].model_files)
    found: dict[str, str] = {}
    if target.bf16_optimizer and target.checkpoint.zero_stage == 0:
        found["zero_stage"] = (
            "BF16_Optimizer's state is written as ZeRO-1's; the training can continue at stage 1 with "
            "grad_accum_dtype fp32: at stage 0, DeepSpeed 0.19 loads no masters, and raises on its own checkpoints"
        )
    if target.regrouped and len(ranks) > 1:
        for key in _differing([files.model for files in ranks]):
            found[key] = f"{key} differs between model-parallel ranks: mp_rank 0's is carried to all"
    if target.origin.rules is not None and AFFINE_KEY in target.origin.rules and len(ranks) % len(target.ranks):
        found[AFFINE_KEY] = (
            "slices are equal shares; AutoTP cuts attention by key and value heads, and DeepSpeed will not load this "
            f"if the number of ranks, {len(target.ranks)}, does not divide that of them"
        )
    if old > 1 and not (target.stage == 3 and target.world_size == old):
        kept = 1 if target.regrouped else len(ranks)
        for key in dict.fromkeys(key for files in ranks[:kept] for key in _differing(files.model_files)):
            fate = f"ranks below {target.world_size} keep theirs, the others' are left out"
            if target.stage != 3:
                fate = "rank 0's is carried and the others' are left out, because there is one model file"
            elif target.world_size > old:
                fate = f"ranks below {old} keep theirs, the new ones get rank 0's"
            found[key] = f"{key} differs between ranks: {fate}"
    if target.world_size != target.checkpoint.topology.dp or target.regrouped:
        content = target.origin.model.content
        named = [key for key in content if "rng" in key.lower() or "random" in key.lower()]
        for key in dict.fromkeys([*_OF_THE_RANKS, *named]):
            if content.get(key) is not None and key not in found:
                found[key] = f"{key} is carried over as it was saved at another number of ranks"
    frozen = alone_among_frozen(target)
    if frozen:
        found["frozen"] = f"{listed(frozen)}: unchanged in the engine, because not all frozen parameters can be loaded"
    return [*stage_notes(target), *found.values()]


def _differing(models: Sequence[ModelShard]) -> list[str]:
    """Return the keys and buffers of which not all of these files have the same value."""
    first = models[0]
    keys = dict.fromkeys(key for model in models for key in model.content if key not in _WRITTEN)
    buffers = [name for name in first.module if name in first.buffer_names]

    def differs(one: Mapping[str, object], model: ModelShard, other: Mapping[str, object], key: str) -> bool:
        mine, its = FromFile.of(first.file, one.get(key)), FromFile.of(model.file, other.get(key))
        return (key in one) != (key in other) or not is_same(mine, its)

    found = [key for key in keys if any(differs(first.content, m, m.content, key) for m in models[1:])]
    return found + [f"buffer {n}" for n in buffers if any(differs(first.module, m, m.module, n) for m in models[1:])]


def stage_notes(target: Target) -> list[str]:
    """Return how layers were dealt anew."""
    stages = target.stages
    if stages is None:
        return []
    notes = ["stages of layers " + "; ".join(f"{low} to {high - 1}" for low, high in pairwise(stages.bounds))]
    for key in stages.uses if target.pp > 1 else ():
        its = ", ".join(map(str, stages.of(f"{TIED}{key}.")))
        notes.append(f"tied layer {key} is assumed to be used in stages {its}, which get its first stage's state")
    return [*notes, *stages.untold]
