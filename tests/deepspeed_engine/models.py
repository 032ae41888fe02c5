"""Small models that hold every structural case of a checkpoint, and the param groups they train with.

Weights depend only on the seed, data only on the step, so that a run can be repeated at any world size.
"""

from __future__ import annotations

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
    torch.manual_seed(seed)
    if spec.model == "rich":
        model: nn.Module = Rich(empty=spec.empty, zero_dim=spec.zero_dim, tied=spec.tied)
    elif spec.model == "matrices":
        model = Matrices()
    elif spec.model == "tiny":
        model = Tiny()
    elif spec.model == "moe":
        model = MixtureOfExperts(spec.expert_parallel, spec.experts)
    elif spec.model == "moe_layers":
        model = ExpertLayers(spec.expert_layers)
        if spec.frozen_experts:
            model.freeze_last()
    elif spec.model == "moe_megatron":
        from tests.deepspeed_engine.tensor_parallel import MegatronOfExperts

        model = MegatronOfExperts(spec)
    elif spec.model in HUGGING_FACE:
        model = HUGGING_FACE[spec.model]()
    elif spec.model == "megatron":
        from tests.deepspeed_engine.tensor_parallel import Megatron

        model = Megatron(invariant=spec.invariant)
    elif spec.model == "unstaged":
        from tests.deepspeed_engine.pipeline import Unstaged

        model = Unstaged(recomputed=spec.recomputed)
    elif spec.is_pipeline:
        from tests.deepspeed_engine.pipeline import build_pipeline

        model = build_pipeline(spec)
    else:
        raise ValueError(f"unknown model {spec.model!r}")
    return Wrapped(spec.prefix, model) if spec.prefix else model


def param_groups(spec: Spec, model: nn.Module) -> list[dict[str, Any]]:
    """Cut the trained parameters into `spec.groups` groups with their own hyperparameters."""
    if spec.model in ("moe", "pipeline_moe", "pipeline_moe_megatron"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        dense = {"params": list(model.parameters()), "name": "dense", "weight_decay": 0.1, "lr": 1e-2}
        return split_params_into_different_moe_groups_for_optimizer(dense, spec.expert_group_size)
    if spec.model in ("moe_layers", "moe_megatron"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        big, small = (
            [p for p in model.parameters() if (p.dim() >= 2) == wanted and p.requires_grad] for wanted in (True, False)
        )
        both = [{"params": big, "name": "decay", "weight_decay": 0.1, "lr": 1e-2},
                {"params": small, "name": "rest", "weight_decay": 0.0, "lr": 2e-2}]  # fmt: skip
        return split_params_into_different_moe_groups_for_optimizer(both, spec.expert_group_size)
    decay, plain, tiny = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad and not spec.frozen_in_group:
            continue
        if name.endswith("alpha"):
            tiny.append(p)
        else:
            (decay if p.dim() >= 2 else plain).append(p)
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


class MixtureOfExperts(nn.Module):
    """A dense part and DeepSpeed's own expert layer."""

    def __init__(self, expert_parallel: int, experts: int, *, sliced: bool = False):
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.fc = nn.Linear(HIDDEN, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 11), nn.ReLU(), nn.Linear(11, HIDDEN))
        self.moe = MoE(
            hidden_size=HIDDEN, expert=expert, num_experts=experts, ep_size=expert_parallel, k=1,
            min_capacity=0, capacity_factor=4.0, use_rts=False, enable_expert_tensor_parallelism=sliced,
        )  # fmt: skip
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        x = self.fc(self.emb(ids))
        y, balance, _ = self.moe(x)
        return token_loss(self.out(x + y), labels) + 0.01 * balance


class ExpertLayers(nn.Module):
    """Several expert layers, each with its own number of experts and of ranks over which they are spread."""

    def __init__(self, layers: tuple[tuple[int, int, bool], ...]):
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.fc = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in layers)
        self.moes = nn.ModuleList()
        for index, (experts, degree, residual) in enumerate(layers):
            width = 9 + 2 * index
            expert = nn.Sequential(nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, HIDDEN))
            self.moes.append(
                MoE(
                    hidden_size=HIDDEN,
                    expert=expert,
                    num_experts=experts,
                    ep_size=degree,
                    k=1,
                    min_capacity=0,
                    capacity_factor=4.0,
                    use_rts=False,
                    use_residual=residual,
                )
            )
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def freeze_last(self) -> None:
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


def _llama(*, tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, vocab_size=HUGGING_FACE_VOCABULARY, max_position_embeddings=32,
        tie_word_embeddings=tied, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=HUGGING_FACE_VOCABULARY, n_positions=16,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama_heads() -> nn.Module:
    """Build one that several ranks can share by heads; its vocabulary no two ranks divide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=3, head_dim=4,
        intermediate_size=22, vocab_size=HUGGING_FACE_VOCABULARY, max_position_embeddings=32,
        tie_word_embeddings=False, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _bigcode() -> nn.Module:
    """Build one of which every rank has key and value whole."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(
        n_embd=16, n_layer=1, n_head=4, vocab_size=HUGGING_FACE_VOCABULARY, n_positions=16, multi_query=True,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return GPTBigCodeForCausalLM(config)


def _codegen() -> nn.Module:
    """Build one whose fused rows a rank takes in blocks."""
    from transformers import CodeGenConfig, CodeGenForCausalLM

    config = CodeGenConfig(
        n_embd=32, n_layer=1, n_head=8, rotary_dim=4, vocab_size=HUGGING_FACE_VOCABULARY, n_positions=16,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    return CodeGenForCausalLM(config)


def _phi3() -> nn.Module:
    """Build one with fused query, key and value, and fused gate and up projection."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        vocab_size=HUGGING_FACE_VOCABULARY, max_position_embeddings=32, pad_token_id=0, tie_word_embeddings=False,
        resid_pdrop=0, embd_pdrop=0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return Phi3ForCausalLM(config)


def _mixtral(*, experts: int = 3) -> nn.Module:
    """Experts that are ordinary parameters, in modules that ZeRO-3 gathers as a whole."""
    from deepspeed.utils import set_z3_leaf_modules
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=HUGGING_FACE_VOCABULARY, max_position_embeddings=32, num_local_experts=experts,
        num_experts_per_tok=2, tie_word_embeddings=False, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    return model


HUGGING_FACE = {
    "mixtral": _mixtral, "mixtral_of_4": lambda: _mixtral(experts=4),
    "llama": _llama, "llama_untied": lambda: _llama(tied=False), "llama_heads": _llama_heads, "gpt2": _gpt2,
    "bigcode": _bigcode, "codegen": _codegen, "phi3": _phi3,
}  # fmt: skip
