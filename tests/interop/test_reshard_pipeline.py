"""Pipelines that `reshard` deals to other stages, slices and data-parallel ranks: stock DeepSpeed goes on from there.

Compared as in `test_reshard_parallel`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import zckpt
from tests.deepspeed_engine import Spec, resume
from tests.interop.cut import TOLERANCE, Cut, cut
from tests.pairwise import some
from tests.truth import Truth, assert_same

pytestmark = pytest.mark.interop

LAYERS = "Embedding=embed,_Block,relu,_FeedForward,LayerNorm,Embedding=embed"
"""Of the model `pipeline`."""


def pipeline(name: str, stages: int, dp: int = 1, **changes: Any) -> Spec:
    known = {"model": "pipeline", "stage": 1, "groups": 2, "steps": 3, "steps_after": 2, "dtype": "fp32"}
    ranks = stages * dp * changes.get("tensor_parallel", 1)
    return Spec(name, **{**known, "pipeline_parallel": stages, "world_size": ranks, **changes})


def sliced(name: str, stages: int, degree: int, **changes: Any) -> Spec:
    return pipeline(name, stages, model="pipeline_megatron", tensor_parallel=degree, universal_info=True,
                    invariant=True, **changes)  # fmt: skip


def to(source: Spec, world_size: int, stages: int, method: str = "uniform", **options: Any) -> Cut:
    return cut(source, world_size, pipeline_parallel_size=stages, partition_method=method, **options)


def with_experts(stages: int, degree: int, **changes: Any) -> Spec:
    name = "_".join([f"pp{stages}", f"ep{degree}", *map(str, changes.values())])
    return pipeline(name, stages, 2, model="pipeline_moe", expert_parallel=degree,
                    **changes)  # fmt: skip


def with_sliced_experts(dp: int, degree: int, **changes: Any) -> Spec:
    name = "_".join(["pp2_tp2", f"dp{dp}", f"ep{degree}", *map(str, changes)])
    return pipeline(name, 2, dp, model="pipeline_moe_megatron", tensor_parallel=2, expert_parallel=degree,
                    invariant=True, **changes)  # fmt: skip


TWO = pipeline("pp2", 2, 2)
BY_WEIGHT = pipeline("pp2_parameters", 2, partition_method="parameters")
BY_BIG_WEIGHT = sliced("pp2_tp1_parameters", 2, 1, partition_method="parameters")
SLICED = sliced("pp2_tp2", 2, 2)

MEGATRON_LAYERS = "Embedding=embed,Layer*2,LayerNorm,Embedding=embed"
SLICED_EXPERT_LAYERS = "Embedding=embed,_Experts,Layer,_Experts,LayerNorm,Embedding=embed"
ONE_GROUP = pipeline("pp2_one_group", 2, 2, groups=1)
EXPERT_LAYERS = "Embedding=embed,_Experts,_FeedForward,_Experts,LayerNorm,Embedding=embed"

SLICED_BF16 = sliced("pp2_tp2_bf16", 2, 2, dtype="bf16")
FEW = [to(TWO, 1, 3), cut(SLICED_BF16, 1, tensor_parallel_size=1)]

MANY = [
    cut(SLICED_BF16, 3),
    *(cut(TWO, ranks) for ranks in (1, 3)),
    cut(TWO, 2, pipeline_parallel_size=1),
    to(TWO, 2, 3),
    to(TWO, 1, 2, "parameters", pipeline_layers=LAYERS),
    to(TWO, 1, 3, "type:_feed|block|norm", pipeline_layers=LAYERS),
    cut(TWO, 1, pipeline_parallel_size=3, stage_bounds="0,2,4,6", pipeline_layers=LAYERS),
    to(BY_WEIGHT, 1, 3, "uniform", pipeline_layers=LAYERS),
    to(BY_WEIGHT, 2, 2, "type:_feed|norm", pipeline_layers=LAYERS),
    to(BY_BIG_WEIGHT, 2, 3, "parameters"),
    to(pipeline("pp1", 1), 1, 2, pipeline_layers=LAYERS),
    to(pipeline("pp1", 1), 2, 3, pipeline_layers=LAYERS),
    to(pipeline("pp3", 3), 2, 2),
    cut(pipeline("pp3", 3), 1, pipeline_parallel_size=1),
    to(pipeline("pp2_bf16", 2, 2, dtype="bf16"), 1, 3),
    to(pipeline("pp2_fp16", 2, 2, dtype="fp16"), 2, 3),
    to(pipeline("pp2_bf16opt", 2, 2, dtype="bf16", bf16_optimizer=True), 1, 3),
    to(pipeline("pp2_sgdm", 2, 2, optimizer="sgdm"), 1, 3),
    to(pipeline("pp2_elastic", 2, 2, elastic=True, optimizer="fused_layout"), 2, 2),
    cut(SLICED, 2, tensor_parallel_size=1),
    cut(SLICED, 1, tensor_parallel_size=4),
    cut(SLICED, 1, tensor_parallel_size=1, pipeline_parallel_size=1),
    cut(SLICED, 2, pipeline_parallel_size=1),
    cut(with_experts(2, 2), 1, expert_parallel_size=1),
    cut(with_experts(2, 2), 4, expert_parallel_size=2, pipeline_parallel_size=1),
    cut(with_experts(2, 2, dtype="bf16"), 3, expert_parallel_size=1),
    cut(with_experts(2, 2, stage=0), 4),
    to(with_experts(1, 2), 2, 2, pipeline_layers=EXPERT_LAYERS),
    *(cut(with_sliced_experts(1, 2), 2, expert_parallel_size=degree) for degree in (1, 4)),
    cut(with_sliced_experts(1, 2), 1, pipeline_parallel_size=1),
    cut(with_sliced_experts(2, 2), 1, tensor_parallel_size=1, expert_parallel_size=1),
    cut(with_sliced_experts(2, 2, sliced_experts=True), 1, expert_parallel_size=1, tensor_parallel_size=1,
        pipeline_parallel_size=1),
    to(sliced("pp1_tp4", 1, 4), 1, 2, tensor_parallel_size=2, pipeline_layers=MEGATRON_LAYERS),
]  # fmt: skip
ELSEWHERE = [
    to(TWO, 1, 2, through="dcp", pipeline_layers=LAYERS),
    to(TWO, 1, 3, through="consolidated", pipeline_layers=LAYERS),
    to(with_experts(2, 2), 2, 2, through="zckpt", pipeline_layers=EXPERT_LAYERS),
    to(with_experts(2, 2), 1, 2, through="universal", pipeline_layers=EXPERT_LAYERS, expert_parallel_size=1),
    to(SLICED, 1, 2, through="dcp", pipeline_layers=MEGATRON_LAYERS, tensor_parallel_size=4),
    to(with_sliced_experts(1, 2), 1, 2, through="consolidated", pipeline_layers=SLICED_EXPERT_LAYERS,
       tensor_parallel_size=2, expert_parallel_size=2),
    # weights before biases, back to the stages that had them
    *(to(ONE_GROUP, 3, 2, through=form, pipeline_layers=LAYERS) for form in ("dcp", "universal")),
]  # fmt: skip


@pytest.mark.parametrize("case", some(FEW, MANY + ELSEWHERE), ids=str)
def test_deepspeed_resumes_pipelines(case, made):
    case.assert_goes_on(made(case.source), Path("cut"))


RECOMPUTED = [
    cut(pipeline("pp2_recomputed", 2, 1, dtype="bf16", recomputed=True), 2, pipeline_parallel_size=1),
    cut(pipeline("s3_recomputed", 1, 2, model="unstaged", stage=3, recomputed=True), 1),
    cut(pipeline("s2_recomputed", 1, 2, model="unstaged", stage=2, recomputed=True), 3),
    cut(pipeline("s1_recomputed", 1, 2, model="unstaged", recomputed=True), 1, stage=2),
]
"""Modules in torch's `checkpoint_wrapper`, which DeepSpeed lists under other names than state dicts have."""


@pytest.mark.parametrize("case", some(RECOMPUTED[:2], RECOMPUTED[2:]), ids=str)
def test_wrapped_modules_have_weights_and_masters_under_one_name(case, made):
    folder = made(case.source)
    checkpoint, truth = zckpt.open(folder), Truth(folder)
    assert {*checkpoint.parameters} == {name.replace("_checkpoint_wrapped_module.", "") for name in truth.weights}
    for name, expected in truth.masters.items():
        assert_same(checkpoint.read(name.replace("_checkpoint_wrapped_module.", ""), "master"), expected, name)
    case.assert_goes_on(folder, Path("cut"), verify=True)
    zckpt.convert(folder, "dcp", to="dcp", verify=True)
    assert zckpt.diff(folder, "dcp").equal


UNSTAGED = [("tied_modules.embed.*", "embed.*"), ("1.*", "block.*"), ("3.*", "feed.*"), ("4.*", "norm.*")]


PLAIN_BF16 = pipeline("pp2_bf16opt", 2, 2, dtype="bf16", bf16_optimizer=True)


@pytest.mark.parametrize(
    ("source", "verb", "ranks", "options"),
    some(
        [(TWO, zckpt.convert, 2, {"to": "deepspeed", "stage": 2})],
        [(TWO, zckpt.convert, 1, {"to": "deepspeed", "stage": 3}), (PLAIN_BF16, zckpt.reshard, 3, {})],
    ),
    ids=lambda one: getattr(one, "name", None),
)
def test_deepspeed_resumes_one_model_from_a_pipeline(source, verb, ranks, options, made):
    """With the optimizer that it had, where no other is asked for."""
    folder = made(source)
    with pytest.raises(zckpt.UnsupportedError, match="--rename"):
        verb(folder, Path("one"), world_size=ranks, rename=UNSTAGED[1:], **options)
    verb(folder, Path("one"), world_size=ranks, rename=UNSTAGED, verify=True, **options)
    one = zckpt.open("one")
    assert one.topology.pp == 1
    assert bool(one.details.get("bf16_optimizer")) == source.bf16_optimizer
    truth, stage = renamed_truth(folder, Path("truth")), options.get("stage", source.stage)
    verdict = resume("one", source.at(ranks, model="unstaged", stage=stage, pipeline_parallel=1), truth)
    verdict.assert_goes_on(TOLERANCE[source.dtype])


def renamed_truth(folder: Path, target: Path) -> Path:
    """Write the truth about a pipeline under the names that one model has."""
    target.mkdir()
    shutil.copy(folder / "truth.json", target)
    patterns = [(old.removesuffix("*"), new.removesuffix("*")) for old, new in UNSTAGED]
    tensors = {}
    for key, value in load_file(folder / "truth.safetensors").items():
        kind, _, name = key.partition("/")
        name = next((new + name.removeprefix(old) for old, new in patterns if name.startswith(old)), name)
        tensors[f"{kind}/{name}"] = value
    save_file(tensors, target / "truth.safetensors")
    return target


def test_recomputed_layers_of_bf16_optimizer_without_zero_have_their_shapes(made):
    """Its files have names with the wrapper and numbers of elements, the layers' have shapes and names without it."""
    folder = made(pipeline("pp2_s0_recomputed", 2, stage=0, dtype="bf16", recomputed=True, steps=1))
    found, truth = zckpt.open(folder), Truth(folder).tensors
    wrapped = [key for key in truth if "_checkpoint_wrapped_module" in key and key.startswith("fp32/")]
    assert wrapped
    for key in wrapped:
        name = key.removeprefix("fp32/").replace("_checkpoint_wrapped_module.", "")
        assert_same(found.read(name, "master"), truth[key], key)
