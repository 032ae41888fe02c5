"""The same logical state is equal and has one fingerprint, whatever format, stage and number of ranks it is kept in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from tests.pairwise import each

FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("deepspeed", {"world_size": 3, "stage": 1}),
    ("deepspeed", {"world_size": 1, "stage": 2}),
    ("deepspeed", {"world_size": 5, "stage": 3}),
    ("universal", {}),
    ("consolidated", {}),
    ("zckpt", {"world_size": 4}),
    ("dcp", {"world_size": 2}),
    ("zero-redundancy", {"world_size": 2}),
]

SOURCES = [
    "s1_fp32_dp4_sgdm",
    "s2_bf16_dp2_adagrad1g",
    "s2_bf16_dp2_client",
    "s2_bf16_dp2_frozengroup",
    "s2_bf16_dp2_rr",
    "s2_bf16_dp2_zerodim",
    "s2_bf16_dp4",
    "s2_fp16_dp2",
    "s3_bf16_dp3",
    "s1_bf16_dp2_empty",
    "hf_gpt2_s1_fp32_dp2",
]


@pytest.mark.parametrize(("name", "number"), each(SOURCES, range(len(FORMATS))))
@pytest.mark.every(3)
def test_every_format_and_world_size(name, number, tmp_path):
    source, target = FIXTURES / name, tmp_path / "target"
    to, options = FORMATS[number]
    zckpt.convert(source, target, to=to, **options)
    found = zckpt.diff(*((source, target) if number % 2 else (target, source)))
    assert [*found.changed, *found.only_in_a, *found.only_in_b, *found.settings, *found.warnings] == []
    assert found.equal
    assert found.num_parameters == len(list(zckpt.open(source).tensors()))
    assert zckpt.fingerprint(target).text == zckpt.fingerprint(source).text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tp2_s1_bf16_dp2", {"world_size": 3, "tensor_parallel_size": 1}),
        ("tp2_s2_fp32_dp2", {"world_size": 1}),
        ("moe_ep2_s2_fp32_dp4", {"world_size": 2}),
        ("moe_ep1_s2_bf16_dp2", {"world_size": 4, "expert_parallel_size": 4}),
        ("s2_bf16_dp2_palign", {"world_size": 7, "stage": 1, "parameter_alignment": False}),
        ("s2_bf16_dp2_elastic_fused", {"world_size": 11}),
        ("s1_bf16_dp2_bf16opt", {"world_size": 40}),
    ],
)
@pytest.mark.every(3)
def test_slices_experts_and_forms_cut_anew(name, options):
    zckpt.reshard(FIXTURES / name, "cut", **options)
    assert zckpt.diff(FIXTURES / name, "cut").equal
    assert zckpt.fingerprint("cut") == zckpt.fingerprint(FIXTURES / name)


@pytest.mark.parametrize(
    ("name", "to"),
    each(
        ["dcp_fsdp2_dp2", "dcp_fsdp2_dp2_2dtp", "zro_dp2_adamw", "zro_dp3_sgdm_1g", "plain_adamw"],
        ["consolidated", "zckpt", "dcp"],
    ),
)
@pytest.mark.every(2)
def test_what_other_programs_wrote(name, to):
    folder = FIXTURES / "other" / name
    source = folder / "ckpt" if (folder / "ckpt").exists() else folder / "ckpt.pt"
    zckpt.convert(source, "target", to=to)
    assert zckpt.diff(source, "target").equal
    assert zckpt.fingerprint("target") == zckpt.fingerprint(source)


def test_runs_of_other_ranks_are_one_training_within_a_tolerance_only():
    """DeepSpeed at 2 and at 4 ranks sums in another order."""
    a, b = FIXTURES / "s1_fp32_dp2", FIXTURES / "s1_fp32_dp1"
    exact = zckpt.diff(a, b)
    assert exact.changed
    assert not exact.equal
    assert exact.settings == []
    assert zckpt.diff(a, b, rtol=1e-2, atol=1e-3).equal
    assert zckpt.fingerprint(a) != zckpt.fingerprint(b)


def test_a_model_alone_lacks_the_optimizer():
    source = FIXTURES / "s2_bf16_dp2"
    zckpt.consolidate(source, "model.safetensors")
    found = zckpt.diff(source, "model.safetensors", ignore_metadata=True)
    assert found.changed == []
    assert {slot for _, slot in found.only_in_a} == {"exp_avg", "exp_avg_sq"}
    assert found.only_in_b == []
    assert zckpt.diff(source, "model.safetensors", slots=["weight", "master"], ignore_metadata=True).equal


def test_a_rounded_model_has_no_masters():
    source = FIXTURES / "s3_bf16_dp2"
    zckpt.consolidate(source, "model.safetensors", dtype="bfloat16")
    found = zckpt.diff("model.safetensors", source, slots=["weight", "master"], ignore_metadata=True)
    assert found.changed == []
    assert {slot for _, slot in found.only_in_b} == {"master"}
    assert zckpt.diff(source, "model.safetensors", slots=["weight"], ignore_metadata=True).equal


def test_names_that_torch_keeps_among_hyperparameters_are_members():
    named, other = (zckpt.open(FIXTURES / "s2_bf16_dp4") for _ in range(2))
    for group in named.param_groups:
        group.hyperparameters["param_names"] = list(group.parameters)
    assert zckpt.diff(named, other).equal
    named.param_groups[0].parameters.reverse()
    assert [one.key for one in zckpt.diff(named, other).settings] == ["param_groups[0].params"]


def test_a_scheduler_that_was_written_by_rule_is_none():
    source = FIXTURES / "s2_bf16_dp2"
    zckpt.convert(source, "state", to="accelerate")
    assert zckpt.diff(source, "state").equal
    state = torch.load("state/scheduler.bin")
    torch.save({**state, "last_epoch": 7}, "state/scheduler.bin")
    assert "metadata.scheduler.last_epoch" in [one.key for one in zckpt.diff(source, "state").settings]


def test_weights_of_the_masters_type_are_compared_as_they_round():
    """The Trainer has no masters besides the weights, so that a model of 16 bits is one of 32 there."""
    source = FIXTURES / "hf_llama_s2_bf16_dp2"
    zckpt.convert(source, "trainer", to="transformers-trainer", train_batch_size=2)
    found = zckpt.diff(source, "trainer", ignore_metadata=True)
    assert found.equal
    assert zckpt.diff("trainer", source, ignore_metadata=True).equal
    assert zckpt.fingerprint(source).text != zckpt.fingerprint("trainer").text
    copied = zckpt.open(source)
    one, other = (copied.parameters[f"model.layers.{number}.mlp.up_proj.weight"] for number in (0, 1))
    one.slots["weight"] = other.slots["weight"]
    changed = zckpt.diff(copied, "trainer", ignore_metadata=True).changed
    assert [(it.match.name, it.match.slot) for it in changed] == [(one.name, "weight")]
