"""What the verbs are given, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.verbs import inputs


def made(at: Path) -> Path:
    inputs(at)
    return at


@pytest.fixture
def made_inputs(shared) -> Path:
    return shared("faults", made)
