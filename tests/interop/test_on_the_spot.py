"""Checkpoints that the real DeepSpeed engine writes here and now come out bit-equal to its live state."""

from __future__ import annotations

from typing import Any

import pytest

import zckpt
from tests.deepspeed_engine import Spec
from tests.interop.cut import small
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop

BATCH_OF_5 = 60

MEGATRON = {"model": "megatron", "world_size": 4, "tensor_parallel": 2, "universal_info": True, "groups": 2}
PIPELINE = {"model": "pipeline", "pipeline_parallel": 2, "groups": 2}


def short(name: str, **changes: Any) -> Spec:
    return Spec(name, **{"steps": 2, "steps_after": 0, **changes})


KEPT = [
    short("s2_dp3_amsgrad", world_size=3, optimizer="adam_amsgrad"),
    short("s2_dp3_elastic", world_size=3, elastic=True),
    short("s2_dp3_bf16master", world_size=3, bf16_master=True),
    short("s2_dp3_zerodim_fp32", world_size=3, dtype="fp32", zero_dim=True),
]
DTYPES = ("bf16", "fp32", "fp16")
MORE = [
    *(short(f"s{stage}_dp{ranks}", stage=stage, world_size=ranks, dtype=DTYPES[(stage + ranks) % 3],
            **({"batch": BATCH_OF_5} if ranks == 5 else {}))
      for stage in (1, 2, 3) for ranks in (1, 2, 3, 5, 12)),
    short("moe_ep2_dp4", model="moe", expert_parallel=2, world_size=4),
    short("moe_ep2_dp4_s1_fp32", model="moe", expert_parallel=2, world_size=4, stage=1, dtype="fp32"),
    short("moe_ep4_dp4", model="moe", expert_parallel=4, world_size=4),
    short("tp2_s2_fp32_dp2", **MEGATRON, dtype="fp32", universal_version=0.4),
    short("tp2_s1_dp3", **{**MEGATRON, "world_size": 6}, stage=1),
    short("tp2_s3_dp2", **MEGATRON, stage=3),
    short("pp2_s1_dp1", **PIPELINE, world_size=2, stage=1),
    short("pp2_s1_dp3_fp32", **PIPELINE, world_size=6, stage=1, dtype="fp32"),
    small("s1_dp3_empty", stage=1, empty=True),
    small("s3_dp3_subgroup", stage=3, sub_group_size=50),
    short("s2_dp3_rr_palign", world_size=3, round_robin=True, parameter_alignment=True),
    short("s0_dp3_fp32", stage=0, world_size=3, dtype="fp32"),
    short("s0_dp2_bf16", stage=0),
    short("s1_dp3_elastic", stage=1, world_size=3, elastic=True, optimizer="fused_layout"),
    short("s2_dp12_elastic_rr", world_size=12, elastic=True, round_robin=True),
    short("s1_dp12_bf16opt", stage=1, world_size=12, bf16_optimizer=True),
    short("s2_dp3_untied_1g", world_size=3, tied=False, groups=1),
]  # fmt: skip
"""Every stage at every number of ranks, and kinds of which others have the form, or a training that resumes."""


@pytest.mark.parametrize("spec", some(KEPT, MORE), ids=lambda spec: spec.name)
def test_what_deepspeed_writes_is_read_bit_for_bit(spec, made, tmp_path):
    folder = made(spec)
    output = tmp_path / "output"
    output.mkdir()
    assert_consolidated(folder / spec.run_folder, Truth(folder), output)
    opened = zckpt.open(folder / spec.run_folder)
    assert opened.step == 2
    if spec.stage:
        assert opened.topology.dp == spec.data_parallel
    assert opened.topology.tp == spec.tensor_parallel
    assert opened.topology.ep == spec.expert_parallel
