"""On a terminal verdicts are coloured and lines fit its width; anywhere else, and under NO_COLOR, they are plain."""

from __future__ import annotations

import pytest

from tests.cli.console import FIXTURES, on_terminal, run

ESCAPE = "\x1b["


COMMANDS = {
    "diff": ("diff", FIXTURES / "s1_fp32_dp1", FIXTURES / "s1_fp32_dp2", "--parameters", "fc*"),
    "verify": ("verify", FIXTURES / "s1_fp32_dp1", "--deep"),
}


@pytest.mark.parametrize(("verb", "variables"), [("diff", {}), ("verify", {"NO_COLOR": ""})])
def test_colour_is_for_terminals_and_an_empty_no_color_is_none(verb, variables):
    assert ESCAPE in on_terminal(*COMMANDS[verb], **variables)
    assert ESCAPE not in run(*COMMANDS[verb]).stdout


def test_no_color_is_heeded_and_tables_fit_the_terminal():
    shown = on_terminal(*COMMANDS["diff"], NO_COLOR="1")
    assert ESCAPE not in shown
    lines = shown.split("different: ")[1].splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) == 70
