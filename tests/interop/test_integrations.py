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
from tests.deepspeed_engine.spec import plain_config
from tests.folders import files_in, names_in
from tests.fsdp_training.training import truth
from tests.gloo import on_ranks, run
from tests.hf_training.training import reset_accelerate, shard_by_accelerate
from tests.interop.test_accelerate import Counter
from tests.logical import assert_same_tree
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
    from accelerate.utils import DeepSpeedPlugin

    import zckpt.accelerate

    reset_accelerate()
    options: dict[str, Any] = {"cpu": True, "step_scheduler_with_optimizer": False}
    if form == "deepspeed":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        rows = BATCH // torch.distributed.get_world_size()
        config = plain_config(2, train_micro_batch_size_per_gpu=rows, gradient_accumulation_steps=1)
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    accelerator = accelerate.Accelerator(**options) if stock else zckpt.accelerate.Accelerator(**options, async_=True)
    if form == "fsdp2":
        shard_by_accelerate(accelerator, 2, auto_wrap_policy="no_wrap")
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
            done.held = held()
    if not stock:
        accelerator.wait_for_save()
    done.rate, done.count = scheduler.get_last_lr()[0], counter.count
    return done


def accelerated_by_contexts(rank, world_size, form: str, path: Path, source: Path | None, stock: bool) -> Accelerated:
    """The same with Accelerate's own class, where zckpt saves and loads for every engine of DeepSpeed."""
    with zckpt.deepspeed.durable_saves() as saves, zckpt.deepspeed.any_world_size() as loading:
        done = accelerated(rank, world_size, form, path, source, True)
    assert (len(loading.in_place), len(saves.saved)) == ((1, 0) if source else (0, 1))
    return done


def assert_accelerates(form: str, other: str, path: Path, *, stock: bool = False, by: Any = accelerated) -> None:
    whole = run(by, 2, form, path, None, stock, fresh=form == "deepspeed")[0]
    if not stock:
        opened = zckpt.open(path)
        assert opened.format == ("deepspeed" if form == "deepspeed" else "zckpt")
    files = files_in(path)
    resumed = run(by, 3, other, path, path, False, fresh=form == "deepspeed")[0]
    assert files_in(path) == files
    assert_same_tree(resumed.held, whole.held)
    assert len(whole.losses) == STEPS
    assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=1e-5)
    assert (resumed.rate, resumed.count) == (whole.rate, STEPS - SAVED if stock else STEPS)


@pytest.mark.parametrize("form", some(["plain"], ["fsdp2", "deepspeed"]))
def test_accelerate_goes_on_at_another_number_of_processes(form, tmp_path):
    assert_accelerates(form, form, tmp_path / "state")


def test_accelerates_own_class_goes_on_where_every_engine_is_served(tmp_path):
    assert_accelerates("deepspeed", "deepspeed", tmp_path / "state", by=accelerated_by_contexts)


@pytest.mark.nightly
def test_accelerate_goes_on_with_what_it_saved_itself(tmp_path):
    assert_accelerates("plain", "fsdp2", tmp_path / "state", stock=True)


@pytest.mark.nightly
@on_ranks(1)
def test_accelerate_makes_names_and_what_cannot_be_saved_is_refused(rank, world_size, tmp_path):
    from accelerate.utils import ProjectConfiguration

    accelerator = accelerator_of("plain")
    accelerator.project_configuration = ProjectConfiguration(
        str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    model = accelerator.prepare(nn.Linear(2, 2))
    there = tmp_path / "checkpoints"
    left = there / ".checkpoint_7.zckpt-partial"
    left.mkdir(parents=True)  # as a killed save leaves it
    os.utime(left, (0, 0))
    for _ in range(3):
        accelerator.save_state()
    accelerator.wait_for_save()
    assert accelerator.load_state().path == str(there / "checkpoint_2")
    assert names_in(there) == ["checkpoint_1", "checkpoint_2"]
    (there / "checkpoint_0").symlink_to(tmp_path)  # what cannot be removed stops no process
    accelerator.save_state()
    with pytest.warns(UserWarning, match="exceeds total_limit"):
        accelerator.wait_for_save()
    (there / "checkpoint_0").unlink()
    zckpt.save(tmp_path / "other", model=model, extra={"accelerate": 3})
    assert accelerator.load_state(tmp_path / "other").extra == {"accelerate": 3}
    handle = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="registered hooks"):
        accelerator.save_state()
    handle.remove()
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(SourceError, match="expected 1, found 0"):
        accelerator.load_state()
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="2 prepared models"):
        accelerator.save_state()


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
