"""Files of many ranks that say the same, read with one tree for all of them.

Under ZeRO-3 every rank's model file has every name and shape, and a record for each tensor, all of them empty. Such a
file costs as much to read as the whole model has names. Where another file has the same pickle and its records in the
same places, only that is found out, and the file gets the other's tree:

    central directory   the same but for the archive's own name, which each record's begins with, and the checksums
    local headers       each names its record, and its data begins where the other's does
    data.pkl            byte for byte the same

Small ones are compared as they are, byte for byte, but for the archive's name, the checksums, and the records' data.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zckpt.formats.alike_records import WHOLE_NBYTES
from zckpt.storage.files import read_into
from zckpt.torchfile import TorchFile, find_directory, open_range, read_source

if TYPE_CHECKING:
    from zckpt.formats.alike_patterns import Pattern

FEWEST_RECORDS = 64
"""A file of fewer is read as fast as it is compared."""

ENOUGH_RECORDS = 1 << 13
"""Of the files so far; reading as many takes as long as loading what compares files."""

MOST_PATTERNS = 32
"""Trees that are kept: ranks of a node name their devices, and there are 8 or 16 of those."""

MOST_WHOLE = 8
"""Files that are kept."""


class AlikeReader:
    """Reads files one after the other; those that are alike share a tree."""

    def __init__(self) -> None:
        self._patterns: list[Pattern] = []
        self._count = 0
        self._buffer = bytearray()

    def read(self, path: str | os.PathLike[str]) -> TorchFile:
        """Read the structure of a torch file; parameters, result and errors are those of `read_torchfile`.

        The trees, storages and what is known of plain parts are the same objects in files that are alike.
        """
        with open_range(path, 0, None) as source:
            head = source.read(0, min(source.nbytes, 4))
            if head != b"PK\3\4":
                return read_source(source)
            alike = [one for one in self._patterns if len(one.whole) == source.nbytes]
            if alike:
                if len(self._buffer) != source.nbytes:
                    self._buffer = bytearray(source.nbytes)
                read_into(source.descriptor, source.base, memoryview(self._buffer), path=source.path)
            for pattern in alike:
                found = pattern.match_whole(source, self._buffer)
                if found is not None:
                    return found
            count, start, size = find_directory(source)
            self._count += count
            if count < FEWEST_RECORDS or self._count < ENOUGH_RECORDS:
                return read_source(source)
            from zckpt.formats.alike_patterns import Pattern

            directory = source.read(start, size) if size < 1 << 28 else b""
            matched = (pattern.match(source, count, start, directory) for pattern in self._patterns)
            found = next((file for file in matched if file is not None), None)
            if found is not None and (alike or source.nbytes > WHOLE_NBYTES):
                return found
            file = found or read_source(source)
            made = Pattern.of(source, file, start, directory)
            if made is not None:
                self._patterns = [*self._patterns[1 - MOST_PATTERNS :], made]
                for one in self._patterns[:-MOST_WHOLE]:
                    one.forget()
            return file
