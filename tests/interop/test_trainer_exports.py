"""The Trainer with DeepSpeed saves the model once more, as transformers 5 names and arranges it: a copy, by its values.

The engine's own files are complete, under the names in memory: verbs read those, and engines of other ranks load them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.deepspeed_engine import Spec
from tests.deepspeed_engine.spec import plain_config
from tests.gloo import run
from tests.interop.test_transformers_families import families
from tests.logical import assert_same_tree
from zckpt.errors import LeftOutError
from zckpt.formats.account import take_inventory
from zckpt.state.inventory import COPY

pytestmark = pytest.mark.interop

SAVED, STEPS, BATCH = 2, 3, 6
Held = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A model of transformers, and how it is trained and saved."""

    model: str
    stage: int = 2
    bf16: bool = False
    shards: str | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.stage}{'-bf16' if self.bf16 else ''}{'-sharded' if self.shards else ''}"


MIXTRAL, VIT = Kind("mixtral"), Kind("vit", stage=3)
KINDS = [
    MIXTRAL, VIT,
    *(pytest.param(one, marks=pytest.mark.nightly) for one in (
        Kind("mixtral", shards="10KB"), Kind("qwen3_moe", stage=3, bf16=True), Kind("deepseek_v3", stage=1),
        Kind("llava", bf16=True), Kind("dinov2"), Kind("jamba", stage=3), Kind("granitemoe"),
    )),
]  # fmt: skip


def row(model: Any, number: int) -> dict[str, torch.Tensor]:
    given = torch.Generator().manual_seed(number)
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        return {"pixel_values": torch.randn(3, side, side, generator=given), "labels": torch.tensor(number % 2)}
    tokens = torch.randint(3, 30, (12,), generator=given)
    return {"input_ids": tokens, "labels": tokens}


def held(engine: Any) -> Held:
    """Masters and moments of all parameters, whole, by slot and name; every rank asks for them together."""
    from tests.deepspeed_engine.truth import read_live

    slots = read_live(engine, Spec("trainer", stage=engine.zero_optimization_stage())).slots
    called = {"fp32": "master"}
    return {f"{called.get(slot, slot)}/{name}": one for name, its in slots.items() for slot, one in its.items()}


def trained(rank, world_size, kind: Kind, output: Path, source: Path | None) -> tuple[Held, list[str]]:
    """Train and save, or go on; return what was held then, and what was loaded in place."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    zero = {"stage": kind.stage, "stage3_gather_16bit_weights_on_model_save": True}
    config = plain_config(
        kind.stage, zero_optimization=zero, train_micro_batch_size_per_gpu="auto", bf16={"enabled": kind.bf16}
    )
    arguments = TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=BATCH // world_size, max_steps=STEPS, save_steps=SAVED,
        learning_rate=1e-2, weight_decay=0.1, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, bf16=kind.bf16, deepspeed=config,
    )  # fmt: skip
    model = families.model_of(kind.model)
    for one in model.parameters() if source else ():  # another before
        one.data += 0.1
    if kind.shards is not None:
        model.save_pretrained = partial(model.save_pretrained, max_shard_size=kind.shards)
    trainer = Trainer(model=model, args=arguments, train_dataset=[row(model, number) for number in range(36)])
    found: Held = {}

    class Taking(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            if source is None and trainer.state.global_step == SAVED:
                found.update(held(trainer.model_wrapped))

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if source is not None:
                found.update(held(trainer.model_wrapped))

    trainer.add_callback(Taking())
    with zckpt.deepspeed.any_world_size() as loading:
        trainer.train(resume_from_checkpoint=None if source is None else str(source))
    return found, loading.in_place


@pytest.fixture
def saved(shared) -> Callable[[Kind], tuple[Path, Held]]:
    """A directory that the Trainer saved, and what was held; made once, and changed by none."""

    def make(kind: Kind, folder: Path) -> tuple[Path, Held]:
        return folder / f"checkpoint-{SAVED}", run(trained, 2, kind, folder, None)[0][0]

    return lambda kind: shared(f"trainer-export-{kind}", partial(make, kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.every(2)
def test_the_models_export_is_a_copy(kind, saved, tmp_path):
    source, truth = saved(kind)
    checkpoint = zckpt.open(source)
    names = {name for name, one in checkpoint.parameters.items() if one.tied_to is None}
    exported = {name for path in source.glob("model*.safetensors") for name in load_file(path)}
    assert exported - names, "transformers saves it under the names in memory"
    inventory = take_inventory(checkpoint)
    assert not inventory.left_out
    assert {path.name for path in source.glob("model*.safetensors")} <= {item.file for item in inventory.of(COPY)}
    assert {one.of for one in checkpoint.duplicates} >= names
    assert zckpt.verify(source, deep=True).findings == []

    zckpt.consolidate(source, tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    assert [n for n in names if not torch.equal(whole[n].float(), truth[f"master/{n}"])] == []
    zckpt.convert(source, tmp_path / "there", to="zckpt")
    there = zckpt.open(tmp_path / "there")
    assert [key for key, value in truth.items() if not torch.equal(there.read(*key.split("/")[::-1]), value)] == []

    found, in_place = run(trained, 3, kind, tmp_path / "run", source)[0]
    assert in_place
    assert_same_tree(found, truth)


def changed(source: Path, folder: Path, change: Callable[[Held], Any]) -> Path:
    """Return a copy of a directory with another model beside the engine's files."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w3.weight"


def test_what_is_no_copy_is_refused_and_found(saved, tmp_path):
    source, truth = saved(MIXTRAL)
    more = changed(source, tmp_path / "more", lambda file: file.update({"ema.weight": torch.full((16, 24), 0.5)}))
    other = changed(source, tmp_path / "other", lambda file: file[EXPERT].mul_(0.99))
    for folder, left in (
        (more, ["ema.weight"]),
        (other, [n for n in load_file(other / "model.safetensors") if ".0.block" in n]),
    ):
        lost = [item.place for item in take_inventory(zckpt.open(folder)).left_out]
        assert set(lost) <= set(left)
        assert lost
        with pytest.raises(LeftOutError, match="would be lost"):
            zckpt.consolidate(folder, tmp_path / "target.safetensors")
        zckpt.consolidate(folder, tmp_path / "target.safetensors", drop=["model.safetensors:*"], overwrite=True)
        # it stays where it is, and the engine's files are complete
        found, in_place = run(trained, 1, MIXTRAL, tmp_path / "run", folder)[0]
        assert in_place
        assert_same_tree(found, truth)


def test_an_export_that_differs_is_found_by_verify(saved, tmp_path):
    def flip(file: Held) -> None:
        file["lm_head.weight"].view(-1)[7] += 1

    folder = changed(saved(MIXTRAL)[0], tmp_path / "flipped", flip)
    assert [one.code for one in zckpt.verify(folder, deep=True).findings] != []
