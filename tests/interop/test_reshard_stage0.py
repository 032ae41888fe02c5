"""Stage 0 for other ranks: stock DeepSpeed goes on from there, with pipelines and experts, too."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from tests.deepspeed_engine import Spec
from tests.deepspeed_engine.catalogue import SPECS
from tests.deepspeed_engine.resume import LOSS_TOLERANCE
from tests.interop.cut import cut
from tests.interop.test_reshard_pipeline import LAYERS, pipeline, sliced
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


OF_FIXTURES = some(
    [cut(SPECS["s0_bf16_dp2"], 3), cut(SPECS["pp2_s0_fp32_dp2"], 1)], [cut(SPECS["moe_ep2_s0_fp32_dp4"], 2)]
)


@pytest.mark.parametrize("case", OF_FIXTURES, ids=str)
def test_deepspeed_resumes_it(case):
    within = 2e-3 if case.source.model == "moe" else LOSS_TOLERANCE[case.source.dtype]
    case.assert_goes_on(FIXTURES / case.source.name, Path("cut"), within)


NAMES = [
    "0.weight", "1.mix.weight", "1.alpha", "1.norm.weight", "1.norm.bias", "1.mix.bias",
    "0.weight", "3.up.weight", "3.down.weight", "3.up.bias", "4.weight", "4.bias",
]  # fmt: skip
"""Of the model `pipeline` in two stages, with two param groups."""

SHORT = {"stage": 0, "steps": 3, "steps_after": 2}
SLICED = sliced("pp2_tp2_s0", 2, 2, dtype="fp16", **SHORT)
FLAT = pipeline("pp2_s0_flat", 2, 1, dtype="fp16", optimizer="fused", **SHORT)
NAMED = pipeline("pp2_s0_named", 2, 1, named=True, **SHORT)
FP32 = pipeline("pp2_s0_fp32", 2, 2, **SHORT)
BF16 = pipeline("pp2_s0_bf16", 2, 2, dtype="bf16", **SHORT)

SLICES = Spec("tp2_s0", model="megatron", world_size=2, tensor_parallel=2, stage=0, groups=2, universal_info=True,
              invariant=True, steps=2, steps_after=2)  # fmt: skip
"""Each tensor-parallel rank numbers its own; they are read as whole parameters, and resumed as slices."""

OF_BF16 = {"stage": 1, "bf16_optimizer": True}
"""With bf16, DeepSpeed has BF16_Optimizer at stage 0 of pipelines, and loads of it what ZeRO-1 saves."""

THREE = {"pipeline_parallel_size": 3, "partition_method": "uniform"}
KEPT = [cut(NAMED, 2, pipeline_parallel_size=1), cut(SLICES, 2)]
REGROUPED = [
    cut(SLICES.at(2, name="tp2_s0_fp32", dtype="fp32"), 2),
    cut(FLAT, 2, pipeline_parallel_size=1),
    cut(FLAT, 1, **THREE),
    cut(pipeline("pp2_s0_fp16", 2, 1, dtype="fp16", **SHORT), 1, pipeline_parallel_size=3, stage_bounds="0,2,4,6",
        pipeline_layers=LAYERS),
    cut(FP32, 1, names=NAMES, **THREE),
    # a stage of float32 that trains nothing
    cut(FP32, 1, pipeline_parallel_size=3, partition_method="type:(_Block|relu|_FeedForward)", names=NAMES,
        pipeline_layers=LAYERS),
    cut(NAMED, 1, **THREE),
    cut(SLICED, 1, tensor_parallel_size=1),
    cut(SLICED, 2, pipeline_parallel_size=1),
    cut(SLICED, 1, pipeline_parallel_size=1, tensor_parallel_size=4),
    cut(BF16, 2, OF_BF16, pipeline_parallel_size=1),
    cut(BF16, 1, OF_BF16, **THREE),
]  # fmt: skip


@pytest.mark.parametrize("case", some(KEPT, REGROUPED), ids=str)
def test_deepspeed_resumes_other_stages_and_slices(case, made):
    folder = made(case.source)
    if "names" not in case.options:
        assert not zckpt.open(folder).warnings
        assert zckpt.verify(folder, deep=True).sound
    case.assert_goes_on(folder, Path("cut"), LOSS_TOLERANCE[case.source.dtype], verify=True)


def test_flat_masters_have_names_by_their_values(made):
    spec = Spec("s0_flat", stage=0, dtype="fp16", optimizer="fused", world_size=1, steps=2, steps_after=1)
    folder = made(spec)
    assert_consolidated(folder, Truth(folder))
    assert not zckpt.open(folder).warnings
    names = [name for group in zckpt.open(folder).param_groups for name in group.parameters]
    assert [group.parameters for group in zckpt.open(folder, names=names).param_groups] == [
        group.parameters for group in zckpt.open(folder).param_groups
    ]
    with pytest.raises(zckpt.UsageError, match="does not match element"):
        zckpt.open(folder, names=names[::-1])
    zckpt.convert(folder, "zero", to="deepspeed", world_size=2, stage=2, verify=True)
