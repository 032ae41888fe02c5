"""Files of many ranks that say the same, read with one tree for all of them.

Under ZeRO-3 every rank's model file has every name and shape, and a record for each tensor, all of them empty. Such a
file costs as much to read as the whole model has names. Where all of a file's bytes are those of another, but for the
archive's name, which each record's begins with, the checksums and the records' data, it gets the other's tree. Names
have as many characters. Of other files, those with the same pickle, and records in the same places, share a tree: the
first of another length, ranks' optimizers, parameters of one shape.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from zckpt.state.context import during
from zckpt.torchfile import FileRange, TorchFile, opened, read_entries, read_source

if TYPE_CHECKING:
    from zckpt.formats.alike_patterns import Pattern

FEWEST_RECORDS = 64
"""A file of fewer is read as fast as it is compared."""

ENOUGH_RECORDS = 1 << 13
"""Of the files so far; reading as many takes as long as loading what compares files."""

MOST_PATTERNS = 16
"""Trees that are kept: ranks of a node name their devices, and there are 8 or 16 of those."""

MOST_NBYTES = 1 << 27
"""Of what files are held against."""


_GLANCED: ContextVar[bool] = ContextVar("glanced", default=False)


def glanced() -> AbstractContextManager[None]:
    """Hold files against each other by what their directories state, the CRC-32s of their pickles, and read no more.

    For what describes a checkpoint and writes nothing: a pickle that is damaged and never read is not noticed.
    """
    return during(_GLANCED, True)


class AlikeReader:
    """Reads files one after the other; those that are alike share a tree.

    `blanks`: those too that differ only in the numbers of meshes, each with its own.
    """

    def __init__(self, *, blanks: bool = False) -> None:
        self._blanks = blanks
        self._patterns: list[Pattern] = []
        self._known: dict[bytes, TorchFile] = {}
        self._count = 0
        self._data = bytearray()  # of the last file: most have its size

    def read(self, path: str | os.PathLike[str]) -> TorchFile:
        """Read the structure of a torch file; parameters, result and errors are those of `read_torchfile`.

        The trees, storages and what is known of plain parts are the same objects in files that are alike.
        """
        with opened(path) as source:
            if source.read(0, min(source.nbytes, 4)) != b"PK\3\4":
                return read_source(source)
            found = self._alike(source)
            if found is not None:
                return found
            start, entries = read_entries(source)
            self._count += len(entries)
            file = read_source(source, self._known, blanks=self._blanks, listed=(start, entries))
            if len(entries) >= FEWEST_RECORDS and self._count >= ENOUGH_RECORDS:
                from zckpt.formats.alike_patterns import Pattern

                made = Pattern.of(source, file, start, entries, glanced=_GLANCED.get())
                self._patterns = [*self._patterns[1 - MOST_PATTERNS :], made] if made is not None else self._patterns
                while sum(len(one.data) for one in self._patterns) > MOST_NBYTES and len(self._patterns) > 1:
                    del self._patterns[0]
            return file

    def _alike(self, source: FileRange) -> TorchFile | None:
        ranges: list[tuple[int, int]] = []
        for pattern in self._patterns:
            if pattern.file.nbytes != source.nbytes:
                continue
            if pattern.ranges != ranges:
                from zckpt.formats.alike_patterns import read_ranges

                ranges, self._data = pattern.ranges, read_ranges(source, pattern.ranges, self._data)
            found = pattern.match(source, self._data)
            if found is not None:
                return found
        return None
