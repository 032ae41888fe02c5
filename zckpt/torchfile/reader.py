"""Reads the structure of a torch file: which kind it is, its object tree, and where its storages are.

    zip      ROOT/data.pkl        the object tree, a pickle
             ROOT/data/<key>      one storage each
             ROOT/byteorder       `little` or `big`; absent: little

    legacy   pickle 1             magic number                   (before torch 1.6)
             pickle 2             protocol version, 1001
             pickle 3             system information: byte order and sizes of C types of the writer
             pickle 4             the object tree; storages are persistent ids
             pickle 5             list of storage keys
             per key              number of elements (int64), then the data

A legacy file's data and counts are little-endian whatever its system information says: torch has always converted them
when writing (`writeFileRaw`, torch/csrc/Storage serialization).

No byte of tensor data is read, and no class of the file is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from zckpt.codes import CHECKSUM, TRUNCATED, UNSUPPORTED
from zckpt.errors import DamagedFileError, PickleError, UnknownFormatError, UnsupportedError, ZckptError, about
from zckpt.state.dtypes import itemsize
from zckpt.state.mappings import are_distinct
from zckpt.storage.crc32 import crc32
from zckpt.storage.files import FileRange, collector_paused, opened
from zckpt.torchfile.archive import AlikeRecords, Listed, has_checksums, read_archive
from zckpt.torchfile.blanks import cut_out, find_blanks, numbers_at, run_with_blanks
from zckpt.torchfile.nodes import Storage
from zckpt.torchfile.torch_file import PlainParts, StorageTable, TorchFile
from zckpt.torchfile.trees import check_depth
from zckpt.torchfile.unpickle import Machine, TruncatedPickleError

MAX_PICKLE = 1 << 30
"""Bytes of a pickle: it is read into memory, and real ones have a few MB."""

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

PREFIX = 1 << 20
"""Bytes read at first: the pickles of nearly every file are shorter."""

MAX_PICKLES = 1 << 30
"""Bytes that the pickles may have together."""

RESAVE = "load it with torch and save it again with torch.save"


def read_torchfile(path: str | os.PathLike[str], *, offset: int = 0, nbytes: int | None = None) -> TorchFile:
    """Read the structure of a torch file, or of one that lies within another file.

    Parameters
    ----------
    path : path-like
    offset : int, bytes
        Where the torch file begins.
    nbytes : int or None, bytes
        Its length; None: up to the end of the file.

    Returns
    -------
    TorchFile
        All offsets in it count from the start of `path`.

    Raises
    ------
    SourceError
        The file cannot be opened, or is no regular file.
    UnknownFormatError
        torch.save did not write it.
    DamagedFileError
        It is truncated or inconsistent.
    PickleError
        A pickle in it is malformed or hostile.
    UnsupportedError
        It is TorchScript, compressed, from before 2016, or has an unknown dtype.
    """
    with opened(path, offset, nbytes) as source:
        return read_source(source)


def read_pickle(path: str | os.PathLike[str]) -> TorchFile:
    """Read a file that is one pickle without tensors, as DCP's `.metadata`.

    Raises SourceError: the file cannot be opened; PickleError: it is no pickle, or a malformed or hostile one;
    UnsupportedError: it is larger than 1 GiB.
    """
    with opened(path) as source:
        if source.nbytes == 0:
            raise DamagedFileError("is empty", expected="a pickle")
        with collector_paused():
            machine, root = run_pickle(pickle_of(source, 0, source.nbytes, "pickle"), "pickle")
        names = {"pickle": machine.globals.names}
        return TorchFile(
            source.path, source.nbytes, "pickle", "little", root, {}, names, machine.protocol, plain=PlainParts()
        )


def read_source(
    source: FileRange, known: dict[bytes, TorchFile] | None = None, *, blanks: bool = False,
    listed: Listed | None = None,
) -> TorchFile:  # fmt: skip
    """Read a torch file that is a range of an open one; errors are those of `read_torchfile`.

    `known`: what was read by the same pickle and the places of records, which shares its tree with what is alike;
    `blanks`: whether pickles are the same that differ in the numbers of meshes; `listed`: an archive's directory.
    """
    head = source.read(0, min(source.nbytes, 512))
    with collector_paused(), about(source.path):
        if head[:4] in (b"PK\3\4", b"PK\5\6"):
            return read_zip(source, known, blanks=blanks, listed=listed)
        try:  # a legacy file begins with torch's magic number, in any pickle protocol
            is_legacy = Machine(head[:128], record="pickle 1").run() == MAGIC_NUMBER
        except ZckptError:
            is_legacy = False
        if is_legacy:
            return read_legacy(source)
        expected = "a file that torch.save wrote"
        if not head:
            raise DamagedFileError("is empty", expected=expected, code=TRUNCATED)
        if not head.strip(b"\0"):
            raise DamagedFileError("begins with zeros", expected=expected)
        if head[257:262] == b"ustar" or head[:9].rstrip(b"\0") in (b"sys_info", b"storages", b"pickle", b"tensors"):
            raise UnsupportedError("is a tar file from torch before 2016", advice=RESAVE)
        text = head.translate(None, b"\n\t\r")
        found, code = "something else", None
        if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= source.nbytes - 8:
            found = "a safetensors file"
        elif head[0] == 0x80 and len(head) > 1 and head[1] <= 5:
            found, code = "a pickle that torch.save did not write", UNSUPPORTED  # torch.load runs it all the same
        elif text.isascii() and text.decode("ascii").isprintable():
            found = "text"
        raise UnknownFormatError("is not a torch file", expected=expected, found=found, code=code)


def pickle_of(source: FileRange, offset: int, nbytes: int, record: str) -> bytes:
    """Return the bytes of a pickle that fills a range."""
    if nbytes > MAX_PICKLE:
        raise UnsupportedError(f"{record} is too large", expected=f"at most {MAX_PICKLE} bytes", found=nbytes)
    return source.read(offset, nbytes)


def run_pickle(
    data: bytes, record: str, byteorder: str = "little", table: StorageTable | None = None
) -> tuple[Machine, object]:
    """Run a pickle; return the machine and the object tree."""
    machine = Machine(data, record=record, byteorder=byteorder, persistent=table)
    root = machine.run()
    if machine.pos != len(data):
        raise PickleError(f"{record} continues after STOP", expected=f"{machine.pos} bytes", found=len(data))
    check_depth(root, record=record)
    return machine, root


def read_zip(
    source: FileRange, known: dict[bytes, TorchFile] | None, *, blanks: bool, listed: Listed | None
) -> TorchFile:
    """Read a torch file that is a zip archive, or only what tells it from one that is known."""
    records = read_archive(source, listed)
    archive = next(iter(records), "").partition("/")[0]
    pickle = records.get(f"{archive}/data.pkl")
    if pickle is None:
        raise UnknownFormatError(
            "is a zip archive that torch.save did not write",
            expected=f"a record {f'{archive}/data.pkl'!r:.120}",
            found=f"{len(records)} records",
        )
    byteorder, stated = "little", records.get(f"{archive}/byteorder")  # archives of torch before 2.1 state none
    if stated is not None:
        text = source.read(stated.offset - source.base, min(stated.nbytes, 16))
        if text not in (b"little", b"big"):
            raise DamagedFileError(f"record {stated.name!r}", expected="'little' or 'big'", found=f"{text!r}")
        byteorder = text.decode()
    data = pickle_of(source, pickle.offset - source.base, pickle.nbytes, "data.pkl")
    if has_checksums(records.values()) and crc32(data) != pickle.crc32:
        raise DamagedFileError(
            "data.pkl is damaged",
            expected=f"CRC-32 {pickle.crc32:08x}",
            found=f"{crc32(data):08x}",
            advice="copy the file again from its origin",
            code=CHECKSUM,
        )
    digest, cut = b"", find_blanks(data) if blanks and known is not None else []
    if known is not None and all(name.startswith(f"{archive}/") for name in records):
        places = [(name[len(archive) :], one.offset, one.nbytes) for name, one in records.items()]
        digest = blake2b(repr((byteorder, places, cut)).encode() + cut_out(data, cut)).digest()
        if digest in known:
            own = known[digest].records
            pairs = list(enumerate(zip(own, records.values(), strict=True)))
            filled = [index for index, (other, one) in pairs if one.nbytes or one.crc32 or other.crc32]
            changed = {index: one.crc32 for index, (other, one) in pairs if one.crc32 != other.crc32}
            return alike_file(known[digest], source, archive, filled, changed.get, numbers_at(data, cut))
    folder = f"{archive}/data/"

    def find(key: str, nbytes: int) -> int:
        record = records.get(folder + key)
        if record is None:
            raise PickleError(f"storage {key!r}", expected=f"a record {folder + key!r}", found="none")
        if record.nbytes != nbytes:
            raise PickleError(f"record {record.name!r}", expected=f"{nbytes} bytes", found=f"{record.nbytes} bytes")
        return record.offset

    table = StorageTable(find)
    if not (digest and cut):
        machine, root = run_pickle(data, "data.pkl", byteorder, table)
    elif (found := run_with_blanks(data, cut, byteorder, table)) is not None:
        machine, root = found
    else:
        return read_zip(source, None, blanks=False, listed=listed)
    for name, record in records.items():
        key = name.removeprefix(folder)
        if key not in (name, "") and key not in table.storages:
            table.storages[key] = Storage(key, "uint8", record.nbytes, "cpu", record.offset)
    file = TorchFile(
        source.path,
        source.nbytes,
        "zip",
        byteorder,
        root,
        table.storages,
        {"data.pkl": machine.globals.names},
        machine.protocol,
        tuple(records.values()),
        archive,
        PlainParts(),
        numbers_at(data, cut) if digest else (),
    )
    if known is not None and digest:
        known[digest] = file
    return file


def alike_file(
    file: TorchFile, source: FileRange, archive: str, filled: Sequence[int], crc: Callable[[int, int], int],
    numbers: tuple[int | str, ...],
) -> TorchFile:  # fmt: skip
    """Return a file with the tree of another, whose records have the same places; for the rest see `AlikeRecords`."""
    records = AlikeRecords(file.records, filled, len(file.archive), archive, crc)
    return replace(file, path=source.path, nbytes=source.nbytes, records=records, archive=archive, numbers=numbers)


def read_legacy(source: FileRange) -> TorchFile:
    """Return the object tree and storages of a legacy file."""
    size = min(source.nbytes, PREFIX)
    while True:
        try:
            return read_pickles(source, source.read(0, size))
        except TruncatedPickleError:
            if size == source.nbytes:
                raise
            if size >= MAX_PICKLES:
                raise UnsupportedError("its pickles are too large", expected=f"at most {MAX_PICKLES} bytes") from None
        size = min(source.nbytes, size * 8)


def read_pickles(source: FileRange, data: bytes) -> TorchFile:
    """Read the five pickles that `data` begins with.

    The object's pickle is run twice: where the storages are is known only after its end.
    """
    position = 0
    for number, expected in ((1, MAGIC_NUMBER), (2, PROTOCOL_VERSION), (3, None)):
        machine = Machine(data, start=position, record=f"pickle {number}")
        value = machine.run()
        if expected is not None and value != expected:
            raise DamagedFileError(f"pickle {number}", expected=expected, found=f"{value!r:.40}")
        position = machine.pos
    first = StorageTable(lambda _key, _nbytes: 0, legacy=True)
    machine = Machine(data, start=position, record="pickle 4", persistent=first)
    machine.run()
    last = Machine(data, start=machine.pos, record="pickle 5")
    offsets = locate_storages(source, last.run(), last.pos, first.storages)

    def find(key: str, _nbytes: int) -> int:
        offset = offsets.get(key)
        if offset is None:
            raise PickleError(f"storage {key!r} is not in the file")
        return source.base + offset

    table = StorageTable(find, legacy=True)
    machine = Machine(data, start=position, record="pickle 4", persistent=table)
    root = machine.run()
    check_depth(root, record="pickle 4")
    return TorchFile(
        source.path,
        source.nbytes,
        "legacy",
        "little",
        root,
        table.storages,
        {"pickle 4": machine.globals.names},
        machine.protocol,
        plain=PlainParts(),
    )


def locate_storages(source: FileRange, keys: object, position: int, storages: dict[str, Storage]) -> dict[str, int]:
    """Return the offset of each storage's data, walking from one to the next."""
    if type(keys) is not list or any(type(key) is not str for key in keys) or not are_distinct(keys):
        raise PickleError("pickle 5", expected="a list of distinct storage keys")
    offsets: dict[str, int] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise PickleError(f"pickle 5: no tensor has storage {key!r:.80}")
        numel = int.from_bytes(source.read(position, 8), "little", signed=True)
        if numel * itemsize(storage.dtype) != storage.nbytes:
            raise DamagedFileError(
                f"storage {key!r}",
                expected=f"{storage.nbytes // itemsize(storage.dtype)} elements",
                found=numel,
            )
        offsets[key] = position + 8
        position += 8 + storage.nbytes
    if position != source.nbytes:
        raise DamagedFileError(
            "the file does not end with its last storage",
            expected=f"{position} bytes",
            found=source.nbytes,
            advice="copy it again from its origin",
        )
    return offsets
