"""Checkpoints that the real DeepSpeed trained, each once for all tests, which name files alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deepspeed_engine import Spec, train


@pytest.fixture(scope="session")
def made(shared) -> Callable[[Spec], Path]:
    """Give the folder of a trained checkpoint, which is made when it is first asked for, by whatever name."""

    def get(wanted: Spec) -> Path:
        digest = hashlib.sha256(repr(dataclasses.replace(wanted, name="")).encode()).hexdigest()[:16]
        folder: Path = shared(f"trained-{digest}", lambda directory: train(wanted, directory))
        return folder

    return get
