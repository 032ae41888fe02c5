"""A third of the table of DeepSpeed's versions, every kind and every version in it, is still what it says."""

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


def script() -> ModuleType:
    """`bench/compatibility.py`, which installs each version in a directory of its own."""
    if "compatibility" not in sys.modules:
        spec = importlib.util.spec_from_file_location("compatibility", ROOT / "bench" / "compatibility.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["compatibility"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["compatibility"]


def cells() -> list[tuple[str, str]]:
    known = script()
    return [
        (version, kind.name)
        for row, kind in enumerate(known.KINDS)
        for column, version in enumerate(known.VERSIONS)
        if (row + column) % 3 == 0
    ]


@functools.cache
def environment(version: str) -> Path | str | None:
    """Where this version is, or why not: what was never installed is not tested without an index of packages."""
    known = script()
    try:
        place: Path | None = known.environment_of(version, ROOT / "bench" / "cache" / "deepspeed")
    except known.CannotInstallError as error:
        if "(from versions: none)" not in str(error):  # an index was there, or pip failed at something else
            raise
        return f"no index of packages to install DeepSpeed {version} from"
    return place


@pytest.mark.parametrize(("version", "kind"), cells())
def test_cell_is_as_the_table_has_it(version, kind):
    known = script()
    place = environment(version)
    if isinstance(place, str):
        pytest.skip(place)
    [(_, found)] = known.cells(version, place, [one for one in known.KINDS if one.name == kind])
    wanted = json.loads(known.RESULTS.read_text())[version][kind]
    assert {column: found.get(column) == known.YES for column in known.COLUMNS} == {
        column: wanted.get(column) == known.YES for column in known.COLUMNS
    }, found
