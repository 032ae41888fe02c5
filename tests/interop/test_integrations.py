"""What docs/integrations.md shows is run by the real programs, which go on at another number of processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
from tests.cli.console import ROOT
from tests.gloo import run
from tests.training.test_hf import SAVED, STEPS, trainer_of

pytestmark = pytest.mark.interop

BATCH = 12  # for 1, 2 and 3 processes


def shown(title: str, directory: Path) -> str:
    """The Python under a heading of the page, with a directory and steps of this test."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    [found] = re.findall(rf"^## {title}\n.*?^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found.count('"run", every=500') == 1
    return found.replace('"run", every=500', f"{str(directory)!r}, every={SAVED}")


def last_step(directory: Path) -> Path:
    """The checkpoint of the step that all resume from; later ones are removed."""
    kept, *others = sorted(path for path in directory.iterdir() if path.is_dir())
    for path in others:
        shutil.rmtree(path)
    (directory / "latest").write_text(kept.name)
    return kept


def accelerator_of(form: str) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    if form == "fsdp2":
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
        for one in (PartialState(), accelerator.state):
            one.distributed_type, one.device = DistributedType.FSDP, torch.device("cpu")
    return accelerator


def accelerated(rank: int, world_size: int, form: str, directory: Path) -> tuple[list[float], float]:
    """Run the page's loop; return the loss of each step, and the last rate."""
    accelerator = accelerator_of(form)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    torch.manual_seed(world_size)  # a resumed model is another before
    for one in model.parameters():
        nn.init.normal_(one)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    backward = accelerator.backward

    def seen(loss: torch.Tensor) -> None:
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total / world_size))
        backward(loss)

    def batch_of(step: int) -> torch.Tensor:
        return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]

    accelerator.backward = seen
    space = {
        "zckpt": zckpt, "accelerator": accelerator, "model": model, "optimizer": optimizer, "steps": STEPS,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "batch_of": batch_of,
    }  # fmt: skip
    exec(shown("Accelerate without DeepSpeed", directory), space)
    assert hasattr(next(space["model"].parameters()), "placements") == (form == "fsdp2")
    return losses, space["scheduler"].get_last_lr()[0]


@pytest.mark.parametrize("form", ["plain", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_accelerate_goes_on_at_another_number_of_processes(form: str, tmp_path: Path) -> None:
    losses, rate = run(accelerated, 2, form, tmp_path / "run")[0]
    last_step(tmp_path / "run")
    found, its = run(accelerated, 3, form, tmp_path / "run")[0]
    assert len(losses) == STEPS
    assert found == pytest.approx(losses[SAVED:], rel=1e-5)
    assert its == rate


def trained(rank: int, world_size: int, output: Path, directory: Path | None) -> list[float]:
    """Run the page's Trainer, or without a directory resume one that is given files; return losses of its model."""
    from transformers import TrainerCallback

    trainer = trainer_of(world_size, output, deepspeed=False)
    if directory is None:
        trainer.train(resume_from_checkpoint=True)
    else:
        space = {"zckpt": zckpt, "trainer": trainer, "TrainerCallback": TrainerCallback}
        exec(shown("The Trainer without DeepSpeed", directory), space)
    assert trainer.state.global_step == STEPS
    rows = [{name: row[None] for name, row in one.items()} for one in trainer.train_dataset]
    with torch.no_grad():
        return [float(trainer.model(**row).loss) for row in rows]


@pytest.mark.nightly
def test_trainer_goes_on_with_what_its_callback_saved(tmp_path: Path) -> None:
    expected = run(trained, 2, tmp_path / "out", tmp_path / "run")[0]
    (tmp_path / "out2").mkdir()
    target = tmp_path / "out2" / f"checkpoint-{SAVED}"
    zckpt.convert(last_step(tmp_path / "run"), target, to="transformers-trainer", train_batch_size=BATCH // 3)
    assert json.loads((target / "trainer_state.json").read_text())["global_step"] == SAVED
    assert run(trained, 3, tmp_path / "out2", None)[0] == pytest.approx(expected, rel=1e-4)
