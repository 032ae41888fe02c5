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
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
MOE = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **COMMON, "num_key_value_heads": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
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

SHARED = {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 16}
V3 = {**LATENT, "q_lora_rank": 12, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
OF_V3 = {**OF_LATENT, **BY_SIGMOID, "moe_layer_freq": [0, 1], "q_lora_rank": 12}


class WholeNorm(torch.nn.RMSNorm):
    """A norm of all heads together, as Megatron-Bridge has it for MiniMax M2 and OLMoE."""

    heads = "num_attention_heads"

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(hidden_size * getattr(config, self.heads), eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).unflatten(-1, x.shape[-2:])


class WholeKeysNorm(WholeNorm):
    heads = "num_query_groups"


class CentredNorm(torch.nn.RMSNorm):
    """A norm kept less 1, which Transformer Engine has, and megatron-core's own asserts that it has not."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight + 1, self.eps)


class CentredLayerNorm(torch.nn.LayerNorm):
    """The same with a mean and a bias."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight + 1, self.bias, self.eps)


def norms(kind: type, *more: str) -> Mapping[str, type]:
    """Return norms of one kind: before attention and what follows it, behind all layers,
    and where else it is said."""
    return dict.fromkeys(("input_layernorm", "pre_mlp_layernorm", "layer_norm", *more), kind)


def norms_behind(kind: Any) -> Mapping[str, type]:
    """Return linear layers with a norm of a kind behind them, as Megatron-Bridge has them."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class WithNorm(RowParallelLinear):
        def __init__(self, inputs: int, outputs: int, *, config: Any, **more: Any) -> None:
            super().__init__(inputs, outputs, config=config, **more)
            self.post_layernorm = kind(config=config, hidden_size=outputs, eps=config.layernorm_epsilon)

        def forward(self, x: torch.Tensor) -> Any:
            found, bias = super().forward(x)
            return self.post_layernorm(found), bias

    return {"linear_proj": WithNorm, "linear_fc2": WithNorm}


def only_behind() -> Mapping[str, type]:
    """Return no norms before layers, and some behind them."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return {"input_layernorm": IdentityOp, "pre_mlp_layernorm": IdentityOp, **norms_behind(WrappedTorchNorm)}


def copying_linear() -> Mapping[str, type]:
    """Return a linear layer whose result may be added to: `MLP.forward` does so with the biases of experts,
    which torch
    forbids for a view that megatron-core's own function has made.
    """
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class Copying(RowParallelLinear):
        def forward(self, x: torch.Tensor) -> Any:
            found, bias = super().forward(x)
            return found.clone(), bias

    return {"linear_fc2": Copying}


def scaled_words(model: Any) -> None:
    model.embedding.register_forward_hook(lambda *of: of[-1] * 24**0.5)


def capped(x: torch.Tensor, at: float) -> torch.Tensor:
    return at * torch.tanh(x / at)


def scaled_and_capped(model: Any) -> None:
    scaled_words(model)
    model.output_layer.register_forward_hook(lambda *of: (capped(of[-1][0], 30.0), of[-1][1]))


def capping() -> Mapping[str, type]:
    """Return norms as of Gemma, and attention whose scores are capped, as of Gemma 2."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Capping(DotProductAttention):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.scale_mask_softmax.register_forward_pre_hook(lambda _, of: (capped(of[0], 50.0), *of[1:]))

    return {**norms(CentredNorm), **norms_behind(CentredNorm), "core_attention": Capping}


LAST = "model.layers.2"
FURTHER = {"layer": LAST, "final": f"{LAST}.shared_head.norm",
           **{name: f"{LAST}.{name}" for name in ("enorm", "hnorm", "eh_proj")}}  # fmt: skip
"""What files call a layer that predicts further tokens, and its parts."""


@dataclass(frozen=True)
class Family:
    """A model in both programs.

    Parameters
    ----------
    name : str
        What Hugging Face's configuration is called, without the ending.
    sizes : mapping
        What that gets.
    settings : mapping
        What Megatron-Core's configuration has, besides what every model has.
    model : mapping
        Arguments of its GPTModel.
    parts : callable
        Returns of what its layers are made instead, by the name of the part.
    map : str
        The map, where it has another name than the family.
    further : mapping
        What files call a layer that predicts further tokens and its parts, where not as DeepSeek V3's do.
    wrap : callable
        Changes the model, as Megatron-Bridge does.
    """

    name: str
    sizes: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[], Mapping[str, type]] = dict
    map: str = ""
    further: Mapping[str, str] = field(default_factory=dict)
    wrap: Callable[[Any], None] = lambda _: None

    def config(self, hf: Any) -> Any:
        """Make Hugging Face's configuration, given its library."""
        return getattr(hf, f"{self.name}Config")(**self.sizes)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


TIED = {"share_embeddings_and_output_weights": True}
OF_GPT = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "num_query_groups": 6,
    "kv_channels": 4,
}
GEMMA = {"layernorm_zero_centered_gamma": True, "activation_func": tanh_gelu}

FAMILIES = {
    "llama": Family("Llama", GROUPED),
    "ministral3": Family(
        "Ministral3",
        {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
                                        "original_max_position_embeddings": 64}},
        map="llama",
    ),
    "qwen2": Family("Qwen2", GROUPED | {"head_dim": 4}, {"kv_channels": 4, "add_qkv_bias": True},
                    map="llama"),
    "qwen3": Family("Qwen3", GROUPED, {"qk_layernorm": True}, map="llama"),
    "ernie4.5": Family("Ernie4_5", GROUPED, {"rotary_interleaved": True}),
    "nemotron": Family(
        "Nemotron", {**GROUPED, "norm_eps": 1e-6},
        {"layernorm_zero_centered_gamma": True, "normalization": "LayerNorm", "gated_linear_unit": False,
         "activation_func": lambda x: functional.relu(x).square()},
        {"rotary_percent": 0.5},
        lambda: norms(CentredLayerNorm),
    ),
    "gpt2": Family(
        "GPT2", {"vocab_size": 64, "n_embd": 24, "n_inner": 20, "n_layer": 2, "n_head": 6, "n_positions": LENGTH,
                 "layer_norm_epsilon": 1e-6, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        {**OF_GPT, "activation_func": tanh_gelu}, {**TIED, "position_embedding_type": "learned_absolute"},
    ),
    "gpt-neox": Family(
        "GPTNeoX", {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
                    "num_attention_heads": 6, "rotary_pct": 0.5, "use_parallel_residual": False,
                    "layer_norm_eps": 1e-6, "tie_word_embeddings": False},
        {**OF_GPT, "activation_func": functional.gelu}, {"rotary_percent": 0.5},
    ),
    "gemma": Family("Gemma", GROUPED | {"tie_word_embeddings": True}, GEMMA, TIED,
                    lambda: norms(CentredNorm), wrap=scaled_words),
    "gemma2": Family(
        "Gemma2", {**GROUPED, "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 64},
        {**GEMMA, "softmax_scale": 0.25}, TIED, capping, wrap=scaled_and_capped,
    ),
    "gemma3": Family(
        "Gemma3Text", {**GROUPED, "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 64,
                       "rope_local_base_freq": 10000.0},
        {**GEMMA, "qk_layernorm": True, "softmax_scale": 0.25}, TIED,
        lambda: {**norms(CentredNorm, "q_layernorm", "k_layernorm"), **norms_behind(CentredNorm)},
        map="gemma2", wrap=scaled_words,
    ),
    "exaone4": Family(
        "Exaone4", {**GROUPED, "sliding_window": None, "sliding_window_pattern": None,
                    "layer_types": ["full_attention"] * 2},
        {"qk_layernorm": True}, parts=only_behind,
    ),
    "mixtral": Family("Mixtral", {**MOE, "intermediate_size": 16, "num_local_experts": 4}, EXPERTS),
    "olmoe": Family(
        "Olmoe", {**MOE, "intermediate_size": 16, "head_dim": 4, "num_experts": 4, "norm_topk_prob": False},
        {**EXPERTS, "qk_layernorm": True, "kv_channels": 4, "moe_router_pre_softmax": True},
        parts=lambda: {"q_layernorm": WholeNorm, "k_layernorm": WholeKeysNorm}, map="qwen3-moe",
    ),
    "hy-v3": Family(
        "HYV3", {**MOE, "num_experts": 4, "router_scaling_factor": 1.5},
        {**BY_SIGMOID, "qk_layernorm": True, **SHARED,
         "moe_router_topk_scaling_factor": 1.5, "mtp_num_layers": 1},
        further={"final": f"{LAST}.final_layernorm"},
    ),
    "exaone-moe": Family(
        "ExaoneMoe", {**MOE, "num_experts": 4, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
        {**BY_SIGMOID, "qk_layernorm": True, **SHARED,
         "moe_router_topk_scaling_factor": 2.5, "window_size": (3, 0), "mtp_num_layers": 1},
        further={"layer": "mtp.layers.0", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
                 "eh_proj": "mtp.fc", "final": "mtp.norm"},
    ),
    "llama4": Family(
        "Llama4Text", {**MOE, "num_experts_per_tok": 1, "intermediate_size": 16, "num_local_experts": 4,
                       "intermediate_size_mlp": 20, "attn_temperature_tuning": False, "use_qk_norm": True,
                       "moe_layers": [1], "no_rope_layers": [1, 1], "attention_chunk_size": 64},
        {**EXPERTS, "moe_layer_freq": [0, 1], "moe_router_topk": 1, "moe_router_score_function": "sigmoid",
         "moe_apply_probs_on_input": True, "moe_shared_expert_intermediate_size": 16, "qk_l2_norm": True,
         "rotary_interleaved": True},
    ),
    "glm4-moe-lite": Family(
        "Glm4MoeLite", {**LATENT, "q_lora_rank": 12, "routed_scaling_factor": 1.8, "norm_topk_prob": True},
        {**OF_V3, "moe_router_topk_scaling_factor": 1.8,
         "mtp_num_layers": 1},
        map="deepseek-mtp",
    ),
    "qwen3-moe": Family(
        "Qwen3Moe", {**MOE, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": []},
        {**EXPERTS, "qk_layernorm": True},
    ),
    "deepseek-v2": Family(
        "DeepseekV2", {**LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_method": "greedy",
                       "norm_topk_prob": False},
        {**OF_LATENT, "q_lora_rank": None, "moe_router_pre_softmax": True},
        map="deepseek",
    ),
    "deepseek-v3": Family(
        "DeepseekV3", V3,
        {**OF_V3, "moe_router_topk_scaling_factor": 2.5},
        map="deepseek",
    ),
    "qwen2-moe": Family(
        "Qwen2Moe", {**MOE, "head_dim": 4, "num_experts": 4, "shared_expert_intermediate_size": 12,
                     "norm_topk_prob": False},
        {**EXPERTS, "kv_channels": 4, "add_qkv_bias": True, "moe_router_pre_softmax": True,
         "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    ),
    "gpt-oss": Family(
        "GptOss", {**MOE, "intermediate_size": 16, "num_local_experts": 4, "layer_types": ["full_attention",
                   "sliding_attention"], "sliding_window": 4, "rope_parameters": {"rope_type": "default",
                   "rope_theta": 10000.0}},
        {**EXPERTS, "add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable", "window_size": (3, 0),
         "window_attn_skip_freq": [0, 1], "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
         "activation_func": lambda x: x * torch.sigmoid(1.702 * x)},
        parts=copying_linear,
    ),
    "deepseek-mtp": Family(
        "DeepseekV3", V3,
        {**OF_V3, "moe_router_topk_scaling_factor": 2.5,
         "mtp_num_layers": 1},
    ),
    "glm4-moe": Family(
        "Glm4Moe", {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
                    "routed_scaling_factor": 1.5, "norm_topk_prob": True},
        {**BY_SIGMOID, "add_qkv_bias": True, "qk_layernorm": True, "moe_layer_freq": [0, 1],
         "moe_shared_expert_intermediate_size": 16, "moe_router_topk_scaling_factor": 1.5, "mtp_num_layers": 1},
        {"rotary_percent": 0.5},
    ),
    "minimax-m2": Family(
        "MiniMaxM2", {**MOE, "intermediate_size": 16, "num_local_experts": 4, "rotary_dim": 4},
        {**BY_SIGMOID, "qk_layernorm": True},
        {"rotary_percent": 0.5},
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
    lengthen(config, further)
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for one in [*model.parameters(), *(one for key, one in model.named_buffers() if "correction_bias" in key)]:
            one.copy_(torch.randn_like(one) * 0.3)
    lengthen(config, -further)
    model.save_pretrained(folder)
    if further:
        names = {**FURTHER, **FAMILIES[family].further}
        [file] = folder.glob("*.safetensors")
        tensors = {key.replace(LAST, names["layer"]): one for key, one in load_file(file).items()}
        tensors |= {f"{names[name]}.weight": torch.randn(24) for name in ("enorm", "hnorm", "final")}
        tensors[f"{names['eh_proj']}.weight"] = torch.randn(24, 48) * 0.3
        if names == FURTHER:
            tensors[f"{LAST}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{LAST}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, file)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def lengthen(config: Any, by: int) -> None:
    """Give a configuration more layers, the last of its kind once more."""
    config.num_hidden_layers += by
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds:
            setattr(config, name, [*kinds, *kinds[-1:] * by][: config.num_hidden_layers])


def expected_logits(family: str, folder: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return what transformers' model says of the next token, and of the one after it where a layer predicts that."""
    import transformers as hf

    further = FAMILIES[family].settings.get("mtp_num_layers", 0)
    names = {**FURTHER, **FAMILIES[family].further}
    config = hf.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    lengthen(config, further)
    tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    config.save_pretrained(folder / "numbered")
    renamed = {name.replace(f"{names['layer']}.", f"{LAST}."): one for name, one in tensors.items()}
    save_file(renamed, folder / "numbered" / "model.safetensors", {"format": "pt"})
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "numbered", config=config, dtype="float32").eval()
    with torch.no_grad():
        if not further:
            return [model(tokens).logits]
        base, layers, eps = model.model, model.model.layers, config.rms_norm_eps
        base.layers = layers[: len(layers) - further]
        words = base.embed_tokens(torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), 1))
        parts = (("enorm", words), ("hnorm", base(tokens).last_hidden_state))
        both = [functional.rms_norm(one, (24,), tensors[f"{names[name]}.weight"], eps) for name, one in parts]
        found = [model(tokens).logits]
        base.layers = layers[-1:]
        base.norm.weight.copy_(tensors[f"{names['final']}.weight"])
        joined = torch.cat(both, -1) @ tensors[f"{names['eh_proj']}.weight"].T
        return [*found, model(inputs_embeds=joined).logits]


def layers(config: Any, family: str) -> Any:
    """Return what a model's layers are made of, on a CPU."""
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(latent, name, type(name, (torch.nn.Module,), {}))  # only asked whether a layer is one
    found = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    parts = {**FAMILIES[family].parts()}
    if config.multi_latent_attention:

        class Attention(DotProductAttention):
            """Told the widths of keys and values, which only that of Transformer Engine asks for."""

            def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **more: Any) -> None:
                super().__init__(*args, **more)

        parts["core_attention"] = Attention
    found.layer_norm = parts.get("layer_norm", found.layer_norm)
    for layer in found.layer_specs:
        of, mlp = layer.submodules, layer.submodules.mlp.submodules
        for part in (of, of.self_attention.submodules, mlp, getattr(getattr(mlp, "experts", None), "submodules", None)):
            for name, own in parts.items():
                if hasattr(part, name):
                    setattr(part, name, own)
    return found
