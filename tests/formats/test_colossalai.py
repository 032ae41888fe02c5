"""ColossalAI: what its own saving functions wrote in shards, with the truth beside it; and every damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.damage import edit
from tests.formats.holding import converted, edit_json
from tests.interop.test_fsdp_rank_files import assert_is
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, ShardError, UnsupportedError
from zckpt.formats.account import take_inventory

SAVED = Path(__file__).with_name("colossalai")
INDEX = "pytorch_optim.bin.index.json"


@pytest.fixture
def saved():
    return Path(shutil.copytree(SAVED / "ckpt", "saved"))


def test_a_model_and_its_optimizer_are_one_checkpoint(saved):
    truth = load_file(SAVED / "truth.safetensors")
    checkpoint = zckpt.open(saved)
    assert_is(checkpoint, truth)
    assert (checkpoint.format, checkpoint.step) == ("colossalai", 2)
    assert checkpoint.metadata["lr_scheduler"]["last_epoch"] == 2
    assert not checkpoint.unnamed
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(saved, deep=True).sound
    assert_is(zckpt.open(converted(saved, "dcp", "dcp")), truth)


def test_what_modules_keep_besides_tensors_goes_along(saved):
    file, more = saved / "modeling" / "pytorch_model-00001.bin", {"gate._extra_state": {"calls": 3}}
    edit(file, lambda content: content.update(more))
    checkpoint = zckpt.open(saved)
    assert checkpoint.metadata["gate._extra_state"] == {"calls": 3}
    assert not take_inventory(checkpoint).left_out
    converted(saved, "dcp", "dcp")


@pytest.mark.parametrize("name", ["modeling/pytorch_model-00001.bin", "optimizer/pytorch_optim-00002.bin",
                                  "optimizer/pytorch_optim_group.bin"])  # fmt: skip
def test_a_lost_file_is_named(name, saved):
    (saved / name).unlink()
    with refusing(ShardError, f"{Path(name).parent}: the file {Path(name).name} is missing"):
        zckpt.open(saved)


def test_an_index_that_says_otherwise_is_refused(saved):
    edit_json(saved / "optimizer" / INDEX, lambda said: said["weight_map"].update({"0": said["weight_map"]["9"]}))
    with refusing(DamagedFileError, "state of parameters other than those in the index"):
        zckpt.open(saved)
    torch.save({"groups": 1}, saved / "optimizer" / "pytorch_optim_group.bin")
    (saved / "optimizer" / INDEX).write_bytes((SAVED / "ckpt" / "optimizer" / INDEX).read_bytes())
    with refusing(DamagedFileError, r"pytorch_optim_group\.bin: unexpected content: expected a list of param groups"):
        zckpt.open(saved)


def test_other_forms_are_refused_by_name(saved):
    (saved / "optimizer" / INDEX).rename(saved / "optimizer" / INDEX.replace(".bin", ".safetensors"))
    with refusing(UnsupportedError, "a ColossalAI checkpoint in a form that zckpt does not read"):
        zckpt.open(saved)
