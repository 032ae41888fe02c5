"""Damage to copies of real checkpoints, so that nothing but what is meant changes.

DeepSpeed need not be there: the few classes that its files mention have stand-ins.
"""

from __future__ import annotations

import enum
import shutil
import struct
import sys
import types
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import zckpt
from tests.cli.console import FIXTURES
from zckpt.state import Slot, Span

TAG = "global_step5"


def copy(name: str, directory: Path | str = ".") -> Path:
    """A copy of a fixture that a test may damage."""
    source = FIXTURES / name
    target = Path(directory) / source.name
    if source.is_file():
        return Path(shutil.copy(source, target))
    return Path(shutil.copytree(source, target))


def optimizer_file(directory: Path, rank: int, mp_rank: int = 0) -> Path:
    """A rank's optimizer file in a run or a tag of DeepSpeed."""
    (path,) = directory.rglob(f"*zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt")
    return path


def place(source: Path, name: str, slot: str, index: int) -> tuple[Span, int]:
    """The span that holds an element of a slot, and the byte at which the element is."""
    return place_in(zckpt.open(source).owner(name).slots[slot], index)


def place_in(slot: Slot, index: int) -> tuple[Span, int]:
    for span in slot.spans:
        assert span.strides is None
        if span.extent.start <= index < span.extent.start + span.extent.numel:
            size = getattr(torch, span.dtype).itemsize
            return span, span.offset + (index - span.extent.start) * size
    raise AssertionError(index)


def patch(path: str | Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file."""
    with Path(path).open("r+b") as file:
        file.seek(offset)
        assert file.read(len(data)) != data, "it would change nothing"
        file.seek(offset)
        file.write(data)


def flip(path: str | Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with Path(path).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def set_element(source: Path, name: str, slot: str, index: int, value: float) -> str:
    """Set one element of a slot and state its record's new checksum; return the file."""
    span, offset = place(source, name, slot, index)
    patch(span.path, offset, element(value, span.dtype))
    fix_checksums(span.path)
    return span.path


def element(value: float, dtype: str) -> bytes:
    return torch.tensor([value], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


def fix_checksums(path: str | Path) -> None:
    """State the CRC-32 that the bytes of each record of a zip archive have, wherever the archive states it."""
    data = bytearray(Path(path).read_bytes())
    with zipfile.ZipFile(path) as archive:
        entries, at = archive.infolist(), archive.start_dir
    for entry in entries:
        name, extra = struct.unpack_from("<2H", data, entry.header_offset + 26)
        start = entry.header_offset + 30 + name + extra
        crc = struct.pack("<L", zlib.crc32(data[start : start + entry.file_size]))
        lengths = struct.unpack_from("<3H", data, at + 28)
        data[at + 16 : at + 20] = crc
        at += 46 + sum(lengths)
        if entry.flag_bits & 8:  # stated behind the data
            assert data[start + entry.file_size :][:4] == b"PK\7\x08"
            data[start + entry.file_size + 4 : start + entry.file_size + 8] = crc
        else:
            data[entry.header_offset + 14 : entry.header_offset + 18] = crc
    Path(path).write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


class ZeroStageEnum(int, enum.Enum):
    """As DeepSpeed's, which need not be installed to load its files."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules with the classes that DeepSpeed's files mention."""
    named: dict[str, list[Any]] = {
        "deepspeed.runtime.zero.config": [ZeroStageEnum],
        "deepspeed.runtime.fp16.loss_scaler": [type("LossScaler", (), {}), type("DynamicLossScaler", (), {})],
        "deepspeed.utils.tensor_fragment": [type("fragment_address", (), {})],
    }
    modules: dict[str, types.ModuleType] = {}
    for name, classes in named.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for one in classes:
            one.__module__ = name
            setattr(modules[name], one.__name__, one)
    return modules


def edit(path: Path, change: Callable[[Any], Any], *, legacy: bool = False) -> None:
    """Load a file, change what it holds in place, and save it again, with torch: perhaps as before its version 1.6."""
    with mock.patch.dict(sys.modules, stand_ins()):
        content = torch.load(path, map_location="cpu", weights_only=False)
        change(content)
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)


def swap(one: Path, other: Path) -> None:
    """Give two files each other's names."""
    aside = one.with_name("aside")
    one.replace(aside)
    other.replace(one)
    aside.replace(other)


def another_run(path: Path) -> None:
    """Multiply all floats of a file's storages, as if it were of a run with another seed, and state their checksums."""
    data = bytearray(path.read_bytes())
    from zckpt.torchfile import read_torchfile, walk_tensors

    storages = {t.storage.offset: t for _, t in walk_tensors(read_torchfile(path).root) if t.numel > 1}
    for tensor in storages.values():
        if tensor.dtype == "float32":
            view = np.frombuffer(data, np.float32, tensor.storage.nbytes // 4, tensor.storage.offset)
            view *= np.float32(1.75)
    path.write_bytes(data)
    fix_checksums(path)
