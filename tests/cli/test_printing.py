"""Standard output that is closed, left by its reader, or of few letters: the verb does its work all the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cli.console import command, environment, succeeded
from tests.pairwise import some
from zckpt.cli.streams import json_text

CKPT = "fixtures/other/plain_adamw/ckpt.pt"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unsound file about which more is printed than a pipe holds."""
    path = tmp_path_factory.mktemp("large") / "model.pt"
    torch.save({f"layers.{i}.{'x' * 60}.weight": torch.tensor([float("nan")]) for i in range(1500)}, path)
    return path


def left(*arguments: object) -> tuple[int, str]:
    """Run a verb whose reader goes away after a line; return its exit status and what it says on standard error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(*arguments), **pipes, env=environment()) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        said = child.stderr.read().decode()
    return child.returncode, said


def closed(descriptor: int, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$@" {descriptor}>&-', "sh", *command(*arguments)],
        capture_output=True, text=True, env={**environment(), **variables}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "arguments"),
    some(
        [(0, "inspect --parameters"), (1, "verify --deep --json")],
        [(0, "inspect --json"), (1, f"diff --json {CKPT}")],
    ),
)
def test_what_was_found_is_the_status_though_nobody_reads_on_after_a_line(status, arguments, large):
    assert left(arguments, large) == (status, "")


def test_closed_standard_output_is_said_in_one_line():
    done = closed(1, f"inspect {CKPT}")
    assert done.returncode == 4
    assert done.stderr == "zckpt: cannot print: Bad file descriptor\n"


def test_verb_that_prints_nothing_needs_no_standard_output():
    done = closed(1, f"consolidate {CKPT} closed.pt")
    assert done.returncode == 0, done.stderr
    succeeded(f"consolidate {CKPT} open.pt")
    assert torch.load("closed.pt").keys() == torch.load("open.pt").keys()


@pytest.mark.parametrize("descriptor", [0, 2])
def test_other_closed_streams_do_no_harm(descriptor):
    done = closed(descriptor, f"consolidate {CKPT} model.pt")
    assert done.returncode == 0
    assert torch.load("model.pt")


@pytest.mark.parametrize(
    ("encoding", "arguments"),
    some(
        [("ascii", "inspect --parameters"), ("ascii", f"diff {CKPT}"), ("utf-8", "inspect --json")],
        [("ascii", "inspect --json"), ("ascii", "verify --deep")],
    ),
)
def test_names_that_no_encoding_has_are_printed(encoding, arguments):
    torch.save({"schön.\ud800": torch.ones(2)}, "model.pt")
    os.rename("model.pt", b"\xff.pt")  # noqa: PTH104  # a name that is not text
    done = subprocess.run(
        [*command(arguments), b"\xff.pt"],
        capture_output=True, env={**environment(), "PYTHONIOENCODING": encoding}, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if "diff" in arguments else 0), done.stderr
    assert done.stderr == b""
    if "--json" in arguments:
        (parameter,) = json.loads(done.stdout)["parameters"]
        assert parameter["name"] == "schön.\ud800"


def test_long_lists_in_json_have_a_line_for_each_entry_and_short_ones_are_indented():
    entries = [{"name": f"a\n{number}\x9b"} for number in range(101)]
    document = {"few": entries[:2], "many": entries, "none": [], "text": "a\nb"}
    text = json_text(document)
    assert json.loads(text) == document
    assert ' "few": [\n  {\n   "name": "a\\n0\\u009b"\n  },' in text
    assert '  {"name": "a\\n7\\u009b"},' in text.splitlines()
