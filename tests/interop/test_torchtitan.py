"""torchtitan's own manager, optimizers and schedulers save through `zckpt.torchtitan`, and go on elsewhere."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zckpt
from tests.gloo import run
from tests.logical import assert_same_tree
from zckpt.errors import UnsupportedError

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

BATCH = 12  # for 1, 2 and 3 processes
STEPS, SAVED = 6, 2

Weights = dict[str, torch.Tensor]


class Trainer:
    """What torchtitan's trainer and loader are to a manager; here they count."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "state": b"any"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(rank, world_size, folder: Path, mode: str, step: int, stock: bool) -> tuple[list[float], Weights]:
    """Train to the end from a step that was saved, or the first; the losses, and the weights at that one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components import checkpointer
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    import zckpt.torchtitan

    logging.getLogger().setLevel(logging.ERROR)
    torch.manual_seed(world_size)  # a resumed model is another before
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    of_adamw = default_adamw(lr=1e-2)
    of_adamw.implementation = "foreach"
    optimizer = of_adamw.build(model_parts=[model])
    scheduler = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizer, training_steps=2 * STEPS)
    trainer, loader = Trainer(), Trainer()
    source: Any = checkpointer if stock else zckpt.torchtitan
    manager = source.CheckpointManager.Config(
        enable=True, folder=str(folder), interval=2, async_mode=mode, last_save_model_only=False, load_step=step
    ).build(
        dataloader=loader, model_parts=[model], optimizers=optimizer, lr_schedulers=scheduler,
        states={"train_state": trainer}, sd_adapter=None, base_folder="",
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="pinned"):
        zckpt.torchtitan.CheckpointManager.Config(enable=True, async_mode="async_with_pinned_mem").build()
    assert manager.load(step=step) == (step > 0)
    assert trainer.step == loader.step == max(step, 0)
    weights: Weights = {}
    losses = []
    while trainer.step < STEPS:
        if trainer.step == SAVED:
            weights = {key: one.full_tensor().clone() for key, one in model.state_dict().items()}
        rows = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(trainer.step)).chunk(world_size)[rank]
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total / world_size))
        manager.maybe_wait_for_staging()
        optimizer.step()
        scheduler.step()
        trainer.step += 1
        loader.step += 1
        manager.save(trainer.step, last_step=trainer.step == STEPS)
    manager.maybe_wait_for_saving()
    manager.close()
    return losses, weights


@pytest.mark.parametrize("mode", ["disabled", "async", "stock"])
def test_torchtitan_goes_on_at_another_number_of_processes(mode, tmp_path):
    pytest.importorskip("torchtitan.components.checkpointer")
    how = "disabled" if mode == "stock" else mode
    losses, weights = run(train, 2, tmp_path / "run", how, -1, mode == "stock", fresh=True)[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-4", "step-6"]
    assert zckpt.open(tmp_path / "run" / "step-2").format == ("dcp" if mode == "stock" else "zckpt")
    if mode == "stock":  # another program's are not replaced
        shutil.rmtree(tmp_path / "run" / "step-4")
        shutil.rmtree(tmp_path / "run" / "step-6")
    found, loaded = run(train, 3, tmp_path / "run", how, SAVED, False, fresh=True)[0]
    assert_same_tree(loaded, weights)
    assert found == pytest.approx(losses[SAVED:], rel=1e-5)


def purge(rank, _: int, folder: Path) -> list[str]:
    """Let a manager that is to keep two remove what is old."""
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from zckpt.torchtitan import CheckpointManager

    model = nn.Linear(2, 2)
    of_adamw = default_adamw(lr=1e-2)
    of_adamw.implementation = "foreach"
    optimizer = of_adamw.build(model_parts=[model])
    manager = CheckpointManager.Config(enable=True, folder=str(folder), keep_latest_k=2).build(
        dataloader=Trainer(), model_parts=[model], optimizers=optimizer, states={}, sd_adapter=None, base_folder="",
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizer, training_steps=4),
    )  # fmt: skip
    for step in (2, 4, 6):
        zckpt.save(folder / f"step-{step}", model=model)
    for name in ("step-1", "step-5", ".step-8.zckpt-partial"):  # killed saves, and one that is going on
        (folder / name).mkdir()
    manager._purge_stale_checkpoints()
    manager.close()
    return sorted(path.name for path in folder.iterdir())


def test_only_whole_checkpoints_count_among_those_to_keep(tmp_path):
    pytest.importorskip("torchtitan.components.checkpointer")
    (tmp_path / "run").mkdir()
    [left] = run(purge, 1, tmp_path / "run", fresh=True)
    assert left == [".step-8.zckpt-partial", "step-4", "step-5", "step-6"]
