"""Tiny pipeline-parallel models with a tied embedding, of DeepSpeed's own `PipelineModule`.

`pipeline_megatron` is an embedding, two layers of `tensor_parallel`, a norm and the embedding as head;
`pipeline` is

    layer 0   embedding, tied with layer 5 (`tied_modules.embed.weight` on both stages)
    layer 1   norm and linear
    layer 2   a function without parameters
    layer 3   two linears
    layer 4   norm
    layer 5   the tied embedding again, as head

`pipeline_megatron_KIND` is Megatron-DeepSpeed's model, see `gpt_pipe`.

`pipeline_moe` has layers of DeepSpeed's experts: the embedding, experts, two linears, experts, norm, the embedding.
In `pipeline_moe_megatron` the linears are a layer of `tensor_parallel`, and the embedding is sliced.

Ranks: rank = (stage * data_parallel + dp) * tensor_parallel + tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.deepspeed_engine import gpt_pipe
from tests.deepspeed_engine.models import HIDDEN, VOCABULARY, experts_of, token_loss
from tests.deepspeed_engine.spec import Spec
from tests.deepspeed_engine.tensor_parallel import Embedding, Layer, gather_tokens_on_gloo, logits_of, universal_info


def build_pipeline(spec: Spec) -> Any:
    """Build this rank's stage; collective."""
    from deepspeed.pipe import PipelineModule

    layers = gpt_pipe.layers(spec) if spec.model.startswith(gpt_pipe.FRONT) else _layers(spec)
    module = PipelineModule(
        layers, topology=_topology(spec), loss_fn=token_loss, partition_method=spec.partition_method,
        seed_layers=True, base_seed=torch.initial_seed(), seed_fn=_seed,
    )  # fmt: skip
    if spec.model == "pipeline_moe_megatron":
        gather_tokens_on_gloo()
        module.universal_checkpoint_info = universal_info(spec)  # as in `MegatronOfExperts`
    return module


def _seed(seed: Any) -> None:
    torch.manual_seed(int(seed))  # of bounds by weight DeepSpeed makes a number of numpy, and `random` takes none


def _topology(spec: Spec) -> Any:
    """Return the grid of ranks; only one with a model axis puts `-model_MM` into the names of layer files."""
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    if "megatron" in spec.model:
        return PipeModelDataParallelTopology(
            num_pp=spec.pipeline_parallel, num_mp=spec.tensor_parallel, num_dp=spec.data_parallel
        )
    return PipeDataParallelTopology(num_pp=spec.pipeline_parallel, num_dp=spec.data_parallel)


def _layers(spec: Spec) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    sliced = "megatron" in spec.model
    embedding, head = ((Embedding,), logits_of) if sliced else ((nn.Embedding, VOCABULARY, HIDDEN), _head)
    experts = LayerSpec(_Experts, spec.experts, spec.expert_parallel, sliced=spec.sliced_experts)
    layer = LayerSpec(Layer, invariant=spec.invariant)
    inner = {
        "pipeline": [LayerSpec(_Recomputed if spec.recomputed else _Block), torch.relu, LayerSpec(_FeedForward)],
        "pipeline_megatron": [layer, layer],
        "pipeline_moe": [experts, LayerSpec(_FeedForward), experts],
        "pipeline_moe_megatron": [experts, layer, experts],
    }[spec.model]
    return [
        TiedLayerSpec("embed", *embedding),
        *inner,
        LayerSpec(nn.LayerNorm, HIDDEN),
        TiedLayerSpec("embed", *embedding, forward_fn=head),
    ]


def _head(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, embedding.weight)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("scale", torch.full((HIDDEN,), 1.5))

    def forward(self, x):
        return x + self.mix(self.norm(x)) * self.alpha * self.scale.to(x.dtype)


def _recomputed() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(_Block())


class _Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = _recomputed()

    def forward(self, x):
        return self.block(x)


class _FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 13)
        self.down = nn.Linear(13, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Unstaged(nn.Module):
    """What `pipeline` computes, as one model with names of its own."""

    def __init__(self, *, recomputed: bool = False):
        super().__init__()
        block = _recomputed() if recomputed else _Block()
        self.embed, self.block, self.feed = nn.Embedding(VOCABULARY, HIDDEN), block, _FeedForward()
        for name, p in self.block.named_parameters():  # frozen ones are listed in another place
            p.requires_grad_(not (recomputed and name.endswith("mix.weight")))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids, labels):
        x = self.norm(self.feed(torch.relu(self.block(self.embed(ids)))))
        return token_loss(_head(self.embed, x), labels)


class _Experts(nn.Module):
    """DeepSpeed's own experts; what balances them is left out of the loss."""

    def __init__(self, experts: int, degree: int, *, sliced: bool = False):
        super().__init__()
        self.moe = experts_of(11, experts, degree, enable_expert_tensor_parallelism=sliced)

    def forward(self, x):
        return x + self.moe(x)[0]
