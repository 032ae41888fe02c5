"""What docs/integrations.md shows is run by the real programs, which go on at another number of processes."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
from tests.cli.console import ROOT
from tests.fsdp_training.training import truth
from tests.gloo import run
from tests.interop.test_accelerate import Counter
from tests.pairwise import some
from tests.training.test_hf import SAVED, STEPS, trainer_of
from zckpt.errors import SourceError, UnsupportedError

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


def accelerator_of(form: str, *, stock: bool = False) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin

    import zckpt.accelerate

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    options: dict[str, Any] = {"cpu": True, "step_scheduler_with_optimizer": False}
    if form == "deepspeed":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        config = {
            "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": BATCH // torch.distributed.get_world_size(),
        }  # fmt: skip
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    accelerator = accelerate.Accelerator(**options) if stock else zckpt.accelerate.Accelerator(**options, async_=True)
    if form == "fsdp2":
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
        for one in (PartialState(), accelerator.state):
            one.distributed_type, one.device = DistributedType.FSDP, torch.device("cpu")
    return accelerator


@dataclass
class Accelerated:
    """The loss of each step, the last rate, what was registered, and what was held when it was saved or loaded."""

    losses: list[float]
    rate: float
    count: int
    held: dict[str, torch.Tensor]


def accelerated(rank, world_size, form: str, path: Path, source: Path | None, stock: bool) -> Accelerated:
    """Train from the first step, or from a state; save one halfway."""
    accelerator = accelerator_of(form, stock=stock)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    torch.manual_seed(world_size)  # a resumed model is another before
    for one in model.parameters():
        nn.init.normal_(one)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert hasattr(next(model.parameters()), "placements") == (form == "fsdp2")
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    done = Accelerated([], 0.0, 0, {})

    def held() -> dict[str, torch.Tensor]:
        return {} if form == "deepspeed" else truth(accelerator.unwrap_model(model), optimizer.optimizer)

    if source is not None:
        accelerator.load_state(str(source))
        done.held = held()
    for step in range(SAVED if source else 0, STEPS):
        rows = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        loss = model(rows).square().mean()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        done.losses.append(float(total / world_size))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.count += 1
        if source is None and step + 1 == SAVED:
            accelerator.save_state(str(path))
            done.held = {key: one.clone() for key, one in held().items()}
    if not stock:
        accelerator.wait_for_save()
    done.rate, done.count = scheduler.get_last_lr()[0], counter.count
    return done


def assert_accelerates(form: str, other: str, path: Path, *, stock: bool = False) -> None:
    whole = run(accelerated, 2, form, path, None, stock)[0]
    if not stock:
        opened = zckpt.open(path)
        assert opened.format == ("deepspeed" if form == "deepspeed" else "zckpt")
    resumed = run(accelerated, 3, other, path, path, False)[0]
    assert resumed.held.keys() == whole.held.keys()
    for key, value in whole.held.items():
        assert torch.equal(resumed.held[key], value), key
    assert len(whole.losses) == STEPS
    assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=1e-5)
    assert (resumed.rate, resumed.count) == (whole.rate, STEPS - SAVED if stock else STEPS)


@pytest.mark.parametrize("form", some(["plain"], ["fsdp2", "deepspeed"]))
def test_accelerate_goes_on_at_another_number_of_processes(form, tmp_path):
    assert_accelerates(form, form, tmp_path / "state")


@pytest.mark.nightly
def test_accelerate_goes_on_with_what_it_saved_itself(tmp_path):
    assert_accelerates("plain", "fsdp2", tmp_path / "state", stock=True)


def numbered(rank, world_size, directory: Path) -> list[str]:
    """Let Accelerate make the names; return what is there, and what was refused."""
    from accelerate.utils import ProjectConfiguration

    accelerator = accelerator_of("plain")
    accelerator.project_configuration = ProjectConfiguration(
        str(directory), automatic_checkpoint_naming=True, total_limit=2
    )
    first = accelerator.prepare(nn.Linear(2, 2))
    left = directory / "checkpoints" / ".checkpoint_7.zckpt-partial"
    left.mkdir(parents=True)  # as a killed save leaves it
    os.utime(left, (0, 0))
    for _ in range(3):
        accelerator.save_state()
    accelerator.wait_for_save()
    assert accelerator.load_state().path == str(directory / "checkpoints" / "checkpoint_2")
    said = sorted(path.name for path in (directory / "checkpoints").iterdir())
    (directory / "checkpoints" / "checkpoint_0").symlink_to(directory)  # what cannot be removed stops no process
    accelerator.save_state()
    with pytest.warns(UserWarning, match="exceeds total_limit"):
        accelerator.wait_for_save()
    (directory / "checkpoints" / "checkpoint_0").unlink()
    zckpt.save(directory / "other", model=first, extra={"accelerate": 3})
    assert accelerator.load_state(directory / "other").extra == {"accelerate": 3}
    handle = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError) as hooks:
        accelerator.save_state()
    handle.remove()
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(SourceError) as objects:
        accelerator.load_state()
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError) as models:
        accelerator.save_state()
    assert first is not None
    return [*said, str(hooks.value), str(objects.value), str(models.value)]


@pytest.mark.nightly
def test_accelerate_makes_names_and_what_cannot_be_saved_is_refused(tmp_path):
    *names, hooks, objects, models = run(numbered, 1, tmp_path)[0]
    assert names == ["checkpoint_1", "checkpoint_2"]
    assert "registered hooks" in hooks
    assert "expected 1, found 0" in objects
    assert "2 prepared models" in models


def trained(rank, world_size, output: Path, directory: Path | None) -> list[float]:
    """Run the page's Trainer, or without a directory resume one that is given files; return losses of its model."""
    trainer = trainer_of(world_size, output, deepspeed=False)
    if directory is None:
        trainer.train(resume_from_checkpoint=True)
    else:
        space = {"zckpt": zckpt, "trainer": trainer}
        exec(shown("The Trainer without DeepSpeed", directory), space)
    assert trainer.state.global_step == STEPS
    rows = [{name: row[None] for name, row in one.items()} for one in trainer.train_dataset]
    with torch.no_grad():
        return [float(trainer.model(**row).loss) for row in rows]


@pytest.mark.nightly
def test_trainer_goes_on_with_what_its_callback_saved(tmp_path):
    expected = run(trained, 2, tmp_path / "out", tmp_path / "run")[0]
    (tmp_path / "out2").mkdir()
    target = tmp_path / "out2" / f"checkpoint-{SAVED}"
    zckpt.convert(last_step(tmp_path / "run"), target, to="transformers-trainer", train_batch_size=BATCH // 3)
    assert json.loads((target / "trainer_state.json").read_text())["global_step"] == SAVED
    assert run(trained, 3, tmp_path / "out2", None)[0] == pytest.approx(expected, rel=1e-4)
