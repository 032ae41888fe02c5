"""What a program keeps of its training beside a checkpoint, in torch files of any name, goes along."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES, refused, succeeded
from tests.formats.holding import converted
from zckpt.formats.account import take_inventory

NEMO_RANK, STATE = "rng/rng_global_rank_0.pt", "step_scheduler.pt"
"""As NeMo Automodel has them, beside `model/` and `optim/`."""

KEPT = {STATE: {"step": 5, "epoch": 0}, NEMO_RANK: {"cpu": torch.get_rng_state(), "python": (3, (1, 2), None)},
        "train_state.pt": {"step": torch.tensor(5), "flops": torch.tensor(1.5)},
        "lr_scheduler": {"last_epoch": 5}}  # fmt: skip

SOURCES = {
    "dcp": ("other/dcp_fsdp2_dp2/ckpt", ""),
    "deepspeed": ("s2_bf16_dp2", "global_step5"),
    "stage0": ("s0_bf16_dp2", "global_step5"),
    "universal": ("universal/s2_bf16_dp4", ""),
    "megatron": ("other/mcore11_gathered_fp16_dp2/ckpt", "iter_0000002"),
}


@pytest.fixture
def source(request):
    """A copy of a checkpoint, with such files, and its own directory."""
    name, own = SOURCES[request.param]
    path = Path(shutil.copytree(FIXTURES / name, "source", ignore=shutil.ignore_patterns("truth*")))
    for file, value in KEPT.items():
        (path / own / file).parent.mkdir(exist_ok=True)
        torch.save(value, path / own / file)
    return path, path / own


def states(folder) -> dict[str, object]:
    """Return what such files hold, by their names."""
    return {path.name: torch.load(path, weights_only=False) for name in KEPT for path in folder.rglob(Path(name).name)}


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_values_are_carried(source):
    path, _ = source
    checkpoint = zckpt.open(path)
    assert {Path(name).stem for name in KEPT} <= checkpoint.metadata.keys()
    assert not take_inventory(checkpoint).left_out
    converted(path, "t", "zckpt")
    assert zckpt.open("t").metadata["step_scheduler"] == KEPT[STATE]


@pytest.mark.parametrize("source", ["deepspeed", "stage0"], indirect=True)
@pytest.mark.parametrize("is_run", [True, False])
def test_files_in_deepspeeds_tag_are_copied_for_other_ranks(source, is_run):
    path, own = source
    given, target = (path, Path("t", own.name)) if is_run else (own, Path("t"))
    zckpt.reshard(given, "t", world_size=3)
    assert str(states(target)) == str(states(own))
    assert not take_inventory(zckpt.open("t")).left_out
    zckpt.reshard("t", "back", world_size=2)
    assert zckpt.diff(path, "back").equal


@pytest.mark.parametrize("source", ["megatron"], indirect=True)
@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_megatron_bridges_files_are_written_again(source, ckpt_format):
    """Megatron-Bridge 0.3.1 takes the step and the samples from `train_state.pt`, the run's newest by `latest_...`."""
    path, own = source
    torch.save({"dataloader_state_dict": {"at": 3}}, own / "train_dataloader_dprank000.pt")
    (own / "run_config.yaml").write_text("model:\n  tensor_model_parallel_size: 2\n")
    zckpt.convert(path, "t", to="megatron", ckpt_format=ckpt_format)
    there = Path("t", own.name)
    for name in ("train_state.pt", "train_dataloader_dprank000.pt", "../latest_train_state.pt"):
        assert str(torch.load(there / name)) == str(torch.load(own / name.replace("../latest_", "")))
    assert (there / "run_config.yaml").is_file() == (ckpt_format == "torch_dist")
    assert not take_inventory(zckpt.open("t")).left_out
    found = zckpt.diff(path, "t")
    assert not [one.key for one in found.settings if "train" in one.key]
    zckpt.convert(path, "t", to="megatron", ckpt_format=ckpt_format, overwrite=True)


@pytest.mark.parametrize(
    "value",
    [{"w": torch.ones(2)}, {"ids": torch.arange(1 << 14)}, {"w": torch.eye(2).to_sparse()}, torch.ones(3),
     {"half": torch.ones(2, dtype=torch.float16)}],
)  # fmt: skip
def test_what_may_be_trained_or_is_large_is_left_out(value):
    path = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", "s"))
    torch.save(value, path / "global_step5" / "more.pt")
    assert "more" not in zckpt.open(path).metadata
    refused(3, "reshard", path, "t", "--world-size", 3, words=("more.pt", "--drop"))
    succeeded("reshard", path, "t", "--world-size", 3, "--drop", "global_step5/more.pt")
    assert not list(Path("t").rglob("more.pt"))


def test_files_of_one_name_in_many_folders_are_all_carried():
    path = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", "s"))
    for rank in range(3):
        (path / "global_step5" / f"rank{rank}").mkdir()
        torch.save({"rank": rank}, path / "global_step5" / f"rank{rank}" / "state.pt")
    torch.save({"mine": 1}, path / "global_step5" / "ds_config.pt")  # a key of DeepSpeed's own
    found = zckpt.open(path).metadata
    assert found["ds_config.pt"] == {"mine": 1}
    assert [found[key]["rank"] for key in ("state", "rank1/state", "rank2/state")] == [0, 1, 2]
    zckpt.reshard(path, "t", world_size=3)
    zckpt.convert("t", "back", to="deepspeed", world_size=2, stage=2)
    assert zckpt.diff(path, "back").equal
    zckpt.convert(path, "dcp", to="dcp")
    assert not take_inventory(zckpt.open("dcp")).left_out
    assert zckpt.diff(path, "dcp", ignore_metadata=False).equal


def test_another_checkpoints_files_are_not_carried():
    path = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", "s"))
    shutil.copytree(path / "global_step5", path / "global_step9")
    torch.save({"step": 9}, path / "global_step9" / "state.pt")
    torch.save({"step": 1}, path / "state.pt")
    assert "state" not in zckpt.open(path).metadata
