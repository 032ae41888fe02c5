"""Which files of a target have come into a store whole, so that a run that goes on need not send them again.

    .NAME.zckpt-partial/            the files
    .NAME.zckpt-journal/00000001    lines, each of a file: that it has come, or that it is about to be sent again
    .NAME.zckpt-journal/note        that all have come

A file is told by a digest of its bytes as they were sent, and by what the store has said of it when it had come: of how
many bytes it is, of which version. Where either is another, it has not come. Lines have a CRC-32; one that is not whole
is none. They are written as soon as they are of `RECORD_NBYTES` of files: of small files, that much may be sent twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

from zckpt.storage.crc32 import content_of, line_of

RECORD_NBYTES = 4 << 20


class Finished(NamedTuple):
    """A file that has come whole."""

    nbytes: int
    digest: str
    version: str


def new_digest() -> Any:  # noqa: ANN401  # hashlib's class has no public name
    """Return what the bytes of a file are told by."""
    return blake2b(digest_size=16)


class Record:
    """What is known of the files of one target; `write` writes a file of the record by its number."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._number = 0
        self._unwritten: set[str] = set()
        self.files: dict[str, Finished] = {}

    def read(self, number: int, data: bytes) -> None:
        """Take a file of the record; they come in order."""
        self._number = number
        for line in data.splitlines():
            content = content_of(line)
            if content is not None:
                name, *about = content
                self.files.pop(name, None)
                if about:
                    self.files[name] = Finished(*about)

    def add(self, name: str, one: Finished) -> None:
        """Note that a file has come; in any thread."""
        with self._lock:
            self.files[name] = one
            self._unwritten.add(name)
            self._append([name, *one], one.nbytes)

    def forget(self, name: str) -> None:
        """Note, before anything of it is sent, that a file is about to be another."""
        with self._lock:
            del self.files[name]
            self._append([name], RECORD_NBYTES)

    def flush(self) -> None:
        """Write what is not written."""
        with self._lock:
            self._flush()

    @property
    def written_nbytes(self) -> int:
        """Bytes of the files whose lines are written: another run knows of these."""
        with self._lock:
            return sum(one.nbytes for name, one in self.files.items() if name not in self._unwritten)

    def _append(self, content: list[object], nbytes: int) -> None:
        self._lines.append(line_of(content))
        self._nbytes += nbytes
        if self._nbytes >= RECORD_NBYTES:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._write(self._number + 1, b"".join(self._lines))
            self._number += 1
            self._lines.clear()
            self._unwritten.clear()
            self._nbytes = 0
