"""Megatron's way of tensor parallelism, in miniature, under the real engine.

One layer holds every way of cutting that DeepSpeed's universal checkpoints know; RULES says, by
parameter, which it is, and `universal_info` says the same in DeepSpeed's words.

    embedding (vocabulary, padded to PADDED)   rows over ranks
    query_key_value                            sub-parameters QKV, each cut by rows, concatenated per rank
    h_to_4h                                    two equal sub-parameters, the same (SwiGLU)
    adapter_in                                 column parallel: rows over ranks
    dense, 4h_to_h, adapter_out                row parallel: columns over ranks; their biases are replicated
    local_norm                                 one copy per rank that drifts apart: averaged

Ranks: tensor parallel is the fastest, rank = dp * tensor_parallel + tp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.deepspeed_engine.models import HIDDEN, VOCABULARY, MixtureOfExperts, token_loss
from tests.deepspeed_engine.spec import Spec

PADDED = 40  # the vocabulary, padded so that it divides among the ranks
FEED_FORWARD = 12
ADAPTER = 8
HEADS = 4  # of the model that computes the same at any degree
QKV = (8, 8, 4)  # rows of query, key and value: uneven, as with grouped queries
HALVES = (FEED_FORWARD, FEED_FORWARD)

# parameter name (regular expression) -> how the ranks' slices make the whole
RULES = {
    r"(embedding|tied_modules\.embed)\.weight": "vocabulary",
    r"\w+\.query_key_value\.(weight|bias)": "query_key_value",
    r"\w+\.h_to_4h\.(weight|bias)": "two_sub_params",
    r"\w+\.adapter_in\.(weight|bias)": "column",
    r"\w+\.(dense|4h_to_h|adapter_out)\.weight": "row",
    r"\w+\.(dense|4h_to_h|adapter_out)\.bias": "replicated",
    r"\w+\.input_norm\.(weight|bias)": "replicated",
    r"\w+\.local_norm\.(weight|bias)": "average",
    r"alpha": "replicated",  # not in pipelines
    r"experts\.moe\.deepspeed_moe\.experts\.\w+.*": "replicated",  # only where DeepSpeed takes them for slices
    r"experts\.(fc\.(weight|bias)|moe\.deepspeed_moe\.gate\.wg\.weight)": "replicated",  # only with experts
    r"\d+\.moe\.deepspeed_moe\.experts\.\w+.*": "replicated",  # the same in pipelines
    r"\d+\.moe\.deepspeed_moe\.gate\.wg\.weight": "replicated",
    r"\d+\.(weight|bias)": "replicated",  # only in pipelines: the last norm
}
SUB_PARAMS = {"query_key_value": QKV, "two_sub_params": HALVES}  # rows of each


def rule_of(name: str) -> str:
    """Return how the slices of parameter `name` make the whole."""
    return next(rule for pattern, rule in RULES.items() if re.fullmatch(pattern, name))


def merge(name: str, slices: list[torch.Tensor]) -> torch.Tensor:
    """Make the whole parameter (or optimizer slot) of its slices in rank order."""
    rule = rule_of(name)
    if rule == "replicated":
        return replicated(name, slices)
    if rule == "average":
        return sum(slices) / len(slices)
    if rule in SUB_PARAMS:
        rows = [size // len(slices) for size in SUB_PARAMS[rule]]
        return in_parts([one.split(rows) for one in slices])
    whole = torch.cat(slices, dim=1 if rule == "row" else 0)
    return whole[:VOCABULARY] if rule == "vocabulary" else whole


def replicated(name: str, slices: list[torch.Tensor]) -> torch.Tensor:
    """Return what all ranks have."""
    if not all(torch.equal(slices[0], other) for other in slices):
        raise AssertionError(f"the replicas of {name} differ")
    return slices[0]


def in_parts(slices: list[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Join each sub-parameter of slices, and then these."""
    return torch.cat([torch.cat(same) for same in zip(*slices, strict=True)])


def universal_info(spec: Spec) -> dict[str, Any]:
    """Return RULES as the `universal_checkpoint_info` that DeepSpeed's converter reads (it uses re.match)."""

    def patterns(rule: str) -> list[str]:
        return [rf"{pattern}$" for pattern, its in RULES.items() if its == rule and pattern not in absent]

    absent = {r"alpha" if spec.is_pipeline else r"\d+\.(weight|bias)"}  # unused ones are refused
    absent |= {pattern for pattern in RULES if pattern.startswith(r"experts" if spec.is_pipeline else r"\d+\.moe")}
    if "moe" not in spec.model:
        absent |= {pattern for pattern in RULES if "experts" in pattern or "moe" in pattern}
    elif not spec.sliced_experts:
        absent |= {pattern for pattern in RULES if "deepspeed_moe\\.experts" in pattern}
    tied = [r"tied_modules\.embed\.weight$"] if spec.is_pipeline else []

    weight, bias = (rf"\w+\.query_key_value\.{kind}$" for kind in ("weight", "bias"))
    info = {
        "universal_checkpoint_version": spec.universal_version,
        "original_vocab_size": VOCABULARY,
        "padded_vocab_size": PADDED,
        "vocabulary_parameter_patterns": patterns("vocabulary"),
        "pipeline_replicated_parameter_patterns": tied,
        "tp_replicated_parameter_patterns": patterns("replicated"),
        "parameter_to_average_patterns": patterns("average"),
        "parameter_with_row_parallelism_patterns": patterns("row"),
        "parameter_with_2_sub_params_cat_dim_0": patterns("two_sub_params"),
        "parameter_with_sub_params": [
            {"patterns": [weight], "shape": (QKV, HIDDEN), "partition_dim": 0},
            {"patterns": [bias], "shape": (QKV,), "partition_dim": 0},
        ],
    }
    if spec.universal_version >= 0.4:
        widths = [[size // spec.tensor_parallel] * spec.tensor_parallel for size in QKV]
        info["sub_param_shard_widths"] = {weight: widths, bias: widths}
    return info


class Grid:
    """The `mpu` that DeepSpeed asks for this rank's place in the grid of ranks."""

    def __init__(self, tensor_parallel: int):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tensor_rank, self.data_rank = rank % tensor_parallel, rank // tensor_parallel
        for start in range(0, world, tensor_parallel):
            group = dist.new_group(range(start, start + tensor_parallel))
            if start <= rank < start + tensor_parallel:
                self.tensor_group = group
        for start in range(tensor_parallel):
            group = dist.new_group(range(start, world, tensor_parallel))
            if rank % tensor_parallel == start:
                self.data_group = group

    def get_model_parallel_rank(self) -> int:
        return self.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor_group)

    def get_model_parallel_group(self) -> Any:
        return self.tensor_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data_group)

    def get_data_parallel_group(self) -> Any:
        return self.data_group


grid: Grid | None = None


def use_grid(spec: Spec) -> Grid:
    """Make this rank's grid, for the engine and for the models built afterwards; collective."""
    global grid  # noqa: PLW0603  one grid per process, as in Megatron
    grid = Grid(spec.tensor_parallel)
    return grid


class _Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return _sum(gradient)


class _Reduce(torch.autograd.Function):
    """Sum over the tensor-parallel ranks whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x):
        return _sum(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Gather(torch.autograd.Function):
    """Concatenation of the ranks' last dimensions whose gradient is this rank's part."""

    @staticmethod
    def forward(ctx, x):
        return _gathered(x, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(grid.get_model_parallel_world_size(), dim=-1)[grid.tensor_rank].contiguous()


def _sum(x: torch.Tensor) -> torch.Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=grid.tensor_group)
    return total


def _gathered(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(grid.get_model_parallel_world_size())]
    dist.all_gather(parts, x.contiguous(), group=grid.tensor_group)
    return torch.cat(parts, dim=dim)


class _Affine(nn.Module):
    """Holds a weight and a bias; whoever owns it knows how to apply them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


def _mine(whole: torch.Tensor, dim: int = 0, sub_params: tuple[int, ...] | None = None) -> torch.Tensor:
    """Cut this rank's slice of every sub-parameter of `whole`."""
    size = grid.get_model_parallel_world_size()
    parts = whole.split(sub_params or whole.shape[dim], dim)
    return torch.cat([part.chunk(size, dim)[grid.tensor_rank] for part in parts], dim)


class Layer(nn.Module):
    """A transformer layer with every way of cutting, of this rank's slices."""

    def __init__(self, *, invariant: bool = False):
        super().__init__()
        self.invariant = invariant
        self.input_norm = nn.LayerNorm(HIDDEN)
        self.local_norm = nn.LayerNorm(HIDDEN)
        self.query_key_value = _column(HIDDEN, QKV)
        self.dense = _row(QKV[-1], HIDDEN)
        self.h_to_4h = _column(HIDDEN, HALVES)
        self.add_module("4h_to_h", _row(FEED_FORWARD, HIDDEN))
        self.adapter_in = _column(HIDDEN, (ADAPTER,))
        self.adapter_out = _row(ADAPTER, HIDDEN)

    def forward(self, x):
        rows = [size // grid.get_model_parallel_world_size() for size in QKV]
        query, key, value = self.query_key_value(_Copy.apply(self.input_norm(x))).split(rows, dim=-1)
        x = x + _apply_row(self.dense, self._attend(query, key, value))
        gate, up = self.h_to_4h(self._local(x)).chunk(2, dim=-1)
        x = x + _apply_row(self.get_submodule("4h_to_h"), functional.silu(gate) * up)
        return x + _apply_row(self.adapter_out, torch.relu(self.adapter_in(_Copy.apply(x))))

    def _attend(self, query, key, value):
        """Attend with one head for each rank or, to compute the same at any degree, HEADS over all ranks."""
        if not self.invariant:
            return functional.scaled_dot_product_attention(query, key, value)
        local = HEADS // grid.get_model_parallel_world_size()
        heads = (x.unflatten(-1, (local, -1)).transpose(1, 2) for x in (query, key, value))
        return functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def _local(self, x):
        """Apply a norm of which each rank trains its own copy on its own part of the work, as sequence parallelism
        does where gradients are not reduced: the copies drift apart. Or, not to drift, on all of the work."""
        return _Copy.apply(self.local_norm(x)) if self.invariant else self.local_norm(_Copy.apply(x))


def _column(size_in: int, sub_params: tuple[int, ...]) -> _Affine:
    weight, bias = _drawn(size_in, sum(sub_params))
    return _Affine(_mine(weight, sub_params=sub_params), _mine(bias, sub_params=sub_params))


def _row(size_in: int, size_out: int) -> _Affine:
    weight, bias = _drawn(size_in, size_out)
    return _Affine(_mine(weight, dim=1), bias)


def _drawn(size_in: int, size_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size_out, size_in) * 0.3, torch.randn(size_out) * 0.1


def _apply_row(layer: _Affine, x: torch.Tensor) -> torch.Tensor:
    return _Reduce.apply(functional.linear(x, layer.weight)) + layer.bias


class Embedding(nn.Module):
    """This rank's rows of the padded vocabulary."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(_mine(torch.randn(PADDED, HIDDEN)).clone())

    def forward(self, ids):
        return looked_up(ids, self.weight)


def looked_up(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of tokens, of which this rank has some rows."""
    local = ids - grid.tensor_rank * len(weight)
    outside = (local < 0) | (local >= len(weight))
    found = functional.embedding(local.masked_fill(outside, 0), weight)
    return _Reduce.apply(found.masked_fill(outside[..., None], 0))


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Use rows of a padded vocabulary as the head; the padding takes no part."""
    return _Gather.apply(functional.linear(_Copy.apply(x), weight))[..., :VOCABULARY]


def logits_of(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return logits(x, embedding.weight)


class Megatron(nn.Module):
    """One transformer layer whose parameters are cut over the ranks of `use_grid`."""

    def __init__(self, *, invariant: bool = False):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.embedding = Embedding()
        self.layer = Layer(invariant=invariant)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        return token_loss(logits_of(self.embedding, x + self.layer(x) * self.alpha), labels)


class MegatronOfExperts(nn.Module):
    """The same, and DeepSpeed's expert layer behind it, which knows of tensor-parallel ranks by itself."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.embedding = Embedding()
        self.layer = Layer(invariant=spec.invariant)
        self.experts = MixtureOfExperts(spec.expert_parallel, spec.experts, sliced=spec.sliced_experts)
        del self.experts.emb, self.experts.out
        gather_tokens_on_gloo()
        self.universal_checkpoint_info = universal_info(spec)  # of client state DeepSpeed does not take it here

    def forward(self, ids, labels):
        x = self.embedding(ids)
        x = x + self.layer(x) * self.alpha
        y, balance, _ = self.experts.moe(self.experts.fc(x))
        return token_loss(logits_of(self.embedding, x + y), labels) + 0.01 * balance


def gather_tokens_on_gloo() -> None:
    """Let DeepSpeed gather the tokens of tensor-parallel ranks: its flat buffer is none that gloo takes."""
    from deepspeed.moe import mappings

    mappings._gather_tokens = _gathered
