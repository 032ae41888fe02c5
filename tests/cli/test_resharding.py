"""`zckpt reshard` as a user meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, inspected, refused, run, succeeded

SOURCE = FIXTURES / "s2_bf16_dp4"


def files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_run_directory_comes_out_as_a_run_directory(tmp_path: Path) -> None:
    done = succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 2)
    assert done.stdout == ""
    assert (tmp_path / "run/latest").read_text() == "global_step5"
    assert inspected(tmp_path / "run")["topology"]["dp"] == 2


def test_tag_directory_comes_out_as_a_tag_directory(tmp_path: Path) -> None:
    succeeded("reshard", SOURCE / "global_step5", tmp_path / "tag", "--world-size", 2)
    assert files(tmp_path / "tag") == [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
    ]


def test_stage_and_form_are_as_asked(tmp_path: Path) -> None:
    succeeded("reshard", SOURCE, tmp_path / "a", "--world-size", 3, "--stage", 1, "--elastic", "--round-robin")
    found = inspected(tmp_path / "a")
    assert found["zero_stage"] == 1
    assert found["details"]["optimizer_form"] == "elastic"
    assert found["details"]["round_robin_gradients"] is True


def test_dry_run_names_the_files_and_writes_nothing(tmp_path: Path) -> None:
    done = succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 2, "--dry-run")
    assert str(tmp_path / "run/latest") in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document(tmp_path: Path) -> None:
    done = succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 2, "--json")
    document = json.loads(done.stdout)
    assert sorted(document["files"]) == [str(tmp_path / "run" / name) for name in files(tmp_path / "run")]
    assert document["write_nbytes"] == sum(Path(name).stat().st_size for name in document["files"])


def test_quiet_says_nothing(tmp_path: Path) -> None:
    done = succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 2, "--quiet")
    assert (done.stdout, done.stderr) == ("", "")


def test_tag_chooses_the_checkpoint(tmp_path: Path) -> None:
    succeeded("reshard", FIXTURES / "s2_bf16_dp2_multitag", tmp_path / "r", "--world-size", 3, "--tag", "global_step3")
    assert (tmp_path / "r/latest").read_text() == "global_step3"
    assert inspected(tmp_path / "r")["step"] == 3


@pytest.mark.parametrize("world_size", ["0", "-1", "many", "1.5"])
def test_unusable_world_size_is_refused(world_size: str, tmp_path: Path) -> None:
    refused(2, "reshard", SOURCE, tmp_path / "run", "--world-size", world_size)
    assert list(tmp_path.iterdir()) == []


def test_missing_world_size_and_unknown_stage_are_refused(tmp_path: Path) -> None:
    refused(2, "reshard", SOURCE, tmp_path / "run", words=("--world-size",))
    refused(2, "reshard", SOURCE, tmp_path / "run", "--world-size", 2, "--stage", 4, words=("--stage",))


@pytest.mark.parametrize(
    "name",
    ["tp2_s1_bf16_dp2", "pp2_s1_fp32_dp2", "moe_ep2_s2_fp32_dp4", "moe_ep1_s2_bf16_dp2", "s0_fp32_dp2", "s0_bf16_dp2"],
)
def test_what_is_not_cut_anew_is_refused_by_name(name: str, tmp_path: Path) -> None:
    refused(3, "reshard", FIXTURES / name, tmp_path / "run", "--world-size", 2, words=(name,))
    assert list(tmp_path.iterdir()) == []


def test_elastic_source_has_no_rigid_form(tmp_path: Path) -> None:
    source = FIXTURES / "s2_bf16_dp2_elastic"
    refused(3, "reshard", source, tmp_path / "run", "--world-size", 3, "--rigid", words=("hyperparameters",))
    assert list(tmp_path.iterdir()) == []


def test_file_of_torch_save_is_refused(tmp_path: Path) -> None:
    refused(3, "reshard", FIXTURES / "other/plain_adamw/ckpt.pt", tmp_path / "run", "--world-size", 2)


def test_missing_rank_is_named_and_nothing_written(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "source")
    (tmp_path / "source/global_step5/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    refused(3, "reshard", tmp_path / "source", tmp_path / "run", "--world-size", 2, words=("rank 2",))
    assert not (tmp_path / "run").exists()


def test_existing_target_is_refused_unless_overwrite(tmp_path: Path) -> None:
    succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 2)
    refused(4, "reshard", SOURCE, tmp_path / "run", "--world-size", 3, words=("exists",))
    assert inspected(tmp_path / "run")["topology"]["dp"] == 2
    succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 3, "--overwrite")
    assert inspected(tmp_path / "run")["topology"]["dp"] == 3


@pytest.mark.parametrize("target", ["source", "source/global_step5", "."])
def test_source_is_never_overwritten(target: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "in/source")
    before = files(tmp_path / "in")
    done = run("reshard", tmp_path / "in/source", tmp_path / "in" / target, "--world-size", 2, "--overwrite")
    assert done.returncode in (2, 4)
    assert files(tmp_path / "in") == before


def test_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    succeeded("reshard", SOURCE, tmp_path / "run", "--world-size", 2)
    (tmp_path / "run/notes.txt").write_text("mine")
    refused(4, "reshard", SOURCE, tmp_path / "run", "--world-size", 3, "--overwrite", words=("notes.txt",))
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
