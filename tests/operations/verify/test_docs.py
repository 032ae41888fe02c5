"""docs/verify.md and the codes say the same."""

from __future__ import annotations

import re

from tests.cli.console import ROOT
from zckpt import codes
from zckpt.codes import CODES, SEVERITIES

ROW = re.compile(r"\| (ZC-\d{3}) \| (\w+) \| (.+?) \| (.+?) \|")
ROWS = ROW.findall((ROOT / "docs/verify.md").read_text())


def test_every_code_is_documented_once_and_no_other():
    assert [code for code, *_ in ROWS] == list(CODES)


def test_severities_and_titles_are_the_documented_ones():
    for code, severity, meaning, _ in ROWS:
        assert severity == CODES[code].severity
        assert severity in SEVERITIES
        assert meaning.lower().startswith(f"{CODES[code].title.lower()}.")


def test_every_name_of_a_code_is_a_code_of_its_own():
    named = [value for name, value in vars(codes).items() if re.fullmatch(r"ZC-\d{3}", str(value))]
    assert sorted(named) == sorted(CODES)


def test_codes_in_the_text_exist():
    text = (ROOT / "docs/verify.md").read_text()
    assert set(re.findall(r"ZC-\d{3}", text)) == set(CODES)
