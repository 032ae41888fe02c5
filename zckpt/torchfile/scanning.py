"""Everything in a file that some program unpickles, whatever it is called: found by content, followed by `witness`.

    a pickle, and what is behind its end             zip, tar and compressed archives, each record of them
    the five pickles of a legacy torch file          bytes in a pickle, and storages, that are one of all these
    a numpy file of objects

A zip that `archive` reads has one meaning for every reader. Of any other, all that begins with a record's header is
looked at, in the directory or not, and so is all that is packed behind something else.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from tarfile import HeaderError, TarInfo
from typing import Any

from zckpt.errors import DamagedFileError, ZckptError
from zckpt.immutable import immutable, mutable
from zckpt.storage.crc32 import crc32
from zckpt.storage.files import FileRange, collector_paused
from zckpt.torchfile.archive import (
    LOCAL,
    MAX_16,
    MOST_END,
    Record,
    find_directory,
    has_checksums,
    read_archive,
    tail_of,
)
from zckpt.torchfile.grades import DANGEROUS, UNKNOWN, grade
from zckpt.torchfile.reader import MAGIC_NUMBER, MAX_PICKLE, read_source
from zckpt.torchfile.unpickle import TruncatedPickleError
from zckpt.torchfile.witness import Witness

MAX_DEPTH = 8
"""Archives and pickles within each other: Transformer Engine has a pickle in a torch file in an item of DCP's."""

MAX_UNPACKED = 1 << 26
"""Bytes of what is compressed that are looked at."""

FIRST_NBYTES, MOST_NBYTES = 1 << 12, 1 << 20
"""Of tensors, read at first, and at most where no name is found."""

MAX_SEQUENCE = 1000
"""Pickles that follow each other: a legacy torch file has five."""

HEADER = b"PK\3\4"
LEAST_HIDDEN = LOCAL.size + 12
"""Bytes between records in which another one finds room that calls something."""

STARTS = frozenset(b"()]}NIJKLMFGSTUVXBCPci.\x80\x82\x83\x84\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96\x97")
"""Opcodes that need nothing on the stack: with any other, a pickle ends before it does anything."""

CLOSED = {
    b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4",
}  # fmt: skip
"""What archives begin with that are not looked into."""

MAX_DICTIONARY = 1 << 28
"""Bytes of memory that a stream of LZMA may ask for."""

BLOCK = 1 << 16
"""Bytes that are unpacked at once."""

PACKED: dict[bytes, Callable[[], Any]] = {
    **dict.fromkeys((b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), partial(zlib.decompressobj, 47)),
    b"BZh": bz2.BZ2Decompressor,
    **dict.fromkeys((b"\xfd7zXZ", b"\x5d\0"), partial(lzma.LZMADecompressor, memlimit=MAX_DICTIONARY)),
}
"""What compressed files begin with, and what makes their unpacker; of zlib, 47 stands for its own form and gzip's."""


DAMAGES = zlib.error, lzma.LZMAError, OSError, EOFError
"""What unpackers raise."""

USTAR = b"ustar"
"""The mark of a tar archive's header, at byte 257."""

REST = "rest"
"""Name of what lies behind the members of a tar archive."""


@mutable
class Mention:
    """A global that a pickle names, and how often it is named and called."""

    record: str
    module: str
    name: str
    grade: str
    program: str | None
    named: int
    called: int


@immutable
class Oddity:
    """Something about a file that lets programs see other things in it, or lets nobody see what is in it."""

    record: str
    grade: str
    message: str


class InMemory(FileRange):
    """Bytes that were read from a file, as a range."""

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(-1, path, 0, len(data))
        self.data = data

    def at(self, offset: int, nbytes: int) -> bytes:
        """Copy from memory."""
        return self.data[offset : offset + nbytes]


def _part(source: FileRange, offset: int, nbytes: int) -> FileRange:
    if isinstance(source, InMemory):
        return InMemory(source.at(offset, nbytes), source.path)
    return FileRange(source.descriptor, source.path, source.base + offset, nbytes)


class Scanner:
    """Looks at what some ranges of a file hold.

    Attributes
    ----------
    pickles : list of str
        Where each is: the records that lead to it.
    """

    def __init__(self) -> None:
        self.pickles: list[str] = []
        self._mentions: dict[tuple[str, str, str], Mention] = {}
        self._oddities: dict[tuple[str, str], Oddity] = {}

    @property
    def mentions(self) -> list[Mention]:
        """Every global that is named, of each record."""
        return list(self._mentions.values())

    @property
    def oddities(self) -> list[Oddity]:
        """What is odd, each thing once."""
        return list(self._oddities.values())

    def odd(self, record: str, found: str, message: str) -> None:
        """Note something odd."""
        self._oddities.setdefault((record, message), Oddity(record, found, message))

    def look(
        self, source: FileRange, record: str = "", *, is_data: bool = False, is_pickle: bool = False, depth: int = 0
    ) -> None:
        """Look at a range.

        `record`: where it is within its file; `is_data`: whether it is a tensor's, or any bytes: nothing but pickles,
        and torch files, count in it; `is_pickle`: whether it has to be a pickle; `depth`: archives and pickles that it
        is in.
        """
        if depth > MAX_DEPTH:
            self.odd(record, DANGEROUS, f"more than {MAX_DEPTH} archives or pickles within each other")
            return
        head = source.read(0, min(source.nbytes, 512))
        if head[:4] in (HEADER, b"PK\5\6"):
            self._archive(source, record, depth)
            return
        if not is_data:
            self._other_archives(source, head, record, depth)
        if head[:6] == b"\x93NUMPY" and len(head) > 12:
            width = 2 if head[6] == 1 else 4
            begin = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
            if begin < source.nbytes:
                rest = _part(source, begin, source.nbytes - begin)
                self._pickles(rest, record, is_data=True, is_pickle=b"O" in head[10:begin], depth=depth)
            return
        if head and (head[0] in STARTS or is_pickle):
            self._pickles(source, record, is_data=is_data, is_pickle=is_pickle, depth=depth)

    def physical(self, source: FileRange, record: str, depth: int) -> None:
        """Look at whatever begins with a record's header, up to the next one."""
        for start, end in pairwise([*_headers(source), source.nbytes]):
            if end - start < LOCAL.size:
                continue
            _, _, _, method, *_, name_size, extra_size = LOCAL.unpack(source.read(start, LOCAL.size))
            body = start + LOCAL.size + name_size + extra_size
            if body >= end:
                continue
            name = source.read(start + LOCAL.size, name_size).decode("utf-8", "replace")
            part, name = _part(source, body, end - body), _within(record, name)
            self.look(part, name, is_data=True, is_pickle=not method and name.endswith(".pkl"), depth=depth + 1)
            packed = part.read(0, min(part.nbytes, MAX_UNPACKED))
            unpackers: list[tuple[Callable[[], Any], bytes]] = [
                (partial(zlib.decompressobj, -15), packed),
                (bz2.BZ2Decompressor, packed),
            ]
            if packed[2:4] == b"\5\0":  # of LZMA an archive has a version and the length of properties, and no size
                as_lzma = packed[4:9] + b"\xff" * 8 + packed[9:]
                unpackers.append((PACKED[b"\x5d\0"], as_lzma))
            for unpacker, data in unpackers:  # what one header calls stored, the other may call packed
                unpacked, _ = _unpacked(unpacker, memoryview(data), MAX_UNPACKED)
                self.look(InMemory(unpacked, source.path), name, is_data=True, depth=depth + 1)

    def _archive(self, source: FileRange, record: str, depth: int) -> None:
        try:
            records = list(read_archive(source).values())
        except ZckptError as error:
            found, said = UNKNOWN, "its archive"
            if isinstance(error, DamagedFileError):
                found, said = DANGEROUS, "its archive may be read in several ways"
            self.odd(record, found, f"{said}: {error.message}")
            self.physical(source, record, depth)
            return
        has_ends = tail_of(source, MOST_END).count(b"PK\5\6") > 1
        if has_ends or _has_unlisted(source, records):
            what = "it has two ends" if has_ends else "its directory does not list all records"
            self.odd(record, DANGEROUS, f"its archive may be read in several ways: {what}")
            self.physical(source, record, depth)
        root = records[0].name.partition("/")[0] if records else ""
        has_sums = has_checksums(records)
        for one in records:
            within = one.name.removeprefix(f"{root}/")
            part = _part(source, one.offset - source.base, one.nbytes)
            before = len(self.pickles)
            is_pickle = within.lower().endswith(".pkl")
            is_data = within.startswith("data/") and not is_pickle
            self.look(part, _within(record, within), is_data=is_data, is_pickle=is_pickle, depth=depth + 1)
            is_followed = len(self.pickles) > before and not is_data and part.nbytes <= MAX_PICKLE
            if has_sums and is_followed and crc32(part.read(0, part.nbytes)) != one.crc32:
                self.odd(_within(record, within), DANGEROUS, "its checksum is another's: some readers stop there")

    def _other_archives(self, source: FileRange, head: bytes, record: str, depth: int) -> None:
        tail = tail_of(source, MOST_END)
        end = tail.rfind(b"PK\5\6")
        if end >= 0 and end + 22 + int.from_bytes(tail[end + 20 : end + 22], "little") == len(tail):
            self.odd(record, UNKNOWN, "a zip archive lies behind something else")
            self.physical(source, record, depth)
        if head[257:262] == USTAR or _tar_header(head) is not None:
            self.odd(record, UNKNOWN, "is a tar archive, as torch wrote them before 2016")
            for name, part in _tar(source):
                self.look(part, _within(record, name), is_data=name in ("tensors", "storages", REST), depth=depth + 1)
        for magic, name in CLOSED.items():
            if head.startswith(magic):
                self.odd(record, UNKNOWN, f"is packed with {name}, and is not looked into")
        for magic, unpacker in PACKED.items():
            if head.startswith(magic):
                data, at = memoryview(source.read(0, min(source.nbytes, MAX_UNPACKED))), 0
                unpacked = bytearray()
                while at < len(data) and len(unpacked) < MAX_UNPACKED:  # one stream behind another, as programs read
                    piece, nbytes = _unpacked(unpacker, data[at:], MAX_UNPACKED - len(unpacked))
                    unpacked += piece
                    if not nbytes:
                        break
                    at += nbytes
                    while data[at : at + BLOCK] and not any(data[at : at + BLOCK]):
                        at += BLOCK
                    at += next((number for number, byte in enumerate(data[at : at + BLOCK]) if byte), 0)
                if at < len(data) or len(unpacked) >= MAX_UNPACKED:
                    self.odd(record, UNKNOWN, f"of what is compressed in it, {len(unpacked)} bytes are looked at")
                if unpacked:
                    self.look(InMemory(bytes(unpacked), source.path), _within(record, "unpacked"), depth=depth + 1)

    def _pickles(self, source: FileRange, record: str, *, is_data: bool, is_pickle: bool, depth: int) -> None:
        """Look at a pickle, and at those behind it."""
        found, end, is_legacy = _sequence(source, MOST_NBYTES if is_data and not is_pickle else MAX_PICKLE)
        if not (is_pickle or is_legacy or any(_is_evident(one, error) for one, error in found)):
            first, error = found[0]
            signs = bool(first.protocol) + bool(first.globals.tricks)
            is_plain = signs > 1 or (signs and error is None and end == source.nbytes)
            is_too_large = isinstance(error, TruncatedPickleError) and source.nbytes > MAX_PICKLE
            if is_data or not (is_plain or is_too_large):  # what is no pickle, or can do nothing, is not told of
                return
        if not (is_data or is_legacy) and (len(found) > 1 or end < source.nbytes):
            self.odd(record, UNKNOWN, "another pickle, or something else, lies behind its end")
        if len(found) >= MAX_SEQUENCE:
            self.odd(record, DANGEROUS, f"more than {MAX_SEQUENCE} pickles follow each other")
        for number, (witness, error) in enumerate(found, 1):
            name = f"{record} pickle {number}".strip() if number > 1 or is_legacy else record
            self.pickles.append(name)
            for trick in witness.globals.tricks:
                self.odd(name, DANGEROUS, trick)
            if error is not None:
                self.odd(name, DANGEROUS, f"it cannot be followed to its end: {error.message}")
            for (module, what), (named, called) in witness.globals.mentions().items():
                new = Mention(name, module, what, *grade(module, what), 0, 0)
                mention = self._mentions.setdefault((name, module, what), new)
                mention.named += named
                mention.called += called
            for blob in witness.globals.blobs:
                self.look(InMemory(blob, source.path), _within(name, "bytes"), is_data=True, depth=depth + 1)
        if is_legacy:
            with suppress(ZckptError):  # what is wrong with storages, no pickle can make use of
                for key, one in read_source(source).storages.items():
                    part = _part(source, one.offset - source.base, one.nbytes)
                    self.look(part, _within(record, key), is_data=True, depth=depth + 1)


def _within(record: str, name: str) -> str:
    return f"{record}: {name}" if record else name


def _is_evident(witness: Witness, error: ZckptError | None) -> bool:
    """Tell whether bytes are a pickle: it names what can be imported, and more than a text that looks alike."""
    return any(
        (error is None or called or witness.protocol or grade(module, name)[0] == DANGEROUS)
        and all(part.isidentifier() for part in f"{module}.{name}".replace("-", "_").split("."))
        for (module, name), (_, called) in witness.globals.mentions().items()
    )


def _sequence(source: FileRange, most: int) -> tuple[list[tuple[Witness, ZckptError | None]], int, bool]:
    """Follow pickles one behind another; return them with what ends each, the byte behind, and whether torch made them.

    A legacy torch file has five, and storages behind them.
    """
    found: list[tuple[Witness, ZckptError | None]] = []
    at, is_legacy = 0, False
    while at < source.nbytes and len(found) < (5 if is_legacy else MAX_SEQUENCE):
        witness, value, error = _followed(source, at, most=most)
        if error is not None and found and not _is_evident(witness, error):
            break
        found.append((witness, error))
        if error is not None:
            return found, source.nbytes, is_legacy
        at += witness.pos
        is_legacy = is_legacy or (len(found) == 1 and value == MAGIC_NUMBER)
    return found, at, is_legacy


def _followed(source: FileRange, at: int, *, most: int) -> tuple[Witness, object, ZckptError | None]:
    """Follow the pickle that begins at a byte; return its names, its value, and why it could not be followed on."""
    size = FIRST_NBYTES
    while True:
        nbytes = min(size, source.nbytes - at, MAX_PICKLE)
        witness = Witness(source.read(at, nbytes), is_whole=at + nbytes == source.nbytes)
        value, error = None, None
        try:
            with collector_paused():
                value = witness.run()
        except ZckptError as caught:
            error = caught
        is_cut = isinstance(error, TruncatedPickleError) and nbytes < min(source.nbytes - at, MAX_PICKLE)
        if not is_cut or (nbytes >= most and not _is_evident(witness, error)):
            return witness, value, error
        size *= 16


def _headers(source: FileRange) -> Iterator[int]:
    """Yield where records' headers begin."""
    for start in range(0, source.nbytes, MOST_NBYTES):
        data = source.read(start, min(MOST_NBYTES + len(HEADER) - 1, source.nbytes - start))
        at = data.find(HEADER)
        while at >= 0:
            yield start + at
            at = data.find(HEADER, at + 1)


def _has_unlisted(source: FileRange, records: Sequence[Record]) -> bool:
    """Tell whether a record's header lies where none should be, between those of a directory."""
    _, directory, _ = find_directory(source)
    end = 0
    for one in sorted(records, key=lambda one: one.offset):
        start = one.offset - source.base
        gap = start - end - LOCAL.size - len(one.name)
        if gap > LEAST_HIDDEN and (gap > 2 * MAX_16 or source.read(end, start - end).count(HEADER) > 1):
            return True
        end = start + one.nbytes
    return directory - end > 2 * MAX_16 or HEADER in source.read(end, directory - end)


def _unpacked(unpacker: Callable[[], Any], data: memoryview, most: int) -> tuple[bytes, int]:
    """Return about so much of what a packed stream unpacks to, at most, and its length; 0 if it is damaged.

    Of a damaged one, what comes before the damage: a pickle there has run when its reader comes to that. So it is
    unpacked once more, and where it failed, byte by byte.
    """
    found, nbytes = bytearray(), 0
    try:
        for piece, at in _blocks(unpacker(), data, most):
            found += piece
            nbytes = at
            if len(found) >= most:
                break
    except DAMAGES:
        known = len(found)
        found.clear()
        with suppress(*DAMAGES):
            for piece, _ in _blocks(unpacker(), data, known):
                found += piece
        return bytes(found), 0
    return bytes(found), nbytes


def _blocks(one: Any, data: memoryview, known: int) -> Iterator[tuple[bytes, int]]:  # noqa: ANN401  # of any kind
    """Yield what a stream unpacks to, and where it stands in the data; behind so many bytes, one by one."""
    at = done = 0
    while not one.eof:
        given: Any = getattr(one, "unconsumed_tail", b"")  # of zlib; the others keep it themselves
        is_hungry = getattr(one, "needs_input", not given)
        if is_hungry:
            given = data[at : at + BLOCK]
            at += len(given)
        piece = one.decompress(given, BLOCK if done < known else 1)
        if is_hungry and not given and not piece:
            return
        done += len(piece)
        yield piece, at - len(one.unused_data)


def _tar_header(block: bytes) -> TarInfo | None:
    with suppress(HeaderError):
        return TarInfo.frombuf(block, "utf-8", "replace")
    return None


def _tar(source: FileRange) -> Iterator[tuple[str, FileRange]]:
    """Yield the members of a tar archive, also behind headers that are none; and all from the first such one on."""
    at, rest = 0, source.nbytes
    while at + 512 <= source.nbytes:
        header = _tar_header(source.read(at, 512))
        if header is None or header.size < 0:
            rest = min(rest, at)
            at = _next_header(source, at + 512)
            continue
        size = min(header.size, source.nbytes - at - 512)
        yield header.name, _part(source, at + 512, size)
        at += 512 + -(-size // 512) * 512
    if rest < source.nbytes:
        yield REST, _part(source, rest, source.nbytes - rest)


def _next_header(source: FileRange, start: int) -> int:
    """Return where the next block with a tar archive's mark begins; the end, if there is none."""
    for at in range(start, source.nbytes, 1 << 20):
        block = source.read(at, min(1 << 20, source.nbytes - at))
        found = block.find(USTAR)
        while found >= 0:
            if (found - 257) % 512 == 0 and found >= 257:
                return at + found - 257
            found = block.find(USTAR, found + 1)
    return source.nbytes
