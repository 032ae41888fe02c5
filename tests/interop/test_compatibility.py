"""A third of the table of DeepSpeed's versions, every kind and every version in it, is still what it says."""

from __future__ import annotations

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


@pytest.mark.parametrize(("version", "kind"), cells())
def test_cell_is_as_the_table_has_it(version: str, kind: str) -> None:
    known = script()
    place = known.environment_of(version, ROOT / "bench" / "cache" / "deepspeed")
    [(_, found)] = known.cells(version, place, [one for one in known.KINDS if one.name == kind])
    wanted = json.loads(known.RESULTS.read_text())[version][kind]
    assert {column: found.get(column) == known.YES for column in known.COLUMNS} == {
        column: wanted.get(column) == known.YES for column in known.COLUMNS
    }, found
