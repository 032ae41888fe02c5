"""A range of bytes to read a torch file from: a whole file, a part of one, or bytes in memory.

Readers work with offsets from the start of the range; what they report is absolute: `base` + offset.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from zckpt.errors import DamagedFileError, SourceError
from zckpt.storage.files import opened, read_at


class ByteSource(ABC):
    """Where a reader gets its bytes from; `FileRange` and `Buffer` say how.

    Parameters
    ----------
    path : str
        File named in errors.
    base : int, bytes
        Absolute offset of the range in that file.
    nbytes : int, bytes
        Length of the range.
    """

    __slots__ = ("base", "nbytes", "path")

    def __init__(self, path: str, base: int, nbytes: int) -> None:
        self.path = path
        self.base = base
        self.nbytes = nbytes

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`, relative to the range.

        Raises
        ------
        DamagedFileError
            They are not all within the range.
        SourceError
            The system cannot read them.
        """


class FileRange(ByteSource):
    """A range of an open file."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int, path: str, base: int, nbytes: int) -> None:
        super().__init__(path, base, nbytes)
        self.descriptor = descriptor

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read from the file, at a position of its own."""
        check_range(self, offset, nbytes)
        try:
            return read_at(self.descriptor, self.base + offset, nbytes, path=self.path)
        except OSError as error:
            raise SourceError("cannot be read", path=self.path, found=error.strerror) from error


class Buffer(ByteSource):
    """A range of a file whose bytes are in memory already."""

    __slots__ = ("view",)

    def __init__(self, data: bytes | bytearray | memoryview, path: str, base: int) -> None:
        self.view = memoryview(data).cast("B")
        super().__init__(path, base, self.view.nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy from memory."""
        check_range(self, offset, nbytes)
        return bytes(self.view[offset : offset + nbytes])


def check_range(source: ByteSource, offset: int, nbytes: int) -> None:
    """Refuse bytes outside of the range.

    Raises
    ------
    DamagedFileError
        Some of them are.
    """
    if offset < 0 or nbytes < 0 or offset + nbytes > source.nbytes:
        raise DamagedFileError(
            "it refers to bytes outside of itself",
            path=source.path,
            expected=f"at most {source.nbytes} bytes",
            found=f"bytes {offset} to {offset + nbytes}",
            advice="copy it again from where it came from",
        )


@contextmanager
def open_range(path: str | os.PathLike[str], offset: int, nbytes: int | None) -> Iterator[FileRange]:
    """Open a file, or a part of it, for reading.

    Parameters
    ----------
    path : path-like
    offset : int, bytes
    nbytes : int or None, bytes
        None: up to the end of the file.

    Raises
    ------
    SourceError
        It does not exist, cannot be opened, or is no regular file.
    DamagedFileError
        The range is not within the file, or is empty.
    """
    name = os.fspath(path)
    with opened(name) as descriptor:
        size = os.fstat(descriptor).st_size
        length = size - offset if nbytes is None else nbytes
        if offset < 0 or length < 0 or offset + length > size:
            raise DamagedFileError(
                "a torch file is said to lie outside of it",
                path=name,
                expected=f"at most {size} bytes",
                found=f"bytes {offset} to {offset + length}",
            )
        yield FileRange(descriptor, name, offset, length)
