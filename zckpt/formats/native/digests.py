"""The checksums of a directory held against its bytes. Reads every byte once, in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zckpt.formats.native.rank_file import DIGEST_NBYTES, DIGESTS
from zckpt.formats.native.reader import read
from zckpt.formats.safetensors.file import read_header
from zckpt.state import Slot
from zckpt.storage.files import opened, read_at, read_into

BUFFER_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor of a file whose bytes are not those that were written.

    Parameters
    ----------
    path : str
    key : str
        Its name in the file.
    expected, found : int
        CRC-32.
    """

    path: str
    key: str
    expected: int
    found: int

    def __str__(self) -> str:
        return f"{self.path}: {self.key} is damaged: expected CRC-32 {self.expected:08x}, found {self.found:08x}"


def check_digests(path: Path, *, part: tuple[int, int] = (0, 1)) -> list[Mismatch]:
    """Return the tensors of a directory that are damaged; the document's own checksum is checked as it is read.

    Parameters
    ----------
    path : Path
    part : (int, int)
        Which of how many parts of the files to read: several can share the work.

    Raises
    ------
    SourceError
        The document or a file's header is damaged, or a file is missing.
    """
    found: list[Mismatch] = []
    first, step = part
    for file in [file for file in read(path).files if file.role == "rank"][first::step]:
        found.extend(_mismatches(file.path))
    return found


def recorded(path: str) -> list[tuple[Slot, int]]:
    """Return the tensors of a rank's file under their names, each with the CRC-32 that was written for it.

    Raises
    ------
    SourceError
        The file's header is damaged.
    """
    tensors, _, _ = read_header(Path(path))
    digests = tensors.pop(DIGESTS)
    if not digests.spans:
        return []
    with opened(path) as descriptor:
        data = read_at(descriptor, digests.spans[0].offset, digests.nbytes, path=path)
    sums = [int.from_bytes(data[at : at + DIGEST_NBYTES], "little") for at in range(0, len(data), DIGEST_NBYTES)]
    return [(replace(tensors[key], name=key), crc) for key, crc in zip(sorted(tensors), sums, strict=True)]


def _mismatches(path: str) -> Iterator[Mismatch]:
    buffer = bytearray(BUFFER_NBYTES)
    with opened(path) as descriptor:
        for slot, expected in recorded(path):
            found = _crc(descriptor, slot, buffer, path)
            if found != expected:
                yield Mismatch(path, slot.name, expected, found)


def _crc(descriptor: int, slot: Slot, buffer: bytearray, path: str) -> int:
    crc = 0
    for span in slot.spans:
        for at in range(0, slot.nbytes, len(buffer)):
            view = memoryview(buffer)[: min(len(buffer), slot.nbytes - at)]
            read_into(descriptor, span.offset + at, view, path=path)
            crc = zlib.crc32(view, crc)
    return crc
