"""Byte ranges of files. Knows how to read them and nothing of what they mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zckpt.codes import TRUNCATED
from zckpt.errors import DamagedFileError, SourceError

OPEN_SOURCES = 32
"""Source files kept open at once by each worker; a checkpoint may have more files than a process may open."""


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file for reading and yield its descriptor.

    Raises
    ------
    SourceError
        It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise SourceError("cannot be opened", path=path, found=error.strerror) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_nbytes(path: str, nbytes: int) -> None:
    """Raise unless a file can be opened for reading and has so many bytes.

    Raises
    ------
    DamagedFileError
        It is shorter.
    SourceError
        It cannot be opened.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            raise _too_short(path, nbytes, size)


def read_at(descriptor: int, offset: int, nbytes: int, *, path: str) -> bytes:
    """Read exactly `nbytes` bytes at byte `offset`.

    Raises
    ------
    DamagedFileError
        The file ends before that.
    """
    data = bytearray(nbytes)
    read_into(descriptor, offset, memoryview(data), path=path)
    return bytes(data)


def read_into(descriptor: int, offset: int, buffer: memoryview, *, path: str) -> None:
    """Fill `buffer` with the bytes at byte `offset`.

    Raises
    ------
    DamagedFileError
        The file ends before the buffer is full.
    SourceError
        The operating system cannot read it.
    """
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        except OSError as error:
            raise SourceError("cannot be read", path=path, found=error.strerror) from error
        if count == 0:
            raise _too_short(path, offset + len(buffer), offset + filled)
        filled += count


class Sources:
    """Descriptors of source files for one worker; the first opened is closed when there are many."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self, path: str) -> int:
        """Return a descriptor of `path` for reading.

        Raises
        ------
        SourceError
            It cannot be opened.
        """
        if path not in self._open:
            if len(self._open) >= OPEN_SOURCES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise SourceError("cannot be opened", path=path, found=error.strerror) from error
        return self._open[path]

    def close(self) -> None:
        """Close all."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _too_short(path: str, expected: int, found: int) -> DamagedFileError:
    return DamagedFileError(
        "the file ends too early",
        path=path,
        expected=f"at least {expected} bytes",
        found=found,
        advice="copy it again from where it came from",
        code=TRUNCATED,
    )
