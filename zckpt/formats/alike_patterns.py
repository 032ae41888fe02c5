"""What a file is held against that may say the same as another: all of its bytes but the data of its records.

Apart from `alike_files` because it needs numpy, which is loaded when there are many files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zckpt.storage.files import read_into
from zckpt.torchfile import LOCAL, FileRange, Record, TorchFile, alike_file, read_directory

CLOSE = 1 << 13
"""Bytes of a record's data below which one read is cheaper than two."""

Numbers = npt.NDArray[np.int64]
Ranges = list[tuple[int, int]]


class Pattern:
    """A file that others are held against: what its ranges hold, where names and CRC-32s are in it, what is free.

    Of one that is `glanced` at, the ranges are its beginning and its directory, which states the CRC-32 of its pickle.
    """

    def __init__(
        self,
        source: FileRange,
        file: TorchFile,
        records: Sequence[Record],
        start: int,
        entries: Numbers,
        headers: Numbers,
        *,
        glanced: bool,
    ) -> None:
        self.file, self.root = file, file.archive.encode() + b"/"
        inner = {one.name.partition("/")[2]: index for index, one in enumerate(records)}
        pickle = inner["data.pkl"]
        kept = [pickle, *(index for name, index in inner.items() if name == "byteorder")]
        data = sorted((one.offset, one.offset + one.nbytes) for index, one in enumerate(records)
                      if index not in kept and one.nbytes)  # fmt: skip
        begin = records[pickle].offset
        shown = begin + min(records[pickle].nbytes, CLOSE)
        far = [(shown, start)] if glanced else [one for one in data if one[1] - one[0] > CLOSE]
        self.ranges = list(zip([0, *(high for _, high in far)], [*(low for low, _ in far), source.nbytes], strict=True))
        lows, highs = np.array(self.ranges).T
        skipped = lows - np.cumsum([0, *(high - low for low, high in self.ranges[:-1])])

        def within(offsets: Numbers) -> Numbers:
            """Return where in the ranges bytes of the file are: of those that are."""
            number = np.searchsorted(lows, offsets, "right") - 1
            found: Numbers = (offsets - skipped[number])[offsets < highs[number]]
            return found

        self.data = read_ranges(source, self.ranges, bytearray())
        self.begin = slice(*within(np.array([begin, shown - 1])).tolist())
        self.free = np.zeros(len(self.data), bool)
        for low, high in data:
            for at in within(np.array([low])):
                self.free[at : at + high - low] = True
        self.sums = within(start + entries + 16)
        self.free[np.delete(self.sums, kept)[:, None] + np.arange(4)] = True
        ends = within(np.array([one.offset + one.nbytes for one in records])).tolist()
        stated = [at + 4 for at in ends if self.data[at : at + 4] == b"PK\7\x08"]
        self.free[np.array([*within(headers + 14).tolist(), *stated])[:, None] + np.arange(4)] = True
        self.crcs = self._crcs(self.data)
        self.filled = [index for index, one in enumerate(records) if one.nbytes or one.crc32]
        between = np.array([len(one) for one in self.data.split(self.root)])
        self.named = np.cumsum(between[:-1] + len(self.root)) - len(self.root)
        self.name = self.root

    @classmethod
    def of(cls, source: FileRange, file: TorchFile, start: int, size: int, *, glanced: bool) -> Pattern | None:
        """Return the pattern of a file, given its directory; None for one of unusual form.

        The archive's name is nowhere in it but where records are named.
        """
        records = list(file.records)
        listed = read_directory(source.read(start, size), len(records))
        entries, headers = [one.at for one in listed], [one.header for one in listed]
        inner = [one.name.partition("/")[2] for one in records]
        if "data.pkl" not in inner or not file.archive.isascii() or source.base or max(headers) >= 0xFFFFFFFF:
            return None
        glanced = glanced and inner[int(np.argmin(headers))] == "data.pkl" and any(one.crc32 for one in records)
        made = cls(source, file, records, start, np.array(entries), np.array(headers), glanced=glanced)
        return made if len(made.named) == (1 if glanced else len(entries)) + len(entries) else None

    def match(self, source: FileRange, data: bytearray) -> TorchFile | None:
        """Return a file with this one's tree if what its ranges hold is the same but for names, CRC-32s and data."""
        name, expected = bytes(data[LOCAL.size : LOCAL.size + len(self.root)]), np.frombuffer(self.data, np.uint8)
        if name[-1:] != b"/" or name.count(b"/") > 1 or not name.isascii():
            return None
        if data[self.begin] != self.data[self.begin]:  # the pickle, which names the device of its rank
            return None
        for at, (before, after) in enumerate(zip(self.name, name, strict=True)):
            if before != after:
                expected[self.named + at] = after
        self.name, changed = name, dict[int, int]()
        if data != self.data:
            if not self.free[np.frombuffer(data, np.uint8) != expected].all():
                return None
            crcs = self._crcs(data)
            changed = {int(i): int(crcs[i]) for i in np.flatnonzero(crcs != self.crcs)}
        return alike_file(self.file, source, name[:-1].decode(), self.filled, changed)

    def _crcs(self, data: bytearray) -> Numbers:
        """Return the CRC-32s that a directory states."""
        fields = np.frombuffer(data, np.uint8)[self.sums[:, None] + np.arange(4)]
        found: Numbers = fields.view("<u4")[:, 0].astype(np.int64)
        return found


def read_ranges(source: FileRange, ranges: Ranges, into: bytearray) -> bytearray:
    """Read what ranges of a file hold, one after the other, into a buffer if it has their size, else into another."""
    nbytes, at = sum(high - low for low, high in ranges), 0
    found = into if len(into) == nbytes else bytearray(nbytes)
    for low, high in ranges:
        view = memoryview(found)[at : at + high - low]
        read_into(source.descriptor, source.base + low, view, path=source.path)
        at += high - low
    return found
