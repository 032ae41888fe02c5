"""`zckpt demo`: what it prints where all is well is tested with the example; here, where it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.console import environment, refused

pytestmark = pytest.mark.interop

PROGRAM = """
import sys

sys.modules["matplotlib"] = None  # cannot be imported
from zckpt.cli import main

if __name__ == "__main__":
    from zckpt.training import demo

    demo.TOLERANCE = -1.0
    main()
"""


def test_demo_without_agreement_or_matplotlib(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, program, "demo", "--quick", "--directory", run],
        capture_output=True, text=True, env=environment(), timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert [line.split(" of ")[1][:7] for line in wrong] == ["3 ranks", "2 ranks"]  # those of 4 are bit-equal
    assert done.stdout.splitlines()[-1] == "matplotlib is not here to draw a picture"
    assert "  step     alone   resumed  ranks" in done.stdout
    assert not list(run.glob("*.png"))


def test_demo_refuses_a_directory_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    refused(2, "demo", "--directory", tmp_path, words=(str(tmp_path), "is not empty"))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
