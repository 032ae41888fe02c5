"""What ranks do to save with torch-checkpointing and to load it, on gloo in the place of NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.fsdp_training.training import STEPS, made, step, trained, truth_and_losses

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _manager(*, reshards: bool) -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(_: object, data: Any, group: Any = None) -> dict[int, Any]:  # it gathers on CUDA devices only
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, data, group=group)
        return dict(enumerate(found))

    DefaultMetadataManager._all_gather_pickled_data = gathered
    items = {key: ItemSpec(resharder=DefaultResharder() if reshards else None) for key in ("model", "optimizer")}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(
        CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage)
    )


def _state(model: Any, optimizer: Any, keys: str) -> Any:
    from torch_checkpointing.state_transformations import optimizer_transform_pre

    if keys == "flat":
        return get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = optimizer.state_dict()
    if keys == "numbers":
        return state
    state["param_groups"][0]["param_names"] = [name for name, _ in model.named_parameters()]
    return optimizer_transform_pre(state)


def save(rank: int, world_size: int, wrap: str, keys: str, folder: Path, reshards: bool = True) -> Any:
    """Train and save; rank 0 returns the truth, and the losses of two steps more."""
    torch.set_num_threads(1)
    model, optimizer, scheduler = trained(wrap, world_size)
    manager = _manager(reshards=reshards)
    others = {"step": STEPS, "lr_scheduler": scheduler.state_dict(), "rng": torch.full((9,), rank, dtype=torch.uint8)}
    items = {"model": model.state_dict(), "optimizer": _state(model, optimizer, keys)}
    manager.save(str(folder), {**items, **others})
    manager.close()
    found = truth_and_losses(model, optimizer, scheduler)
    return found if not rank else None


def load(rank: int, world_size: int, wrap: str, keys: str, folder: Path, reshards: bool = True) -> list[float]:
    """Load, by rank 0's file what only ranks with a file have, and return the losses of two steps."""
    from torch_checkpointing.state_transformations import optimizer_transform_post

    torch.set_num_threads(1)
    model, optimizer, scheduler = made(wrap, world_size, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that there is state to load into
    optimizer.zero_grad()
    manager = _manager(reshards=reshards)
    state = _state(model, optimizer, keys)
    state = manager.load(str(folder), into={"model": model.state_dict(), "optimizer": state})["optimizer"]
    manager.close()
    if keys == "flat":
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    else:
        optimizer.load_state_dict(optimizer_transform_post(state))
    assert torch.load(folder / "step_0.pt") == STEPS
    scheduler.load_state_dict(torch.load(folder / "lr_scheduler_0.pt", weights_only=False))
    optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    return [step(model, optimizer, scheduler, STEPS + number) for number in range(2)]
