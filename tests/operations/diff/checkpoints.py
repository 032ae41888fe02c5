"""Checkpoints that are copied from fixtures and changed in one place."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zckpt
from tests import damage
from tests.cli.console import FIXTURES
from zckpt.engine.cast import numpy_dtype
from zckpt.state import Slot
from zckpt.state.dtypes import itemsize


def copied(name: str, directory: Path | str = ".") -> Path:
    """A writable copy of a fixture."""
    target = Path(directory) / "copy"
    shutil.copytree(FIXTURES / name, target, ignore=shutil.ignore_patterns("truth.*"))
    for path in [target, *target.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    return target


def slot_of(source: Path, name: str, key: str) -> Slot:
    return zckpt.open(source).owner(name).slots[key]


def place(slot: Slot, element: int) -> tuple[str, int]:
    """File and byte offset of an element of a slot whose spans are ranges of the whole tensor."""
    for span in slot.spans:
        first = span.extent.start
        if span.extent.sizes == slot.shape and first <= element < first + span.extent.numel:
            return span.path, span.offset + (element - first) * itemsize(span.dtype)
    raise KeyError(element)


def rewrite(source: Path, name: str, key: str, element: int, change: Callable[[Any], Any]) -> None:
    """Change one element of a slot where it lies."""
    slot = slot_of(source, name, key)
    path, offset = place(slot, element)
    with Path(path).open("r+b") as file:
        file.seek(offset)
        value = np.frombuffer(file.read(itemsize(slot.dtype)), numpy_dtype(slot.dtype))
        file.seek(offset)
        file.write(np.asarray(change(value[0])).astype(value.dtype).tobytes())


def flip(source: Path, name: str, key: str, element: int, bit: int) -> None:
    """Flip one bit of an element."""
    path, offset = place(slot_of(source, name, key), element)
    damage.flip(path, offset + bit // 8, bit % 8)


def resave(path: Path, change: Callable[[Any], Any]) -> None:
    """Load a file with torch, change what it holds, and save it with torch."""
    content = torch.load(path, weights_only=False)
    changed = change(content)
    torch.save(content if changed is None else changed, path)
    assert zipfile.is_zipfile(path)
