"""The checksums that a file holds of its own bytes: CRC-32 of every record of a torch archive, and zckpt's digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zckpt.state import SourceFile
from zckpt.storage import opened, read_at
from zckpt.torchfile.archive import read_archive
from zckpt.torchfile.source import open_range

ZIP = b"PK\3\4"

NATIVE_ROLE = "rank"
"""Of files that zckpt's own format deals the elements to."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Bytes of a file and the CRC-32 that the file states for them.

    Parameters
    ----------
    name : str
        Of the record or tensor, for messages.
    path : str
    offset, nbytes : int, bytes
    crc32 : int
    """

    name: str
    path: str
    offset: int
    nbytes: int
    crc32: int


def checksums(file: SourceFile) -> list[Sum]:
    """Return the checksums of a file, by offset; none for a format that has none (safetensors, JSON, legacy files).

    Raises
    ------
    SourceError
        The file cannot be read, or the structure that states them is damaged.
    """
    return sorted(_found(file), key=lambda one: one.offset)


def _found(file: SourceFile) -> Iterator[Sum]:
    if file.role == NATIVE_ROLE:
        from zckpt.formats.native.digests import recorded

        for slot, crc in recorded(file.path):
            for span in slot.spans:
                yield Sum(slot.name, file.path, span.offset, slot.nbytes, crc)
        return
    for offset, nbytes in file.archives or _whole(file):
        with open_range(file.path, offset, nbytes) as source:
            for record in read_archive(source).values():
                yield Sum(record.name, file.path, record.offset, record.nbytes, record.crc32)


def _whole(file: SourceFile) -> list[tuple[int, int]]:
    if file.nbytes < len(ZIP):
        return []
    with opened(file.path) as descriptor:
        return [(0, file.nbytes)] if read_at(descriptor, 0, len(ZIP), path=file.path) == ZIP else []
