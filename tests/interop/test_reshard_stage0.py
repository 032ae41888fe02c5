"""Stage 0 for other ranks: stock DeepSpeed goes on from there, with pipelines and experts, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.deepspeed_engine import Spec, resume, train
from tests.deepspeed_engine.catalogue import SPECS
from tests.deepspeed_engine.resume import LOSS_TOLERANCE
from tests.interop.test_reshard_pipeline import LAYERS, pipeline, sliced
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


@pytest.mark.parametrize(
    ("name", "world_size", "ranks"),
    [
        ("s0_bf16_dp2", 3, 3),
        ("pp2_s0_fp32_dp2", 1, 2),
        pytest.param("moe_ep2_s0_fp32_dp4", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_deepspeed_resumes_it(name: str, world_size: int, ranks: int, tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / name, tmp_path / "cut", world_size=world_size)
    verdict = resume(tmp_path / "cut", SPECS[name].at(ranks), FIXTURES / name)
    verdict.assert_goes_on(2e-3 if "moe" in name else verdict.loss_tolerance)


@pytest.mark.parametrize("dtype", some(["bf16"], ["fp32"]))
def test_slices_have_their_optimizer(dtype: str, tmp_path: Path) -> None:
    """Each tensor-parallel rank numbers its own slices; they are read as whole parameters, and resumed as slices."""
    spec = Spec("tp2_s0", model="megatron", tensor_parallel=2, stage=0, dtype=dtype, groups=2, universal_info=True,
                invariant=True, steps=2, steps_after=2)  # fmt: skip
    made = train(spec, tmp_path)
    assert_consolidated(made, Truth(made), tmp_path)
    assert not zckpt.open(made).warnings
    assert zckpt.verify(made, deep=True).sound
    zckpt.reshard(made, tmp_path / "cut", world_size=2, verify=True)
    verdict = resume(tmp_path / "cut", spec.at(4), made)
    assert verdict.ok, verdict


NAMES = [
    "0.weight", "1.mix.weight", "1.alpha", "1.norm.weight", "1.norm.bias", "1.mix.bias",
    "0.weight", "3.up.weight", "3.down.weight", "3.up.bias", "4.weight", "4.bias",
]  # fmt: skip
"""Of the model `pipeline` in two stages, with two param groups."""

SHORT = {"stage": 0, "steps": 3, "steps_after": 2}
SLICED = sliced("pp2_tp2_s0", 2, 2, dtype="fp16", **SHORT)
FLAT = pipeline("pp2_s0_flat", 2, 1, dtype="fp16", optimizer="fused", **SHORT)
NAMED = pipeline("pp2_s0_named", 2, 1, named=True, **SHORT)
BF16 = pipeline("pp2_s0_bf16", 2, 2, dtype="bf16", **SHORT)

REGROUPED = [
    (NAMED, {"world_size": 2, "pipeline_parallel_size": 1}),
    (FLAT, {"world_size": 2, "pipeline_parallel_size": 1}),
    (FLAT, {"world_size": 1, "pipeline_parallel_size": 3, "partition_method": "uniform"}),
    (pipeline("pp2_s0_fp16", 2, 1, dtype="fp16", **SHORT), {"world_size": 1, "stage_bounds": "0,2,4,6",
                                                                  "pipeline_layers": LAYERS}),
    (pipeline("pp2_s0_fp32", 2, 2, **SHORT), {"world_size": 1, "pipeline_parallel_size": 3, "names": NAMES,
                                             "partition_method": "uniform"}),
    (NAMED, {"world_size": 1, "pipeline_parallel_size": 3, "partition_method": "uniform"}),
    (SLICED, {"world_size": 1, "tensor_parallel_size": 1}),
    (SLICED, {"world_size": 2, "pipeline_parallel_size": 1}),
    (SLICED, {"world_size": 1, "pipeline_parallel_size": 1, "tensor_parallel_size": 4}),
    (BF16, {"world_size": 2, "pipeline_parallel_size": 1}),
    (BF16, {"world_size": 1, "pipeline_parallel_size": 3, "partition_method": "uniform"}),
]  # fmt: skip
"""Pipelines and slices of stage 0. With bf16, DeepSpeed has BF16_Optimizer there, and loads of it what ZeRO-1 saves."""


@pytest.mark.parametrize(
    ("spec", "options"),
    some(REGROUPED[:2], REGROUPED[2:]),
    ids=lambda one: one.name if isinstance(one, Spec) else "-".join(map(str, one.values()))[:40],
)
def test_deepspeed_resumes_other_stages_and_slices(
    spec: Spec, options: dict[str, Any], made: Callable[[Spec], Path], tmp_path: Path
) -> None:
    folder = made(spec)
    if "names" not in options:
        assert not zckpt.open(folder).warnings
        assert zckpt.verify(folder, deep=True).sound
    zckpt.reshard(folder, tmp_path / "cut", verify=True, **options)
    stages = 3 if "stage_bounds" in options else options.get("pipeline_parallel_size", spec.pipeline_parallel)
    degree = options.get("tensor_parallel_size", spec.tensor_parallel)
    ranks = options["world_size"] * stages * degree
    bf16 = {"stage": 1, "bf16_optimizer": True} if spec.dtype == "bf16" else {}
    resumed = spec.at(ranks, pipeline_parallel=stages, tensor_parallel=degree, **bf16)
    verdict = resume(tmp_path / "cut", resumed, folder)
    verdict.assert_goes_on(LOSS_TOLERANCE[spec.dtype])


@pytest.mark.nightly
def test_a_stage_in_float32_may_train_nothing(made: Callable[[Spec], Path], tmp_path: Path) -> None:
    spec, method = pipeline("pp2_s0_fp32", 2, 2, **SHORT), "type:(_Block|relu|_FeedForward)"
    folder = made(spec)
    zckpt.reshard(folder, tmp_path / "cut", verify=True, world_size=1, pipeline_parallel_size=3, names=NAMES,
                  partition_method=method, pipeline_layers=LAYERS)  # fmt: skip
    verdict = resume(tmp_path / "cut", spec.at(3, pipeline_parallel=3, partition_method=method), folder)
    verdict.assert_goes_on(2e-5)


def test_flat_masters_have_names_by_their_values(made: Callable[[Spec], Path], tmp_path: Path) -> None:
    spec = Spec("s0_flat", stage=0, dtype="fp16", optimizer="fused", world_size=1, steps=2, steps_after=1)
    folder = made(spec)
    assert_consolidated(folder, Truth(folder), tmp_path)
    assert not zckpt.open(folder).warnings
    names = [name for group in zckpt.open(folder).param_groups for name in group.parameters]
    assert [group.parameters for group in zckpt.open(folder, names=names).param_groups] == [
        group.parameters for group in zckpt.open(folder).param_groups
    ]
    with pytest.raises(zckpt.UsageError, match="is not what lies at element"):
        zckpt.open(folder, names=names[::-1])
    zckpt.convert(folder, tmp_path / "zero", to="deepspeed", world_size=2, stage=2, verify=True)
