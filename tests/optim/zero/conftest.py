"""Where a training is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.optim.zero.test_files import STEPS


@pytest.fixture
def saved(tmp_path) -> Path:
    """A directory that is not there, in a run of DeepSpeed's."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / f"global_step{STEPS}"
