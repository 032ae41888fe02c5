"""What transformers saves of a model that it has distributed: torch's shards, with DCP's optimizer in a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import zckpt
from tests import gloo
from tests.hf_training.distributed import load_elsewhere, train_and_save
from tests.interop.test_fsdp_rank_files import assert_is
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import ShardError, UnknownFormatError
from zckpt.formats.account import take_inventory

pytestmark = pytest.mark.interop


TRAINED = {"fsdp_size": 2}


@pytest.fixture
def trained(shared) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """What so many ranks have saved, and the truth about it."""

    def get(ranks: int, sizes: dict[str, int]) -> tuple[Path, dict[str, torch.Tensor]]:
        def make(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
            return folder / "saved", gloo.run(train_and_save, ranks, sizes, folder / "saved")[0]

        return shared("-".join(["distributed", *sizes]), make)

    return get


@pytest.mark.parametrize(
    ("ranks", "sizes"), some([(2, TRAINED)], [(2, {"tp_size": 2}), (4, {"fsdp_size": 2, "tp_size": 2})])
)
def test_shards_and_the_optimizer_beside_them_are_one_checkpoint(ranks, sizes, trained, tmp_path):
    source, beside = tmp_path / "saved", tmp_path / "run"
    saved, truth = trained(ranks, sizes)
    shutil.copytree(saved, source)
    shutil.copytree(source, beside / "model")
    shutil.move(beside / "model" / "optimizer", beside / "optim")  # as NeMo Automodel has it
    with safe_open(file := next((beside / "model").glob("shard-*")), "pt") as shard:
        texts = {**shard.metadata(), "run": "seven"}
        save_file({name: shard.get_tensor(name) for name in shard.keys()}, file, texts)  # noqa: SIM118  # no dict
    for folder in (source, beside):
        checkpoint = zckpt.open(folder)
        assert_is(checkpoint, truth)
        assert not take_inventory(checkpoint).left_out
        assert zckpt.verify(folder, deep=True).sound
    zckpt.convert(beside, tmp_path / "dcp", to="dcp")
    assert_is(zckpt.open(tmp_path / "dcp"), truth)
    assert zckpt.open(tmp_path / "dcp").metadata["run"] == "seven"
    zckpt.consolidate(source, tmp_path / "whole")
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(one, truth[f"weight/{name}"]) for name, one in live.items())

    last = f"shard-{ranks:05}-model-00001-of-00001.safetensors"
    (source / last).rename(tmp_path / last)
    with refusing(ShardError, "end before its exp_avg does: the last shards are missing|a shard is missing"):
        zckpt.open(source)
    (tmp_path / last).rename(source / last)
    (source / "optimizer" / "__1_0.distcp").unlink()
    with refusing(ShardError, "file __1_0.distcp is missing"):
        zckpt.open(source)
    shutil.rmtree(beside / "model")
    with refusing(UnknownFormatError, f"did you mean {beside / 'optim'}"):
        zckpt.open(beside)


@pytest.mark.parametrize(
    ("ranks", "sizes"), some([(3, {"fsdp_size": 3})], [(1, {"fsdp_size": 1}), (2, {"tp_size": 2})])
)
def test_it_resumes_at_another_number_of_ranks(ranks, sizes, trained):
    source, truth = trained(2, TRAINED)
    found = gloo.run(load_elsewhere, ranks, sizes, source)[0]
    assert_same_tree(found, truth)
