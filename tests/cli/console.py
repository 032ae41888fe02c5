"""The command line as a user meets it: a process, its exit status and what it prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"


def environment() -> dict[str, str]:
    """This process's environment, in which `python -m zckpt` is this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zckpt", *map(str, arguments)]


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `zckpt ARGUMENTS` to its end."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), timeout=120, check=False, **options
    )


def succeeded(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def inspected(*arguments: object) -> dict[str, Any]:
    """The document that `zckpt inspect --json` prints."""
    done = succeeded("inspect", "--json", *arguments)
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def refused(status: int, *arguments: object, words: tuple[str, ...] = ()) -> str:
    """Run a command that must fail with this status and one line; return the line."""
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.endswith("\n")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    return done.stderr


def copy(name: str, directory: Path) -> Path:
    """A copy of a fixture that a test may damage."""
    return Path(shutil.copytree(FIXTURES / name, directory / Path(name).name))
