"""Small models of Hugging Face, and the same in Megatron-Core's GPTModel: what maps between both are proven by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

LENGTH = 8
"""Of texts, in tokens."""

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
MOE = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **COMMON, "num_key_value_heads": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "n_group": 1, "topk_group": 1,
}  # fmt: skip

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.0, "moe_layer_freq": 1, "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
}  # fmt: skip
BY_SIGMOID = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OF_LATENT = {
    **EXPERTS, "multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5, "kv_channels": 5, "num_query_groups": 6, "rope_type": "rope", "rotary_base": 10000,
    "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "moe_shared_expert_intermediate_size": 16,
    "moe_layer_freq": [0, 1], "qk_layernorm": True,
}  # fmt: skip


class WholeNorm(torch.nn.RMSNorm):
    """A norm of all heads together, as Megatron-Bridge has it for MiniMax M2 and OLMoE."""

    heads = "num_attention_heads"

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(hidden_size * getattr(config, self.heads), eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).unflatten(-1, x.shape[-2:])


class WholeKeysNorm(WholeNorm):
    heads = "num_query_groups"


def copying_linear() -> Mapping[str, type]:
    """Return a linear layer whose result may be added to: `MLP.forward` does so with the biases of experts, which torch
    forbids for a view that megatron-core's own function has made.
    """
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class Copying(RowParallelLinear):
        def forward(self, x: torch.Tensor) -> Any:
            found, bias = super().forward(x)
            return found.clone(), bias

    return {"linear_fc2": Copying}


@dataclass(frozen=True)
class Family:
    """A model in both programs.

    Parameters
    ----------
    config : callable
        Makes Hugging Face's configuration, given its library.
    settings : mapping
        What Megatron-Core's configuration has, besides what every model has.
    model : mapping
        Arguments of its GPTModel.
    parts : callable
        Returns of what its layers are made instead, by the name of the part.
    map : str
        The map, where it has another name than the family.
    """

    config: Callable[[Any], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[], Mapping[str, type]] = dict
    map: str = ""


FAMILIES = {
    "qwen3-moe": Family(
        lambda hf: hf.Qwen3MoeConfig(num_experts=4, norm_topk_prob=True, mlp_only_layers=[], **MOE),
        {**EXPERTS, "qk_layernorm": True},
    ),
    "deepseek-v2": Family(
        lambda hf: hf.DeepseekV2Config(
            q_lora_rank=None, routed_scaling_factor=1.0, topk_method="greedy", norm_topk_prob=False, **LATENT
        ),
        {**OF_LATENT, "q_lora_rank": None, "moe_router_pre_softmax": True},
        map="deepseek",
    ),
    "deepseek-v3": Family(
        lambda hf: hf.DeepseekV3Config(q_lora_rank=12, routed_scaling_factor=2.5, norm_topk_prob=True, **LATENT),
        {**OF_LATENT, **BY_SIGMOID, "moe_layer_freq": [0, 1], "q_lora_rank": 12, "moe_router_topk_scaling_factor": 2.5},
        map="deepseek",
    ),
    "qwen2-moe": Family(
        lambda hf: hf.Qwen2MoeConfig(
            num_experts=4, shared_expert_intermediate_size=12, norm_topk_prob=False, **{**MOE, "head_dim": 4}
        ),
        {**EXPERTS, "kv_channels": 4, "add_qkv_bias": True, "moe_router_pre_softmax": True,
         "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    ),
    "gpt-oss": Family(
        lambda hf: hf.GptOssConfig(
            num_local_experts=4, layer_types=["full_attention", "sliding_attention"], sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **{**MOE, "intermediate_size": 16}
        ),
        {**EXPERTS, "add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable", "window_size": (3, 0),
         "window_attn_skip_freq": [0, 1], "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
         "activation_func": lambda x: x * torch.sigmoid(1.702 * x)},
        parts=copying_linear,
    ),
    "deepseek-mtp": Family(
        lambda hf: hf.DeepseekV3Config(q_lora_rank=12, routed_scaling_factor=2.5, norm_topk_prob=True, **LATENT),
        {**OF_LATENT, **BY_SIGMOID, "moe_layer_freq": [0, 1], "q_lora_rank": 12, "moe_router_topk_scaling_factor": 2.5,
         "mtp_num_layers": 1},
    ),
    "glm4-moe": Family(
        lambda hf: hf.Glm4MoeConfig(
            n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, use_qk_norm=True,
            attention_bias=True, routed_scaling_factor=1.5, norm_topk_prob=True, **MOE,
        ),
        {**BY_SIGMOID, "add_qkv_bias": True, "qk_layernorm": True, "moe_layer_freq": [0, 1],
         "moe_shared_expert_intermediate_size": 16, "moe_router_topk_scaling_factor": 1.5, "mtp_num_layers": 1},
        {"rotary_percent": 0.5},
    ),
    "minimax-m2": Family(
        lambda hf: hf.MiniMaxM2Config(num_local_experts=4, rotary_dim=4, **{**MOE, "intermediate_size": 16}),
        {**BY_SIGMOID, "qk_layernorm": True},
        {"rotary_percent": 0.5, "rotary_base": 5000000},
        lambda: {"q_layernorm": WholeNorm, "k_layernorm": WholeKeysNorm},
    ),
}  # fmt: skip


def write_huggingface(family: str, folder: Path) -> dict[str, Any]:
    """Write a model of transformers with weights of noise; return its configuration.

    A layer that predicts further tokens is one more in the files, as released ones have it.
    """
    import transformers as hf

    further = FAMILIES[family].settings.get("mtp_num_layers", 0)
    config = FAMILIES[family].config(hf)
    config.num_hidden_layers += further
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for one in [*model.parameters(), *(one for key, one in model.named_buffers() if "correction_bias" in key)]:
            one.copy_(torch.randn_like(one) * 0.3)
    config.num_hidden_layers -= further
    model.save_pretrained(folder)
    if further:
        [file] = folder.glob("*.safetensors")
        tensors, front = load_file(file), f"model.layers.{config.num_hidden_layers}"
        tensors |= {f"{front}.{name}.weight": torch.randn(24) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{front}.eh_proj.weight"] = torch.randn(24, 48) * 0.3
        tensors[f"{front}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{front}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, file)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def read_huggingface(folder: Path, *, further: int = 0) -> Any:
    """Return the model of a folder, with some layers that predict further tokens behind the others."""
    import transformers as hf

    config = hf.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers += further
    for name in ("layer_types", "mlp_layer_types"):
        if further and getattr(config, name, None):
            setattr(config, name, [*getattr(config, name), getattr(config, name)[-1]])
    model = hf.AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager", dtype="float32")
    return model.eval()


def expected_logits(family: str, folder: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return what transformers' model says of the next token, and of the one after it where a layer predicts that."""
    further = FAMILIES[family].settings.get("mtp_num_layers", 0)
    model = read_huggingface(folder, further=further)
    base, layers = model.model, model.model.layers
    base.layers = layers[: len(layers) - further]
    with torch.no_grad():
        found = [model(tokens).logits]
        if further:
            tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
            front, eps = f"model.layers.{len(base.layers)}", base.config.rms_norm_eps
            hidden = base(tokens).last_hidden_state
            words = base.embed_tokens(torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), 1))
            both = [
                functional.rms_norm(one, (24,), tensors[f"{front}.{name}.weight"], eps)
                for name, one in (("enorm", words), ("hnorm", hidden))
            ]
            base.layers = layers[-1:]
            base.norm.weight.copy_(tensors[f"{front}.shared_head.norm.weight"])
            found.append(model(inputs_embeds=torch.cat(both, -1) @ tensors[f"{front}.eh_proj.weight"].T).logits)
    return found


def layers(config: Any, family: str) -> Any:
    """Return what a model's layers are made of, on a CPU."""
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(latent, name, type(name, (torch.nn.Module,), {}))  # only asked whether a layer is one
    found = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    parts = {**FAMILIES[family].parts()}
    if config.multi_latent_attention:

        class Attention(DotProductAttention):
            """Told the widths of keys and values, which only that of Transformer Engine asks for."""

            def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **more: Any) -> None:
                super().__init__(*args, **more)

        parts["core_attention"] = Attention
    for layer in found.layer_specs:
        of, mlp = layer.submodules, layer.submodules.mlp.submodules
        for part in (of, of.self_attention.submodules, mlp, getattr(getattr(mlp, "experts", None), "submodules", None)):
            for name, own in parts.items():
                if hasattr(part, name):
                    setattr(part, name, own)
    return found
