"""What a file is held against that may say the same as another: its records and its pickle, as columns of numbers.

Apart from `alike_files` because it needs numpy, which is loaded when there are many files.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zckpt.formats.alike_records import WHOLE_NBYTES, AlikeRecords
from zckpt.storage.crc32 import crc32
from zckpt.torchfile import CENTRAL, LOCAL, FileRange, TorchFile

CLOSE = 1 << 13
"""Bytes between local headers below which one read is cheaper than two."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class Pattern:
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
        self.filled = [index for index, one in enumerate(file.records) if one.nbytes or one.crc32]
        self.variable = (entries[:, None] + np.array([16, 17, 18, 19, 28, 29])).ravel()
        self.windows, self.places = _windows(self.headers, int(self.names.max()))
        self.forget()

    @classmethod
    def of(cls, source: FileRange, file: TorchFile, start: int, directory: bytes) -> Pattern | None:
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
        made = cls(file, start, directory, np.array(entries, np.int64), source.read(pickle.offset, pickle.nbytes))
        if source.nbytes <= WHOLE_NBYTES:
            made.keep(source.read(0, source.nbytes))
        return made

    def keep(self, data: bytes) -> None:
        """Keep all of the file, if the archive's name is nowhere in it but where records are named."""
        between = np.array([len(one) for one in data.split(self.root)])
        if len(between) != 2 * len(self.entries) + 1:
            return
        self.whole, self.name, self.free = bytearray(data), self.root, np.zeros(len(data), bool)
        self.named = np.cumsum(between[:-1] + len(self.root)) - len(self.root)
        crcs = np.concatenate((self.start + self.entries + 16, self.headers + 14))
        self.free[crcs[:, None] + np.arange(4)] = True
        for index, one in enumerate(self.file.records):
            self.free[one.offset : one.offset + one.nbytes] = index not in (self.pickle_index, self.order_index)
        self.free[self.start + self.entries[self.pickle_index] + 16 + np.arange(4)] = False

    def forget(self) -> None:
        """Keep the file no longer."""
        self.whole, self.name, self.free, self.named = bytearray(), b"", np.zeros(0, bool), np.zeros(0, np.int64)

    def match_whole(self, source: FileRange, data: bytearray) -> TorchFile | None:
        """Return a file with this one's tree if all bytes are the same but for names, CRC-32s, and data of records."""
        name, expected = bytes(data[LOCAL.size : LOCAL.size + len(self.root)]), np.frombuffer(self.whole, np.uint8)
        if name[-1:] != b"/" or name.count(b"/") > 1 or not name.isascii():
            return None
        for at, (before, after) in enumerate(zip(self.name, name, strict=True)):
            if before != after:
                expected[self.named + at] = after
        self.name, changed = name, dict[int, int]()
        if data != self.whole:
            found = np.frombuffer(data, np.uint8)
            if not self.free[found != expected].all():
                return None
            crcs = _field(found, self.start + self.entries, 16, 4)
            changed = {int(i): int(crcs[i]) for i in np.flatnonzero(crcs != self.crcs)}
        return self._file(
            source, AlikeRecords(self.file.records, self.filled, len(self.root) - 1, name[:-1].decode(), changed), name
        )

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
        records = AlikeRecords(self.file.records, self.filled, len(self.root) - 1, root[:-1].decode("ascii"), changed)
        if not self._heads_fit(source, found, entries, names) or not self._contents_fit(
            source, records, summed=bool(crcs.any())
        ):
            return None
        return self._file(source, records, root)

    def _file(self, source: FileRange, records: AlikeRecords, root: bytes) -> TorchFile:
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
