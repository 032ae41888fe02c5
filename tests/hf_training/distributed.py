"""What a rank does to train a tiny Llama that transformers has distributed, and to save it as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import DistributedConfig, save_optimizer_distributed

import zckpt
from tests.fsdp_training.training import truth
from tests.hf_training.training import CONFIGS


def train_and_save(rank: int, world_size: int, sizes: dict[str, int], folder: Path) -> Any:
    """Save the model's shards, with the optimizer in a folder beside them; rank 0 returns the truth."""
    torch.set_num_threads(1)
    base = folder.with_name("base")
    if not rank:
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIGS["llama"]).save_pretrained(base)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for number in range(2):
        tokens = torch.randint(0, 67, (2, 5), generator=torch.Generator().manual_seed(number))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder, distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(folder / "optimizer"))
    found = truth(model, optimizer)
    return found if not rank else None


def load_elsewhere(rank: int, world_size: int, sizes: dict[str, int], source: Path) -> Any:
    """Load what others saved into a model that is distributed in this way; rank 0 returns what it holds then."""
    base = source.with_name("base")
    model = AutoModelForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    assert zckpt.load(source, model=model, optimizer=optimizer).step == 2
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    found = truth(model, optimizer)
    return found if not rank else None
