"""Copies of real shards, cut anew."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.cli.console import FIXTURES
from tests.damage import edit, optimizer_file


def address(numel, start):
    """A `fragment_address`; to be made inside `edit` only."""
    made = sys.modules["deepspeed.utils.tensor_fragment"].fragment_address()
    made.numel, made.start = numel, start
    return made


MODEL_FILES = "*model_states.pt"


def copy(name, directory=".") -> Path:
    """A copy of a fixture's tag directory."""
    run = Path(shutil.copytree(FIXTURES / name, Path(directory, Path(name).name)))
    (run / "truth.safetensors").unlink(missing_ok=True)
    return run / (run / "latest").read_text().strip()


def edit_all(tag, change: Callable[[Any], Any], files="*optim_states.pt"):
    paths = sorted(tag.glob(files))
    assert paths, f"{tag} has no {files}"
    for path in paths:
        edit(path, change)


def state_in(content) -> dict[int, dict[str, Any]]:
    """The state of a rank's partitions."""
    z = content["optimizer_state_dict"]
    return (z.get("base_optimizer_state") or z["optimizer_state_dict"])["state"]


def model_file(tag, rank: int | None = None) -> Path:
    prefix = "" if rank is None else f"zero_pp_rank_{rank}_"
    return tag / f"{prefix}mp_rank_00_model_states.pt"


def fragments(
    numels: dict[str, int], low, high, pads: Iterable[int] = itertools.repeat(0)
) -> dict[str, tuple[int, int]]:
    """What of parameters, one after the other, is in a range of elements: how much of each, and where it starts."""
    at, found = 0, {}
    for (name, numel), pad in zip(numels.items(), pads, strict=False):
        first, last = max(at, low), min(at + numel, high)
        if first < last:
            found[name] = (last - first, first - low)
        at += numel + pad
    return found


def recut(tag, world):
    """Cut a stage-2 checkpoint of one rank for more ranks, by the rule of DeepSpeed."""
    only = optimizer_file(tag, 0)

    def cut(rank) -> Callable[[dict[str, Any]], None]:
        def change(content):
            z = content["optimizer_state_dict"]
            mappings = []
            for group, whole in enumerate(z["single_partition_of_fp32_groups"]):
                lengths = {name: a.numel for name, a in z["param_slice_mappings"][group].items()}
                total = sum(lengths.values())
                size = 2 * math.ceil(total / (2 * world))
                low, high = rank * size, (rank + 1) * size

                def part(flat, low=low, size=size, total=total) -> torch.Tensor:
                    padded = torch.zeros(size * world)
                    padded[:total] = flat[:total]
                    return padded[low : low + size].clone()

                padding = min(max(high - total, 0), size)
                z["single_partition_of_fp32_groups"][group] = part(whole)[: size - padding]
                state = z["base_optimizer_state"]["state"][group]
                for slot in ("exp_avg", "exp_avg_sq"):
                    state[slot] = part(state[slot])
                z["group_paddings"][group] = padding
                z["partition_count"][group] = world
                mappings.append({name: address(*at) for name, at in fragments(lengths, low, high).items()})
            z["param_slice_mappings"] = mappings
            z.pop("param_alignment_paddings", None)

        return change

    for rank in range(1, world):
        path = tag / only.name.replace("rank_0_", f"rank_{rank}_", 1)
        shutil.copy(only, path)
        edit(path, cut(rank))
    edit(only, cut(0))
    edit(model_file(tag), lambda content: content.update(dp_world_size=world))
