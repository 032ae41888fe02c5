"""Write the order of parameters of models whose experts are modules: transformers 4 has them so, 5 has one tensor.

It writes tests/naming/expert_orders.json, with transformers 4 before the installed one:

    pip install --target old --no-deps transformers==4.57.3 "huggingface_hub<1.0" "tokenizers<0.23"
    PYTHONPATH=old python bench/expert_orders.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "moe_intermediate_size": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "moe_num_experts": 2, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 4, "use_qk_norm": True,
}  # fmt: skip
FAMILIES = ("Qwen3Moe", "Qwen2Moe", "Mixtral", "DeepseekV2", "DeepseekV3", "Glm4Moe", "Olmoe", "Ernie4_5_Moe")


def main() -> None:
    assert transformers.__version__.startswith("4."), transformers.__version__
    found = {}
    for family in FAMILIES:
        own = {"tie_word_embeddings": False, "attention_bias": family == "Glm4Moe"}
        config = getattr(transformers, f"{family}Config")(**SIZES, **own)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        found[family] = [name for name, _ in model.named_parameters()]
    target = Path(__file__).parents[1] / "tests/naming/expert_orders.json"
    target.write_text(json.dumps({"transformers": transformers.__version__, "orders": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
