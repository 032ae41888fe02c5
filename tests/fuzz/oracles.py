"""What has to hold of what was read, whatever the bytes were: `AssertionError` where it does not."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import safetensors

from zckpt.engine.read import read_all
from zckpt.engine.targets import Hole
from zckpt.errors import ZckptError
from zckpt.state import Checkpoint, Slot
from zckpt.state.dtypes import DTYPES, itemsize
from zckpt.torchfile import TorchFile, walk_tensors

READ_NBYTES = 1 << 16
"""Slots of at most so many bytes are read: an edit makes others of a few elements that repeat."""


def check_error(error: ZckptError) -> None:
    """Hold an error to be one line that has an end."""
    text = str(error)
    assert "\n" not in text, text
    assert len(text) < 8000, text[:200]


def check_torch_file(file: TorchFile) -> None:
    """Hold tensors to lie in their storages, and these in the file."""
    for _, one in walk_tensors(file.root):
        storage, last = one.storage, one.storage_offset
        assert 0 <= storage.offset <= storage.offset + storage.nbytes <= file.nbytes, storage
        if one.numel:
            last += sum((size - 1) * step for size, step in zip(one.shape, one.strides, strict=True)) + 1
            assert min(one.shape, default=1) > 0 <= one.storage_offset, one
            assert last * itemsize(one.dtype) <= storage.nbytes, one


class _Inert(pickle._Unpickler):  # type: ignore[name-defined,misc]  # its C twin allots memory by numbers of the pickle
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError

    persistent_load = find_class  # type: ignore[assignment]


def check_plain_pickle(data: bytes, found: object) -> None:
    """Hold what a pickle without globals says to be what Python reads."""
    try:
        expected = _Inert(BytesIO(data), encoding="utf-8").load()
    except Exception:  # what Python refuses, or reads with another encoding, zckpt may read
        return
    assert _said(found) == _said(expected), data[:80]


def _said(value: object) -> str:
    text = repr(value) if not isinstance(value, float) else value.hex()
    return "".join(sorted(text)) if "nan" in text else text  # where a NaN is in a set depends on its address


def check_safetensors(data: bytes, slots: Mapping[str, Slot]) -> None:
    """Hold tensors to be those that the format's own library reads."""
    try:
        expected = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        raise AssertionError(f"safetensors refuses it: {error}") from error
    assert expected.keys() == slots.keys()
    for name, one in slots.items():
        stated = expected[name]
        assert (DTYPES[one.dtype].safetensors, list(one.shape)) == (stated["dtype"], stated["shape"]), name
        begin = one.spans[0].offset if one.spans else 0
        assert data[begin : begin + one.nbytes] == stated["data"], name


def read_slots(checkpoint: Checkpoint) -> None:
    """Read slots whole and as two ranges, and hold both to be the same."""
    every = [slot for one in checkpoint.tensors() for slot in one.slots.values()]
    every = [slot for slot in every if slot.numel and slot.nbytes <= READ_NBYTES and not slot.lost]
    reads, wholes = list[tuple[Hole, memoryview]](), list[tuple[bytearray, bytearray]]()
    for slot in every[:: len(every) // 16 + 1]:
        whole, parts = bytearray(slot.nbytes), bytearray(slot.nbytes)
        half, size = slot.numel // 2, itemsize(slot.dtype)
        reads.append((Hole(0, slot.name, slot, slot.whole, slot.dtype), memoryview(whole)))
        for start, end in ((0, half), (half, slot.numel)):
            hole = Hole(0, slot.name, slot, slot.flat(start, end - start), slot.dtype)
            reads += [(hole, memoryview(parts)[start * size : end * size])] if end > start else []
        wholes.append((whole, parts))
        assert math.prod(slot.shape) == slot.numel
    read_all(reads, threads=False)
    for whole, parts in wholes:
        assert whole == parts
