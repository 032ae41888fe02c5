"""What a checkpoint in a store consists of: its files, their chunks, and the ranges that predict them. As one file.

magic | XXH3-128 of the rest | number of bytes of what follows, each: header, rows, ranges | these, compressed
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from zckpt.errors import DamagedFileError
from zckpt.immutable import immutable
from zckpt.state import positions
from zckpt.storage.files import read_whole
from zckpt.storage.packed.chunks import DIFFERENCE, MOST_NBYTES, TO_FLOAT16

Table = npt.NDArray[np.void]

MAGIC = b"ZCKPTI1\n"

ROW = np.dtype([
    ("file", "<u4"), ("nbytes", "<u4"), ("op", "u1"), ("width", "u1"), ("cast", "u1"), ("depth", "u1"),
    ("data", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("high", "<u8"), ("low", "<u8"),
    ("first", "<u4"), ("count", "<u4"),
])  # fmt: skip
"""A chunk: of which file, how it is stored (`chunks`) and where, its XXH3-128, and the ranges that predict it.

Its depth is greater than that of any chunk that it is predicted from.
"""

RANGE = np.dtype([("checkpoint", "<u4"), ("file", "<u4"), ("offset", "<u8"), ("nbytes", "<u8")])

MOST_INDEX_NBYTES = 1 << 32

_SIZES = struct.Struct("<QQQQQQ")


@immutable
class Filed:
    """A file of a checkpoint: its name there, what it is (`file`, `link` or `folder`), and what the system says of it.

    `target`: of a link.
    """

    name: str
    kind: str
    mode: int
    modified_ns: int
    nbytes: int = 0
    target: str = ""


@dataclass(frozen=True)
class Index:
    """A checkpoint of a store."""

    name: str  # within the run
    is_file: bool  # whether it is one file, which then is the only one, of its name
    files: tuple[Filed, ...]
    rows: Table  # rows in the order of the files, and of what is in each
    ranges: Table
    details: dict[str, Any] = field(default_factory=dict)  # what else is known of it; JSON-able

    @cached_property
    def _starts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first row of each file, and where in its file each row begins."""
        firsts = np.searchsorted(self.rows["file"], np.arange(len(self.files) + 1)).astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(self.rows["nbytes"], dtype=np.int64)])
        begins = ends[:-1] - ends[firsts[self.rows["file"].astype(np.int64)]]
        return firsts, begins

    def rows_of(self, file: int, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the rows that have bytes of a range of a file, each with where in the file it begins."""
        firsts, begins = self._starts
        low, high = int(firsts[file]), int(firsts[file + 1])
        some = begins[low:high]
        first = int(np.searchsorted(some, offset, "right")) - 1
        end = int(np.searchsorted(some, offset + nbytes, "left"))
        return [(low + n, int(some[n])) for n in range(max(first, 0), end)]

    def row(self, number: int) -> dict[str, int]:
        """Return what is said of a chunk."""
        return dict(zip(ROW.names or (), self.rows[number].tolist(), strict=True))

    def depth(self, file: int, offset: int, nbytes: int) -> int:
        """Return how deep the deepest chunk of a range is."""
        return max((int(self.rows["depth"][row]) for row, _ in self.rows_of(file, offset, nbytes)), default=0)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The files' numbers, by name."""
        return positions(one.name for one in self.files)

    def to_bytes(self) -> bytes:
        """Return the file."""
        files = [astuple(one) for one in self.files]
        header = {"name": self.name, "is_file": self.is_file, "files": files, "details": self.details}
        plain = [json.dumps(header).encode(), _columns(self.rows), _columns(self.ranges)]
        packed = [zstandard.ZstdCompressor(level=9).compress(one) for one in plain]
        sizes = _SIZES.pack(*map(len, packed), *map(len, plain))
        rest = sizes + b"".join(packed)
        return MAGIC + xxhash.xxh3_128_digest(rest) + rest


def read_index(path: Path) -> Index:
    """Read an index. Raises SourceError: it cannot be read, or is not as it was written."""
    data = read_whole(str(path), most=MOST_INDEX_NBYTES)
    begin = len(MAGIC) + 16
    rest = data[begin:]
    if (
        data[: len(MAGIC)] != MAGIC
        or len(rest) < _SIZES.size
        or xxhash.xxh3_128_digest(rest) != data[begin - 16 : begin]
    ):
        raise damaged_index(path)
    sizes = _SIZES.unpack_from(rest)
    parts, at = [], _SIZES.size
    try:
        for packed, plain in zip(sizes[:3], sizes[3:], strict=True):
            if plain > MOST_INDEX_NBYTES or zstandard.frame_content_size(rest[at : at + packed]) != plain:
                raise damaged_index(path)
            parts.append(zstandard.ZstdDecompressor().decompress(rest[at : at + packed], max_output_size=plain))
            at += packed
        header = json.loads(parts[0])
        os.fsencode(header["name"])
        files = tuple(map(_filed, header["files"]))
        found = Index(
            header["name"],
            header["is_file"],
            files,
            _table(parts[1], ROW),
            _table(parts[2], RANGE),
            {**header["details"]},
        )
        if not _is_sound(found):
            raise damaged_index(path)
    except (zstandard.ZstdError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_index(path) from error
    return found


def _filed(said: Sequence[Any]) -> Filed:
    """Return a file as a header says it. Raises TypeError, ValueError: it says what no file is."""
    is_one = [*map(type, said)] == [str, str, int, int, int, str]
    if not is_one or "\0" in said[5] or said[2] >> 16 or any(abs(one) >> 63 for one in said[3:5]):
        raise TypeError
    os.fsencode(said[0] + said[5])
    return Filed(*said)


def damaged_index(path: Path) -> DamagedFileError:
    """Return the error about an index that is not as it was written."""
    return DamagedFileError(
        "the index of a checkpoint in this store is damaged",
        path=path,
        expected="what `zckpt pack` wrote",
        advice="copy it again from the store's origin",
    )


def is_inside(name: str) -> bool:
    """Tell whether a name is of something below a directory."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name == "/".join(parts) and not {"..", "/"} & {*parts} and "\0" not in name


def _is_sound(index: Index) -> bool:
    """Tell whether an index says what can be: names that lead nowhere else, rows that make up the files."""
    rows, count = index.rows, len(index.files)
    names = [one.name for one in index.files]
    if not all(map(is_inside, [index.name, *names])) or len({*names}) != count:
        return False
    kinds = [one.kind for one in index.files]
    if not {*kinds} <= {"file", "link", "folder"} or (index.is_file and kinds != ["file"]):
        return False
    if any(one.nbytes < 0 or (one.nbytes and one.kind != "file") for one in index.files):
        return False
    ends_there = {one.name for one in index.files if one.kind != "folder"}
    if any(str(above) in ends_there for name in names for above in PurePosixPath(name).parents):
        return False
    files = rows["file"].astype(np.int64)
    if len(rows) and (files.max() >= count or (np.diff(files) < 0).any()):
        return False
    sums = np.bincount(files, rows["nbytes"].astype(np.float64), count) if count else np.zeros(0)
    ends = rows["first"].astype(np.int64) + rows["count"]
    return bool(
        (sums == np.array([one.nbytes for one in index.files], np.float64)).all()
        and (rows["nbytes"] > 0).all()
        and (rows["nbytes"] <= MOST_NBYTES).all()
        and (rows["op"] <= DIFFERENCE).all()
        and (rows["cast"] <= TO_FLOAT16).all()
        and np.isin(rows["width"], (1, 2, 4, 8)).all()
        and (rows["nbytes"] % np.maximum(rows["width"], 1) == 0).all()
        and (ends <= len(index.ranges)).all()
    )


def _columns(table: Table) -> bytes:
    return b"".join(np.ascontiguousarray(table[name]).tobytes() for name in table.dtype.names or ())


def _table(data: bytes, dtype: np.dtype[np.void]) -> Table:
    count, odd = divmod(len(data), dtype.itemsize)
    if odd:
        raise ValueError("another size")
    table, at = np.empty(count, dtype), 0
    for name in dtype.names or ():
        kind = dtype[name]
        table[name] = np.frombuffer(data, kind, count, at)
        at += count * kind.itemsize
    return table
