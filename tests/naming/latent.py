"""Megatron-Core's model with latent attention, and experts as DeepSeek V3 has them, from its published definition."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.naming.models import LayerNormLinear, MegatronMLP, Norm, Shape, attend


def pairs_turned(x):
    """Rotary positions of neighbouring pairs, which are brought apart: first all first ones, then all second ones."""
    width = x.shape[-1]
    freqs = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(x.shape[1]).float(), freqs)
    angles = torch.cat((angles, angles), dim=-1)[None, :, None]
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat((first, second), -1) * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class LatentAttention(nn.Module):
    """Queries and the rest go through small latent vectors; one rotary key is all heads'."""

    def __init__(self, m, c) -> None:
        super().__init__()
        self.m, self.c = m, c
        self.linear_proj = nn.Linear(m.heads * c.v_head_dim, m.hidden, bias=False)
        rows = m.heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank:
            self.linear_q_down_proj = nn.Linear(m.hidden, c.q_lora_rank, bias=False)
            self.linear_q_up_proj = LayerNormLinear(c.q_lora_rank, rows, False, "rms", m.eps)
        else:
            self.linear_q_proj = nn.Linear(m.hidden, rows, bias=False)
        self.linear_kv_down_proj = nn.Linear(m.hidden, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        rows = m.heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.linear_kv_up_proj = LayerNormLinear(c.kv_lora_rank, rows, False, "rms", m.eps)

    def forward(self, x):
        m, c = self.m, self.c
        q = self.linear_q_up_proj(self.linear_q_down_proj(x)) if c.q_lora_rank else self.linear_q_proj(x)
        plain, turned = q.unflatten(-1, (m.heads, -1)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, key = self.linear_kv_down_proj(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        k, v = self.linear_kv_up_proj(latent).unflatten(-1, (m.heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], -1)
        key = pairs_turned(key[:, :, None]).expand(-1, -1, m.heads, -1)
        return self.linear_proj(attend(torch.cat((plain, pairs_turned(turned)), -1), torch.cat((k, key), -1), v))


class ExpertsBySigmoid(nn.Module):
    """A bias has a part in the choice of experts and none in their scores; another expert has every token."""

    def __init__(self, m, c) -> None:
        super().__init__()
        self.m, self.c = m, c
        own = Shape(ffn=c.moe_intermediate_size)
        self.router = nn.Linear(m.hidden, c.n_routed_experts, bias=False)
        self.router.register_buffer("expert_bias", torch.zeros(c.n_routed_experts))
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(MegatronMLP(own, with_norm=False) for _ in range(c.n_routed_experts))
        self.shared_experts = MegatronMLP(own, with_norm=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        _, chosen = (scores + self.router.expert_bias).topk(self.c.num_experts_per_tok, -1)
        own = scores.gather(-1, chosen)
        own = own / own.sum(-1, keepdim=True) * self.c.routed_scaling_factor
        out = torch.stack([one(x) for one in self.experts.local_experts], dim=-2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, out.shape[-1]))
        return (picked * own[..., None]).sum(-2) + self.shared_experts(x)


class LatentLayer(nn.Module):
    def __init__(self, m, c, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(m.hidden, "rms", m.eps)
        self.self_attention = LatentAttention(m, c)
        self.pre_mlp_layernorm = nn.Identity() if dense else Norm(m.hidden, "rms", m.eps)
        self.mlp = MegatronMLP(m) if dense else ExpertsBySigmoid(m, c)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class MegatronLatent(nn.Module):
    """`c` is Hugging Face's configuration of DeepSeek V3."""

    def __init__(self, m: Shape, c) -> None:
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(m.rows, m.hidden)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(
            LatentLayer(m, c, dense=i < c.first_k_dense_replace) for i in range(m.layers)
        )
        self.decoder.final_layernorm = Norm(m.hidden, "rms", m.eps)
        self.output_layer = nn.Linear(m.hidden, m.rows, bias=False)

    def forward(self, tokens):
        x = self.embedding.word_embeddings(tokens)
        for layer in self.decoder.layers:
            x = layer(x)
        return F.linear(self.decoder.final_layernorm(x), self.output_layer.weight)
