"""What `reshard` writes, stock DeepSpeed loads at the new number of ranks as if that many had saved it.

Neither universal loading nor DeepSpeed's elastic option has a part in this. The model starts from another seed, so
every master, slot, weight, step and hyperparameter that is right was loaded; they are compared bit for bit, and that
is the exact comparison. The losses of the steps that follow are compared as well, within the tolerances of `cut`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.deepspeed_engine import resume
from tests.deepspeed_engine.catalogue import odd_client_state
from tests.interop.cut import TOLERANCE, cut, small, spec
from tests.pairwise import some
from zckpt.formats.deepspeed.axes.stages import balanced, uniform

pytestmark = pytest.mark.interop

S1 = spec("s1_bf16", stage=1)
S1_FP32 = spec("s1_fp32", stage=1, dtype="fp32")
S2 = spec("s2_bf16")
S2_FP32 = spec("s2_fp32", dtype="fp32")
S3 = spec("s3_bf16", stage=3)
S3_FP32 = spec("s3_fp32", stage=3, dtype="fp32")
S3_FP16 = spec("s3_fp16", stage=3, dtype="fp16")
ROUND_ROBIN = small("s2_rr", round_robin=True)
ALIGNED = small("s2_palign", parameter_alignment=True)

CASES = [
    cut(small("s2_fp16", dtype="fp16"), 2),
    cut(small("s2_frozengroup", frozen_in_group=True), 2, stage=3),
    cut(small("s3_subgroup", stage=3, sub_group_size=50), 2, stage=1),
    # nothing is padded, so that DeepSpeed's slice mappings are wrong as without alignment
    cut(small("llama_rr_palign", model="llama", round_robin=True, parameter_alignment=True), 2),
    cut(small("s1_bf16opt_rr", stage=1, bf16_optimizer=True, round_robin=True), 2),
    cut(small("s2_client", client_state=odd_client_state(), scheduler=True, clip=1.0), 2),
]
MORE = [
    # ranks and element types
    *(cut(S2, world) for world in (1, 2, 3, 6, 12)),
    *(cut(S3, world) for world in (1, 3, 6, 12)),
    *(cut(S1_FP32, world) for world in (1, 3, 6)),
    *(cut(S3_FP32, world) for world in (1, 2, 6)),
    cut(S3_FP16, 3),
    cut(spec("s3_dp12", stage=3, world_size=12), 4),
    # stages
    cut(S1, 3, stage=2),
    cut(S1_FP32, 6, stage=3),
    cut(S2_FP32, 2, stage=1),
    cut(S3_FP32, 3, stage=2),
    cut(S3_FP32, 4, stage=1),
    cut(small("s3_bf16", stage=3), 2, stage=1),
    # optimizers
    cut(small("s2_adagrad", optimizer="adagrad", groups=1), 2),
    *(cut(small(f"s2_{kind}", optimizer=kind), 2) for kind in ("sgdm", "lion", "fused_layout")),
    *(cut(small(f"s3_{kind}", stage=3, optimizer=kind), 2) for kind in ("sgdm", "lion", "fused_layout")),
    cut(spec("s3_sgdm_fp32", stage=3, dtype="fp32", optimizer="sgdm"), 6),
    cut(small("s2_fused_layout", optimizer="fused_layout"), 2, stage=3),
    # order and alignment: kept, switched on, switched off
    cut(ROUND_ROBIN, 4),
    cut(ROUND_ROBIN, 2, round_robin=False),
    cut(ALIGNED, 2),
    cut(ALIGNED, 6, parameter_alignment=False),
    cut(small("s1_rr_palign", stage=1, round_robin=True, parameter_alignment=True), 2),
    cut(S2, 3, round_robin=True),
    cut(S2, 3, parameter_alignment=True),
    cut(S2_FP32, 3, parameter_alignment=True, round_robin=True),
    # other forms, odd parameters
    *(cut(small("s1_bf16opt", stage=1, bf16_optimizer=True), world) for world in (2, 6)),
    cut(small("s1_bf16opt_palign", stage=1, bf16_optimizer=True, parameter_alignment=True), 6),
    cut(small("s3_frozengroup", stage=3, frozen_in_group=True), 2),
    cut(small("s3_subgroup", stage=3, sub_group_size=50), 2),
    cut(small("s1_empty", stage=1, empty=True), 2),
    cut(small("s2_untied", tied=False), 2),
    cut(small("s2_zerodim", zero_dim=True), 2, stage=1),
    cut(small("s3_client", stage=3, client_state=odd_client_state(), scheduler=True, clip=1.0), 4),
]


@pytest.mark.parametrize("case", some(CASES, MORE), ids=str)
def test_deepspeed_resumes_what_was_resharded(case, made, tmp_path):
    assert not case.resumed.elastic
    assert "checkpoint" not in case.resumed.config
    case.assert_goes_on(made(case.source), tmp_path / "cut")


def test_stages_one_after_the_other_lose_nothing(made, tmp_path):
    """1 -> 2 -> 3 -> 1, each at another number of ranks, and DeepSpeed resumes the last."""
    source = small("s1_fp32", stage=1, dtype="fp32")
    at = folder = made(source)
    for number, (stage, world_size) in enumerate([(2, 4), (3, 6), (1, 2)]):
        zckpt.reshard(at, tmp_path / str(number), world_size=world_size, stage=stage)
        at = tmp_path / str(number)
    resume(at, source.at(2), folder).assert_goes_on(TOLERANCE["fp32"])


@given(st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 10**9)), min_size=1, max_size=14),
       st.integers(1, 8))  # fmt: skip
def test_stages_have_the_bounds_that_deepspeed_gives_them(weights, stages):
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    assert balanced(weights, stages) == tuple(int(n) for n in partition_balanced(weights, stages))
    assert uniform(len(weights), stages) == tuple(int(n) for n in partition_uniform(len(weights), stages))
