"""Names in a file cannot drive the terminal: control characters are not printed by any verb."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.console import run

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    torch.save({f"{ESCAPES}.weight": torch.full((3,), float("nan")), "other": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({f"{ESCAPES}.weight": torch.zeros(3), f"{ESCAPES}new": torch.ones(2)}, tmp_path / "b.pt")
    return tmp_path


def test_no_verb_prints_control_characters(hostile: Path) -> None:
    a, b, escaped = hostile / "a.pt", hostile / "b.pt", hostile / f"{ESCAPES}.pt"
    for arguments in (
        ("inspect", a, "--parameters", "--files"),
        ("diff", a, b),
        ("diff", "--series", a, b),
        ("verify", a, "--deep"),
        ("inspect", escaped),
        ("diff", a, b, "--parameters", ESCAPES),
        ("consolidate", a, hostile / "out.pt", "--slots", ESCAPES),
        ("convert", a, escaped, "--to", "consolidated"),
        ("strip", a, hostile / "none" / "x.pt", "--optimizer"),
    ):
        done = run(*arguments)
        said = done.stdout + done.stderr
        assert said, arguments
        assert not [c for c in said if (c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0"], arguments
