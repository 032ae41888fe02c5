"""`--map transformers`: names and tensors in files and in memory, each slot as transformers itself saves weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import zckpt
from zckpt.errors import UnsupportedError, UsageError

if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("transformers converts since version 5", allow_module_level=True)

from transformers.core_model_loading import revert_weight_conversion

pytestmark = pytest.mark.interop

TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "image_size": 8,
    "patch_size": 4, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "n_group": 1,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "q_lora_rank": 8,
    "topk_group": 1,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "pad_token_id": 0,
    "first_k_dense_replace": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip
USUAL = {"qwen3_moe": "ForCausalLM", "vit": "ForImageClassification", "jamba": "ForCausalLM"}
OTHERS = {
    **dict.fromkeys(["mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "phimoe", "granitemoe",
                     "minimax", "ernie4_5_moe", "glm4_moe", "flex_olmo", "afmoe", "gpt_neox"], "ForCausalLM"),
    **dict.fromkeys(["deit", "vit_mae", "vit_msn", "ijepa", "clip", "siglip"], "Model"),
}  # fmt: skip


def model_of(kind, head):
    config = CONFIG_MAPPING[kind]()
    for key, value in TINY.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, value)
    for part in ("vision_config", "text_config"):
        for key, value in TINY.items() if hasattr(config, part) else ():
            if isinstance(getattr(getattr(config, part), key, None), int):
                setattr(getattr(config, part), key, value)
    config = CONFIG_MAPPING[kind].from_dict({**config.to_dict(), "layer_types": None, "layers_block_type": None}
                                            if kind != "jamba" else config.to_dict())  # fmt: skip
    name = transformers.AutoModel._model_mapping[type(config)].__name__.removesuffix("Model")
    torch.manual_seed(0)
    return getattr(transformers, name + head)(config)


def hold(kind, head, tmp_path):
    """Write what is in memory under the file's names, and that in memory's again; hold all slots against the truth."""
    model = model_of(kind, head)
    every = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(every.items(), lr=1e-2)
    for one in every.values():
        one.grad = torch.randn_like(one)
    optimizer.step()
    model.save_pretrained(tmp_path / "file")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "memory.pt")
    saved, config = load_file(tmp_path / "file/model.safetensors"), tmp_path / "file"
    done = zckpt.convert(tmp_path / "memory.pt", tmp_path / "there", to="zckpt", map="transformers", map_config=config)
    there = zckpt.open(tmp_path / "there")
    for name, tensor in saved.items():
        assert torch.equal(there.read(name, "weight") if name in there.parameters else tensor, tensor), name
    assert {*saved} <= {*there.parameters, *there.buffers}
    for slot in ("exp_avg", "exp_avg_sq"):
        moments = {name: optimizer.state[one][slot] for name, one in every.items()}
        for name, tensor in revert_weight_conversion(model, moments).items():
            assert torch.equal(there.read(name, slot), tensor), (slot, name)
    if "same names" in str(done.notes):
        return False
    zckpt.convert(tmp_path / "there", tmp_path / "back", to="zckpt", map="transformers", map_config=config)
    back = zckpt.open(tmp_path / "back")
    own = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name in back.parameters if name in own] == [*own]
    for name, one in every.items():
        assert torch.equal(back.read(name, "weight"), one), name
        assert torch.equal(back.read(name, "exp_avg"), optimizer.state[one]["exp_avg"]), name
    live = model_of(kind, head)
    its = torch.optim.AdamW(live.parameters(), lr=1e-2)
    zckpt.load(tmp_path / "there", model=live, optimizer=its, map="transformers", map_config=config)
    assert all(torch.equal(one, every[name]) for name, one in live.named_parameters())
    return True


@pytest.mark.parametrize("kind", USUAL)
def test_every_slot_is_as_transformers_saves_it_and_comes_back(kind, tmp_path):
    assert hold(kind, USUAL[kind], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", OTHERS)
def test_other_families(kind, tmp_path):
    hold(kind, OTHERS[kind], tmp_path)


def test_what_cannot_be_made_is_refused_in_one_line(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="needs the configuration"):
        zckpt.consolidate(tmp_path / "model.pt", tmp_path / "out.safetensors", map="transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    with pytest.raises(UnsupportedError, match="no model of type nothing_known"):
        zckpt.consolidate(tmp_path / "model.pt", tmp_path / "out.safetensors", map="transformers")
    assert not (tmp_path / "out.safetensors").exists()
