"""Names in a file cannot drive the terminal: control characters are not printed by any verb."""

from __future__ import annotations

import json
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


LONG = "x" * 5000


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Names of 5,000 characters wherever a checkpoint has names."""
    weight = torch.nn.Parameter(torch.full((3,), float("nan")))
    optimizer = torch.optim.AdamW([{"params": [weight], LONG: LONG}])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0][f"slot{LONG}"] = torch.ones(3)
    for name in ("a.pt", "b.pt"):
        content = {"model": {LONG: weight.detach()}, "optimizer": state, LONG: {LONG: LONG}, name + LONG: 1}
        torch.save(content, tmp_path / name)
    return tmp_path


def test_no_verb_echoes_a_name_without_end(long):
    a, b = long / "a.pt", long / "b.pt"
    for arguments in (
        ("inspect", a, "--parameters", "--files", "--globals"),
        ("diff", a, b),
        ("diff", "--series", a, b),
        ("verify", a, "--deep"),
        ("consolidate", a, long / "out.pt", "--slots", "all", "--dry-run"),
        ("consolidate", a, long / "out.pt", "--slots", LONG),
        ("convert", a, long / "universal", "--to", "universal"),
        ("convert", a, long / "zckpt", "--to", "zckpt"),
        ("strip", a, long / "s.pt", "--optimizer"),
    ):
        done = run(*arguments)
        assert done.stdout + done.stderr, arguments
        assert LONG not in done.stdout + done.stderr, arguments
        assert max(map(len, (done.stdout + done.stderr).splitlines())) < 4000, arguments


def test_name_cannot_add_a_line(tmp_path):
    name = "weight\nsound  everything.pt"
    torch.save({"model": {name: torch.full((2,), float("nan"))}, f"other{name}": 1}, tmp_path / "a.pt")
    torch.save({"model": {name: torch.zeros(2), f"{name}2": torch.zeros(1)}}, tmp_path / "b.pt")
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    for arguments in (("inspect", a, "--parameters"), ("verify", a), ("diff", a, b), ("diff", "--series", a, b)):
        done = run(*arguments)
        assert not [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("sound  every")]


def test_json_says_control_characters_by_their_number(hostile):
    a, b = hostile / "a.pt", hostile / "b.pt"
    for arguments in (("inspect", a), ("diff", a, b), ("verify", "--deep", a), ("fingerprint", a)):
        done = run(*arguments, "--json")
        assert not [c for c in done.stdout if (c < " " and c != "\n") or "\x7f" <= c < "\xa0"], arguments
        assert ESCAPES in str(values(json.loads(done.stdout))), arguments


def values(document: object) -> str:
    """All keys and texts of a document, one after the other."""
    if isinstance(document, dict):
        return "".join(map(values, [*document, *document.values()]))
    return "".join(map(values, document)) if isinstance(document, list) else str(document)


@pytest.mark.parametrize("name", [f"{ESCAPES}.weight", "two\nlines", "back\rspace"])
def test_no_folder_is_named_by_control_characters(name, tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    torch.save({"model": {name: weight.detach()}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "universal", "--to", "universal")
    assert done.returncode == 5
    assert "cannot be a file name" in done.stderr
    assert not (tmp_path / "universal").exists()


def test_no_verb_prints_control_characters(hostile):
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
