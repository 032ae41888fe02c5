"""Checkpoints that DeepSpeed wrote, mapped with all of their state into other formats, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import FIXTURES, succeeded
from tests.pairwise import each
from tests.test_imports import commands_without
from tests.truth import Truth, assert_same

LLAMA = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"n_head": 2, "n_embd": 16}

SOURCES = {
    "hf_llama_s2_bf16_dp2": (
        LLAMA,
        ("llama-huggingface-meta", "llama-huggingface-megatron", "llama-huggingface-megatron-dist"),
    ),
    "hf_gpt2_s1_fp32_dp2": (GPT2, ("gpt2-huggingface-megatron",)),
}
WAYS = {
    "dcp": {"world_size": 3},
    "universal": {},
    "deepspeed": {"world_size": 3, "stage": 3},
    "zckpt": {"world_size": 2},
}


@pytest.mark.parametrize(
    ("mapped", "to"), each([(name, one) for name, (_, maps) in SOURCES.items() for one in maps], WAYS)
)
@pytest.mark.every(2)
def test_all_state_is_mapped_and_comes_back(mapped, to):
    name, map_ = mapped
    source, config = FIXTURES / name, {**SOURCES[name][0], "padded_vocab_size": 80, "vocab_size": 67}
    how = {"map": map_, "map_config": config}
    done = zckpt.convert(source, "there", to=to, verify=True, **how, **WAYS[to])
    assert done.verified > 0
    assert zckpt.diff(source, "there", ignore_metadata=True, **how).equal
    zckpt.convert("there", "back", to="zckpt", verify=True, **how)
    assert zckpt.diff(source, "back", ignore_metadata=True).equal
    same = zckpt.diff(source, "back")
    assert not [one for one in same.settings if "param_groups" in one.key or one.key == "step"]


@pytest.mark.parametrize(
    "name",
    ["s3_bf16_dp3", "tp2_s1_bf16_dp2", "moe_ep2_s2_bf16_dp2", "s2_bf16_dp2_sgdm", "s2_bf16_dp4", "s1_fp32_dp4_sgdm"],
)
@pytest.mark.every(3)
def test_every_matrix_of_a_checkpoint_is_transposed_and_transposed_back(name):
    """However it is cut: shards of ZeRO-3, slices and means of tensor parallelism, experts, ties, frozen parameters."""
    source = zckpt.open(FIXTURES / name)
    rules = [
        {"mine": {one.name: "a b"}, "theirs": {f"T.{one.name}": "b a"}} if len(one.shape) == 2
        else {"mine": one.name, "theirs": f"T.{one.name}"}
        for one in source.tensors()
    ]  # fmt: skip
    document = {"sides": ["mine", "theirs"], "rules": rules}
    zckpt.convert(source, "there", to="zckpt", map=document, verify=True)
    there = zckpt.open("there")
    for one in source.parameters.values():
        if len(one.shape) == 2:
            for key in source.owner(one.name).slots:
                if key in there.owner(f"T.{one.name}").slots and not source.owner(one.name).slots[key].replicas:
                    assert_same(there.read(f"T.{one.name}", key), source.read(one.name, key).T.contiguous(), one.name)
    zckpt.convert(there, "back", to="zckpt", map=document, verify=True)
    assert zckpt.diff(source, "back", ignore_metadata=True).equal


def test_a_model_is_mapped_where_torch_is_not_installed(tmp_path):
    Path("config.json").write_text(json.dumps(LLAMA))
    mapped = f"--map llama-huggingface-meta --map-config {tmp_path}/config.json"
    commands = [
        f"consolidate {source} {tmp_path}/{target}.safetensors {mapped}"
        for source, target in (("fixtures/hf_llama_s2_bf16_dp2", "meta"), (Path("meta.safetensors"), "back"))
    ]
    commands_without(("torch", "transformers"), *commands)
    back = zckpt.open("back.safetensors")
    for name, value in Truth(FIXTURES / "hf_llama_s2_bf16_dp2").masters.items():
        assert_same(back.read(name), value, name)


def test_the_command_line_says_which_way_a_map_went_and_lists_the_maps():
    Path("config.json").write_text(json.dumps(LLAMA))
    mapped = ("--map", "llama-huggingface-meta", "--map-config", Path("config.json"))
    here, there, back = FIXTURES / "hf_llama_s2_bf16_dp2", Path("meta.safetensors"), Path("back.safetensors")
    assert "names of huggingface become those of meta" in succeeded("consolidate", here, there, *mapped).stderr
    assert "names of meta become those of huggingface" in succeeded("consolidate", there, back, *mapped).stderr
    assert "--map llama-huggingface-meta: Llama, Mistral and Qwen2" in succeeded("formats").stdout
