"""On a terminal verdicts are coloured and lines fit its width; anywhere else, and under NO_COLOR, they are plain."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios

import pytest

from tests.cli.console import FIXTURES, command, environment

ESCAPE = "\x1b["


def on_terminal(*arguments: object, columns: int = 70, **variables: str) -> str:
    """Run a command whose standard output is a real terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {key: value for key, value in environment().items() if key not in ("COLUMNS", "NO_COLOR")} | variables
    child = subprocess.Popen(command(*arguments), stdout=theirs, stderr=subprocess.DEVNULL, env=variables)
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


COMMANDS = {
    "diff": ("diff", FIXTURES / "s1_fp32_dp1", FIXTURES / "s1_fp32_dp2", "--parameters", "fc*"),
    "verify": ("verify", FIXTURES / "s1_fp32_dp1", "--deep"),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_colour_is_for_terminals(verb: str) -> None:
    assert ESCAPE in on_terminal(*COMMANDS[verb])
    assert ESCAPE not in on_terminal(*COMMANDS[verb], NO_COLOR="1")
    assert ESCAPE in on_terminal(*COMMANDS[verb], NO_COLOR="")
    done = subprocess.run(command(*COMMANDS[verb]), capture_output=True, text=True, env=environment(), check=False)
    assert ESCAPE not in done.stdout


def test_tables_fit_the_terminal() -> None:
    lines = on_terminal(*COMMANDS["diff"], NO_COLOR="1").split("different: ")[1].splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) == 70
