"""Files that no disk has: their bytes, or some of them, are in this process's memory, and readers find them by name.

A folder has a name and a size for each, as for what is in a store (`zckpt.storage.stand_ins`).
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from zckpt.deepspeed.engine import in_memory
from zckpt.engine.targets import Literal, TargetFile
from zckpt.errors import SourceError, TargetError
from zckpt.storage.stand_ins import FILES, forget_all, new_base, stand_in


class NotHereError(SourceError):
    """Bytes are asked for that are in another process's memory."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A file as another process is told of it.

    `literals`: all but long ones, and what the file begins with, its pickle, however long; `absent`: where the long
    ones are, and how long.
    """

    nbytes: int
    literals: list[Literal]
    absent: list[tuple[int, int]]


def sketch(file: TargetFile, longest: int) -> Sketch:
    """Return a file of literals, for another process, without those of tensors of more than `longest` bytes."""
    absent = [(one.offset, len(one.data)) for one in file.literals if one.offset and len(one.data) > longest]
    without = {offset for offset, _ in absent}
    sent = [Literal(one.offset, bytes(one.data)) for one in file.literals if one.offset not in without]
    return Sketch(file.nbytes, sent, absent)


class Held:
    """A file of which some bytes are here.

    What begins with bytes that are here is read, with zeros for others: what reads an archive's headers passes over
    data. What begins with others is refused, and noted.
    """

    identity = ""

    def __init__(self, path: str, literals: Iterable[Literal]) -> None:
        self.path = path
        self.missed: list[int] = []
        self.take(literals)

    def take(self, literals: Iterable[Literal]) -> None:
        """Take bytes instead of those that are here."""
        self._literals = sorted((one for one in literals if len(one.data)), key=lambda one: one.offset)
        self._starts = [one.offset for one in self._literals]

    def has(self, offset: int) -> bool:
        """Tell whether a byte is here."""
        return self._first(offset) is not None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`. Raises NotHereError: the first is not here."""
        first, end = self._first(offset), offset + len(buffer)
        if first is None:
            if not len(buffer):
                return
            self.missed.append(offset)
            raise NotHereError("has bytes that another rank has", path=self.path)
        done = offset
        for one in self._literals[first:]:
            if one.offset >= end:
                break
            low, high = max(one.offset, offset), min(one.offset + len(one.data), end)
            buffer[done - offset : low - offset] = bytes(low - done)
            buffer[low - offset : high - offset] = memoryview(one.data)[low - one.offset : high - one.offset]
            done = high
        buffer[done - offset :] = bytes(end - done)

    def _first(self, offset: int) -> int | None:
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return None
        one = self._literals[index]
        return index if offset < one.offset + len(one.data) else None


class HeldFiles:
    """A folder of such files, below which `tag` is; to be closed. Raises TargetError: names cannot be made."""

    def __init__(self, tag: str) -> None:
        with _named():
            self._base = new_base(in_memory())
            self.directory = self._base / "files" / tag
            self.directory.mkdir(parents=True)
        self.files: dict[str, Held] = {}

    def add(self, name: str, nbytes: int, literals: Sequence[Literal]) -> None:
        """Add a file; its directories are made. Raises as the folder itself."""
        path = self.directory / name
        with _named():
            stand_in(path, nbytes)
        FILES[str(path)] = self.files[name] = Held(str(path), literals)

    def close(self) -> None:
        """Remove the folder."""
        forget_all(self._base, [one.path for one in self.files.values()])


@contextmanager
def _named() -> Iterator[None]:
    """Turn an error of the file system that has the names into one that says so."""
    try:
        yield
    except OSError as error:
        raise TargetError(
            "names of files, which have no bytes there, cannot be made",
            path=in_memory() or tempfile.gettempdir(),
            found=error.strerror,
            advice="make room there, or leave format out",
        ) from error
