"""Torch files whose bytes are in memory, for tests that make thousands of them."""

from __future__ import annotations

import os

from zckpt.storage.files import FileRange
from zckpt.torchfile import TorchFile, read_source


class InMemory(FileRange):
    """A range whose bytes are in memory; the file it is said to be of is not opened."""

    def __init__(self, data: bytes, path: str, base: int) -> None:
        super().__init__(-1, path, base, len(data))
        self.data = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy from memory."""
        self.check(offset, nbytes)
        return self.data[offset : offset + nbytes]


def read_torchbytes(data: bytes, *, path: str | os.PathLike[str], base_offset: int = 0) -> TorchFile:
    """Read the structure of a torch file in memory."""
    return read_source(InMemory(bytes(data), os.fspath(path), base_offset))
