"""Slots in files, files that are planned of them, plans written into directories, and slots read whole, for tests."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from zckpt.engine.cast import Array, numpy_dtype
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.copy import read_extent
from zckpt.engine.plan import Plan
from zckpt.engine.targets import Hole, TargetFile
from zckpt.operations.target import write_target
from zckpt.state import Extent, Slot, Span
from zckpt.storage.files import Sources
from zckpt.storage.ownership import Owned

FILL = 0xAA
"""What stands before a tensor in the files that tests make, so that an offset that is off shows."""


def part_of(tensor, extent: Extent):
    """The elements of an array or tensor that an extent holds, in its order."""
    box = tensor[tuple(slice(o, o + s) for o, s in zip(extent.offsets, extent.sizes, strict=True))]
    return box.reshape(-1)[extent.start : extent.start + extent.numel]


def in_file(path: str | Path, shape: tuple[int, ...], dtype: str = "float32", at: int = 0, **lies: object) -> Span:
    """All elements of a tensor, from byte `at` of a file on."""
    return Span(Extent.whole(shape), str(path), at, dtype, **lies)


def stored(path: str | Path, array: np.ndarray, *, before: int = 0) -> Span:
    """Write an array's bytes, as they lie in memory, after `before` others; return the span of all its elements."""
    Path(path).write_bytes(bytes([FILL]) * before + array.tobytes())
    order = "big" if array.dtype.byteorder == ">" else "little"
    return in_file(path, array.shape, array.dtype.name, before, byteorder=order)


def slot_of(*spans: Span, shape: tuple[int, ...] | None = None, name: str = "weight") -> Slot:
    """What spans hold together: of the first one's shape, if no other is given."""
    return Slot(name, spans[0].dtype, spans[0].extent.sizes if shape is None else shape, spans)


def hole_of(slot: Slot, at: int = 0, dtype: str | None = None) -> Hole:
    """A hole for all of a slot, at a byte of a target."""
    return Hole(at, "weight/w", slot, Extent.whole(slot.shape), dtype or slot.dtype)


def file_of(*holes: Hole, name: str = "target", **filled: list) -> TargetFile:
    """A target that ends behind its last hole."""
    return TargetFile(name, max(hole.offset + hole.nbytes for hole in holes), holes=list(holes), **filled)


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
