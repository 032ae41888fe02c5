"""Names in a file cannot drive the terminal: control characters are not printed by any verb."""

from __future__ import annotations

import json

import pytest
import torch

from tests.cli.console import refused, run
from tests.folders import names_in
from tests.live import trained

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"


LONG = "x" * 5000


def said_of(command: str) -> str:
    """What a command prints, which is something."""
    done = run(command)
    assert done.stdout + done.stderr, command
    return done.stdout + done.stderr


@pytest.fixture
def hostile() -> None:
    torch.save({f"{ESCAPES}.weight": torch.full((3,), float("nan")), "other": torch.ones(2)}, "a.pt")
    torch.save({f"{ESCAPES}.weight": torch.zeros(3), f"{ESCAPES}new": torch.ones(2)}, "b.pt")


def test_no_verb_echoes_a_name_without_end():
    """Names of 5,000 characters wherever a checkpoint has names."""
    weight = torch.nn.Parameter(torch.full((3,), float("nan")))
    optimizer = torch.optim.AdamW([{"params": [weight], LONG: LONG}])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0][f"slot{LONG}"] = torch.ones(3)
    for name in ("a.pt", "b.pt"):
        content = {"model": {LONG: weight.detach()}, "optimizer": state, LONG: {LONG: LONG}, name + LONG: 1}
        torch.save(content, name)
    for command in (
        "inspect a.pt --parameters --files --globals",
        "diff a.pt b.pt",
        "diff --series a.pt b.pt",
        "verify a.pt --deep",
        "consolidate a.pt out.pt --slots all --dry-run",
        f"consolidate a.pt out.pt --slots {LONG}",
        "convert a.pt universal --to universal",
        "convert a.pt zckpt --to zckpt",
        "strip a.pt s.pt --optimizer",
    ):
        said = said_of(command)
        assert LONG not in said, command
        assert max(map(len, said.splitlines())) < 4000, command


def test_name_cannot_add_a_line():
    name = "weight\nsound  everything.pt"
    torch.save({"model": {name: torch.full((2,), float("nan"))}, f"other{name}": 1}, "a.pt")
    torch.save({"model": {name: torch.zeros(2), f"{name}2": torch.zeros(1)}}, "b.pt")
    for command in ("inspect a.pt --parameters", "verify a.pt", "diff a.pt b.pt", "diff --series a.pt b.pt"):
        assert not [line for line in said_of(command).splitlines() if line.startswith("sound  every")]


@pytest.mark.usefixtures("hostile")
def test_json_says_control_characters_by_their_number():
    for command in ("inspect a.pt", "diff a.pt b.pt", "verify --deep a.pt", "fingerprint a.pt"):
        done = run(command, "--json")
        assert not [c for c in done.stdout if (c < " " and c != "\n") or "\x7f" <= c < "\xa0"], command
        assert ESCAPES in str(values(json.loads(done.stdout))), command


def values(document: object) -> str:
    """All keys and texts of a document, one after the other."""
    if isinstance(document, dict):
        return "".join(map(values, [*document, *document.values()]))
    return "".join(map(values, document)) if isinstance(document, list) else str(document)


@pytest.mark.parametrize("name", [f"{ESCAPES}.weight", "two\nlines", "back\rspace"])
def test_no_folder_is_named_by_control_characters(name):
    _, optimizer = trained(torch.nn.Linear(2, 2, bias=False))
    torch.save({"model": {name: torch.ones(2, 2)}, "optimizer": optimizer.state_dict()}, "a.pt")
    refused(5, "convert a.pt universal --to universal", words="cannot be a file name")
    assert names_in() == ["a.pt"]


@pytest.mark.usefixtures("hostile")
def test_no_verb_prints_control_characters():
    for command in (
        "inspect a.pt --parameters --files",
        "diff a.pt b.pt",
        "diff --series a.pt b.pt",
        "verify a.pt --deep",
        f"inspect {ESCAPES}.pt",
        f"diff a.pt b.pt --parameters {ESCAPES}",
        f"consolidate a.pt out.pt --slots {ESCAPES}",
        f"convert a.pt {ESCAPES}.pt --to consolidated",
        "strip a.pt none/x.pt --optimizer",
    ):
        said = said_of(command)
        assert not [c for c in said if (c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0"], command
