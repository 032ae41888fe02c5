"""Plans written into directories, and slots read whole, for tests."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.copy import read_extent
from zckpt.engine.plan import Plan
from zckpt.operations.target import write_target
from zckpt.state import Extent, Slot
from zckpt.storage.files import Sources
from zckpt.storage.ownership import Owned


def write_directory(made: Plan, target: str | os.PathLike[str], *, owned: Owned | None = None, **options) -> Checked:
    """Write a plan, whatever overflows, into a directory, which may hold files of the plan's names only."""
    names = {one.file.name for one in made.files}
    options["checks"] = options.get("checks") or Checks()
    options["checks"].allows_overflow = True
    return write_target(made, target, owned=owned or Owned(names.__contains__), **options)


def read_slot(slot: Slot) -> Array:
    """All elements of a slot, in its shape."""
    with Sources() as sources:
        return read_extent(slot, Extent.whole(slot.shape), sources).reshape(slot.shape)


def noise(numel: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(numel).standard_normal(numel).astype(numpy_dtype(dtype))


def sparse(path: Path, nbytes: int) -> str:
    with path.open("wb") as file:
        file.truncate(nbytes)
    return str(path)


class Counter:
    """A reporter that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def begin(self, nbytes: int) -> None:
        self.told.append(("begin", nbytes))

    def advance(self, nbytes: int) -> None:
        self.told.append(("advance", nbytes))

    def end(self) -> None:
        self.told.append(("end", 0))
