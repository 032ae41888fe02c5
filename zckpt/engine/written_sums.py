"""The checksums that a target states of itself, from those of what was written, in whatever order that was.

A file whose runs tile the bytes of a checksum is not read again for it.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from zckpt.engine.plan import FilePlan
from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import read_into


@dataclass(frozen=True, slots=True)
class Written:
    """A contiguous run of a target file that has been written: byte offset, length, CRC-32 where it was computed."""

    offset: int
    nbytes: int
    crc32: int | None


def patch_checksums(path: Path, one: FilePlan, written: list[Written], large: int) -> None:
    """Compute each checksum from those of the runs that were written and put it where it belongs.

    Parameters
    ----------
    path : Path
        Under which the file is written.
    one : FilePlan
    written : list of Written
        All of it but the literals that are smaller than `large` bytes.
    large : int, bytes
    """
    runs = sorted(
        [*written, *(Written(x.offset, len(x.data), crc32(x.data)) for x in one.file.literals if len(x.data) < large)],
        key=lambda run: run.offset,
    )
    starts = [run.offset for run in runs]
    descriptor = os.open(path, os.O_RDWR)
    try:
        for checksum in one.file.checksums:
            crc = _combined(runs, starts, checksum.start, checksum.end)
            if crc is None:
                crc = _reread(descriptor, checksum.start, checksum.end, str(path))
            for offset in checksum.offsets:
                os.pwrite(descriptor, crc.to_bytes(4, "little"), offset)
    finally:
        os.close(descriptor)


def _combined(runs: list[Written], starts: list[int], start: int, end: int) -> int | None:
    """Return the CRC-32 of bytes [start, end), or None where the runs do not tile them."""
    crc, at = 0, start
    index = bisect_left(starts, start)
    while at < end:
        if index == len(runs) or runs[index].offset != at or runs[index].crc32 is None:
            return None
        crc = combine(crc, runs[index].crc32 or 0, runs[index].nbytes)
        at += runs[index].nbytes
        index += 1
    return crc if at == end else None


def _reread(descriptor: int, start: int, end: int, path: str) -> int:
    crc = 0
    buffer = bytearray(min(end - start, 1 << 20))
    for at in range(start, end, len(buffer) or 1):
        view = memoryview(buffer)[: min(len(buffer), end - at)]
        read_into(descriptor, at, view, path=path)
        crc = crc32(view, crc)
    return crc
