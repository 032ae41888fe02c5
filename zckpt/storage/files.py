"""Byte ranges of files. Knows how to open and read them and nothing of what they mean.

Every file of a checkpoint is opened here. Only regular files are: a pipe would wait for a writer that never comes, and
a device has no end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from stat import S_ISREG
from typing import TYPE_CHECKING

from zckpt.codes import TRUNCATED
from zckpt.errors import DamagedFileError, SourceError

if TYPE_CHECKING:
    from typing_extensions import Self

OPEN_SOURCES = 32
"""Source files kept open at once by each worker; a checkpoint may have more files than a process may open."""


FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Opening does not wait, whatever has taken the place of a file since it was looked at."""


def open_file(path: str) -> int:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises
    ------
    SourceError
        It cannot be opened, or is no regular file.
    """
    try:
        if S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # first: a device may act on being opened
            descriptor = os.open(path, FLAGS)
            if S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceError("cannot be opened", path=path, found=found) from error
    raise SourceError("is not a regular file", path=path)


def read_head(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file: `nbytes`, or all where it has fewer.

    Raises
    ------
    SourceError
        It cannot be read, or is no regular file.
    """
    with opened(path) as descriptor:
        return read_at(descriptor, 0, min(nbytes, os.fstat(descriptor).st_size), path=path)


def read_whole(path: str, *, most: int) -> bytes:
    """Return all bytes of a file that has at most `most`.

    Raises
    ------
    DamagedFileError
        It has more.
    SourceError
        It cannot be read, or is no regular file.
    """
    data = read_head(path, most + 1)
    if len(data) > most:
        raise DamagedFileError("too large", path=path, expected=f"at most {most} bytes")
    return data


def is_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is a regular file; not under a name that no file can have, either."""
    return os.path.isfile(path)  # noqa: PTH113  # pathlib raises where a name is too long


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Raises
    ------
    SourceError
        It cannot be opened, or is no regular file.
    """
    descriptor = open_file(path)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self, path: str) -> int:
        """Return a descriptor of `path` for reading.

        Raises
        ------
        SourceError
            It cannot be opened, or is no regular file.
        """
        if path not in self._open:
            if len(self._open) >= OPEN_SOURCES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = open_file(path)
        return self._open[path]

    def read(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset` of a file; errors are those of `read_into`."""
        read_into(self.descriptor(path), offset, buffer, path=path)

    def touch(self, path: str, offset: int, nbytes: int) -> None:
        """Note that some of these bytes are read otherwise."""

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
