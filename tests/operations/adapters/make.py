"""Adapters that PEFT saved, and what it makes of them: `python make.py [NAME...]`, in an environment with peft 0.21.

NAME/base.safetensors                                 the model before
NAME/adapter_config.json, adapter_model.safetensors   what PEFT saved of it
NAME/merged.safetensors                               the model after merge_and_unload, under the model's own names
NAME/whole.safetensors                                the whole model with the adapter in it, of some
"""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(6, 6)
        self.up_proj = torch.nn.Linear(6, 9, bias=False)
        self.down_proj = torch.nn.Linear(9, 6)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(11, 6)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(6, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wte(x))


class Transposed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = Conv1D(12, 4)
        self.attn = torch.nn.ModuleDict({"c_proj": Conv1D(4, 4)})
        self.mlp = torch.nn.ModuleDict({"c_fc": Conv1D(8, 4), "c_proj": Conv1D(4, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_attn(x)


class OfFixture(torch.nn.Module):
    """Some modules of the model that `fixtures/s2_bf16_dp2` is a checkpoint of."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(37, 8)
        self.fc1 = torch.nn.Linear(8, 13)
        self.fc2 = torch.nn.Linear(13, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(self.emb(x)))


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Conv2d(2, 3, 3)
        self.one = torch.nn.Conv2d(3, 4, 1)
        self.line = torch.nn.Conv1d(2, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x)


class Fused(torch.nn.Module):
    """Experts in one tensor, as (expert, out, in), or as (expert, in, out)."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        for name, *sizes in (("gate_up_proj", 10, 6), ("down_proj", 6, 5)):
            shape = (3, *(sizes[::-1] if is_transposed else sizes))
            setattr(self, name, torch.nn.Parameter(torch.randn(shape)))


class Experts(torch.nn.Module):
    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"experts": Fused(is_transposed=is_transposed), "router": torch.nn.Linear(6, 3)})
        self.q_proj = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)


LINEAR = ["q_proj", "up_proj", "down_proj"]
PATTERNS = {"rank_pattern": {"down_proj": 2, "layers.1.q_proj": 5}, "alpha_pattern": {"^layers.0.up_proj": 3}}
EXPERTS = {
    "target_parameters": ["experts.down_proj", "experts.gate_up_proj"], "rank_pattern": {"experts.gate_up_proj": 3},
}  # fmt: skip
CASES: dict[str, tuple[Callable[[], torch.nn.Module], torch.dtype, LoraConfig]] = {
    "plain": (Model, torch.bfloat16, LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR)),
    "patterns": (Model, torch.float32, LoraConfig(r=3, lora_alpha=5, target_modules=LINEAR, **PATTERNS)),
    "rslora": (
        Model,
        torch.bfloat16,
        LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=r"layers\.\d\.(q|up)_proj"),
    ),
    "embedding": (Model, torch.bfloat16, LoraConfig(r=2, lora_alpha=3, target_modules=["wte", "q_proj"])),
    "saved": (
        Model,
        torch.bfloat16,
        LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], modules_to_save=["head", "up_proj"], bias="all"),
    ),
    "own_bias": (Model, torch.float32, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], bias="lora_only")),
    "transposed": (
        Transposed,
        torch.float32,
        LoraConfig(r=2, lora_alpha=3, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True),
    ),
    "convolutions": (
        Convolutions,
        torch.float32,
        LoraConfig(r=2, lora_alpha=3, target_modules=["wide", "one", "line"]),
    ),
    "of_s2_bf16_dp2": (OfFixture, torch.bfloat16, LoraConfig(r=2, target_modules=["emb", "fc1", "fc2"])),
    "experts": (Experts, torch.bfloat16, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], **EXPERTS)),
    "experts_transposed": (
        partial(Experts, is_transposed=True),
        torch.float32,
        LoraConfig(r=2, lora_alpha=3, use_rslora=True, **EXPERTS),
    ),
    "dora": (
        Model,
        torch.bfloat16,
        LoraConfig(r=2, target_modules=["q_proj", "up_proj", "wte"], use_dora=True, use_rslora=True, **PATTERNS),
    ),
    "dora_transposed": (
        Transposed,
        torch.float32,
        LoraConfig(r=2, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, use_dora=True),
    ),
    "dora_convolutions": (
        Convolutions,
        torch.bfloat16,
        LoraConfig(r=2, lora_alpha=3, target_modules=["wide", "one", "line"], use_dora=True),
    ),
    "lora_bias": (Model, torch.bfloat16, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], lora_bias=True)),
    "tokens": (
        Model,
        torch.bfloat16,
        LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"wte": [7, 1], "head": [10]}),
    ),
    "several": (Model, torch.float32, LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR)),
    "ia3": (Model, torch.float32, IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
}
OTHER = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], use_rslora=True, modules_to_save=["head"])
"""The second of several."""

WHOLE = ("plain", "saved", "embedding", "experts", "dora", "lora_bias", "tokens", "several")


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def make(name: str, directory: Path) -> None:
    kind, dtype, config = CASES[name]
    torch.manual_seed(len(name))
    directory.mkdir(exist_ok=True)
    model = kind().to(dtype)
    if kind is not OfFixture:
        save_file(copies(model.state_dict()), directory / "base.safetensors")
    adapted = get_peft_model(model, config)
    if name == "several":
        adapted.add_adapter("other", OTHER)
    for key, parameter in adapted.named_parameters():
        if parameter.requires_grad or "lora_" in key:
            parameter.data += 0.3 * torch.randn_like(parameter)
    adapted.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    for path in directory.rglob("adapter_config.json"):
        text = json.loads(path.read_text())
        if isinstance(text["target_modules"], list):
            text["target_modules"].sort()
        path.write_text(json.dumps(text, indent=1) + "\n")
    if name in WHOLE:
        save_file(copies(adapted.state_dict()), directory / "whole.safetensors")
    if name == "several":
        merged = deepcopy(adapted).merge_and_unload(adapter_names=["other"])
        save_file(copies(merged.state_dict()), directory / "other/merged.safetensors")
    if name not in ("ia3", "of_s2_bf16_dp2"):
        save_file(copies(adapted.merge_and_unload().state_dict()), directory / "merged.safetensors")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case, Path(__file__).parent / case)
