"""On a terminal verdicts are coloured and lines fit its width; anywhere else, and under NO_COLOR, they are plain."""

from __future__ import annotations

import subprocess

import pytest

from tests.cli.console import FIXTURES, command, environment, on_terminal

ESCAPE = "\x1b["


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
