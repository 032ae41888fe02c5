"""Which directories and files of a run are its checkpoints, and what is said of each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.damage import flip, optimizer_file
from tests.refusals import refusing
from zckpt.formats.units import called

OTHER = FIXTURES / "other"
TAG = "s2_bf16_dp2/global_step5"


def put(at: Path | str = "run", **sources: str) -> Path:
    """Copy fixtures below a run's directory; two underlines in a name stand for a slash, one hyphen for `_to_`."""
    run = Path(at)
    for name, source in sources.items():
        target = run / name.replace("__", "/").replace("_to_", "-")
        shutil.copytree(FIXTURES / source, target, ignore=shutil.ignore_patterns("truth*"), dirs_exist_ok=True)
    return run


def names(run: Path | str) -> list[str]:
    return [one.name for one in zckpt.history(run).checkpoints]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s2_bf16_dp2_multitag", ["global_step3", "global_step5"]),
        ("s2_bf16_dp2", ["global_step5"]),
        ("other/trainer_ds2_gpt2", ["checkpoint-4"]),
        ("other/litsim_ds2", ["epoch=0-step=5.ckpt"]),
        ("other/accel_ds2_bf16", ["state"]),
        ("other/accel_fsdp2_dp2", ["state"]),
        ("other/dcp_fsdp2_dp2", ["ckpt"]),
        ("other/mcore_bf16_plain_tp2/ckpt", ["iter_0000004"]),
        ("other/mcore_legacy_tp2_pp2/ckpt", ["iter_0000003"]),
        ("other/plain_adamw", ["ckpt.pt"]),
        ("other/zro_dp2_adamw", ["ckpt"]),
        ("other/dcphf_consolidated_dp2", ["ckpt"]),
    ],
)
@pytest.mark.every(2)
def test_a_checkpoint_in_another_directory_of_its_is_listed_once(source, expected):
    run = put(**{".": source})
    found = zckpt.history(run).checkpoints
    assert [one.name for one in found] == expected
    for one in found:
        opened = zckpt.open(one.path)
        assert (one.format, one.step, one.world_size) == (opened.format, opened.step, opened.world_size)
        assert one.sound
        at = Path(one.path)
        assert one.nbytes == sum(path.stat().st_size for path in (at, *at.rglob("*")) if path.is_file())
        assert at.is_file() or names(at) == ["."]


def test_a_final_model_lies_beside_a_trainers_checkpoints():
    run = put(checkpoint_to_500="other/trainer_ds2_gpt2/checkpoint-4")
    put(run, checkpoint_to_1000="other/trainer_ds2_gpt2/checkpoint-4", best="other/dcp_fsdp2_dp2/ckpt")
    zckpt.consolidate(run / "best", run / "model.safetensors")
    (run / "config.json").write_text("{}")
    (run / "trainer_state.json").write_text("{}")
    (run / "logs/1").mkdir(parents=True)
    assert sorted(names(run)) == sorted([".", "best", "checkpoint-500", "checkpoint-1000"])


def test_models_that_were_saved_in_one_step_are_one_checkpoint():
    run = Path("run")
    zckpt.convert(FIXTURES / "hf_llama_s2_bf16_dp2", "actor", to="fsdp-rank-files")
    for step in (5, 10):
        for role in ("actor", "critic"):
            shutil.copytree("actor", run / f"global_step_{step}" / role)
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    found = zckpt.history(run).checkpoints
    assert [(one.name, one.latest) for one in found] == [("global_step_5", False), ("global_step_10", True)]
    (run / "global_step_5/critic/model_world_size_2_rank_1.pt").unlink()
    assert [one.sound for one in zckpt.history(run).checkpoints] == [False, True]


def test_a_run_that_is_called_by_a_step_is_a_run():
    top = put("all", step1__global_step5=TAG)
    assert names(top) == ["step1/global_step5"]
    put(top, step1__global_step10=TAG, step2__best=TAG)
    assert names(top) == ["step2", "step1/global_step5", "step1/global_step10"]


def test_files_are_checkpoints_by_themselves_and_not_of_one_directory():
    run = Path("run")
    run.mkdir()
    for step in (20, 100):
        shutil.copy(OTHER / "plain_adamw/ckpt.pt", run / f"ckpt_{step}.pt")
    (run / "step_5.safetensors").write_bytes(b"cut off")
    (run / "notes.pt.txt").write_text("notes")
    (run / "last.pt").symlink_to("ckpt_100.pt")
    found = zckpt.history(run).checkpoints
    assert [(one.name, one.sound, one.latest) for one in found] == [
        ("step_5.safetensors", False, False), ("ckpt_20.pt", True, False), ("ckpt_100.pt", True, True),
    ]  # fmt: skip


def test_a_directory_of_a_step_has_files_that_are_checkpoints_by_themselves():
    for step in (1, 2):
        Path(f"step{step}").mkdir()
        torch.save({"model": {"w": torch.ones(step)}}, f"step{step}/model.pt")
    torch.save({"model": {"w": torch.ones(1)}}, "step2/ema.pt")
    assert names(".") == ["step1", "step2"]
    Path("epoch3").mkdir()
    for step in (10, 20):  # which are of other steps than the directory, and so is each
        torch.save({"model": {"w": torch.ones(step)}}, f"epoch3/ckpt_{step}.pt")
    assert names(".") == ["step1", "step2", "epoch3/ckpt_10.pt", "epoch3/ckpt_20.pt"]
    for gone in ({"step1", "epoch3/ckpt_10.pt"}, {"epoch3/ckpt_10.pt"}):
        found = zckpt.prune(".", keep_last=1, settle=0).checkpoints
        assert {one.checkpoint.name for one in found if one.goes} == gone
        Path("step1/notes.txt").write_text("mine")


def test_what_is_left_of_a_checkpoint_is_listed_and_not_sound():
    run = put(global_step1=TAG, global_step2=TAG, global_step3=TAG)
    (run / "latest").write_text("global_step3")
    (run / "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (run / "global_step4").mkdir()
    (run / ".global_step5.zckpt-partial").mkdir()
    found = zckpt.history(run)
    assert [(one.name, one.sound, one.latest) for one in found.checkpoints] == [
        ("global_step1", True, False), ("global_step2", False, False), ("global_step3", True, True),
        ("global_step4", False, False),
    ]  # fmt: skip
    assert "ZC-101" in str(found.checkpoints[1].why)
    assert found.leftovers == [str(run / ".global_step5.zckpt-partial")]
    printed = succeeded("list run").stdout
    assert "global_step3     5" in printed
    assert "not sound  ZC-101" in printed
    assert "4 checkpoints" in printed


def test_deep_reads_what_structure_does_not_tell():
    run = put(global_step1=TAG)
    shard = optimizer_file(run, 0)
    flip(shard, shard.stat().st_size // 2)
    assert [one.sound for one in zckpt.history(run).checkpoints] == [True]
    assert [one.sound for one in zckpt.history(run, deep=True).checkpoints] == [False]


def test_equal_ones_are_told_by_fingerprints_of_any_format():
    run = put(global_step5=TAG, global_step6="s2_bf16_dp3/global_step5")
    zckpt.convert(run / "global_step5", run / "step5-dcp", to="dcp")
    assert [one.fingerprint for one in zckpt.history(run).checkpoints] == [None] * 3
    succeeded("fingerprint run/global_step5 --write")
    text = zckpt.fingerprint(run / "global_step5").text
    recorded = {one.name: one.fingerprint for one in zckpt.history(run).checkpoints}
    assert recorded == {"global_step5": text, "step5-dcp": None, "global_step6": None}
    equal = {one.name: one.equal for one in zckpt.history(run, fingerprint=True).checkpoints}
    assert equal == {"global_step5": ("step5-dcp",), "step5-dcp": ("global_step5",), "global_step6": ()}


def test_the_document_is_what_is_printed():
    run = put(global_step5=TAG)
    os.utime(next((run / "global_step5").iterdir()), (1e9, 1e9))
    done = zckpt.history(run).as_dict()
    assert printed("list run") == done
    assert done["checkpoints"][0]["saved"].endswith("+00:00")


def test_a_page_is_written_whole_or_not_at_all():
    put(global_step5=TAG)
    assert succeeded("list run --html page.html").stdout == succeeded("list run").stdout
    assert "global_step5" in Path("page.html").read_text()
    refused(4, "list run --html page.html", words="--overwrite")
    refused(3, "list none --html none.html", words="not a directory")
    assert not Path("none.html").exists()


def test_a_directory_without_checkpoints_is_refused():
    refused(3, "list .", words="no checkpoint")
    with refusing(zckpt.UsageError, "does not apply to a sample"):
        zckpt.history(".", direct=True)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500), ("global_step100", 100), ("iter_0000100", 100), ("step-3", 3),
        ("ep1-ba300-rank0.pt", 300), ("epoch=2-step=90.ckpt", 90), ("0000120", 120), ("step 5", 5), ("epoch_3.pt", 3),
        ("checkpoint_0", 0), ("best", None), ("gpt2", None), ("run-3", None), ("2026-01-01", None),
        ("zero_pp_rank_0", None), ("steps", None),
    ],
)  # fmt: skip
def test_names_that_say_a_step(name, step):
    assert called(name) == step
