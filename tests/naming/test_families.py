"""Families of Megatron-Bridge: the published names, values as its tables arrange them, and the same bits back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import zckpt
from tests.logical import assert_same_tree
from tests.megatron_families import FAMILIES, write_huggingface
from tests.naming.test_shipped import load_all, made
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import UnsupportedError, UsageError

PREDICTING = ("deepseek-mtp", "glm4-moe")


@pytest.fixture(params=["qwen2-moe", "gpt-oss", "minimax-m2", "deepseek-v2", *PREDICTING])
def family(request, tmp_path):
    """A model's files, with one layer that predicts further tokens where released ones have it; and its config."""
    config = write_huggingface(request.param, tmp_path / "hf")
    return request.param, load_all(tmp_path / "hf"), config


def expected(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return some tensors of Megatron-Core's model, put together by hand."""

    def queries_keys_values(front: str, kind: str) -> torch.Tensor:
        q, k, v = (tensors[f"{front}.self_attn.{one}_proj.{kind}"] for one in "qkv")
        return torch.cat([torch.cat((a, b, c)) for a, b, c in zip(*(x.chunk(2) for x in (q, k, v)), strict=True)])

    def joined(front: str, names: tuple[str, str]) -> torch.Tensor:
        return torch.cat([tensors[f"{front}.{name}.weight"] for name in names])

    gate_up = ("gate_proj", "up_proj")
    one, mlp = "model.layers.1", "decoder.layers.1.mlp"
    found = {"decoder.final_layernorm.weight": tensors["model.norm.weight"]}
    if "deepseek" in kind:
        attention = "decoder.layers.1.self_attention"
        named = {"linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj", "linear_proj": "o_proj"}
        if kind == "deepseek-v2":
            named["linear_q_proj"] = "q_proj"
        else:
            named |= {"linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj"}
            found[f"{attention}.linear_q_up_proj.layer_norm_weight"] = tensors[f"{one}.self_attn.q_a_layernorm.weight"]
        found[f"{attention}.linear_kv_up_proj.layer_norm_weight"] = tensors[f"{one}.self_attn.kv_a_layernorm.weight"]
        found |= {f"{attention}.{ours}.weight": tensors[f"{one}.self_attn.{its}.weight"] for ours, its in named.items()}
    else:
        found["decoder.layers.1.self_attention.linear_qkv.weight"] = queries_keys_values(one, "weight")
        found["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"] = tensors[f"{one}.input_layernorm.weight"]
    if kind in ("gpt-oss", "qwen2-moe", "glm4-moe"):
        found["decoder.layers.1.self_attention.linear_qkv.bias"] = queries_keys_values(one, "bias")
    if kind == "gpt-oss":
        for name in ("weight", "bias"):
            end = "" if name == "weight" else "_bias"
            both = tensors[f"{one}.mlp.experts.gate_up_proj{end}"][2]
            apart = torch.cat((both[..., ::2], both[..., 1::2]), -1)
            found[f"{mlp}.experts.local_experts.2.linear_fc1.{name}"] = apart.T if name == "weight" else apart
            down = tensors[f"{one}.mlp.experts.down_proj{end}"][2]
            found[f"{mlp}.experts.local_experts.2.linear_fc2.{name}"] = down.T if name == "weight" else down
            found[f"{mlp}.router.{name}"] = tensors[f"{one}.mlp.router.{name}"]
        found["decoder.layers.1.self_attention.core_attention.softmax_offset"] = tensors[f"{one}.self_attn.sinks"]
        found["decoder.layers.1.self_attention.linear_proj.bias"] = tensors[f"{one}.self_attn.o_proj.bias"]
    if kind == "minimax-m2":
        sparse = f"{one}.block_sparse_moe"
        for name in "qk":
            key = f"decoder.layers.1.self_attention.{name}_layernorm.weight"
            found[key] = tensors[f"{one}.self_attn.{name}_norm.weight"]
        found[f"{mlp}.router.expert_bias"] = tensors[f"{sparse}.e_score_correction_bias"]
        found[f"{mlp}.experts.local_experts.2.linear_fc1.weight"] = joined(f"{sparse}.experts.2", ("w1", "w3"))
        found[f"{mlp}.experts.local_experts.2.linear_fc2.weight"] = tensors[f"{sparse}.experts.2.w2.weight"]
    if kind == "qwen2-moe":
        found[f"{mlp}.shared_experts.gate_weight"] = tensors[f"{one}.mlp.shared_expert_gate.weight"]
        found[f"{mlp}.shared_experts.linear_fc1.weight"] = joined(f"{one}.mlp.shared_expert", gate_up)
    if kind in PREDICTING:
        found[f"{mlp}.shared_experts.linear_fc1.weight"] = joined(f"{one}.mlp.shared_experts", gate_up)
        two, further = "model.layers.2", "mtp.layers.0"
        for name in ("enorm", "hnorm", "eh_proj"):
            found[f"{further}.{name}.weight"] = tensors[f"{two}.{name}.weight"]
        found[f"{further}.final_layernorm.weight"] = tensors[f"{two}.shared_head.norm.weight"]
        inner = f"{further}.transformer_layer"
        found[f"{inner}.mlp.shared_experts.linear_fc1.weight"] = joined(f"{two}.mlp.shared_experts", gate_up)
        found[f"{inner}.mlp.router.expert_bias"] = tensors[f"{two}.mlp.gate.e_score_correction_bias"]
        found[f"{inner}.pre_mlp_layernorm.weight"] = tensors[f"{two}.post_attention_layernorm.weight"]
        if kind == "glm4-moe":
            found[f"{inner}.self_attention.linear_qkv.weight"] = queries_keys_values(two, "weight")
    return found


def test_names_and_values_are_as_published_and_the_way_back_gives_the_same_bits(family):
    kind, tensors, config = family
    name = f"{FAMILIES[kind].map or kind}-huggingface-megatron"
    zckpt.consolidate("hf", "there.safetensors", map=name)
    there = load_file("there.safetensors")
    some = expected(kind, tensors)
    assert_same_tree({key: there[key] for key in some}, some)
    copies = {one for one in tensors if one.endswith(("2.embed_tokens.weight", "shared_head.head.weight"))}
    grouped = re.compile(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
    spellings = [there, {grouped.sub(r"\2\1", key): one for key, one in there.items()}]  # as published
    if kind in PREDICTING:  # later versions have another name for the layer within
        spellings.append({key.replace(".transformer_layer.", ".mtp_model_layer."): one for key, one in there.items()})
    for number, spelling in enumerate(spellings):
        save_file(spelling, f"{number}.safetensors")
        back = Path(f"back{number}")
        zckpt.consolidate(f"{number}.safetensors", back, map=name, map_config=config)
        assert_same_tree(load_all(back), {key: value for key, value in tensors.items() if key not in copies})
    if kind not in PREDICTING:
        return
    with refusing(UsageError, "num_hidden_layers"):
        zckpt.consolidate(
            "there.safetensors", "no", map=name,
            map_config={key: value for key, value in config.items() if key != "num_hidden_layers"},
        )  # fmt: skip
    tensors["model.layers.2.embed_tokens.weight"][3, 4] += 1
    save_file(tensors, "hf/model.safetensors")
    with refusing(UnsupportedError, "not a copy of model.embed_tokens.weight"):
        zckpt.consolidate("hf", "no", map=name)


def test_moments_of_experts_go_where_their_weights_go_and_return():
    torch.manual_seed(1)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES["gpt-oss"].config(hf)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randint(0, 37, (2, 7))).logits.square().mean().backward()
    optimizer.step()
    zckpt.save("mine", model=model, optimizer=optimizer, step=1)
    names = {"map": "gpt-oss-huggingface-megatron", "map_config": model.config.to_dict()}
    zckpt.convert("mine", "there", to="universal", **names)
    found = zckpt.open("there")
    for key in ("exp_avg", "exp_avg_sq"):
        both = optimizer.state[model.model.layers[1].mlp.experts.gate_up_proj][key][2]
        expected = torch.cat((both[:, ::2], both[:, 1::2]), 1).T
        assert_same(found.read("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", key), expected, key)
    zckpt.convert("there", "back", to="zckpt", **names)
    assert not zckpt.diff("mine", "back").changed


def test_codes_of_experts_are_refused_and_lead_to_dequantising():
    front = "model.layers.0.mlp.experts.down_proj"
    codes = {f"{front}_blocks": torch.zeros(2, 24, 1, 16, dtype=torch.uint8)}
    save_file({**codes, f"{front}_scales": torch.zeros(2, 24, 1, dtype=torch.uint8)}, "codes.safetensors")
    with refusing(UsageError, "has no rule for .*--dequantize"):
        zckpt.consolidate("codes.safetensors", "no", map="gpt-oss-huggingface-megatron")


def test_a_live_model_gets_what_a_map_makes_of_megatrons_experts():
    model = made("qwen3_moe")
    model.save_pretrained("hf")
    names = {"map": "qwen3-moe-huggingface-megatron", "map_config": Path("hf")}
    zckpt.consolidate("hf", "there.safetensors", **names)
    live = hf.AutoModelForCausalLM.from_config(model.config).float()
    zckpt.load("there.safetensors", model=live, **names)
    assert_same_tree(live.state_dict(), model.state_dict())
