"""Files that torch.save wrote before version 1.6: five pickles in a row, then the storages.

    pickle 1    magic number
    pickle 2    protocol version, 1001
    pickle 3    system information (byte order and sizes of C types of the writer)
    pickle 4    the object; storages are persistent ids
    pickle 5    list of storage keys
    per key     number of elements (int64), then the data

Data and counts are little-endian whatever the system information says: torch has always converted
them when writing (`writeFileRaw`, torch/csrc/Storage serialization).
"""

from __future__ import annotations

from zckpt.errors import DamagedFileError, PickleError, UnsupportedError, ZckptError
from zckpt.state.dtypes import itemsize
from zckpt.torchfile.pickle_machine import Machine, TruncatedPickleError
from zckpt.torchfile.plain_parts import PlainParts
from zckpt.torchfile.source import ByteSource
from zckpt.torchfile.storage_table import StorageTable
from zckpt.torchfile.tensors import Storage
from zckpt.torchfile.torch_file import TorchFile
from zckpt.torchfile.walk import check_tree

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

PREFIX = 1 << 20
"""Bytes read at first: the pickles of nearly every file are shorter."""

MAX_PICKLES = 1 << 30
"""Bytes that the pickles may have together."""


def is_legacy(source: ByteSource) -> bool:
    """Tell whether the range begins with torch's magic number, in any pickle protocol."""
    head = source.read(0, min(source.nbytes, 128))
    try:
        return Machine(head, path=source.path, record="pickle 1").run() == MAGIC_NUMBER
    except ZckptError:
        return False


def read_legacy(source: ByteSource) -> TorchFile:
    """Return the object tree and storages of a legacy file.

    Raises
    ------
    PickleError
        One of its pickles is malformed or hostile.
    DamagedFileError
        The storages do not fill the rest of the file.
    """
    size = min(source.nbytes, PREFIX)
    while True:
        try:
            return read_pickles(source, source.read(0, size))
        except TruncatedPickleError:
            if size == source.nbytes:
                raise
            if size >= MAX_PICKLES:
                raise UnsupportedError(
                    "its pickles are too large", path=source.path, expected=f"at most {MAX_PICKLES} bytes"
                ) from None
        size = min(source.nbytes, size * 8)


def read_pickles(source: ByteSource, data: bytes) -> TorchFile:
    """Read the five pickles that `data` begins with.

    The object's pickle is run twice: where the storages are is known only after its end.
    """
    position = 0
    for number, expected in ((1, MAGIC_NUMBER), (2, PROTOCOL_VERSION), (3, None)):
        machine = Machine(data, start=position, path=source.path, record=f"pickle {number}")
        value = machine.run()
        if expected is not None and value != expected:
            raise DamagedFileError(f"pickle {number}", path=source.path, expected=expected, found=f"{value!r:.40}")
        position = machine.pos
    first = StorageTable(lambda _key, _nbytes: 0, legacy=True)
    machine = Machine(data, start=position, path=source.path, record="pickle 4", persistent=first)
    machine.run()
    last = Machine(data, start=machine.pos, path=source.path, record="pickle 5")
    offsets = locate(source, last.run(), last.pos, first.storages)

    def find(key: str, _nbytes: int) -> int:
        offset = offsets.get(key)
        if offset is None:
            raise PickleError(f"storage {key!r} is not in the file")
        return source.base + offset

    table = StorageTable(find, legacy=True)
    machine = Machine(data, start=position, path=source.path, record="pickle 4", persistent=table)
    root = machine.run()
    check_tree(root, source.path, "pickle 4")
    return TorchFile(
        source.path,
        source.nbytes,
        "legacy",
        "little",
        root,
        table.storages,
        {"pickle 4": machine.names},
        machine.protocol,
        plain=PlainParts(),
    )


def locate(source: ByteSource, keys: object, position: int, storages: dict[str, Storage]) -> dict[str, int]:
    """Return the offset of each storage's data, walking from one to the next.

    Raises
    ------
    DamagedFileError
        A storage has another size than the object says, or the file does not end with the last.
    """
    if type(keys) is not list or any(type(key) is not str for key in keys) or len(set(keys)) != len(keys):
        raise PickleError("pickle 5", path=source.path, expected="a list of distinct storage keys")
    offsets: dict[str, int] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise PickleError(f"pickle 5: no tensor has storage {key!r:.80}", path=source.path)
        numel = int.from_bytes(source.read(position, 8), "little", signed=True)
        if numel * itemsize(storage.dtype) != storage.nbytes:
            raise DamagedFileError(
                f"storage {key!r}",
                path=source.path,
                expected=f"{storage.nbytes // itemsize(storage.dtype)} elements",
                found=numel,
            )
        offsets[key] = position + 8
        position += 8 + storage.nbytes
    if position != source.nbytes:
        raise DamagedFileError(
            "the file does not end with its last storage",
            path=source.path,
            expected=f"{position} bytes",
            found=source.nbytes,
            advice="copy it again from where it came from",
        )
    return offsets
