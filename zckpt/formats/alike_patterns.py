"""What a file is held against that may say the same as another: all of its bytes but the data of its records.

Apart from `alike_files` because it needs numpy, which is loaded when there are many files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import read_into
from zckpt.torchfile import (
    LOCAL,
    FileRange,
    Record,
    TorchFile,
    alike_file,
    find_blanks,
    numbers_at,
    stated_sum,
)
from zckpt.torchfile.archive import CENTRAL_CRC, Entry

CLOSE = 1 << 13
"""Bytes of a record's data below which one read is cheaper than two."""

FEW = 64
"""Records whose CRC-32s are kept for each file; of one with more they are read again."""

Numbers = npt.NDArray[np.int64]
Ranges = list[tuple[int, int]]


class Pattern:
    """A file that others are held against: what its ranges hold, where names and CRC-32s are in it, what is free.

    Of one that is `glanced` at, the ranges are its beginning and its directory, which states the CRC-32 of its pickle.
    Numbers for which its tree has blanks are free; whether the pickle is whole its CRC-32 tells.
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
        self.file, self.root, self.glanced = file, file.archive.encode() + b"/", glanced
        inner = {one.name.partition("/")[2]: index for index, one in enumerate(records)}
        pickle = inner["data.pkl"]
        self.pickle, kept = pickle, [pickle, *(index for name, index in inner.items() if name == "byteorder")]
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
        near = np.array([one for one in data if not glanced and one[1] - one[0] <= CLOSE], np.int64).reshape(-1, 2)
        borders, at = np.zeros(len(self.data) + 1, np.int8), within(near[:, 0])
        borders[at] += 1
        borders[at + near[:, 1] - near[:, 0]] -= 1
        self.free = borders[:-1].cumsum(dtype=np.int8).astype(bool)
        self.sums = within(start + entries + CENTRAL_CRC)
        self.places: memoryview[int] = (start + entries + CENTRAL_CRC).data
        self.free[np.delete(self.sums, kept)[:, None] + np.arange(4)] = True
        self._open(source, records[pickle])
        ends = within(np.array([one.offset + one.nbytes for one in records])).tolist()
        stated = [at + 4 for at in ends if self.data[at : at + 4] == b"PK\7\x08"]
        self.free[np.array([*within(headers + 14).tolist(), *stated])[:, None] + np.arange(4)] = True
        self.crcs = self._crcs(self.data)
        self.filled = [index for index, one in enumerate(records) if one.nbytes or one.crc32]
        self.empty = np.delete(np.arange(len(records)), self.filled)
        between = np.array([len(one) for one in self.data.split(self.root)])
        self.named = np.cumsum(between[:-1] + len(self.root)) - len(self.root)
        self.name = self.root

    def _open(self, source: FileRange, pickle: Record) -> None:
        """Let the numbers of meshes in the pickle be free: its beginning up to the last one is in the ranges."""
        self.numbers: list[tuple[int, int, int]] = []
        if not self.file.numbers:
            return
        data = source.read(pickle.offset, pickle.nbytes)
        places, first = find_blanks(data), self.begin.start
        self.numbers = [(first + at, first + begin, first + end) for at, begin, end in places]
        for _, begin, end in self.numbers:
            self.free[begin:end] = True
        self.free[self.sums[self.pickle] + np.arange(4)] = True
        rest = data[places[-1][-1] :]
        self.rest = crc32(rest), len(rest)

    @classmethod
    def of(
        cls, source: FileRange, file: TorchFile, start: int, listed: Sequence[Entry], *, glanced: bool
    ) -> Pattern | None:
        """Return the pattern of a file, given its directory; None for one of unusual form.

        The archive's name is nowhere in it but where records are named.
        """
        records = list(file.records)
        entries, headers = [one.at for one in listed], [one.header for one in listed]
        inner = [one.name.partition("/")[2] for one in records]
        if "data.pkl" not in inner or not file.archive.isascii() or source.base or max(headers) >= 0xFFFFFFFF:
            return None
        if glanced and file.numbers:
            pickle = records[inner.index("data.pkl")]
            glanced = find_blanks(source.read(pickle.offset, pickle.nbytes))[-1][-1] < CLOSE
        glanced = glanced and inner[int(np.argmin(headers))] == "data.pkl" and any(one.crc32 for one in records)
        made = cls(source, file, records, start, np.array(entries), np.array(headers), glanced=glanced)
        return made if len(made.named) == (1 if glanced else len(entries)) + len(entries) else None

    def match(self, source: FileRange, data: bytearray) -> TorchFile | None:
        """Return a file with this one's tree if what its ranges hold is the same but for names, CRC-32s and data."""
        name, expected = bytes(data[LOCAL.size : LOCAL.size + len(self.root)]), np.frombuffer(self.data, np.uint8)
        if name[-1:] != b"/" or name.count(b"/") > 1 or not name.isascii():
            return None
        if not self.numbers and data[self.begin] != self.data[self.begin]:  # the pickle, which names its rank's device
            return None
        for at, (before, after) in enumerate(zip(self.name, name, strict=True)):
            if before != after:
                expected[self.named + at] = after
        self.name = name
        is_same = data == self.data
        if not is_same and ((np.frombuffer(data, np.uint8) != expected) > self.free).any():
            return None
        try:
            crcs, numbers = self.crcs if is_same else self._crcs(data), numbers_at(data, self.numbers)
        except UnicodeDecodeError:
            return None
        changed = np.flatnonzero(crcs != self.crcs)
        if crcs[self.empty].any() or (numbers and not self._is_whole(data, crcs)):
            return None
        sums = dict(zip(changed.tolist(), crcs[changed].tolist(), strict=True)).get if len(changed) <= FEW else None
        archive = name[:-1].decode()
        return alike_file(
            self.file, source, archive, self.filled, sums or partial(stated_sum, source.path, self.places), numbers
        )

    def _is_whole(self, data: bytearray, crcs: Numbers) -> bool:
        """Tell whether a pickle with other numbers has the CRC-32 that its directory states."""
        begin = bytes(memoryview(data)[self.begin.start : self.numbers[-1][-1]])
        return crcs[self.pickle] == combine(crc32(begin), *self.rest) or not (self.glanced or crcs.any())

    def _crcs(self, data: bytearray) -> Numbers:
        """Return the CRC-32s that a directory states."""
        found: Numbers = np.ndarray(len(data) - 3, "<u4", data, strides=1)[self.sums].astype(np.int64)
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
