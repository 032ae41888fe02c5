"""Zip archives as torch writes them: records stored as they are, read through the central directory and laid out.

    local header | padding | data | descriptor     one per record; data is aligned to 64 bytes
    ...
    central directory                              name, size, header offset of every record
    zip64 end record, zip64 locator                only where 32 bits are not enough
    end record                                     size and offset of the central directory

Only the length of a record's local header is unknown to the central directory, so every local header is read;
neighbouring small records share one read. A record that is written has its CRC-32 in both of its headers; for data that
is not yet known both are patched later. Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct, pack, unpack_from
from typing import Any, NamedTuple

from zckpt.codes import TRUNCATED
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.immutable import immutable, mutable
from zckpt.state.spans import Numbered
from zckpt.storage.disk import BLOCK_NBYTES
from zckpt.storage.files import FileRange, opened

END = Struct("<4s4H2LH")
ZIP64_LOCATOR = Struct("<4sLQL")
ZIP64_END = Struct("<4sQ2H2L4Q")
ENDS = ZIP64_END.size + ZIP64_LOCATOR.size + END.size
"""Bytes that an archive of torch ends with."""

CENTRAL = Struct("<4s6H3L5H2L")
LOCAL = Struct("<4s5H3L2H")

MAX_16 = 0xFFFF
MAX_32 = 0xFFFFFFFF
"""A field with this value is in the zip64 extra field or end record."""

ZIP64 = 1
"""Tag of the extra field with 64-bit sizes and offsets."""

PADDING = 0x4246
"""Tag of the extra field that aligns data: the letters FB, as torch's own writer uses."""

MOST_END = END.size + MAX_16
"""Bytes of an end record with the longest comment."""

ALIGNMENT = 64
"""torch's default since 2.6; what it writes in `.storage_alignment`."""

ENCRYPTED, UTF8 = 1, 0x0800
"""Bits of an entry's flags."""

VERSION = 45
"""Version 4.5 of the zip format, the first with zip64."""

DATE = (1 << 5) | 1
"""1 January 1980, the zero of zip dates: the same state gives the same file."""

LOCAL_CRC, CENTRAL_CRC = 14, 16
"""Where in its two headers a record's CRC-32 is."""

MAX_DIRECTORY = 1 << 28
"""Bytes of a central directory: two million records."""

WINDOW = 1 << 16
"""Bytes read at once where local headers are close to each other."""

CLOSE = 1 << 13
"""Bytes between local headers below which one read of a window is cheaper than several."""


class Record(NamedTuple):
    """An entry of the archive."""

    name: str  # with the archive's root folder
    offset: int  # bytes; of its data, from the start of the file
    nbytes: int
    crc32: int  # as the archive states it; nobody has checked it


@immutable(eq=False, repr=False)
class AlikeRecords(Numbered[Record]):
    """The records of a file that is like another, of which only what differs is kept."""

    _records: Sequence[Record]  # the other's
    _filled: Sequence[int]  # which are not empty
    _skip: int  # characters of the archive's name there
    _archive: str
    _crc: Callable[[int, int], int]  # from the number of one, and what the other's has, to its CRC-32

    def filled(self) -> Iterator[Record]:
        """Yield those that are not empty, or are said not to be."""
        return (self[index] for index in self._filled)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    def numbered(self, index: int) -> Record:
        """Return one of them, in the order of the directory."""
        one = self._records[index]
        return Record(self._archive + one.name[self._skip :], one.offset, one.nbytes, self._crc(index, one.crc32))


def stated_sum(path: str, places: memoryview[int], index: int, _: int) -> int:
    """Return the CRC-32 that a file's directory states of a record, by number. `places`: of all of them in the file."""
    with opened(path) as file:
        return int.from_bytes(file.at(places[index], 4), "little")


def has_checksums(records: Iterable[Record]) -> bool:
    """Tell whether an archive states checksums of its records.

    Where torch is told not to compute them (`torch.serialization.set_crc32_options(False)`, torch 2.6), all are zero.
    """
    return any(record.crc32 for record in records)


@mutable
class Entry:
    """What the central directory says of a record."""

    at: int  # bytes; offset of this in the directory
    raw_name: bytes
    name: str
    header: int  # bytes; offset of its local header
    nbytes: int
    crc32: int
    stored: bool  # whether the data is neither compressed nor encrypted


Listed = tuple[int, list[Entry]]
"""Where a central directory begins, and what it says of every record."""


def read_entries(source: FileRange) -> Listed:
    """Return what the central directory says; errors are those of `read_archive`."""
    count, directory, size = find_directory(source)
    if size > MAX_DIRECTORY:
        raise UnsupportedError("its directory is too large", found=f"{size} bytes")
    data = source.read(directory, size)
    entries: list[Entry] = []
    names: set[bytes] = set()
    at = 0
    while at < len(data):
        if at + CENTRAL.size > len(data):
            raise damaged("its central directory is malformed")
        magic, _, _, flags, method, _, _, crc, packed, nbytes, name_size, extra_size, comment, *_, header = (
            CENTRAL.unpack_from(data, at)
        )
        begin, start = at, at + CENTRAL.size
        at = start + name_size + extra_size + comment
        if magic != b"PK\1\2" or at > len(data):
            raise damaged("its central directory is malformed")
        raw = data[start : start + name_size]
        name = raw.decode("utf-8", "surrogateescape")
        if MAX_32 in (nbytes, packed, header):
            extra = data[start + name_size : start + name_size + extra_size]
            nbytes, packed, header = zip64_sizes(name, extra, (nbytes, packed, header))
        if raw in names:
            raise damaged(f"record {name!r} appears twice")
        stored = not flags & ENCRYPTED and method == 0 and packed == nbytes
        names.add(raw)
        entries.append(Entry(begin, raw, name, header, nbytes, crc, stored=stored))
    if len(entries) != count:
        raise damaged("its central directory", expected=f"{count} records", found=len(entries))
    return directory, entries


def read_archive(source: FileRange, listed: Listed | None = None) -> dict[str, Record]:
    """Return the records of a zip archive by name, in the order of its central directory, which may have been read.

    Raises DamagedFileError: it is truncated, inconsistent, or its records overlap; UnsupportedError: it is TorchScript,
    or a record is compressed or encrypted.
    """
    directory, entries = listed or read_entries(source)
    root = entries[0].name.partition("/")[0] if entries else ""
    if any(entry.name == f"{root}/constants.pkl" for entry in entries):
        raise UnsupportedError(
            "is a TorchScript archive",
            expected="a file that torch.save wrote",
            advice="load it with torch.jit.load and save its state_dict() with torch.save",
        )
    packed = next((entry for entry in entries if not entry.stored), None)
    if packed is not None:
        raise UnsupportedError(
            f"record {packed.name!r} is compressed or encrypted",
            expected="uncompressed records",
            advice="load it with torch and save it again with torch.save",
        )
    offsets = locate(source, entries, directory)
    return {
        entry.name: Record(entry.name, source.base + offset, entry.nbytes, entry.crc32)
        for entry, offset in zip(entries, offsets, strict=True)
    }


def damaged(message: str, **details: Any) -> DamagedFileError:  # noqa: ANN401  # those of an error
    """Return an error about the archive as a whole."""
    return DamagedFileError(message, **details, advice="copy it again from its origin")


def tail_of(source: FileRange, most: int) -> bytes:
    """Return at most so many bytes that a range ends with."""
    nbytes = min(source.nbytes, most)
    return source.read(source.nbytes - nbytes, nbytes)


def find_directory(source: FileRange) -> tuple[int, int, int]:
    """Return number of records, offset and size of the central directory."""
    tail = tail_of(source, ENDS)
    if tail[-END.size :][:4] != b"PK\5\6" or tail[-2:] != b"\0\0":  # there is a comment after it
        tail = tail_of(source, MOST_END)
    tail_size, tail_start = len(tail), source.nbytes - len(tail)
    at = tail.rfind(b"PK\5\6")
    while at >= 0:
        if at + END.size <= tail_size:
            _, disk, first, here, count, size, offset, comment = END.unpack_from(tail, at)
            if at + END.size + comment == tail_size:
                break
        at = tail.rfind(b"PK\5\6", 0, at)
    else:
        raise damaged("is a truncated zip archive", found=f"{source.nbytes} bytes", code=TRUNCATED)
    if disk != first or here != count:
        raise UnsupportedError("is one file of a split archive")
    end = tail_start + at
    locator = end - ZIP64_LOCATOR.size

    def unpacked(fields: Struct, at: int) -> tuple[Any, ...]:
        inside = at >= tail_start and at + fields.size <= source.nbytes
        return fields.unpack_from(tail, at - tail_start) if inside else fields.unpack(source.read(at, fields.size))

    if locator >= 0:
        magic, _, zip64_end, _ = unpacked(ZIP64_LOCATOR, locator)
        if magic == b"PK\6\7":
            fields = unpacked(ZIP64_END, zip64_end)
            if fields[0] != b"PK\6\6" or zip64_end + fields[1] + 12 != locator:
                raise damaged("its zip64 end record is malformed")
            count, size, offset = fields[7:10]
            end = zip64_end
    if offset + size != end:
        raise damaged("its central directory is not where it should be", expected=end - size, found=offset)
    return count, offset, size


def zip64_sizes(name: str, extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return size, packed size and header offset with the 64-bit values of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = unpack_from("<HH", extra, at)
        body = extra[at + 4 : at + 4 + size]
        at += 4 + size
        if kind == ZIP64:
            if len(body) < 8 * fields.count(MAX_32):
                raise damaged(f"record {name!r}: its zip64 sizes are cut off")
            values = iter(unpack_from(f"<{fields.count(MAX_32)}Q", body))
            first, second, third = (next(values) if value == MAX_32 else value for value in fields)
            return first, second, third
    return fields


def locate(source: FileRange, entries: list[Entry], directory: int) -> list[int]:
    """Return where each record's data begins, from the start of the range."""
    order = sorted(range(len(entries)), key=lambda index: entries[index].header)
    offsets = [0] * len(entries)
    window, window_start = b"", 0
    for number, index in enumerate(order):
        entry = entries[index]
        limit = entries[order[number + 1]].header if number + 1 < len(order) else directory
        needed = LOCAL.size + len(entry.raw_name)
        if entry.header + needed > limit:
            raise damaged(f"record {entry.name!r} overlaps what follows it")
        if entry.header + needed > window_start + len(window):
            nbytes = needed if limit - entry.header > CLOSE else min(WINDOW, directory - entry.header)
            window, window_start = source.read(entry.header, nbytes), entry.header
        at = entry.header - window_start
        magic, _, flags, method, *_, name_size, extra_size = LOCAL.unpack_from(window, at)
        name = window[at + LOCAL.size : at + LOCAL.size + name_size]
        if magic != b"PK\3\4" or name != entry.raw_name or method != 0 or flags & ENCRYPTED:
            raise damaged(f"record {entry.name!r}: its two headers disagree")
        offsets[index] = start = entry.header + LOCAL.size + name_size + extra_size
        if start + entry.nbytes > limit:
            raise damaged(
                f"record {entry.name!r} overlaps what follows it",
                expected=f"at most {max(limit - start, 0)} bytes",
                found=entry.nbytes,
            )
    return offsets


@immutable
class NewRecord:
    """A record to write, its name with the archive's root: its bytes, or for tensor data only their number.

    Its data begins at a multiple of `ALIGNMENT`, or at `start` modulo a block of the file system.
    """

    name: str
    data: bytes | None
    nbytes: int
    start: int | None = None


@immutable
class Placed:
    """Where a record's data lies, and where its CRC-32 is to be written (byte offsets in the file)."""

    record: NewRecord
    offset: int
    checksum_offsets: tuple[int, int]


@immutable
class ArchiveLayout:
    """All bytes of an archive but those of tensors, and where each record lies, in their order."""

    nbytes: int
    literals: list[tuple[int, bytes]]
    placed: list[Placed]


def lay_out_archive(records: Sequence[NewRecord]) -> ArchiveLayout:
    """Return where the headers and data of an archive lie."""
    literals: list[tuple[int, bytes]] = []
    listed: list[tuple[int, int, bytes]] = []  # where a record's header and its data begin; what the directory says
    at = 0
    for record in records:
        name, is_large, is_far = record.name.encode(), record.nbytes >= MAX_32, at >= MAX_32
        size, large = (MAX_32, [record.nbytes] * 2) if is_large else (record.nbytes, [])
        crc = 0 if record.data is None else zlib.crc32(record.data)
        about = (VERSION, UTF8, 0, 0, DATE, crc, size, size, len(name))
        extra = _zip64(large)
        bare = at + LOCAL.size + len(name) + len(extra)
        fill = -(bare + 4) % ALIGNMENT if record.start is None else (record.start - bare - 4) % BLOCK_NBYTES
        extra += pack("<HH", PADDING, fill) + b"Z" * fill
        header = LOCAL.pack(b"PK\3\4", *about, len(extra)) + name + extra
        literals.append((at, header + (record.data or b"")))
        extra = _zip64([*large, at] if is_far else large)
        fixed = CENTRAL.pack(b"PK\1\2", VERSION, *about, len(extra), 0, 0, 0, 0, MAX_32 if is_far else at)
        listed.append((at, at + len(header), fixed + name + extra))
        at += len(header) + record.nbytes
    directory = at
    placed = []
    for record, (start, data, header) in zip(records, listed, strict=True):
        literals.append((at, header))
        placed.append(Placed(record, data, (start + LOCAL_CRC, at + CENTRAL_CRC)))
        at += len(header)
    count, nbytes, end = len(records), at - directory, b""
    if count >= MAX_16 or directory >= MAX_32 or nbytes >= MAX_32:
        end = ZIP64_END.pack(b"PK\6\6", ZIP64_END.size - 12, VERSION, VERSION, 0, 0, count, count, nbytes, directory)
        end += ZIP64_LOCATOR.pack(b"PK\6\7", 0, at, 1)
    short = min(count, MAX_16)
    end += END.pack(b"PK\5\6", 0, 0, short, short, min(nbytes, MAX_32), min(directory, MAX_32), 0)
    literals.append((at, end))
    return ArchiveLayout(at + len(end), literals, placed)


def _zip64(values: Sequence[int]) -> bytes:
    """Return the extra field of values that 32 bits are not enough for; nothing, if there are none."""
    return pack(f"<HH{len(values)}Q", ZIP64, 8 * len(values), *values) if values else b""
