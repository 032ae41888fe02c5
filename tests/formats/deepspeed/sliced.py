"""A tensor-parallel checkpoint of ZeRO-2 as DeepSpeed lays it out, made by torch's own cutting, for any degree.

It holds every way of slicing, a padded vocabulary with a head tied to it, frozen parameters and a buffer. Values are
small whole numbers, so that a mean is exact.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

VOCABULARY, PADDED = 37, 40
STEP = 5

Part = tuple[int, ...]

# name -> shape of the whole, sliced dimension (None: every rank has it), its parts along that dimension
WAYS: dict[str, tuple[tuple[int, ...], int | None, Part]] = {
    "embedding.weight": ((PADDED, 6), 0, (PADDED,)),
    "layer.qkv.weight": ((28, 6), 0, (16, 8, 4)),
    "layer.qkv.bias": ((28,), 0, (16, 8, 4)),
    "layer.fused_columns.weight": ((5, 24), 1, (12, 8, 4)),
    "layer.three_d.weight": ((2, 24, 3), 1, (8, 8, 8)),
    "layer.swiglu.weight": ((16, 6), 0, (8, 8)),
    "layer.row.weight": ((7, 8), 1, (8,)),
    "layer.row.conv": ((5, 8, 3), 1, (8,)),
    "layer.row.bias": ((7,), None, ()),
    "layer.column.weight": ((12, 5), 0, (12,)),
    "layer.column.bias": ((12,), 0, (12,)),
    "layer.norm.weight": ((6,), None, ()),
    "layer.drifting.weight": ((6,), None, ()),
    "scale": ((), None, ()),
    "frozen.column": ((8, 3), 0, (8,)),
    "frozen.norm": ((3,), None, ()),
}
GROUPS = [
    ["embedding.weight", "layer.qkv.weight", "layer.fused_columns.weight", "layer.three_d.weight",
     "layer.swiglu.weight", "layer.row.weight", "layer.row.conv", "layer.column.weight"],
    ["layer.qkv.bias", "layer.row.bias", "layer.column.bias", "layer.norm.weight", "layer.drifting.weight", "scale"],
]  # fmt: skip
DRIFTING = "layer.drifting.weight"
TIED = {"head.weight": "embedding.weight"}

RULES: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCABULARY,
    "padded_vocab_size": PADDED,
    "vocabulary_parameter_patterns": [r"embedding\.weight$"],
    "tp_replicated_parameter_patterns": [r".*\.norm", r".*row\.bias$", "scale$"],
    "parameter_to_average_patterns": [r".*drifting"],
    "parameter_with_row_parallelism_patterns": [r"layer\.row\.(weight|conv)$"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu"],
    "parameter_with_sub_params": [
        {"patterns": [r"layer\.qkv\.weight$"], "shape": ((16, 8, 4), 6), "partition_dim": 0},
        {"patterns": [r"layer\.qkv\.bias$"], "shape": ((16, 8, 4),), "partition_dim": 0},
        {"patterns": [r"layer\.fused_columns"], "shape": (5, (12, 8, 4)), "partition_dim": 1},
        {"patterns": [r"layer\.three_d"], "shape": (2, 3, 3), "partition_dim": 1},
    ],
}

SLOTS = ("master", "exp_avg", "exp_avg_sq")


def whole(name, slot) -> torch.Tensor:
    """The whole parameter or slot; of one that drifts, rank 0's."""
    shape = WAYS[name][0]
    generator = torch.Generator().manual_seed(100 * list(WAYS).index(name) + ["weight", *SLOTS].index(slot))
    return torch.randint(-64, 64, shape, generator=generator).float() * 4


def local(name, slot, rank, degree) -> torch.Tensor:
    """What one rank of so many has."""
    _, dim, parts = WAYS[name]
    value = whole(name, slot)
    if name == DRIFTING:
        return value + 4 * rank
    if dim is None:
        return value
    return torch.cat([part.chunk(degree, dim)[rank] for part in value.split(parts, dim)], dim).contiguous()


def mean(slot, degree) -> torch.Tensor:
    """What becomes of the parameter that drifts."""
    return torch.stack([local(DRIFTING, slot, rank, degree) for rank in range(degree)]).mean(0)


def make(run, degree, dp, *, rules: dict[str, Any] | None = RULES) -> Path:
    """Write a run directory for so many tensor- and data-parallel ranks."""
    tag = run / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (run / "latest").write_text(tag.name)
    for rank in range(degree):
        torch.save(_model(rank, degree, dp, rules), tag / f"mp_rank_{rank:02d}_model_states.pt")
        for dp_rank in range(dp):
            name = f"zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save(_optimizer(rank, degree, dp_rank, dp), tag / name)
    return run


def _model(rank, degree, dp, rules: dict[str, Any] | None) -> dict[str, Any]:
    module = OrderedDict()
    for group in GROUPS:
        flat = torch.cat([local(name, "master", rank, degree).reshape(-1) for name in group])
        at = 0
        for name in group:
            value = local(name, "master", rank, degree)
            module[name] = flat[at : at + value.numel()].view(value.shape)
            at += value.numel()
    frozen = OrderedDict((n, local(n, "weight", rank, degree)) for n in WAYS if n.startswith("frozen"))
    module |= frozen
    module |= {alias: module[owner].view(module[owner].shape) for alias, owner in TIED.items()}
    module["counter"] = torch.tensor(7)
    content = {
        "module": module,
        "buffer_names": ["counter"],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, local(n, "master", rank, degree).shape) for n in g) for g in GROUPS],
        "frozen_param_shapes": OrderedDict((n, value.shape) for n, value in frozen.items()),
        "shared_params": dict(TIED) if rank == 0 else {},
        "frozen_param_fragments": frozen,
        "lr_scheduler": {"last": STEP},
        "skipped_steps": 0,
        "global_steps": STEP,
        "global_samples": 60,
        "dp_world_size": dp,
        "mp_world_size": degree,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": degree},
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
        "rng_state": torch.full((8,), rank, dtype=torch.uint8),
        "iteration": STEP,
    }
    return content if rules is None else content | {"universal_checkpoint_info": rules}


def _optimizer(rank, degree, dp_rank, dp) -> dict[str, Any]:
    masters, states, paddings = [], {}, []
    for index, group in enumerate(GROUPS):
        cut = {}
        for slot in SLOTS:
            flat = torch.cat([local(name, slot, rank, degree).reshape(-1) for name in group])
            size = 2 * math.ceil(flat.numel() / (2 * dp))
            padded = torch.nn.functional.pad(flat, (0, size * dp - flat.numel()))
            cut[slot] = padded[dp_rank * size : (dp_rank + 1) * size].clone()
        paddings.append(min(max((dp_rank + 1) * size - flat.numel(), 0), size))
        masters.append(cut.pop("master")[: size - paddings[-1]])
        states[index] = {"step": torch.tensor(float(STEP)), **cut}
    return {
        "optimizer_state_dict": {
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 0.0,
            "base_optimizer_state": {
                "state": states,
                "param_groups": [{"lr": lr, "params": [i]} for i, lr in enumerate((0.01, 0.02))],
            },
            "single_partition_of_fp32_groups": masters,
            "zero_stage": 2,
            "group_paddings": paddings,
            "partition_count": [dp] * len(GROUPS),
            "ds_version": "0.19.8",
        },
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }


def names() -> list[str]:
    """All trained parameters."""
    return list(itertools.chain(*GROUPS))
