"""Real runs of Hugging Face's Trainer on tiny models, with what they had in memory when they saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.truth import bits

SAVED, STEPS = 3, 6
VOCABULARY = 67

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False,
    ),
    "qwen2": Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "bert": BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    ),
}  # fmt: skip
"""Query and output projections, and gate and up, are alike: their order is not to be seen from shapes."""


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@dataclass
class Truth(TrainerCallback):
    """What was in memory when the Trainer saved: every tensor by `slot/name`, and the param groups' names."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy all, once."""
        if state.global_step == SAVED:
            optimizer = kwargs["optimizer"]
            self.take(kwargs["model"], getattr(optimizer, "optimizer", optimizer))

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy all of a model and its optimizer."""
        name_of = {id(p): name for name, p in model.named_parameters()}
        self.groups = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for name, tensor in model.state_dict().items():
            self.tensors[f"weight/{name}"] = tensor.clone()
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, torch.Tensor) and slot != "step":
                    self.tensors[f"{slot}/{name_of[id(parameter)]}"] = value.clone()


@dataclass
class Run:
    """A run that was not broken: its directory after `SAVED` steps, its losses, and the truth about it."""

    directory: Path
    losses: list[float]
    truth: Truth


def build(kind: str, seed: int = 0) -> nn.Module:
    """Return a tiny model."""
    torch.manual_seed(seed)
    factory = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model: nn.Module = factory.from_config(CONFIGS[kind])
    return model


def train(
    model: nn.Module, output: Path, *, resume: Path | None = None, steps: int = STEPS, batch: int = 2,
    optimizer: torch.optim.Optimizer | None = None, **options: Any,
) -> tuple[list[float], Truth]:  # fmt: skip
    """Train, from a checkpoint if one is given; return the losses of all steps and the truth."""
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=batch, learning_rate=1e-2,
        weight_decay=0.1, warmup_steps=2, save_steps=SAVED, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    truth = Truth()
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[truth], optimizers=(optimizer, None))
    trainer.remove_callback(transformers.PrinterCallback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [one["loss"] for one in trainer.state.log_history if "loss" in one], truth


def unbroken(kind: str, output: Path, *, change: Callable[[nn.Module], None] | None = None, **options: Any) -> Run:
    """Train a model without a break."""
    model = build(kind)
    if change is not None:
        change(model)
    losses, truth = train(model, output, **options)
    return Run(output / f"checkpoint-{SAVED}", losses, truth)


def reset_accelerate() -> None:
    """Let an Accelerator or a Trainer be the first of this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def shard_by_accelerate(accelerator: Any, version: int, **options: Any) -> None:
    """Let an Accelerator use FSDP, which it has on CPUs, too, and never chooses there by itself."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False, **options)
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):
        state.distributed_type, state.device = DistributedType.FSDP, torch.device("cpu")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
