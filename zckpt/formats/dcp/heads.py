"""Where the elements of a chunk are in its file, found from what is around them: in an item of its own, or in a blob.

A checkpoint has few shapes of tensors and very many chunks of each. Two torch files of a tensor of one type and shape
differ in its elements, in their checksum, which is in three places, and in the record that identifies the file. Nothing
else of a file bears on where its elements are, and neither do those. So an item whose every other byte is that of one
that was read before is the same with other elements.

A writer that uses safetensors puts all tensors of a file in one blob, after its objects:

objects | 8 bytes length | header, JSON | data to the end of the file

The header's metadata says under DCP_SHARDING_INFO, as JSON once more, which chunk of its tensor each one is. The
places in `.metadata` all say where the blob begins, and nothing of where a tensor is in it (torch 2.15).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zckpt.formats.safetensors.file import header_in
from zckpt.formats.safetensors.shards import offsets_in
from zckpt.state.boxes import row_major
from zckpt.torchfile import CENTRAL, FileRange, Storage, Tensor, TorchFile, find_directory, read_directory

MAXIMUM_KINDS = 4096
"""Kinds that are remembered, in some kB each."""

KINDS_OF_A_SIZE = 8
"""Kinds of one length that are compared: (2, 8), (4, 4), (8, 2) ..."""

MAXIMUM_FRAME = 1 << 14
"""Bytes around the elements: real ones have 1.5 kB."""

READ_WHOLE = 1 << 14
"""Bytes of an item below which it is read at once."""

IDENTITY = "/.data/serialization_id"

DESCRIPTOR = b"PK\7\x08"
CRC_IN_LOCAL, CRC_IN_CENTRAL, CRC_IN_DESCRIPTOR = 14, 16, 4
"""Where the checksum is in each header, in bytes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Items of which every byte but the elements and their checksum is the same.

    Parameters
    ----------
    tensor : Tensor
        Of an item that would begin its file.
    globals : tuple of str
        That each mentions.
    begin, end : int, bytes
        Of the elements in the item.
    parts : tuple of (int, bytes)
        All bytes that are the same, by their offset.
    """

    tensor: Tensor
    globals: tuple[str, ...]
    begin: int
    end: int
    parts: tuple[tuple[int, bytes], ...]


class Kinds:
    """Remembers the kinds of items that a directory has."""

    def __init__(self) -> None:
        self._kinds: dict[int, list[Kind]] = {}
        self._once: set[int] = set()
        self._count = 0

    def known(self, source: FileRange) -> Kind | None:
        """Return the kind of an item that is like one before; None if it is not."""
        kinds = self._kinds.get(source.nbytes)
        if kinds is None:
            return None
        whole = source.read(0, source.nbytes) if source.nbytes <= READ_WHOLE else None
        for kind in kinds:
            head = source.read(0, kind.begin) if whole is None else whole
            tail, start = (source.read(kind.end, source.nbytes - kind.end), kind.end) if whole is None else (whole, 0)
            if all(
                head.startswith(data, at) if at < kind.begin else tail.startswith(data, at - start)
                for at, data in kind.parts
            ):
                return kind
        return None

    def learn(self, source: FileRange, file: TorchFile) -> None:
        """Remember an item, once there was another of its length: many have one that no other has."""
        if source.nbytes not in self._once:
            self._once.add(source.nbytes)
            return
        kinds = self._kinds.setdefault(source.nbytes, [])
        if len(kinds) >= KINDS_OF_A_SIZE or self._count >= MAXIMUM_KINDS:
            return
        kind = _kind(source, file)
        if kind is not None:
            self._count += 1
            kinds.append(kind)


def _kind(source: FileRange, file: TorchFile) -> Kind | None:
    """Return what an item has in common with others of its kind; None for one that is not of the usual form."""
    tensor = file.root
    if file.container != "zip" or not isinstance(tensor, Tensor) or len(file.storages) != 1:
        return None
    begin = tensor.storage.offset - source.base
    end = begin + tensor.storage.nbytes
    if source.nbytes - tensor.storage.nbytes > MAXIMUM_FRAME:
        return None
    holes = sorted([(begin, end), *_differences(source, file)])
    parts, at = [], 0
    for low, high in [*holes, (source.nbytes, source.nbytes)]:
        if at < low:
            parts.append((at, source.read(at, low - at)))
        at = max(at, high)
    if any(at < begin < at + len(data) for at, data in parts):
        return None
    bare = replace(tensor, storage=replace(tensor.storage, offset=begin))
    return Kind(bare, tuple(name for names in file.globals.values() for name in names), begin, end, tuple(parts))


def _differences(source: FileRange, file: TorchFile) -> list[tuple[int, int]]:
    """Return the bytes of checksums of the elements and of the identity, and of the identity itself."""
    found: list[tuple[int, int]] = []
    variable = {f"{file.archive}{IDENTITY}", *(f"{file.archive}/data/{key}" for key in file.storages)}
    data = {record.name: (record.offset - source.base, record.nbytes) for record in file.records}
    count, directory, size = find_directory(source)
    at = directory
    for entry in read_directory(source.read(directory, size), count):
        if entry.name in variable:
            start, nbytes = data[entry.name]
            found += [
                (entry.header + CRC_IN_LOCAL, entry.header + CRC_IN_LOCAL + 4),
                (at + CRC_IN_CENTRAL, at + CRC_IN_CENTRAL + 4),
            ]
            if entry.name.endswith(IDENTITY):
                found.append((start, start + nbytes))
            after = start + nbytes
            if after + CRC_IN_DESCRIPTOR + 4 <= directory and source.read(after, 4) == DESCRIPTOR:
                found.append((after + CRC_IN_DESCRIPTOR, after + CRC_IN_DESCRIPTOR + 4))
        fields = CENTRAL.unpack(source.read(at, CENTRAL.size))
        at += CENTRAL.size + sum(fields[10:13])
    return found


@dataclass(frozen=True, slots=True)
class Blob:
    """A chunk: its node, and its first index in its tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]


def read_blob(source: FileRange) -> dict[str, Blob] | None:
    """Read the header of a blob that ends with its file; None where there is none: an archive has a zero there.

    Raises DamagedFileError: it is malformed, or its tensors leave holes, overlap or reach beyond the file.
    """
    if source.nbytes <= 8 or source.read(8, 1) != b"{":
        return None
    slots, metadata = header_in(source)
    found = {}
    for name, offsets in offsets_in(slots, metadata).items():
        slot = slots[name]
        storage = Storage(name, slot.dtype, slot.nbytes, "cpu", slot.spans[0].offset if slot.spans else 0)
        found[name] = Blob(Tensor(storage, slot.dtype, slot.shape, row_major(slot.shape), 0, "little"), offsets)
    return found
