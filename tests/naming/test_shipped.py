"""The maps that come with zckpt: the mapped model has the same logits, there and back, and the same bits back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import zckpt
from tests.live import save_both
from tests.logical import assert_same_tree
from tests.naming.models import Megatron, MetaLlama, Shape
from tests.naming.test_training import trained
from tests.truth import assert_same
from zckpt.naming.document import read_map, shipped

COMMON = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = {"head_dim": 8, "tie_word_embeddings": False, **COMMON}
TIED = {**LLAMA, "tie_word_embeddings": True}
ROWS = 64


def llama(**more):
    return hf.LlamaConfig(**{**LLAMA, **more})


def gpt_neox(**more):
    return hf.GPTNeoXConfig(
        vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        rotary_pct=0.5, use_parallel_residual=False, tie_word_embeddings=False, **more,
    )  # fmt: skip


CONFIGS = {
    "llama": llama,
    "llama_mha_bias": lambda: llama(num_key_value_heads=6, attention_bias=False),
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "llama_one_group": lambda: llama(num_key_value_heads=1, head_dim=4),
    "mistral": lambda: hf.MistralConfig(sliding_window=None, **LLAMA),
    "qwen2": lambda: hf.Qwen2Config(tie_word_embeddings=False, use_sliding_window=False, head_dim=4, **COMMON),
    "qwen3": lambda: hf.Qwen3Config(use_sliding_window=False, **LLAMA),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, use_sliding_window=False,
        **LLAMA,
    ),
    "gemma": lambda: hf.GemmaConfig(**TIED),
    "gemma2": lambda: hf.Gemma2Config(query_pre_attn_scalar=16, sliding_window=64, **TIED),
    "gemma3": lambda: hf.Gemma3TextConfig(
        query_pre_attn_scalar=16, sliding_window=64, **TIED,
        rope_local_base_freq=10000.0,
    ),
    "mixtral": lambda: hf.MixtralConfig(num_local_experts=3, num_experts_per_tok=2, sliding_window=None, **LLAMA),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=37, n_embd=24, n_inner=20, n_layer=2, n_head=3, n_positions=16, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    ),
    "gpt_neox": gpt_neox,
}  # fmt: skip


def untrained(kind: str, **settings):
    """A model of Hugging Face's as it is made, with other settings."""
    config = CONFIGS[kind]()
    config.update(settings)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def made(kind: str):
    """A model of Hugging Face's with every parameter drawn, norms and biases too."""
    torch.manual_seed(0)
    model = untrained(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def saved_run(kind: str, path: Path) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Save such a model and its optimizer after some steps."""
    model = made(kind).train()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    trained(model, optimizer, range(2))
    save_both(model, optimizer, path)
    return model, optimizer


def megatron(kind: str, config, rows: int) -> Megatron:
    if kind in ("gpt2", "gpt_neox"):
        own = {"gelu": "tanh", "rotary": 0, "positions": 16, "tied": True} if kind == "gpt2" else {"rotary": 0.5}
        return Megatron(Shape(
            heads=3, groups=3, rows=rows, norm="layer", eps=1e-5, bias=True, qkv_bias=True, gated=False, **own
        ))  # fmt: skip
    if kind.startswith("gemma"):
        own = {} if kind == "gemma" else {"post": True, "scale": 0.25}
        if kind == "gemma2":
            own |= {"attention_cap": 50.0, "logit_cap": 30.0}
        return Megatron(Shape(
            groups=2, rows=rows, tied=True, norm="zero", gelu="tanh", embedding=24**0.5, qk_norm=kind == "gemma3", **own
        ))  # fmt: skip
    moe = kind == "qwen3_moe"
    return Megatron(Shape(
        groups=config.num_key_value_heads, d=config.head_dim, ffn=16 if moe else 20, rows=rows,
        qkv_bias=kind == "qwen2", qk_norm=moe or kind == "qwen3", experts=3 if moe or kind == "mixtral" else 0,
        tied=config.tie_word_embeddings,
    ))  # fmt: skip


CASES = [
    *((kind, f"llama-huggingface-{to}") for to in ("meta", "torchtitan")
      for kind in ("llama", "llama_mha_bias", "llama_tied", "llama_one_group", "mistral", "qwen2")),
    *((kind, "llama-huggingface-megatron")
      for kind in ("llama", "llama_mha_bias", "llama_tied", "llama_one_group", "mistral", "qwen2", "qwen3")),
    *((kind, f"qwen3-huggingface-torchtitan{version}") for kind in ("qwen3", "qwen3_moe") for version in ("", "-0.2")),
    ("gemma", "gemma-huggingface-megatron"),
    ("gemma2", "gemma2-huggingface-megatron"),
    ("gemma3", "gemma2-huggingface-megatron"),
    ("mixtral", "mixtral-huggingface-megatron"),
    ("qwen3_moe", "qwen3-moe-huggingface-megatron"),
    ("gpt2", "gpt2-huggingface-megatron"),
    ("gpt_neox", "gpt-neox-huggingface-megatron"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.every(3)
def test_logits_are_the_same_and_the_way_back_gives_the_same_bits(kind, name):
    model = made(kind)
    model.save_pretrained("hf")
    of_megatron = read_map(name).sides[1].name == "megatron"
    rows = ROWS if of_megatron else 37
    config = {**json.loads(Path("hf/config.json").read_text()), "padded_vocab_size": rows}
    zckpt.consolidate("hf", "other.safetensors", map=name, map_config=config, tied="drop")
    titan = name.endswith("titan")
    other = megatron(kind, model.config, rows) if of_megatron else MetaLlama(model.config, titan=titan)
    state = load_file("other.safetensors")
    if kind == "llama_tied" and not of_megatron:
        state[f"{other.head_name}.weight"] = state["tok_embeddings.weight"]
    other.load_state_dict(state)
    assert_same_logits(other, model)

    zckpt.consolidate("other.safetensors", "back", map=name, map_config="hf/config.json")
    first, back = load_all("hf"), load_all("back")
    if model.config.tie_word_embeddings and "lm_head.weight" not in first:
        back.pop("lm_head.weight", None)
    assert_same_tree(back, first)


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found = model(tokens)
    return getattr(found, "logits", found)[..., :37]


def assert_same_logits(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    tokens = torch.randint(0, 37, (2, 11))
    with torch.no_grad():
        first, second = logits_of(found, tokens), logits_of(expected, tokens)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def load_all(directory: str) -> dict[str, torch.Tensor]:
    return {name: value for file in Path(directory).glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3", "llama-huggingface-megatron"),
        ("mixtral", "mixtral-huggingface-megatron"),
        ("gemma", "gemma-huggingface-megatron"),
        ("gemma3", "gemma2-huggingface-megatron"),
    ],
)
def test_one_tensor_of_all_layers_is_the_layers_tensors_stacked(kind, name):
    """torch_dist's keys have no layer, nor expert: what is proven for those that have holds for the stack of them."""
    model = made(kind)
    model.save_pretrained("hf")
    for one in (name, f"{name}-dist"):
        zckpt.consolidate("hf", f"{one}.safetensors", map=one)
    flat, stacked = load_file(f"{name}.safetensors"), load_file(f"{name}-dist.safetensors")
    for key, value in stacked.items():
        layers = [key.replace("decoder.layers.", f"decoder.layers.{layer}.") for layer in range(2)]
        if layers[0] == key:
            expected = flat[key]
        elif ".mlp.experts." in key:
            whole = [
                [flat[one.replace("experts.experts.", f"experts.local_experts.{e}.")] for e in range(3)]
                for one in layers
            ]
            expected = torch.stack([torch.stack(one) for one in whole])
        else:
            expected = torch.stack([flat[one] for one in layers])
        assert_same(value, expected, key)
    zckpt.consolidate(
        f"{name}-dist.safetensors", "back", map=f"{name}-dist",
        map_config="hf/config.json",
    )  # fmt: skip
    found = zckpt.diff("hf", "back")
    assert found.equal or set(found.only_in_b) == {("lm_head.weight", None)}
    assert found.equal != model.config.tie_word_embeddings


def test_the_model_in_memory_of_transformers_5_has_its_experts_in_one_tensor():
    model = made("mixtral")
    model.save_pretrained("hf")
    state = model.state_dict()
    if "model.layers.0.mlp.experts.gate_up_proj" not in state:
        pytest.skip("transformers before 5")
    zckpt.consolidate("hf", "fused.safetensors", map="mixtral-huggingface-fused")
    assert_same_tree(load_file("fused.safetensors"), state)
    save_file({name: value.contiguous() for name, value in state.items()}, "live.safetensors")
    zckpt.consolidate("live.safetensors", "back", map="mixtral-huggingface-fused")
    assert zckpt.diff("hf", "back").equal


def test_a_mapped_directory_is_loaded_by_transformers():
    model = made("llama")
    other = MetaLlama(model.config)
    torch.save(other.state_dict(), "consolidated.pt")
    params = {"dim": 24, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 8, "vocab_size": -1}
    Path("params.json").write_text(json.dumps(params))
    zckpt.consolidate("consolidated.pt", "hf", map="llama-huggingface-meta")
    model.config.save_pretrained("hf")
    loaded = hf.AutoModelForCausalLM.from_pretrained("hf", attn_implementation="eager").float().eval()
    assert_same_logits(loaded, other)


@pytest.mark.parametrize("name", shipped())
def test_every_map_says_what_it_is_about(name):
    found = read_map(name)
    assert found.about
    assert found.name == name
