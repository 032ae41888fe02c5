"""A map gives the names of Hugging Face the order of its models' parameters: an optimizer may only number them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.megatron_families import FAMILIES
from tests.naming.test_shipped import CONFIGS, load_all
from zckpt.naming.apply import sorted_names
from zckpt.naming.document import read_map, shipped

KINDS = {
    "bloom": ("bloom",), "deepseek": ("DeepseekV2", "DeepseekV3"), "deepseek-mtp": ("DeepseekV2", "DeepseekV3"),
    "gemma2": ("gemma2", "gemma3"), "glm4-moe": ("Glm4Moe",), "gpt-neox": ("gpt_neox",),
    "llama": ("llama", "llama_mha_bias", "llama_tied", "mistral", "qwen2"), "mixtral": ("Mixtral",),
    "qwen2-moe": ("Qwen2Moe",), "qwen3-moe": ("Qwen3Moe", "Olmoe"), "qwen3": ("qwen3", "Qwen3Moe"),
}  # fmt: skip
"""Models that a map is about, by what its name begins with, where it is another: of the installed transformers, and in
capitals of version 4, which has experts one by one.
"""

ONE_BY_ONE = json.loads(Path(__file__).with_name("expert_orders.json").read_text())["orders"]


def numbered(kind: str, folder: Path) -> dict[str, int]:
    """Return which number the parameter of a model has that is in a file, by the file's name of it."""
    if kind in ONE_BY_ONE:
        return {name: number for number, name in enumerate(ONE_BY_ONE[kind])}
    if kind == "bloom":
        config = hf.BloomConfig(vocab_size=64, hidden_size=8, n_head=2, n_layer=2)
    else:
        config = CONFIGS[kind]() if kind in CONFIGS else FAMILIES[kind].config(hf)
    model = hf.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for number, one in enumerate([*model.parameters(), *model.buffers()]):
            one.fill_(number)
    model.save_pretrained(folder)
    found = {name: int(value.flatten()[0]) for name, value in load_all(folder).items()}
    return {name: number for name, number in found.items() if number < len([*model.parameters()])}


@pytest.mark.parametrize("name", shipped())
@pytest.mark.every(4)
def test_names_of_hugging_face_have_the_order_of_the_models_parameters(name):
    front = name.partition("-huggingface")[0]
    kinds = {"huggingface": KINDS.get(front, (front,)), "files": ("Mixtral",), "memory": ("mixtral",)}
    for side in read_map(name).sides:
        for kind in kinds.get(side.name, ()):
            numbers = numbered(kind, kind)
            if kind == "mixtral":  # as it is in memory
                model = hf.AutoModelForCausalLM.from_config(CONFIGS[kind]())
                numbers = {key: number for number, (key, _) in enumerate(model.named_parameters())}
            one_by_one = kind in ONE_BY_ONE  # or one tensor of all experts in memory is many in files
            wholes = {key: key if one_by_one else re.sub(r"experts\.\d+\..*", "experts", key) for key in numbers}
            first = {whole: min(numbers[key] for key in numbers if wholes[key] == whole) for whole in wholes.values()}
            order = sorted_names({key: -number for key, number in numbers.items()}, side.order)
            found = [first[wholes[key]] for key in order]
            assert found == sorted(found), (kind, order)
