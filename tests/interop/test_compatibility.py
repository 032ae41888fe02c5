"""A third of the tables of versions, every kind and every version in it, is still what they say."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "bench" / "cache" / "environments"


def script() -> ModuleType:
    """`bench/compatibility.py`, which installs each version in a directory of its own."""
    if "compatibility" not in sys.modules:
        spec = importlib.util.spec_from_file_location("compatibility", ROOT / "bench" / "compatibility.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["compatibility"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["compatibility"]


def cells() -> list[tuple[str, str, str]]:
    """Another torch than the installed one is gigabytes, and left to `make compatibility`."""
    known = script()
    results = json.loads(known.RESULTS.read_text())
    return [
        (program.name, version, kind.name)
        for program in known.PROGRAMS
        for row, kind in enumerate(program.kinds)
        for column, version in enumerate(program.versions)
        if (row + column) % 3 == 0 and kind.name in results.get(program.name, {}).get(version, {})
        if program.alone or version == known.installed(program.name)
    ]


@functools.cache
def missing(program: str, version: str) -> str:
    """Tell why this version is not there: what was never installed is not tested without an index of packages."""
    known = script()
    [one] = [one for one in known.PROGRAMS if one.name == program]
    try:
        known.environment_of(one, version, ENVIRONMENTS)
    except known.CannotInstallError as error:
        if "(from versions: none)" not in str(error):  # an index was there, or pip failed at something else
            raise
        return f"no index of packages to install {program} {version} from"
    return ""


@pytest.mark.parametrize(("program", "version", "kind"), cells())
def test_cell_is_as_the_table_has_it(program, version, kind):
    known = script()
    if why := missing(program, version):
        pytest.skip(why)
    [one] = [one for one in known.PROGRAMS if one.name == program]
    wanted = json.loads(known.RESULTS.read_text())[program][version][kind]
    [(_, found)] = known.cells(one, version, [its for its in one.kinds if its.name == kind], ENVIRONMENTS, keep=True)
    assert {column: found.get(column) == known.YES for column in known.COLUMNS} == {
        column: wanted.get(column) == known.YES for column in known.COLUMNS
    }, found


def test_the_page_is_what_the_script_makes_of_the_results():
    known = script()
    assert known.TABLE.read_text() == known.page(json.loads(known.RESULTS.read_text()))
