"""Small models that hold every structural case of a checkpoint, and the param groups they train with.

Weights depend only on the seed, data only on the step, so that a run can be repeated at any world size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.deepspeed_engine.spec import Spec

MODEL_SEED = 1234
VOCABULARY = 37
HIDDEN = 8
SEQUENCE = 5


def build_model(spec: Spec, seed: int = MODEL_SEED) -> nn.Module:
    """Build the model of `spec`, the same on every rank."""
    from tests.deepspeed_engine import pipeline, tensor_parallel  # which are made of what is here

    torch.manual_seed(seed)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "rich": lambda: Rich(empty=spec.empty, zero_dim=spec.zero_dim, tied=spec.tied),
        "matrices": Matrices,
        "tiny": Tiny,
        "moe": lambda: MixtureOfExperts(spec.expert_parallel, spec.experts),
        "moe_layers": lambda: ExpertLayers(spec.expert_layers, frozen=spec.frozen_experts),
        "moe_megatron": lambda: tensor_parallel.MegatronOfExperts(spec),
        "megatron": lambda: tensor_parallel.Megatron(invariant=spec.invariant),
        "unstaged": lambda: pipeline.Unstaged(recomputed=spec.recomputed),
        **HUGGING_FACE,
    }
    model = pipeline.build_pipeline(spec) if spec.is_pipeline else kinds[spec.model]()
    return Wrapped(spec.prefix, model) if spec.prefix else model


def param_groups(spec: Spec, model: nn.Module) -> list[dict[str, Any]]:
    """Cut the trained parameters into `spec.groups` groups with their own hyperparameters."""
    if "moe" in spec.model:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained, "name": "dense", "weight_decay": 0.1, "lr": 1e-2}]
        if spec.model in ("moe_layers", "moe_megatron"):
            groups = [
                {"params": [p for p in trained if p.dim() >= 2], "name": "decay", "weight_decay": 0.1, "lr": 1e-2},
                {"params": [p for p in trained if p.dim() < 2], "name": "rest", "weight_decay": 0.0, "lr": 2e-2},
            ]
        return split_params_into_different_moe_groups_for_optimizer(groups, spec.expert_group_size)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad or spec.frozen_in_group]
    decay = [p for _, p in trained if p.dim() >= 2]
    tiny = [p for name, p in trained if name.endswith("alpha")]
    plain = [p for name, p in trained if p.dim() < 2 and not name.endswith("alpha")]
    if spec.groups == 1:
        return [{"params": decay + plain + tiny, "weight_decay": 0.0, "lr": 1e-2}]
    bias_lr = 1e-2 if spec.model in HUGGING_FACE else 2e-2
    groups = [
        {"params": decay, "weight_decay": 0.1, "lr": 1e-2},
        {"params": plain, "weight_decay": 0.0, "lr": bias_lr},
    ]
    if spec.groups == 3 and tiny:
        return [*groups, {"params": tiny, "weight_decay": 0.0, "lr": 1e-3}]
    groups[1]["params"] = tiny + plain
    return groups


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of (batch, sequence, vocabulary) logits, in fp32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.reshape(-1))


class Wrapped(nn.Module):
    """A model under one more name, so that every parameter's name gains a prefix."""

    def __init__(self, prefix: str, model: nn.Module):
        super().__init__()
        self.add_module(prefix, model)
        self.prefix = prefix

    def forward(self, *args, **kwargs):
        return getattr(self, self.prefix)(*args, **kwargs)


class Rich(nn.Module):
    """A few thousand parameters with every structural case.

    One-element (or 0-d), prime-sized and 3-d parameters, a grouped convolution, a tied head, frozen
    parameters of odd sizes, a layer outside the graph, optionally zero-sized parameters; float, integer,
    bool and non-persistent buffers.
    """

    def __init__(self, *, empty: bool = False, zero_dim: bool = False, tied: bool = True):
        super().__init__()
        one = () if zero_dim else (1,)
        self.alpha = nn.Parameter(torch.full(one, 0.5))
        self.prime = nn.Parameter(torch.randn(7) * 0.1)
        self.odd3d = nn.Parameter(torch.randn(1, 1, 5) * 0.1)
        self.emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.ln1 = nn.LayerNorm(HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, 13)
        self.fc2 = nn.Linear(13, HIDDEN, bias=False)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=2)
        self.big = nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))
        self.frozen_lin = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.frozen_odd = nn.Parameter(torch.randn(11), requires_grad=False)
        self.frozen_scalar = nn.Parameter(torch.full(one, 1.25), requires_grad=False)
        self.unused = nn.Linear(3, 5)
        self.has_empty = empty
        if empty:
            self.empty = nn.Parameter(torch.zeros(0, HIDDEN))
            self.empty_frozen = nn.Parameter(torch.zeros(3, 0), requires_grad=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.register_buffer("pos", torch.randn(SEQUENCE, HIDDEN) * 0.1)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, True, False, True, True]))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids, labels):
        x = self.emb(ids)
        x = x + self.pos.to(x.dtype) * self.mask.to(x.dtype)[:, None]
        self.counter += 1
        x = x + self.fc2(torch.relu(self.fc1(self.ln1(x)))) * self.alpha
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.big(x) + self.frozen_lin(x) * self.frozen_scalar
        x = x * (1 + self.prime.sum() + self.odd3d.sum() + 0.01 * self.frozen_odd.sum())
        if self.has_empty:
            x = x + self.empty.sum() + self.empty_frozen.sum()
        return token_loss(self.head(x), labels)


class Matrices(nn.Module):
    """Four matrices of 310 elements between vectors, all trained: for optimizers that step matrices as such.

    Two ranks have two of them each, three ranks cut two of them.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.up = nn.ModuleList(nn.Linear(10, 31) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(31, 10, bias=False) for _ in range(2))
        self.lm_head = nn.Linear(10, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(x)))
        return token_loss(self.lm_head(x), labels)


class Tiny(nn.Module):
    """Few elements: two groups, which two ranks cut within a parameter, a frozen matrix and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.head = nn.Linear(3, VOCABULARY)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, labels):
        self.seen += 1
        return token_loss(self.head(self.frozen(self.norm(self.embed(ids)))), labels)


def experts_of(width: int, experts: int, degree: int, **options: bool) -> nn.Module:
    """Build DeepSpeed's own layer of experts, of which each token has one; collective."""
    from deepspeed.moe.layer import MoE

    expert = nn.Sequential(nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, HIDDEN))
    return MoE(
        hidden_size=HIDDEN, expert=expert, num_experts=experts, ep_size=degree, k=1, min_capacity=0,
        capacity_factor=4.0, use_rts=False, **options,
    )  # fmt: skip


class MixtureOfExperts(nn.Module):
    """A dense part and an expert layer."""

    def __init__(self, expert_parallel: int, experts: int, *, sliced: bool = False):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.fc = nn.Linear(HIDDEN, HIDDEN)
        self.moe = experts_of(11, experts, expert_parallel, enable_expert_tensor_parallelism=sliced)
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        x = self.fc(self.emb(ids))
        y, balance, _ = self.moe(x)
        return token_loss(self.out(x + y), labels) + 0.01 * balance


class ExpertLayers(nn.Module):
    """Several expert layers, each with its own number of experts and of ranks over which they are spread."""

    def __init__(self, layers: tuple[tuple[int, int, bool], ...], *, frozen: bool = False):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.fc = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in layers)
        self.moes = nn.ModuleList(
            experts_of(9 + 2 * index, experts, degree, use_residual=residual)
            for index, (experts, degree, residual) in enumerate(layers)
        )
        self.out = nn.Linear(HIDDEN, VOCABULARY)
        if frozen:
            self._freeze_last()

    def _freeze_last(self) -> None:
        """Freeze the experts of the last layer, each with weights of its own: DeepSpeed makes them all alike."""
        moe = self.moes[-1]
        first = dist.get_rank() % moe.ep_size * moe.num_local_experts
        for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            for p in expert.parameters():
                p.requires_grad_(False).data.mul_(1 + first + local)

    def forward(self, ids, labels):
        x, total = self.emb(ids), 0.0
        for fc, moe in zip(self.fc, self.moes, strict=True):
            x = x + fc(x)
            y, balance, _ = moe(x)
            x, total = x + y, total + balance
        return token_loss(self.out(x), labels) + 0.01 * total


HUGGING_FACE_VOCABULARY = 67


def _causal(kind: str, **sizes: Any) -> nn.Module:
    """Build a small model of transformers that computes the same in every run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=HUGGING_FACE_VOCABULARY, attn_implementation="eager", use_cache=False, **sizes
    )
    return AutoModelForCausalLM.from_config(config)


def _mixtral(*, experts: int = 3) -> nn.Module:
    """Experts that are ordinary parameters, in modules that ZeRO-3 gathers as a whole."""
    from deepspeed.utils import set_z3_leaf_modules

    model = _causal("mixtral", **LLAMA, tie_word_embeddings=False, num_local_experts=experts, num_experts_per_tok=2)
    set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    return model


LLAMA: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
HEADS = {**LLAMA, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3,
         "head_dim": 4, "intermediate_size": 22, "tie_word_embeddings": False}  # fmt: skip
PHI3 = {**LLAMA, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        "tie_word_embeddings": False}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 16, "n_positions": 16, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _causal("llama", **LLAMA, tie_word_embeddings=True),
    "llama_untied": lambda: _causal("llama", **LLAMA, tie_word_embeddings=False),
    # several ranks can share it by heads; its vocabulary no two ranks divide
    "llama_heads": lambda: _causal("llama", **HEADS),
    "gpt2": lambda: _causal("gpt2", **GPT2, n_layer=2, n_head=2),
    # every rank has key and value whole
    "bigcode": lambda: _causal("gpt_bigcode", **GPT2, n_layer=1, n_head=4, multi_query=True),
    # a rank takes the fused rows in blocks
    "codegen": lambda: _causal("codegen", **GPT2 | {"n_embd": 32}, n_layer=1, n_head=8, rotary_dim=4),
    # fused query, key and value, and fused gate and up projection
    "phi3": lambda: _causal("phi3", **PHI3, resid_pdrop=0, embd_pdrop=0),
    "mixtral": _mixtral,
    "mixtral_of_4": lambda: _mixtral(experts=4),
}
