"""The checkpoints of `fixtures/` by name, as descriptions that make them again."""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from tests.deepspeed_engine.spec import Spec


def odd_client_state() -> dict[str, Any]:
    """Return what users have been seen to put into `client_state`: generators, arrays, namespaces, ..."""
    return {
        "epoch": 3,
        "consumed": np.int64(60),
        "rng": torch.Generator().manual_seed(0).get_state(),
        "np_rng": np.random.RandomState(0).get_state(),
        "py_rng": random.Random(0).getstate(),
        "args": argparse.Namespace(lr=0.1, name="x", fp=[1, 2.5]),
        "note": "na\u00efve \u2713",
        "arr": np.arange(6.0).reshape(2, 3),
        "dtype": torch.bfloat16,
        "dev": torch.device("cpu"),
        "od": OrderedDict(a=1),
        "none": None,
        "nested": {"t": torch.arange(3), "set": {1, 2}},
    }


def _flat(name: str, **changes: Any) -> Spec:
    """Read stage, dtype and data-parallel size from a name such as `s2_bf16_dp2_rr`."""
    stage, dtype, ranks = name.split("_")[:3]
    return Spec(name, stage=int(stage[1:]), dtype=dtype, world_size=int(ranks[2:]), **changes)


# fmt: off
_PLAIN = [
    "s0_bf16_dp2", "s0_fp16_dp2", "s0_fp32_dp2",
    "s1_bf16_dp2", "s1_bf16_dp4", "s1_fp32_dp1", "s1_fp32_dp2", "s1_fp32_dp3",
    "s2_bf16_dp1", "s2_bf16_dp2", "s2_bf16_dp3", "s2_bf16_dp4", "s2_fp16_dp2", "s2_fp32_dp2",
    "s2_fp32_dp4",
    "s3_bf16_dp2", "s3_bf16_dp3", "s3_bf16_dp4", "s3_fp16_dp2", "s3_fp32_dp2",
]
# fmt: on

_SPECIAL: dict[str, dict[str, Any]] = {
    "s1_bf16_dp2_bf16opt": {"bf16_optimizer": True},
    "s1_bf16_dp2_elastic": {"elastic": True},
    "s1_bf16_dp2_empty": {"empty": True},
    "s1_bf16_dp3_fused": {"optimizer": "fused_layout"},
    "s1_fp32_dp3_palign": {"parameter_alignment": True},
    "s1_fp32_dp4_sgdm": {"optimizer": "sgdm"},
    "s2_bf16_dp2_adagrad1g": {"optimizer": "adagrad", "groups": 1},
    "s2_bf16_dp2_bf16master": {"bf16_master": True},
    "s2_bf16_dp2_client": {"client_state": odd_client_state(), "scheduler": True, "clip": 1.0},
    "s2_bf16_dp2_cpuadam": {"offload": True, "optimizer": "cpuadam"},
    "s2_bf16_dp2_elastic": {"elastic": True},
    "s2_bf16_dp2_elastic_fused": {"elastic": True, "optimizer": "fused_layout"},
    "s2_bf16_dp2_frozengroup": {"frozen_in_group": True},
    "s2_bf16_dp2_lion": {"optimizer": "lion"},
    "s2_bf16_dp2_multitag": {"extra_tag_step": 3},
    "s2_bf16_dp2_palign": {"parameter_alignment": True},
    "s2_bf16_dp2_rr": {"round_robin": True},
    "s2_bf16_dp2_sgdm": {"optimizer": "sgdm"},
    "s2_bf16_dp2_ucinfo": {"universal_info": True},
    "s2_bf16_dp2_untied": {"tied": False},
    "s2_bf16_dp2_zerodim": {"zero_dim": True},
    "s3_bf16_dp2_frozengroup": {"frozen_in_group": True},
    "s3_bf16_dp2_fused": {"optimizer": "fused_layout"},
    "s3_bf16_dp2_nofrozen": {"exclude_frozen": True},
    "s3_bf16_dp2_persist": {"zero": {"stage3_param_persistence_threshold": 100_000}},
    "s3_bf16_dp2_sgdm": {"optimizer": "sgdm"},
    "s3_bf16_dp2_subgroup": {"sub_group_size": 100},
    "s3_bf16_dp2_untied": {"tied": False},
}

_MEGATRON: dict[str, Any] = {
    "model": "megatron", "world_size": 4, "tensor_parallel": 2, "universal_info": True,
    "groups": 2,  # DeepSpeed cannot load a universal checkpoint where a rank holds nothing of a group
}  # fmt: skip

_PIPELINE: dict[str, Any] = {"model": "pipeline", "world_size": 2, "pipeline_parallel": 2, "groups": 2}
_PIPELINE_MEGATRON = _PIPELINE | {"model": "pipeline_megatron", "world_size": 4}

_OTHERS = [
    Spec("moe_ep1_s2_bf16_dp2", model="moe"),
    Spec("moe_ep2_s2_bf16_dp2", model="moe", expert_parallel=2),
    Spec("moe_ep2_s2_fp32_dp4", model="moe", expert_parallel=2, dtype="fp32", world_size=4),
    Spec("moe_ep2_s0_bf16_dp2", stage=0, model="moe", expert_parallel=2, optimizer="sgdm", experts=2),
    Spec("moe_ep2_s0_fp32_dp4", stage=0, model="moe", expert_parallel=2, optimizer="lion", dtype="fp32", world_size=4),
    Spec("muon_s2_bf16_dp3", model="matrices", optimizer="muon", world_size=3),
    Spec("own_lamb_s2_fp32_dp2", optimizer="lamb", dtype="fp32"),
    Spec("own_blockwise_s3_fp32_dp2", stage=3, optimizer="blockwise", dtype="fp32"),
    Spec("hf_llama_s2_bf16_dp2", model="llama"),
    Spec("hf_gpt2_s1_fp32_dp2", model="gpt2", stage=1, dtype="fp32"),
    Spec("tp2_s1_bf16_dp2", stage=1, **_MEGATRON),
    Spec(
        "moe_tp2_ep2_s1_bf16_dp2",
        stage=1,
        expert_parallel=2,
        invariant=True,
        **_MEGATRON | {"model": "moe_megatron", "universal_info": False},
    ),
    Spec("tp2_s2_fp32_dp2", dtype="fp32", universal_version=0.4, **_MEGATRON),
    Spec("tp2_s3_bf16_dp2", stage=3, **_MEGATRON),
    Spec("pp2_s1_bf16_dp1", stage=1, **_PIPELINE),
    Spec("pp2_s1_fp32_dp2", stage=1, dtype="fp32", **_PIPELINE | {"world_size": 4}),
    Spec("pp2_tp2_s1_bf16_dp1", stage=1, universal_info=True, tensor_parallel=2, **_PIPELINE_MEGATRON),
    Spec("pp2_tp1_s1_fp32_dp2", stage=1, universal_info=True, dtype="fp32", **_PIPELINE_MEGATRON),
    Spec(
        "moe_pp2_ep2_s1_bf16_dp2",
        stage=1,
        expert_parallel=2,
        **_PIPELINE | {"model": "pipeline_moe", "world_size": 4, "steps": 2, "steps_after": 2},
    ),
    Spec("pp2_s0_fp32_dp2", stage=0, dtype="fp32", **_PIPELINE | {"world_size": 4}),
]

_TINY: dict[str, Any] = {"model": "tiny", "groups": 2, "steps": 2, "steps_after": 2}
_OF_VERSIONS = [
    Spec("tiny_s2_bf16_dp2", **_TINY),
    Spec("tiny_s3_fp32_dp2", stage=3, dtype="fp32", **_TINY),
]

LIGHTNING = Spec(
    "litsim_ds2", prefix="model", tag="checkpoint", run_folder="epoch=0-step=5.ckpt",
    client_state={
        "epoch": 0, "global_step": 5, "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1, "completed": 0}}}},
        "callbacks": {}, "lr_schedulers": [], "hparams_name": "kwargs", "hyper_parameters": {"lr": 0.01},
    },
)  # fmt: skip

SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        *map(_flat, _PLAIN),
        *(_flat(name, **changes) for name, changes in _SPECIAL.items()),
        *_OTHERS,
        *_OF_VERSIONS,
        LIGHTNING,
    )
}
