"""Files of many ranks that say the same, read with one tree for all of them.

Under ZeRO-3 every rank's model file has every name and shape, and a record for each tensor, all of them empty. Such a
file costs as much to read as the whole model has names. Where another file has the same pickle and its records in the
same places, only that is found out, and the file gets the other's tree:

    central directory   the same but for the archive's own name, which each record's begins with, and the checksums
    local headers       each names its record, and its data begins where the other's does
    data.pkl            byte for byte the same
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from zckpt.storage.crc32 import crc32
from zckpt.torchfile import CENTRAL, LOCAL, FileRange, Record, TorchFile, find_directory, open_range, read_source

FEWEST_RECORDS = 64
"""A file of fewer is read as fast as it is compared."""

CLOSE = 1 << 13
"""Bytes between local headers below which one read is cheaper than two."""

MOST_PATTERNS = 32
"""Trees that are kept: ranks of a node name their devices, and there are 8 or 16 of those."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class AlikeReader:
    """Reads files one after the other; those that are alike share a tree."""

    def __init__(self) -> None:
        self._patterns: list[_Pattern] = []

    def read(self, path: str | os.PathLike[str]) -> TorchFile:
        """Read the structure of a torch file; parameters, result and errors are those of `read_torchfile`.

        The trees, storages and what is known of plain parts are the same objects in files that are alike.
        """
        with open_range(path, 0, None) as source:
            head = source.read(0, min(source.nbytes, 4))
            if head != b"PK\3\4":
                return read_source(source)
            count, start, size = find_directory(source)
            if count < FEWEST_RECORDS:
                return read_source(source)
            directory = source.read(start, size) if size < 1 << 28 else b""
            for pattern in self._patterns:
                found = pattern.match(source, count, start, directory)
                if found is not None:
                    return found
            file = read_source(source)
            made = _Pattern.of(source, file, start, directory)
            if made is not None:
                self._patterns = [*self._patterns[1 - MOST_PATTERNS :], made]
            return file


class AlikeRecords(Sequence[Record]):
    """The records of a file that is like another, of which only what differs is kept.

    Parameters
    ----------
    records : sequence of Record
        The other's.
    skip : int
        Characters of the archive's name there.
    archive : str
    changed : mapping of int to int
        CRC-32 of those that have another.
    """

    __slots__ = ("_archive", "_changed", "_records", "_skip")

    def __init__(self, records: Sequence[Record], skip: int, archive: str, changed: dict[int, int]) -> None:
        self._records, self._skip, self._archive, self._changed = records, skip, archive, changed

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...

    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        """Return a record, or some."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        one = self._records[index]
        crc = self._changed.get(index % len(self._records), one.crc32)
        return Record(self._archive + one.name[self._skip :], one.offset, one.nbytes, crc)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in the order of the directory."""
        return (self[index] for index in range(len(self)))


class _Pattern:
    """A file that others are held against."""

    def __init__(self, file: TorchFile, start: int, directory: bytes, entries: Numbers, pickle: bytes) -> None:
        self.file = file
        self.start = start
        self.root = file.archive.encode() + b"/"
        self.directory = np.frombuffer(directory, np.uint8)
        self.entries = entries
        self.pickle = pickle
        self.computed = crc32(pickle)
        inner = {one.name.partition("/")[2]: index for index, one in enumerate(file.records)}
        self.pickle_index, self.order_index = inner["data.pkl"], inner.get("byteorder")
        self.names = _field(self.directory, entries, 28, 2)
        self.headers = _field(self.directory, entries, 42, 4)
        self.offsets = np.array([one.offset for one in file.records], np.int64)
        self.crcs = _field(self.directory, entries, 16, 4)
        self.variable = (entries[:, None] + np.array([16, 17, 18, 19, 28, 29])).ravel()
        self.windows, self.places = _windows(self.headers, int(self.names.max()))

    @classmethod
    def of(cls, source: FileRange, file: TorchFile, start: int, directory: bytes) -> _Pattern | None:
        """Return the pattern of a file; None for one of unusual form, which nothing is held against."""
        entries, at = [], 0
        while at < len(directory):
            fields = CENTRAL.unpack_from(directory, at)
            entries.append(at)
            at += CENTRAL.size + sum(fields[10:13])
            if 0xFFFFFFFF in (fields[8], fields[9], fields[-1]):
                return None
        root = file.archive.encode() + b"/"
        pickle = next((one for one in file.records if one.name == f"{file.archive}/data.pkl"), None)
        if (
            pickle is None
            or not root.isascii()
            or file.container != "zip"
            or source.base
            or directory.count(root) != len(entries)
        ):
            return None
        return cls(file, start, directory, np.array(entries, np.int64), source.read(pickle.offset, pickle.nbytes))

    def match(self, source: FileRange, count: int, start: int, directory: bytes) -> TorchFile | None:
        """Return a file with this one's tree if it is alike in all that a reader looks at."""
        root = self._root(directory) if count == len(self.entries) and start == self.start else None
        if root is None:
            return None
        longer = len(root) - len(self.root)
        entries, names = self.entries + longer * np.arange(count), self.names + longer
        found = np.frombuffer(directory, np.uint8)
        crcs = _field(found, entries, 16, 4)
        changed = {int(i): int(crcs[i]) for i in np.flatnonzero(crcs != self.crcs)}
        records = AlikeRecords(self.file.records, len(self.root) - 1, root[:-1].decode("ascii"), changed)
        if not self._heads_fit(source, found, entries, names) or not self._contents_fit(
            source, records, summed=bool(crcs.any())
        ):
            return None
        file = self.file
        return TorchFile(source.path, source.nbytes, "zip", file.byteorder, file.root, file.storages, file.globals,
                         file.protocol, records, file.archive if root == self.root else root[:-1].decode("ascii"),
                         file.plain)  # fmt: skip

    def _root(self, directory: bytes) -> bytes | None:
        """Return what the names in a directory begin with, if it is otherwise this one's but for its checksums."""
        if len(directory) < CENTRAL.size:
            return None
        size = int.from_bytes(directory[28:30], "little")
        name, slash, _ = directory[CENTRAL.size : CENTRAL.size + size].partition(b"/")
        root, count = name + slash, len(self.entries)
        longer = len(root) - len(self.root)
        if not name.isascii() or len(directory) != len(self.directory) + longer * count:
            return None
        if directory.count(root) != count:
            return None
        same = np.frombuffer(directory.replace(root, self.root), np.uint8) == self.directory
        same[self.variable] = True
        sizes = _field(np.frombuffer(directory, np.uint8), self.entries + longer * np.arange(count), 28, 2)
        return root if same.all() and (sizes == self.names + longer).all() else None

    def _heads_fit(self, source: FileRange, directory: Bytes, entries: Numbers, names: Numbers) -> bool:
        """Tell whether each local header is that of its record, whose data begins where it does in the pattern."""
        reach = int(names.max())
        heads = b"".join(source.read(low, min(high + reach, self.start) - low) for low, high in self.windows)
        sizes = [min(high + reach, self.start) - low for low, high in self.windows]
        shift = np.cumsum([0, *sizes[:-1]])
        found = np.frombuffer(heads, np.uint8)
        places = self.places[:, 1] + shift[self.places[:, 0]]
        if (places + LOCAL.size + names > len(found)).any():
            return False
        magic, flags, method = (_field(found, places, at, n) for at, n in ((0, 4), (6, 2), (8, 2)))
        own, extra = _field(found, places, 26, 2), _field(found, places, 28, 2)
        if not ((magic == 0x04034B50) & (flags & 1 == 0) & (method == 0) & (own == names)).all():
            return False
        if not (self.headers + LOCAL.size + own + extra == self.offsets).all():
            return False
        order = np.arange(int(names.sum())) - np.repeat(np.cumsum(names) - names, names)
        local = found[np.repeat(places + LOCAL.size, names) + order]
        return bool((local == directory[np.repeat(entries + CENTRAL.size, names) + order]).all())

    def _contents_fit(self, source: FileRange, records: AlikeRecords, *, summed: bool) -> bool:
        """Tell whether the pickle is the same, and so stated, and the byte order."""
        pickle = records[self.pickle_index]
        if (summed and pickle.crc32 != self.computed) or source.read(pickle.offset, pickle.nbytes) != self.pickle:
            return False
        if self.order_index is None:
            return True
        order = records[self.order_index]
        return source.read(order.offset, order.nbytes) == self.file.byteorder.encode()


def _field(data: Bytes, places: Numbers, at: int, nbytes: int) -> Numbers:
    """Return a little-endian number of `nbytes` bytes from each place."""
    found = np.zeros(len(places), np.int64)
    for index in range(nbytes):
        found |= data[places + (at + index)].astype(np.int64) << (8 * index)
    return found


def _windows(headers: Numbers, name: int) -> tuple[list[tuple[int, int]], Numbers]:
    """Return ranges of bytes that hold the headers, less the names at their ends, and where in which each is."""
    windows: list[tuple[int, int]] = []
    places = np.zeros((len(headers), 2), np.int64)
    for index in np.argsort(headers, kind="stable").tolist():
        at = int(headers[index])
        if not windows or at - windows[-1][1] > CLOSE + name:
            windows.append((at, at + LOCAL.size))
        windows[-1] = windows[-1][0], at + LOCAL.size
        places[index] = len(windows) - 1, at - windows[-1][0]
    return windows, places
