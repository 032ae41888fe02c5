"""Small models as their programs define them, written from the published definitions: what maps are proven by.

`MetaLlama`: Meta's Llama (and torchtitan's), rotary positions of neighbouring pairs. `Megatron`: Megatron-Core's
GPTModel without parallelism, whose names and semantics are those of Transformer Engine's layers; for Gemma, as
Megatron-Bridge builds it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def capped(x, cap):
    """Soft capping, as of Gemma 2."""
    return x if cap is None else cap * torch.tanh(x / cap)


def attend(q, k, v, scale=None, cap=None):
    """Causal attention of (batch, length, heads, d), with fewer keys than queries."""
    times = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if cap is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        scores = capped(q @ k.transpose(-1, -2) * scale, cap)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def half_turned(x, width: int):
    """Rotary positions of the first and the second half of the first `width` elements of each head."""
    freqs = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(x.shape[1]).float(), freqs)
    angles = torch.cat((angles, angles), dim=-1)[None, :, None]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * angles.cos() + half * angles.sin(), rest), dim=-1)


# --- Meta


class MetaAttention(nn.Module):
    def __init__(self, c, *, nested: bool, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.d, self.theta = c.num_attention_heads, c.num_key_value_heads, c.head_dim, 10000.0
        bias = getattr(c, "attention_bias", False) or c.model_type == "qwen2"
        self.halves = c.model_type in ("qwen3", "qwen3_moe")
        if self.halves and not nested:
            self.q_norm, self.k_norm = (RMSNorm(self.d, c.rms_norm_eps) for _ in range(2))
        heads = {"wq": self.heads, "wk": self.groups, "wv": self.groups}
        if fused:
            heads = {"wqkv": sum(heads.values())}
        linears = {name: nn.Linear(c.hidden_size, n * self.d, bias=bias) for name, n in heads.items()}
        if nested:
            self.qkv_linear = nn.ModuleDict(linears)
        else:
            for name, one in linears.items():
                self.add_module(name, one)
        self.nested, self.fused = nested, fused
        self.wo = nn.Linear(self.heads * self.d, c.hidden_size, bias=False)
        if self.halves and nested:
            self.q_norm, self.k_norm = (RMSNorm(self.d, c.rms_norm_eps) for _ in range(2))

    def linear(self, name):
        return self.qkv_linear[name] if self.nested else getattr(self, name)

    def forward(self, x):
        batch, length, _ = x.shape
        if self.fused:
            mixed = self.qkv_linear["wqkv"](x).view(batch, length, self.groups, -1, self.d)
            q, k, v = (one.flatten(2, 3) for one in mixed.split([mixed.shape[3] - 2, 1, 1], dim=3))
        else:
            q, k, v = (self.linear(n)(x).view(batch, length, -1, self.d) for n in ("wq", "wk", "wv"))
        if self.halves:
            return self.wo(attend(half_turned(self.q_norm(q), self.d), half_turned(self.k_norm(k), self.d), v))
        freqs = 1.0 / self.theta ** (torch.arange(0, self.d, 2).float() / self.d)
        angles = torch.outer(torch.arange(length).float(), freqs)
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

        def rotated(one):
            pairs = torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(3)

        return self.wo(attend(rotated(q), rotated(k), v))


class MetaFeedForward(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.w2 = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.w3 = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanMoE(nn.Module):
    """torchtitan's: the scores of the experts that are chosen add up to 1. In 0.3 experts lie deeper."""

    def __init__(self, c, *, deep: bool) -> None:
        super().__init__()
        self.router = nn.Module()
        n, size, out = c.num_experts, c.hidden_size, c.moe_intermediate_size
        experts = nn.Module()
        self.names = ("w1_EFD", "w2_EDF", "w3_EFD") if deep else ("w1", "w2", "w3")
        for name in self.names:
            shape = (n, size, out) if name.startswith("w2") else (n, out, size)
            experts.register_parameter(name, nn.Parameter(torch.empty(shape)))
        if deep:
            self.routed_experts = nn.Module()
            self.routed_experts.inner_experts = experts
        else:
            self.experts = experts
        self.router.gate = nn.Linear(size, n, bias=False)
        self.held = [experts]

    def forward(self, x):
        w1, w2, w3 = (getattr(self.held[0], name) for name in self.names)
        scores, chosen = self.router.gate(x).softmax(-1).topk(2, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        gates = F.silu(torch.einsum("bld,efd->blef", x, w1)) * torch.einsum("bld,efd->blef", x, w3)
        out = torch.einsum("blef,edf->bled", gates, w2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, out.shape[-1]))
        return (picked * scores[..., None]).sum(-2)


class MetaBlock(nn.Module):
    def __init__(self, c, *, nested: bool, fused: bool) -> None:
        super().__init__()
        self.attention = MetaAttention(c, nested=nested, fused=fused)
        if c.model_type == "qwen3_moe":
            self.moe = TitanMoE(c, deep=nested)
        else:
            self.feed_forward = MetaFeedForward(c)
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        feed_forward = self.moe if hasattr(self, "moe") else self.feed_forward
        return x + feed_forward(self.ffn_norm(x))


class MetaLlama(nn.Module):
    """`titan`: with the names of torchtitan 0.3, whose Qwen3 turns halves of heads and not pairs, as that of 0.2.

    `fused`: queries, keys and values are one parameter, by groups of heads, as torchtitan 0.3 trains by default.
    """

    def __init__(self, c, *, titan: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(MetaBlock(c, nested=titan, fused=fused) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head_name = "lm_head" if titan else "output"
        setattr(self, self.head_name, nn.Linear(c.hidden_size, c.vocab_size, bias=False))

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return getattr(self, self.head_name)(self.norm(x))

    def saved(self) -> dict[str, torch.Tensor]:
        """What torchtitan saves of the model: a fused parameter taken apart."""
        found = {}
        for name, value in self.state_dict().items():
            if ".wqkv." not in name:
                found[name] = value
                continue
            attention = self.layers[0].attention
            mixed = value.unflatten(0, (attention.groups, -1, attention.d))
            parts = mixed.split([mixed.shape[1] - 2, 1, 1], dim=1)
            names = [name.replace("wqkv", key) for key in ("wq", "wk", "wv")]
            found |= {key: one.flatten(0, 2) for key, one in zip(names, parts, strict=True)}
        return found


# --- Megatron-Core


class Norm(nn.Module):
    def __init__(self, size: int, kind: str, eps: float) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(size))
        if kind == "layer":
            self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        if self.kind == "layer":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight + (self.kind == "zero"), self.eps)


class LayerNormLinear(nn.Module):
    """A norm, then a linear layer: one module, as Transformer Engine has it."""

    def __init__(self, size: int, out: int, bias: bool, kind: str, eps: float) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.layer_norm_weight = nn.Parameter(torch.ones(size))
        self.layer_norm_bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None
        self.weight = nn.Parameter(torch.empty(out, size))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x):
        if self.kind == "layer":
            x = F.layer_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            x = rms_norm(x, self.layer_norm_weight + (self.kind == "zero"), self.eps)
        return F.linear(x, self.weight, self.bias)


class LinearNorm(nn.Linear):
    """A linear layer, then a norm of what comes out."""

    def __init__(self, size: int, out: int, m) -> None:
        super().__init__(size, out, bias=False)
        self.post_layernorm = Norm(out, m.norm, m.eps)

    def forward(self, x):
        return self.post_layernorm(super().forward(x))


class MegatronAttention(nn.Module):
    def __init__(self, m) -> None:
        super().__init__()
        self.m = m
        rows = (m.heads + 2 * m.groups) * m.d
        width = m.heads * m.d
        self.linear_proj = LinearNorm(width, m.hidden, m) if m.post else nn.Linear(width, m.hidden, bias=m.bias)
        self.linear_qkv = LayerNormLinear(m.hidden, rows, m.qkv_bias, m.norm, m.eps)
        if m.qk_norm:
            self.q_layernorm, self.k_layernorm = (Norm(m.d, m.norm, m.eps) for _ in range(2))

    def forward(self, x):
        m = self.m
        times = m.heads // m.groups
        mixed = self.linear_qkv(x).view(*x.shape[:2], m.groups, (times + 2) * m.d)
        q, k, v = mixed.split([times * m.d, m.d, m.d], dim=3)
        q = q.reshape(*x.shape[:2], m.heads, m.d)
        if m.qk_norm:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if m.rotary:
            q, k = (half_turned(one, int(m.d * m.rotary)) for one in (q, k))
        return self.linear_proj(attend(q, k, v, scale=m.scale, cap=m.attention_cap))


class MegatronMLP(nn.Module):
    def __init__(self, m, *, with_norm: bool = True) -> None:
        super().__init__()
        self.m = m
        out = m.ffn * (2 if m.gated else 1)
        self.linear_fc1 = (
            LayerNormLinear(m.hidden, out, m.bias, m.norm, m.eps)
            if with_norm
            else nn.Linear(m.hidden, out, bias=m.bias)
        )
        self.linear_fc2 = LinearNorm(m.ffn, m.hidden, m) if m.post else nn.Linear(m.ffn, m.hidden, bias=m.bias)

    def forward(self, x):
        x = self.linear_fc1(x)
        if self.m.gated:
            gate, up = x.chunk(2, dim=-1)
            gate = F.silu(gate) if self.m.gelu == "none" else F.gelu(gate, approximate=self.m.gelu)
            return self.linear_fc2(gate * up)
        return self.linear_fc2(F.gelu(x, approximate=self.m.gelu))


class MegatronMoE(nn.Module):
    """The softmax is over the experts that are chosen (`moe_router_pre_softmax` off)."""

    def __init__(self, m) -> None:
        super().__init__()
        self.m = m
        self.router = nn.Linear(m.hidden, m.experts, bias=False)
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(MegatronMLP(m, with_norm=False) for _ in range(m.experts))

    def forward(self, x):
        scores, chosen = self.router(x).topk(2, dim=-1)
        scores = scores.softmax(-1)
        out = torch.stack([one(x) for one in self.experts.local_experts], dim=-2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, out.shape[-1]))
        return (picked * scores[..., None]).sum(-2)


class MegatronLayer(nn.Module):
    def __init__(self, m) -> None:
        super().__init__()
        self.self_attention = MegatronAttention(m)
        if m.experts:
            self.pre_mlp_layernorm = Norm(m.hidden, m.norm, m.eps)
            self.mlp = MegatronMoE(m)
        else:
            self.pre_mlp_layernorm = nn.Identity()
            self.mlp = MegatronMLP(m)

    def forward(self, x):
        x = x + self.self_attention(x)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Shape(SimpleNamespace):
    """What Megatron's arguments say of a model; of a small one with two layers, where they say nothing else."""

    hidden, ffn, layers, heads, groups, d, rows = 24, 20, 2, 6, 6, 8, 37
    norm, eps, bias, qkv_bias, qk_norm, gated, gelu = "rms", 1e-6, False, False, False, True, "none"
    rotary, positions, experts, tied, embedding, post = 1.0, 0, 0, False, 1.0, False
    scale = attention_cap = logit_cap = None


class Megatron(nn.Module):
    def __init__(self, m: Shape) -> None:
        super().__init__()
        self.m = m
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(m.rows, m.hidden)
        if m.positions:
            self.embedding.position_embeddings = nn.Embedding(m.positions, m.hidden)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(MegatronLayer(m) for _ in range(m.layers))
        self.decoder.final_layernorm = Norm(m.hidden, m.norm, m.eps)
        if not m.tied:
            self.output_layer = nn.Linear(m.hidden, m.rows, bias=False)

    def forward(self, tokens):
        x = self.embedding.word_embeddings(tokens) * self.m.embedding
        if self.m.positions:
            x = x + self.embedding.position_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.decoder.layers:
            x = layer(x)
        head = self.embedding.word_embeddings if self.m.tied else self.output_layer
        return capped(F.linear(self.decoder.final_layernorm(x), head.weight), self.m.logit_cap)
