"""What is averaged and merged is a model that transformers loads, as it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.hf_training.training import build

pytestmark = pytest.mark.interop


def gpt2(path: Path, seed: int) -> dict[str, torch.Tensor]:
    """Save a small GPT-2, whose layers are transposed and whose embedding is tied, and return its weights."""
    model = build("gpt2", seed)
    model.save_pretrained(path)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def loaded(path: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    return dict(model.state_dict())


def test_a_mean_is_loaded_by_transformers(tmp_path):
    models = [gpt2(tmp_path / str(seed), seed) for seed in range(3)]
    zckpt.average([tmp_path / str(seed) for seed in range(3)], tmp_path / "mean")
    found = loaded(tmp_path / "mean")
    for name in models[0]:
        assert torch.equal(found[name], (models[0][name] + models[1][name] + models[2][name]) / 3), name


def test_a_merged_model_is_loaded_by_transformers(tmp_path):
    base = gpt2(tmp_path / "base", 0)
    factors = {
        f"base_model.model.transformer.h.{layer}.{module}.lora_{factor}.weight": torch.randn(shape)
        for layer in range(2)
        for module, rows, columns in (("attn.c_attn", 48, 16), ("attn.c_proj", 16, 16), ("mlp.c_proj", 16, 64))
        for factor, shape in (("A", (4, columns)), ("B", (rows, 4)))
    }
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "fan_in_fan_out": True, "base_model_name_or_path": "base"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "base" / "adapter_config.json").write_text(json.dumps(settings))  # which is not the merged model's
    done = zckpt.merge_adapter(tmp_path / "base", adapter, tmp_path / "merged")
    assert done.num_merged == 6
    found = loaded(tmp_path / "merged")
    for name, tensor in base.items():
        a, b = (factors.get(f"base_model.model.{name[:-7]}.lora_{factor}.weight") for factor in "AB")
        added = 0 if a is None or b is None else 2.0 * (b @ a).T
        torch.testing.assert_close(found[name], tensor + added, rtol=1e-6, atol=1e-6, msg=name)
