"""The command line as a user meets it: its exit status and what it prints.

Most tests call it in their own process: starting one and importing takes longer than what is tested. Those that are
about processes (signals, pipes, terminals, full disks) start one with `command`.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"


def environment() -> dict[str, str]:
    """This process's environment, in which `python -m zckpt` is this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def words_of(*arguments: object) -> list[str]:
    """The words of a command line: a text may be several of them; those in a list stay as they are.

    One that begins with `fixtures/` is of this checkout.
    """
    words: list[str] = []
    for one in arguments:
        words += one if isinstance(one, list) else filter(None, one.split(" ")) if isinstance(one, str) else [str(one)]
    return [str(ROOT / word) if word.startswith("fixtures/") else word for word in words]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zckpt", *words_of(*arguments)]


COMMANDS = """
import contextlib, io, json, sys
from zckpt.cli import main

said = []
for command in json.load(sys.stdin):
    sys.argv, out, errors, status = ["zckpt", *command], io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as exit_:
        status = exit_.code or 0
    said.append([status, out.getvalue(), errors.getvalue()])
print(json.dumps(said))
"""
"""A program of its own, which runs commands and tells the status, the output and the errors of each."""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `zckpt ARGUMENTS` to its end."""
    from zckpt.cli import main

    out, errors = io.StringIO(), io.StringIO()
    given = sys.argv
    sys.argv = ["zckpt", *words_of(*arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 0
    else:
        status = 0
    finally:
        sys.argv = given
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), errors.getvalue())


@contextlib.contextmanager
def in_time(seconds: int = 30) -> Iterator[None]:
    """Stop what hangs: a limit far beyond what any of this takes."""

    def stop(_signal: int, _frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def succeeded(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done


def printed(*arguments: object) -> Any:
    """The document that a command prints with `--json`."""
    return json.loads(succeeded(*arguments, "--json").stdout)


def inspected(*arguments: object) -> dict[str, Any]:
    """The document that `zckpt inspect --json` prints, which is strict JSON."""
    done = succeeded("inspect", "--json", *arguments)
    assert done.stderr == ""
    document = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(document, dict)
    return document


def refused(status: int, *arguments: object, words: str | tuple[str, ...] = ()) -> str:
    """Run a command that must fail with this status and one line; return the line."""
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert done.stdout == "" if "--json" not in words_of(*arguments) else json.loads(done.stdout).keys() == {"error"}
    assert done.stderr.endswith("\n")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in (words,) if isinstance(words, str) else words:
        assert word in done.stderr, done.stderr
    return done.stderr


def copy(name: str, directory: Path | str = ".") -> Path:
    """A copy of a fixture that a test may damage."""
    return Path(shutil.copytree(FIXTURES / name, Path(directory) / Path(name).name))


def on_terminal(*arguments: object, columns: int = 70, output: str | None = None, **variables: str) -> str:
    """Run a command whose standard output is a real terminal; or its standard error is, and a file gets the output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {key: value for key, value in environment().items() if key not in ("COLUMNS", "NO_COLOR")} | variables
    with Path(output or os.devnull).open("wb") as other:
        streams = {"stdout": other, "stderr": theirs} if output else {"stdout": theirs, "stderr": other}
        child = subprocess.Popen(command(*arguments), **streams, env=variables)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    child.wait()
    os.close(ours)
    return said.decode()
