"""`zckpt strip`: what it prints, each error's status, and that a target appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.folders import contents, names_in, nbytes_in

SOURCE = "fixtures/s1_fp32_dp4_sgdm"
PLAIN = "fixtures/other/plain_adamw/ckpt.pt"
PLAIN_FILE = FIXTURES / "other/plain_adamw/ckpt.pt"


def test_bytes_saved_are_printed_by_kind():
    done = succeeded(f"strip {SOURCE} thin --padding --unreferenced")
    assert done.stdout == ""
    rows = dict(
        line.rsplit(None, 1) for line in done.stderr.splitlines() if line.split()[-1].replace(",", "").isdigit()
    )
    kinds = {kind: int(number.replace(",", "")) for kind, number in rows.items()}
    assert set(kinds) == {"padding", "unreferenced", "structure", "in all"}
    source = FIXTURES / "s1_fp32_dp4_sgdm"
    assert kinds["in all"] == nbytes_in(source) - nbytes_in("thin")
    assert "note: DeepSpeed takes hyperparameters from the training's configuration" in done.stderr
    assert contents("thin").keys() == contents(source).keys()


def test_the_document_says_what_is_saved():
    saved = printed(f"strip {PLAIN} thin.pt --keep-slots exp_avg")["saved_nbytes"]
    assert sum(saved.values()) == PLAIN_FILE.stat().st_size - Path("thin.pt").stat().st_size
    assert saved["exp_avg_sq"] > 0
    assert "exp_avg" not in saved


def test_dry_run_prints_what_would_be_saved():
    done = succeeded(f"strip {PLAIN} thin.pt --optimizer --dry-run")
    assert "would write thin.pt" in done.stdout
    assert "exp_avg_sq" in done.stdout
    assert names_in() == []


@pytest.mark.parametrize("options", ["--keep-slots exp_avg,exp_avg_sq", "--keep-slots exp_avg --keep-slots exp_avg_sq"])
def test_slots_are_named_at_once_or_one_by_one(options):
    succeeded(f"strip {PLAIN} thin.pt {options} --quiet")
    assert Path("thin.pt").read_bytes() == PLAIN_FILE.read_bytes()


def test_file_that_is_written_is_sound():
    succeeded(f"strip {PLAIN} thin.pt --optimizer")
    loaded = torch.load("thin.pt", weights_only=True, mmap=True)
    assert any(isinstance(value, dict) and value.get("state") == {} for value in loaded.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ("--padding (", "--optimizer (", "--unreferenced (", "momentum_buffer")),  # what could be saved
        ("--keep-slots exp_avg", ("no slot exp_avg", "momentum_buffer")),
        ("--keep-slots momentum_buffer --optimizer", ("--optimizer", "--keep-slots")),
        ("--padding --memory 0", ()),
    ],
)
def test_unusable_options_are_refused(options, words):
    refused(2, f"strip {SOURCE} thin {options}", words=words)
    assert names_in() == []
