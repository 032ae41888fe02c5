"""What model files say of AutoEP's layers: `ds_autoep_layers`, which each rank writes from where it stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from zckpt.formats.deepspeed.auto_ep import KEY
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.state.boxes import row_major
from zckpt.torchfile import FromFile


def layers_for(
    listed: object, places: Mapping[str, tuple[int, int, int]], world_size: int, *, sharded: bool = False
) -> list[object]:
    """Return `ds_autoep_layers` as a rank writes it over other ranks.

    Parameters
    ----------
    listed : object
        The source's.
    places : mapping of str to (degree, expert rank, position)
        By a layer's prefix: over how many ranks its experts are spread, which of them this one is, and which of those
        that have the same. By default as it was, the first.
    world_size : int
        Data-parallel ranks.
    sharded : bool
        Whether they are in the sub-groups of ZeRO-3.
    """
    found: list[object] = []
    for entry in listed if isinstance(listed, list) else []:
        degree, rank, position = places.get(entry["expert_key_prefix"], (entry["ep_size"], 0, 0))
        count, per = entry["num_experts"], entry["num_experts"] // degree
        changed = {
            "num_local_experts": per,
            "ep_size": degree,
            "ep_group_name": f"ep_size_{degree}",
            "ep_rank": rank,
            "expert_data_parallel_rank": position,
            "expert_data_parallel_world_size": world_size // degree,
            "global_expert_start": rank * per,
            "global_expert_end": (rank + 1) * per,
            "checkpoint_format": "zero3_partitioned" if sharded else "per_expert_files",
            "checkpoint_format_version": 1 if sharded else None,
        }
        if isinstance(entry.get("expert_placement"), dict):
            ranks = [{"rank": r, "experts": list(range(r * per, (r + 1) * per))} for r in range(degree)]
            changed["expert_placement"] = {**entry["expert_placement"], "ep_size": degree, "ranks": ranks}
        if isinstance(entry.get("affine_maps"), dict):
            maps = {name: _map(one, count, degree) for name, one in entry["affine_maps"]["params"].items()}
            changed["affine_maps"] = {**entry["affine_maps"], "params": maps}
        more = changed if sharded else {}  # which DeepSpeed does not load without; some lists leave them out
        found.append({key: changed.get(key, value) for key, value in {**entry, **more}.items()})
    return found


def listed_layers(
    model: ModelShard, places: Mapping[str, tuple[int, int, int]], world_size: int, *, sharded: bool = False
) -> dict[str, object]:
    """Return the keys of a model file that list AutoEP's layers, for other ranks; none where it lists none.

    Parameters are those of `layers_for`.
    """
    if not model.content.get(KEY):
        return {}
    found: dict[str, object] = {KEY: layers_for(model.content[KEY], places, world_size, sharded=sharded)}
    info = model.content.get(INFO_KEY)
    kept = info if isinstance(info, FromFile) else FromFile.of(model.file, info)
    if isinstance(kept.node, dict) and KEY in kept.node:
        found[INFO_KEY] = replace(kept, node={**kept.node, KEY: found[KEY]})
    return found


def common(model: ModelShard) -> Mapping[str, object]:
    """Return what a model file holds without what it says of its own rank's experts."""
    info = model.content.get(INFO_KEY)
    if not model.content.get(KEY) or not isinstance(info, dict):
        return model.content
    return {**model.content, INFO_KEY: {key: value for key, value in info.items() if key != KEY}}


def with_layers(model: ModelShard) -> Mapping[str, object]:
    """Return what a model file holds, its layers listed in full: DeepSpeed's converter to universal shortens a list."""
    info, listed = model.content.get(INFO_KEY), model.content.get(KEY)
    if not listed or not isinstance(info, dict) or KEY not in info:
        return model.content
    return {**model.content, INFO_KEY: {**info, KEY: listed}}


def _map(known: Mapping[str, object], experts: int, degree: int) -> dict[str, object]:
    """Return where the slices of a tensor are in the whole, as DeepSpeed writes it down."""
    logical = known["logical_shape"]
    rest = [int(n) for n in logical[1:]] if isinstance(logical, (list, tuple)) else []
    shape = [experts // degree, *rest]
    strides = list(row_major(tuple(shape)))
    numel = math.prod(shape)
    ranks = {
        rank: {
            "shard_shape": shape,
            "pieces": [{"shape": shape, "source": [rank * numel, strides], "dest": [0, strides], "locations": [rank]}],
        }
        for rank in range(degree)
    }
    return {**known, "ranks": ranks}
