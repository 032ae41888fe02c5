"""On a terminal verdicts are coloured and lines fit its width; anywhere else, and under NO_COLOR, they are plain."""

from __future__ import annotations

import pytest

from tests.cli.console import on_terminal, run

ESCAPE = "\x1b["
DIFF = "diff fixtures/s1_fp32_dp1 fixtures/s1_fp32_dp2 --parameters fc*"
VERIFY = "verify fixtures/s1_fp32_dp1 --deep"


@pytest.mark.parametrize(("command", "variables"), [(DIFF, {}), (VERIFY, {"NO_COLOR": ""})])
def test_colour_is_for_terminals_and_an_empty_no_color_is_none(command, variables):
    assert ESCAPE in on_terminal(command, **variables)
    assert ESCAPE not in run(command).stdout


def test_no_color_is_heeded_and_tables_fit_the_terminal():
    shown = on_terminal(DIFF, NO_COLOR="1")
    assert ESCAPE not in shown
    lines = shown.split("different: ")[1].splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) == 70
