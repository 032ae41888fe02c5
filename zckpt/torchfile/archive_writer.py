"""Where everything lies in a torch zip file, before a byte of a tensor is known.

    local header + name + extra padding | data      for each record, data on a multiple of 64 bytes
    central directory: one header for each record
    [zip64 end of central directory + its locator]
    end of central directory

Records are stored, not compressed, so that a tensor's bytes can be read, mapped and written in place. A
record's CRC-32 stands in its local and its central header; for data that is not yet known both are patched later.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""torch's default since 2.6; what it writes in `.storage_alignment`."""

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")

_UTF8 = 0x0800
_VERSION = 45
"""Version 4.5 of the zip format, the first with zip64."""

_DATE = (1 << 5) | 1
"""1 January 1980, the zero of zip dates: the same state gives the same file."""

_MAX32 = 0xFFFFFFFF
_MAX16 = 0xFFFF
_ZIP64 = 1
_PADDING = 0x4246
"""Tag of the extra field that aligns data: the letters FB, as torch's own writer uses."""

_LOCAL_CRC = 14
_CENTRAL_CRC = 16


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record that is to be written: its bytes, or for tensor data only their number.

    Parameters
    ----------
    name : str
        With the archive's root.
    data : bytes or None
    nbytes : int, bytes
    """

    name: str
    data: bytes | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a record's data lies, and where its CRC-32 is to be written (byte offsets in the file)."""

    record: NewRecord
    offset: int
    checksum_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """All bytes of an archive but those of tensors.

    Parameters
    ----------
    nbytes : int, bytes
    literals : list of (offset, bytes)
    placed : list of Placed
        In the order of the records.
    """

    nbytes: int
    literals: list[tuple[int, bytes]]
    placed: list[Placed]


def lay_out_archive(records: Sequence[NewRecord]) -> ArchiveLayout:
    """Return where the headers and data of an archive lie."""
    literals: list[tuple[int, bytes]] = []
    starts: list[tuple[int, int]] = []
    at = 0
    for record in records:
        header = _local_header(record, at)
        starts.append((at, at + len(header)))
        literals.append((at, header + (record.data or b"")))
        at += len(header) + record.nbytes
    directory = at
    placed = []
    for record, (start, data) in zip(records, starts, strict=True):
        header = _central_header(record, start)
        literals.append((at, header))
        placed.append(Placed(record, data, (start + _LOCAL_CRC, at + _CENTRAL_CRC)))
        at += len(header)
    end = _end(len(records), directory, at - directory, at)
    literals.append((at, end))
    return ArchiveLayout(at + len(end), literals, placed)


def _crc(record: NewRecord) -> int:
    return 0 if record.data is None else zlib.crc32(record.data)


def _local_header(record: NewRecord, at: int) -> bytes:
    name = record.name.encode()
    large = record.nbytes >= _MAX32
    sizes = struct.pack("<HHQQ", _ZIP64, 16, record.nbytes, record.nbytes) if large else b""
    bare = at + _LOCAL.size + len(name) + len(sizes)
    fill = -(bare + 4) % ALIGNMENT
    extra = sizes + struct.pack("<HH", _PADDING, fill) + b"Z" * fill
    size = _MAX32 if large else record.nbytes
    fixed = _LOCAL.pack(0x04034B50, _VERSION, _UTF8, 0, 0, _DATE, _crc(record), size, size, len(name), len(extra))
    return fixed + name + extra


def _central_header(record: NewRecord, start: int) -> bytes:
    name = record.name.encode()
    large, far = record.nbytes >= _MAX32, start >= _MAX32
    values = ([record.nbytes, record.nbytes] if large else []) + ([start] if far else [])
    extra = struct.pack(f"<HH{len(values)}Q", _ZIP64, 8 * len(values), *values) if values else b""
    size = _MAX32 if large else record.nbytes
    fixed = _CENTRAL.pack(
        0x02014B50,
        _VERSION,
        _VERSION,
        _UTF8,
        0,
        0,
        _DATE,
        _crc(record),
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        _MAX32 if far else start,
    )
    return fixed + name + extra


def _end(count: int, directory: int, nbytes: int, at: int) -> bytes:
    large = count >= _MAX16 or directory >= _MAX32 or nbytes >= _MAX32
    before = b""
    if large:
        before = _END64.pack(0x06064B50, _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, nbytes, directory)
        before += _LOCATOR64.pack(0x07064B50, 0, at, 1)
    short = min(count, _MAX16)
    return before + _END.pack(0x06054B50, 0, 0, short, short, min(nbytes, _MAX32), min(directory, _MAX32), 0)
