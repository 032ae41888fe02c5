"""Small models of Hugging Face, and the same in Megatron-Core, which has experts or latent attention there."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

LENGTH = 8
"""Of texts, in tokens."""

ABOUT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
         "num_attention_heads": 6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "norm_topk_prob": True}  # fmt: skip
LATENT = {"num_key_value_heads": 6, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}  # fmt: skip


def huggingface(family: str) -> Any:
    """Return a model of transformers with weights of noise."""
    import transformers as hf

    if family == "qwen3-moe":
        config = hf.Qwen3MoeConfig(head_dim=8, num_experts=4, num_key_value_heads=2, mlp_only_layers=[], **ABOUT)
    elif family == "deepseek-v2":
        config = hf.DeepseekV2Config(q_lora_rank=None, routed_scaling_factor=1.0, topk_method="greedy", n_group=1,
                                     topk_group=1, **{**ABOUT, "norm_topk_prob": False}, **LATENT)  # fmt: skip
    else:
        config = hf.DeepseekV3Config(q_lora_rank=12, routed_scaling_factor=2.5, n_group=1, topk_group=1,
                                     **ABOUT, **LATENT)  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn_like(one) * 0.3)
        for name, one in model.named_buffers():
            if "correction_bias" in name:
                one.copy_(torch.randn_like(one) * 0.3)
    return model


def settings(family: str) -> dict[str, Any]:
    """Return what Megatron-Core's configuration has of it, besides what every model has."""
    about: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "ffn_hidden_size": 20, "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16, "moe_router_topk": 2, "qk_layernorm": True, "layernorm_epsilon": 1e-6,
        "moe_token_dispatcher_type": "allgather", "moe_aux_loss_coeff": 0.0, "attention_softmax_in_fp32": True,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    }  # fmt: skip
    if family == "qwen3-moe":
        return {**about, "num_query_groups": 2, "kv_channels": 8, "moe_layer_freq": 1}
    about |= {"multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
              "v_head_dim": 5, "rope_type": "rope", "rotary_base": 10000, "rotary_scaling_factor": 1.0, "mscale": 1.0,
              "mscale_all_dim": 1.0, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": [0, 1],
              "moe_router_pre_softmax": True}  # fmt: skip
    if family == "deepseek-v2":
        return {**about, "q_lora_rank": None}
    return {**about, "q_lora_rank": 12, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5}  # fmt: skip


class Attention(torch.nn.Module):
    """What Transformer Engine computes of query, key and value, of which the value may be of another width."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Take and give [length, batch, heads, width], of the result the last two as one."""
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def layers(config: Any) -> Any:
    """Return what a model's layers are made of, on a CPU."""
    import megatron.core.models.backends as backends
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    backends.LocalSpecProvider.core_attention = lambda _: Attention
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(latent, name, type(name, (torch.nn.Module,), {}))  # only asked whether a layer is one
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
