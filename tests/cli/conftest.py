from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test here run in `tmp_path`, so that a name alone is one of its files."""
    monkeypatch.chdir(tmp_path)
