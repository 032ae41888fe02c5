"""Megatron-DeepSpeed's GPTModelPipe in miniature, under the real engine: its layers, names, cuts and client state.

    layer 0     a function (to the type of training)
    layer 1     EmbeddingPipe: word_embeddings, position_embeddings, of BLOOM word_embeddings.norm; tied or not
    layer 2     `transposed` kinds only: a function, and one more behind the blocks
    blocks      input_layernorm, self_attention.query_key_value and dense, post_attention_layernorm,
                mlp.dense_h_to_4h and dense_4h_to_h
    last ones   the final norm, LMHeadPipe (lm_head) or the tied embedding, a function

Written from its published definitions: microsoft/Megatron-DeepSpeed of 2023 to 2025, BigScience's of BLOOM. A model is
`pipeline_megatron_KIND`, of KINDS.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.deepspeed_engine import tensor_parallel as tp
from tests.deepspeed_engine.models import SEQUENCE, VOCABULARY
from tests.deepspeed_engine.spec import Spec

FRONT = "pipeline_megatron_"
HIDDEN, HEADS, HEAD_DIM = 16, 4, 4
MULTIPLE = 20  # `--make-vocab-size-divisible-by`
METHOD = "type:transformer"


@dataclass(frozen=True)
class Kind:
    """What the arguments of a training say of its model."""

    layers: int = 3
    tied: bool = True
    bias: bool = True
    rms: bool = False
    swiglu: bool = False
    positions: str = "learned"  # or rotary, alibi
    groups: int = HEADS  # of key and value heads
    joined: bool = False  # since December 2024 queries, keys and values of a rank lie end to end
    transposed: bool = False  # until July 2023
    bloom: bool = False

    @property
    def feed_forward(self) -> int:
        return 4 * HIDDEN if self.bloom else 12

    @property
    def first(self) -> int:
        """The number of the first block."""
        return 3 if self.transposed or self.bloom else 2


LLAMA = {"tied": False, "bias": False, "rms": True, "swiglu": True, "positions": "rotary"}
KINDS = {
    "llama": Kind(groups=2, **LLAMA),
    "llama_mha": Kind(**LLAMA),
    "llama_joined": Kind(joined=True, **LLAMA),
    "gpt": Kind(),
    "gpt_joined": Kind(joined=True),
    "gpt_old": Kind(transposed=True),
    "gpt_swiglu": Kind(swiglu=True, layers=2),
    "gpt_untied": Kind(tied=False, layers=4),
    "bloom": Kind(bloom=True, positions="alibi"),
}


def kind_of(spec: Spec) -> Kind:
    return KINDS[spec.model.removeprefix(FRONT)]


def ranks() -> int:
    return tp.grid.get_model_parallel_world_size()


def padded(degree: int) -> int:
    """Return the rows of the vocabulary at a number of tensor-parallel ranks."""
    return -(-VOCABULARY // (MULTIPLE * degree)) * MULTIPLE * degree


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(HIDDEN) * 0.1)

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class LayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(HIDDEN)
        nn.init.normal_(self.weight, 1, 0.1)
        nn.init.normal_(self.bias, 0, 0.1)


def share(values: torch.Tensor, **how: Any) -> nn.Parameter:
    """Return this rank's share of a whole, marked as the program marks it: DeepSpeed's gradient norms count by that."""
    parameter = nn.Parameter(tp._mine(values, **how).clone())
    parameter.tensor_model_parallel = True
    return parameter


def norm(kind: Kind) -> nn.Module:
    return RMSNorm() if kind.rms else LayerNorm()


class Linear(nn.Module):
    """A rank's share of a linear layer, `parts` of whose rows are cut each by itself."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, row: bool = False, parts: int = 1):
        super().__init__()
        subs = (outputs // parts,) * parts
        weight, own = torch.randn(outputs, inputs) / math.sqrt(inputs), torch.randn(outputs) * 0.1
        self.row = row
        self.weight = share(weight, dim=1) if row else share(weight, sub_params=subs)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(own) if row else share(own, sub_params=subs)

    def forward(self, x):
        if not self.row:
            return functional.linear(tp._Copy.apply(x), self.weight, self.bias)
        x = tp._Reduce.apply(functional.linear(x, self.weight))
        return x if self.bias is None else x + self.bias


class Words(nn.Module):
    """This rank's rows of the padded vocabulary; BLOOM's have a norm in them."""

    def __init__(self, *, normed: bool):
        super().__init__()
        self.weight = share(torch.randn(padded(ranks()), HIDDEN))
        if normed:
            self.norm = LayerNorm()

    def forward(self, ids):
        x = tp.looked_up(ids, self.weight)
        return self.norm(x) if hasattr(self, "norm") else x


class EmbeddingPipe(nn.Module):
    def __init__(self, kind: Kind):
        super().__init__()
        self.word_embeddings = Words(normed=kind.bloom)
        if kind.positions == "learned":
            self.position_embeddings = nn.Embedding(SEQUENCE + 3, HIDDEN)

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight

    def forward(self, ids):
        x = self.word_embeddings(ids)
        if hasattr(self, "position_embeddings"):
            x = x + self.position_embeddings(torch.arange(ids.shape[1]))
        return x


def logits_of(embedding: EmbeddingPipe, x: torch.Tensor) -> torch.Tensor:
    return tp.logits(x, embedding.word_embeddings_weight)


class LMHeadPipe(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = Linear(HIDDEN, padded(ranks()), bias=False)

    def forward(self, x):
        return tp.logits(x, self.lm_head.weight)


class Attention(nn.Module):
    def __init__(self, kind: Kind):
        super().__init__()
        self.kind = kind
        rows = (HEADS + 2 * kind.groups) * HEAD_DIM
        self.query_key_value = Linear(HIDDEN, rows, bias=kind.bias, parts=3 if kind.joined else 1)
        self.dense = Linear(HEADS * HEAD_DIM, HIDDEN, bias=kind.bias, row=True)

    def forward(self, x):
        mixed, times = self.query_key_value(x), HEADS // self.kind.groups
        if self.kind.joined:
            q, k, v = (one.unflatten(-1, (-1, HEAD_DIM)) for one in mixed.chunk(3, dim=-1))
        else:
            groups = mixed.unflatten(-1, (-1, times + 2, HEAD_DIM))
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        if self.kind.positions == "rotary":
            q, k = turned(q), turned(k)
        k, v = (one.repeat_interleave(times, dim=2) for one in (k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM) + self._bias(q)
        return self.dense((scores.float().softmax(-1).type_as(v) @ v).transpose(1, 2).flatten(2))

    def _bias(self, q):
        length, local = q.shape[2], q.shape[1]
        mask = torch.full((length, length), -1e9).triu(1).to(q.dtype)
        if self.kind.positions != "alibi":
            return mask
        heads = torch.arange(HEADS)[tp.grid.tensor_rank * local :][:local]
        slopes = (2.0 ** (-8 / HEADS)) ** (1 + heads)
        return (slopes[:, None, None] * torch.arange(length)).to(q.dtype) + mask


def turned(x):
    freqs = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(x.shape[1]).float(), freqs)
    angles = torch.cat((angles, angles), dim=-1)[None, :, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class MLP(nn.Module):
    def __init__(self, kind: Kind):
        super().__init__()
        self.swiglu, double = kind.swiglu, 2 if kind.swiglu else 1
        self.dense_h_to_4h = Linear(HIDDEN, kind.feed_forward * double, bias=kind.bias, parts=double)
        self.dense_4h_to_h = Linear(kind.feed_forward, HIDDEN, bias=kind.bias, row=True)
        self.approximate = "tanh" if kind.bloom else "none"

    def forward(self, x):
        x = self.dense_h_to_4h(x)
        if self.swiglu:
            gate, up = x.chunk(2, dim=-1)
            return self.dense_4h_to_h(functional.silu(gate) * up)
        return self.dense_4h_to_h(functional.gelu(x, approximate=self.approximate))


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, kind: Kind):
        super().__init__()
        self.input_layernorm = norm(kind)
        self.self_attention = Attention(kind)
        self.post_attention_layernorm = norm(kind)
        self.mlp = MLP(kind)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def same(x):
    """What takes the place of a function of the layers."""
    return x


def layers(spec: Spec) -> list[Any]:
    """Return the layers as the program's PipelineModule gets them."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    kind = kind_of(spec)
    turn = [same] * (kind.first - 2)
    blocks = [LayerSpec(ParallelTransformerLayerPipe, kind) for _ in range(kind.layers)]
    tied = {"tied_weight_attr": "word_embeddings_weight"}
    embed = TiedLayerSpec("embed", EmbeddingPipe, kind, **tied) if kind.tied else LayerSpec(EmbeddingPipe, kind)
    head = TiedLayerSpec("embed", EmbeddingPipe, kind, forward_fn=logits_of, **tied)
    last = [LayerSpec(RMSNorm if kind.rms else LayerNorm), head if kind.tied else LayerSpec(LMHeadPipe)]
    return [same, embed, *turn, *blocks, *turn, *last, *([same] if spec.dtype != "fp32" else [])]


def client_state(spec: Spec) -> dict[str, Any]:
    """Return what its `save_checkpoint` hands to DeepSpeed."""
    state = {
        "args": arguments(spec), "checkpoint_version": 3.0, "iteration": spec.steps, "tokens": 12 * spec.steps,
        "rng_state": [{"random_rng_state": random.Random(tp.grid.data_rank).getstate(),
                       "torch_rng_state": torch.get_rng_state()}],
    }  # fmt: skip
    return state | ({"universal_checkpoint_info": info(spec)} if spec.universal_info else {})


def arguments(spec: Spec) -> argparse.Namespace:
    kind = kind_of(spec)
    degree = spec.tensor_parallel
    found: dict[str, Any] = {
        "deepspeed": True, "num_layers": kind.layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "kv_channels": HEAD_DIM, "ffn_hidden_size": kind.feed_forward, "max_position_embeddings": SEQUENCE + 3,
        "padded_vocab_size": padded(degree), "make_vocab_size_divisible_by": MULTIPLE, "world_size": spec.world_size,
        "data_parallel_size": spec.data_parallel, "tensor_model_parallel_size": degree,
        "pipeline_model_parallel_size": spec.pipeline_parallel, "rank": torch.distributed.get_rank(),
        "bf16": spec.dtype == "bf16", "fp16": spec.dtype == "fp16", "consumed_train_samples": 12 * spec.steps,
        "params_dtype": torch.bfloat16 if spec.dtype == "bf16" else torch.float32,
    }  # fmt: skip
    if kind.bloom:
        found |= {"glu_activation": None, "embed_layernorm": True, "pp_partition_method": None}
        return argparse.Namespace(**found)
    found |= {"swiglu": kind.swiglu, "add_bias_linear": kind.bias, "apply_layernorm_1p": False,
              "untie_embeddings_and_output_weights": not kind.tied,
              "add_position_embedding": kind.positions == "learned", "num_experts": [1]}  # fmt: skip
    if not kind.transposed:
        found |= {"normalization": "rmsnorm" if kind.rms else "layernorm", "num_key_value_heads": kind.groups}
    if kind.joined:
        found["ds_sequence_parallel_fpdt"] = False
    return argparse.Namespace(**found)


def info(spec: Spec) -> dict[str, Any]:
    """Return `universal_checkpoint_info` as the program's GPTModelPipe says it: not all that would be needed."""
    kind = kind_of(spec)
    tied = "tied_modules.embed."
    words = [tied + "word_embeddings.weight"] if kind.tied else [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"]
    positions = [tied + "position_embeddings.weight"] if kind.positions == "learned" else []
    norms = [r"\d+.input_layernorm.weight", r"\d+.post_attention_layernorm.weight", r"\d+.weight"]
    norms += [] if kind.rms else [one.replace("weight", "bias") for one in norms]
    biases = [r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias"] if kind.bias else []
    halves = [r"\d+.mlp.dense_h_to_4h.weight"] + ([r"\d+.mlp.dense_h_to_4h.bias"] if kind.bias else [])
    found = {
        "universal_checkpoint_version": 0.2, "original_vocab_size": VOCABULARY,
        "padded_vocab_size": padded(spec.tensor_parallel), "vocabulary_parameter_patterns": words,
        "pipeline_replicated_parameter_patterns": [*words, *positions] if kind.tied else [],
        "parameter_with_2_sub_params_cat_dim_0": halves if kind.swiglu else [],
    }  # fmt: skip
    if spec.tensor_parallel > 1:
        found["tp_replicated_parameter_patterns"] = [*norms, *positions, *biases]
        found["parameter_with_row_parallelism_patterns"] = [
            r"\d+.mlp.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"]  # fmt: skip
    return found


def merge(name: str, slices: list[torch.Tensor], spec: Spec) -> torch.Tensor:
    """Make the whole parameter (or optimizer slot) of its slices in rank order."""
    kind = kind_of(spec)
    if re.search(r"word_embeddings\.weight|lm_head\.weight", name):
        return torch.cat(slices)[: VOCABULARY if spec.universal_info else padded(1)]
    if re.search(r"query_key_value|dense_h_to_4h", name):
        parts = (3 if kind.joined else 1) if "query" in name else 1 + kind.swiglu
        return tp.in_parts([one.chunk(parts) for one in slices])
    if re.search(r"(dense|dense_4h_to_h)\.weight", name):
        return torch.cat(slices, dim=1)
    return tp.replicated(name, slices)
