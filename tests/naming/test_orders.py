"""A map gives the names of Hugging Face the order of its models' parameters: an optimizer may only number them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.naming.test_families import CONFIGS as FAMILIES
from tests.naming.test_shipped import CONFIGS
from zckpt.naming.apply import sorted_names
from zckpt.naming.document import read_map, shipped

LLAMAS = ("llama", "llama_mha_bias", "llama_tied", "mistral", "qwen2")
KINDS = {
    "bloom": ("bloom",), "gemma": ("gemma",), "gemma2": ("gemma2", "gemma3"), "gpt-neox": ("gpt_neox",),
    "gpt-oss": ("gpt-oss",), "gpt2": ("gpt2",), "llama": LLAMAS, "mixtral": ("Mixtral",),
    "deepseek": ("DeepseekV2", "DeepseekV3"), "deepseek-mtp": ("DeepseekV2", "DeepseekV3"), "glm4-moe": ("Glm4Moe",),
    "minimax-m2": ("minimax-m2",), "qwen2-moe": ("Qwen2Moe",), "qwen3-moe": ("Qwen3Moe", "Olmoe"),
    "qwen3": ("qwen3", "Qwen3Moe"),
}  # fmt: skip
"""By what a map's name begins with: models of the installed transformers, and of that which has experts one by one."""

ONE_BY_ONE = json.loads(Path(__file__).with_name("expert_orders.json").read_text())["orders"]


def parameters(kind: str) -> list[str]:
    """Return the names of a model's parameters in their order."""
    if kind in ONE_BY_ONE:
        return list(ONE_BY_ONE[kind])
    config = hf.BloomConfig(hidden_size=8, n_head=2, n_layer=2) if kind == "bloom" else {**CONFIGS, **FAMILIES}[kind]()
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("name", shipped())
def test_names_of_hugging_face_have_the_order_of_the_models_parameters(name):
    for side in read_map(name).sides:
        kinds = {"huggingface": KINDS[name.partition("-huggingface")[0]], "files": ("Mixtral",), "memory": ("mixtral",)}
        for kind in kinds.get(side.name, ()):
            names = parameters(kind)
            if kind == "minimax-m2":  # never had experts one by one in transformers; in files they are
                names = [one.replace(".mlp.", ".block_sparse_moe.") for one in names if ".experts." not in one]
            found = sorted_names({one: number for number, one in enumerate(reversed(names))}, side.order)
            assert found == names, kind
