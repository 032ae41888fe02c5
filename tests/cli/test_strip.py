"""`zckpt strip`: what it prints, each error's status, and that a target appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.console import FIXTURES, refused, succeeded

SOURCE = FIXTURES / "s1_fp32_dp4_sgdm"
PLAIN = FIXTURES / "other" / "plain_adamw" / "ckpt.pt"


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def nbytes(path: Path) -> int:
    return sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())


def test_bytes_saved_are_printed_by_kind(tmp_path):
    done = succeeded("strip", SOURCE, tmp_path / "thin", "--padding", "--unreferenced")
    assert done.stdout == ""
    rows = dict(
        line.rsplit(None, 1) for line in done.stderr.splitlines() if line.split()[-1].replace(",", "").isdigit()
    )
    kinds = {kind: int(number.replace(",", "")) for kind, number in rows.items()}
    assert set(kinds) == {"padding", "unreferenced", "structure", "in all"}
    assert kinds["in all"] == nbytes(SOURCE) - nbytes(tmp_path / "thin")
    assert "note: DeepSpeed takes hyperparameters from the training's configuration" in done.stderr
    assert files(tmp_path / "thin") == files(SOURCE)


def test_the_document_says_what_is_saved(tmp_path):
    options = ("--keep-slots", "exp_avg", "--json")
    saved = json.loads(succeeded("strip", PLAIN, tmp_path / "thin.pt", *options).stdout)["saved_nbytes"]
    assert sum(saved.values()) == nbytes(PLAIN) - nbytes(tmp_path / "thin.pt")
    assert saved["exp_avg_sq"] > 0
    assert "exp_avg" not in saved


def test_dry_run_prints_what_would_be_saved(tmp_path):
    done = succeeded("strip", PLAIN, tmp_path / "thin.pt", "--optimizer", "--dry-run")
    assert f"would write {tmp_path / 'thin.pt'}" in done.stdout
    assert "exp_avg_sq" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [("--keep-slots", "exp_avg,exp_avg_sq"),
                                     ("--keep-slots", "exp_avg", "--keep-slots", "exp_avg_sq")])  # fmt: skip
def test_slots_are_named_at_once_or_one_by_one(options, tmp_path):
    succeeded("strip", PLAIN, tmp_path / "thin.pt", *options, "--quiet")
    assert (tmp_path / "thin.pt").read_bytes() == PLAIN.read_bytes()


def test_file_that_is_written_is_sound(tmp_path):
    succeeded("strip", PLAIN, tmp_path / "thin.pt", "--optimizer")
    loaded = torch.load(tmp_path / "thin.pt", weights_only=True, mmap=True)
    assert any(isinstance(value, dict) and value.get("state") == {} for value in loaded.values())


def test_without_an_option_it_says_what_could_be_saved(tmp_path):
    line = refused(2, "strip", SOURCE, tmp_path / "thin", words=("--padding (", "--optimizer (", "--unreferenced ("))
    assert "momentum_buffer" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--keep-slots", "exp_avg"), ("no slot exp_avg", "momentum_buffer")),
        (("--keep-slots", "momentum_buffer", "--optimizer"), ("--optimizer", "--keep-slots")),
        (("--padding", "--memory", "0"), ()),
    ],
)
def test_unusable_options_are_refused(options, words, tmp_path):
    refused(2, "strip", SOURCE, tmp_path / "thin", *options, words=words)
    assert list(tmp_path.iterdir()) == []
