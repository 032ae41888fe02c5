"""AutoEP: experts that DeepSpeed itself spreads are read as one tensor, and cut for other ranks; DeepSpeed goes on."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.deepspeed_engine import Spec, resume
from tests.deepspeed_engine.resume import LOSS_TOLERANCE
from tests.deepspeed_engine.universal import converted_by_deepspeed, resume_universal
from tests.gloo import WorkerError
from tests.pairwise import some
from tests.truth import Truth, assert_consolidated, assert_same
from zckpt.formats.deepspeed.axes.auto_ep import KEY, listed_layers
from zckpt.formats.deepspeed.target_groups import EXPERT_GROUP_NUMEL, expert_groups

pytestmark = pytest.mark.interop


def mixtral(name: str, world_size: int, degree: int, **changes: Any) -> Spec:
    known = {"dtype": "fp32", "stage": 2, "steps": 2, "steps_after": 2, **changes}
    return Spec(name, model="mixtral_of_4", world_size=world_size, config=spread(degree), **known)


def spread(degree: int) -> dict[str, Any]:
    return {
        "expert_parallel": {
            "enabled": True, "autoep_size": degree, "preset_model": "mixtral", "use_grouped_mm": False,
        }
    }  # fmt: skip


TWO = mixtral("autoep2_s2_fp32_dp2", 2, 2)
FOUR = mixtral("autoep2_s1_bf16_dp4", 4, 2, dtype="bf16", stage=1)
NONE = mixtral("autoep2_s0_bf16_dp2", 2, 2, dtype="bf16", stage=0)
CUT = mixtral("autoep2_s3_fp32_dp2", 2, 2, stage=3)
SHARDS = mixtral("autoep2_s3_bf16_dp4", 4, 2, dtype="bf16", stage=3, sub_group_size=2000)
FLOATS = mixtral("autoep2_s0_fp32_dp4", 4, 2, stage=0)
FLAT = mixtral("autoep2_s0_flat_dp2", 2, 2, dtype="bf16", stage=0, optimizer="fused")


OVER = [
    *((TWO, None, *cut) for cut in ((2, 1), (2, 2), (4, 4))),
    *((FOUR, None, *cut) for cut in ((2, 2), (2, 1), (4, 4))),
    *((CUT, None, *cut) for cut in ((2, 1), (2, 2), (4, 4), (4, 1))),
    *((SHARDS, None, *cut) for cut in ((2, 2), (2, 1), (4, 2), (4, 4))),
    (TWO, 3, 4, 4), (FOUR, 3, 2, None), (CUT, 1, 4, 4), (SHARDS, 2, 2, 1),
]  # fmt: skip
named = partial(pytest.mark.parametrize, ids=lambda one: getattr(one, "name", str(one)))


@named(("spec", "stage", "world_size", "degree"), some([(TWO, 3, 2, 1)], OVER))
def test_deepspeed_resumes_experts_over_other_ranks(spec, stage, world_size, degree, made):
    """DeepSpeed loads under ZeRO-3 only what lists its sub-groups and the ranks that share each as it has them itself;
    files by themselves under ZeRO-1 and 2 become sub-groups under ZeRO-3, and the other way round.
    """
    folder, options = made(spec), {} if stage is None else {"stage": stage}
    zckpt.reshard(folder, "cut", world_size=world_size, expert_parallel_size=degree, verify=True, **options)
    assert zckpt.diff(folder, "cut").equal
    assert zckpt.verify("cut", deep=True).sound
    assert zckpt.open("cut").topology.ep == (degree or 2)
    verdict = resume("cut", spec.at(world_size, config=spread(degree or 2), **options), folder)
    verdict.assert_goes_on(LOSS_TOLERANCE[spec.dtype])


@pytest.mark.nightly
def test_engines_load_in_place_what_spreads_experts_as_they_do(made):
    """DeepSpeed by itself loads the moments of other experts without a word where the degree alone is another."""
    folder = made(TWO)
    verdict = resume(folder, TWO, folder, in_place=True)
    assert verdict.differences == []
    assert verdict.loss_difference == 0
    for world_size, degree in ((2, 1), (4, 2)):
        with pytest.raises(
            WorkerError, match=f"on {world_size} data-parallel ranks, experts over {degree}, found deepspeed on 2"
        ):
            resume(folder, TWO.at(world_size, config=spread(degree)), folder, in_place=True)


def test_experts_are_one_tensor(made):
    folder = made(TWO)
    assert_consolidated(folder, Truth(folder))
    assert zckpt.verify(folder, deep=True).sound
    checkpoint = zckpt.open(folder)
    assert checkpoint.topology.ep == 2
    assert checkpoint.parameters["model.layers.1.mlp.experts.w2"].shape == (4, 16, 24)
    zckpt.convert(folder, "dcp", to="dcp", verify=True)
    assert zckpt.diff(folder, "dcp").equal
    for options in ({"round_robin": True}, {"parameter_alignment": True}):
        with pytest.raises(zckpt.UnsupportedError, match="experts"):
            zckpt.reshard(folder, "cut", world_size=2, **options)


def assert_read(folder, master, degree):
    checkpoint, truth = zckpt.open(folder), Truth(folder)
    assert (checkpoint.topology.ep, checkpoint.warnings, checkpoint.unnamed) == (degree, [], {})
    assert set(checkpoint.parameters) == {*truth.weights, *truth.tied}
    for slot, expected in [(master, truth.masters), *((slot, truth.kind(slot)) for slot in truth.slots)]:
        for name, value in expected.items():
            assert_same(checkpoint.read(name, slot), value, f"{slot}/{name}")
    assert zckpt.verify(folder, deep=True).sound
    zckpt.convert(folder, "dcp", to="dcp", verify=True)
    assert zckpt.diff(folder, "dcp").equal


@pytest.mark.parametrize(("world_size", "degree"), some([(2, 2)], [(4, 2)]), ids=str)
def test_experts_under_zero3_are_read(world_size, degree, made):
    """Each rank shares its experts with fewer ranks than all else; routers have a second name that no file lists."""
    folder = made(mixtral(f"autoep{degree}_s3_fp32_dp{world_size}", world_size, degree, stage=3))
    assert_read(folder, "master", degree)
    with pytest.raises(zckpt.UsageError, match="cannot be spread over 3"):
        zckpt.reshard(folder, "cut", world_size=3, expert_parallel_size=3)


@named("spec", some([NONE], [FLOATS, FLAT]))
def test_experts_without_zero_are_resumed_on_other_ranks(spec, made):
    """Each expert rank has an optimizer file of its own; DeepSpeed puts routers and experts after all else in it."""
    folder = made(spec)
    assert_read(folder, "master" if spec.dtype == "bf16" else "weight", 2)
    zckpt.reshard(folder, "cut", world_size=4, verify=True)
    verdict = resume("cut", spec.at(4, config=spread(2)), folder)
    verdict.assert_goes_on(LOSS_TOLERANCE[spec.dtype])


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("expp_rank_1_*", "optimizer files of expert ranks are missing"),
        ("expp_rank_*", "no optimizer files of expert ranks"),
        ("layer_1_expert_3_*", "weights of all experts of model.layers.1.mlp.experts.w1"),
    ],
)
def test_a_lost_file_of_experts_without_zero_is_named(lost, message, made):
    run = Path(shutil.copytree(made(NONE), "run"))
    for path in run.glob(f"*/{lost}"):
        path.unlink()
    with pytest.raises(zckpt.ShardError, match=message):
        zckpt.open(run)


@named(
    ("spec", "stage", "world_size", "degree"),
    some([(CUT, 2, 2, None)], [(TWO, 3, 2, 1), (CUT, 1, 4, 4), (CUT, 3, 4, 4), (NONE, 1, 2, None), (NONE, 3, 4, 2)]),
)
def test_deepspeed_resumes_experts_from_another_format(spec, stage, world_size, degree, made):
    folder = made(spec)
    zckpt.convert(folder, "dcp", to="dcp")
    cut = {"stage": stage, "world_size": world_size, "expert_parallel_size": degree}
    zckpt.convert("dcp", "back", to="deepspeed", verify=True, **cut)
    assert zckpt.verify("back", deep=True).sound
    assert zckpt.open("back").topology.ep == (degree or 2)
    if spec.dtype == "fp32":
        assert zckpt.diff(folder, "back").equal
    verdict = resume("back", spec.at(world_size, stage=stage, config=spread(degree or 2)), folder)
    verdict.assert_goes_on(LOSS_TOLERANCE[spec.dtype])


@named("spec", some([TWO], [FOUR, CUT, SHARDS]))
def test_deepspeeds_own_universal_checkpoint_of_experts_is_read(spec, made):
    """Its folders have all experts, its model file the shapes of one rank's, and a shortened list of layers."""
    folder = made(spec)
    theirs = converted_by_deepspeed(folder / "global_step2", Path("theirs"))
    found = zckpt.diff(folder, theirs)
    assert (found.changed, found.only_in_a, found.only_in_b) == ([], [], [])
    assert zckpt.verify(theirs, deep=True).sound
    for stage in (2, 3):
        zckpt.convert(theirs, f"s{stage}", to="deepspeed", stage=stage, world_size=2, verify=True,
                      expert_parallel_size=2)  # fmt: skip
        assert zckpt.open(f"s{stage}").topology.ep == 2


@named(
    ("spec", "stage", "world_size", "degree"),
    some([(TWO, 2, 2, 1)], [(TWO, 3, 2, 2), (SHARDS, 1, 2, 2), (CUT, 2, 4, 4)]),
)
def test_deepspeed_loads_experts_from_a_universal_checkpoint(spec, stage, world_size, degree, made, tmp_path):
    folder = made(spec)
    written = zckpt.convert(folder, tmp_path / "step_u", to="universal", verify=True)
    assert not any("AutoEP" in note for note in written.notes)
    (tmp_path / "latest_universal").write_text("step_u")
    target = spec.at(world_size, stage=stage, config=spread(degree))
    verdict = resume_universal(tmp_path, target, folder, own_steps=stage == 3)
    verdict.assert_goes_on(LOSS_TOLERANCE[spec.dtype])


def test_experts_that_are_listed_under_other_names_are_refused(made):
    zckpt.convert(made(CUT), "dcp", to="dcp", add_prefix="net.")
    with pytest.raises(zckpt.UnsupportedError, match="but DeepSpeed's list of their layers"):
        zckpt.convert("dcp", "back", to="deepspeed", world_size=2, stage=2)


def test_layers_are_listed_as_deepspeed_lists_them(made):
    folder = made(TWO)
    zckpt.reshard(folder, "same", world_size=2)
    (old, new) = (
        torch.load(root / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
        for root in (folder, Path("same"))
    )
    for key in ("ds_autoep_layers", "universal_checkpoint_info", "param_shapes"):
        assert old[key] == new[key]
    (model, *_) = zckpt.open(folder).origin.ranks[0].model_files
    (layer, _) = listed_layers(model, {"model.layers.0.mlp.experts": (4, 0, 0)}, 8)[KEY]
    assert isinstance(layer, dict)
    assert (layer["num_local_experts"], layer["expert_data_parallel_world_size"]) == (1, 2)
    assert [one["experts"] for one in layer["expert_placement"]["ranks"]] == [[0], [1], [2], [3]]


def test_experts_of_a_rank_go_into_a_group_together():
    third = EXPERT_GROUP_NUMEL // 3
    assert expert_groups([third] * 4) == [[0, 1, 2], [3]]
    assert expert_groups([2 * third] * 2) == [[0], [1]]
