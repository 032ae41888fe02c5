"""CRC-32s of byte ranges, put together from those of parts that were read or written in any order. Knows no format.

Source bytes are held against the CRC-32s that their files state, as they pass by:

    record      |......................................|     a range of a file with one CRC-32
    parts        [ part ][ part ]   [ part ][ part ]          what was read, in any order, each with its CRC-32
                                 ^^^                          not read: read too, where it is little of the record

Who reads hands on parts: the copier, and reads into memory. A record that is not read at all is not checked, for
nothing depends on it; one that is read in part is, if the rest of it costs little. Bytes that parts share count once.

A target states CRC-32s of itself. They come from the parts that were written, and only what none of them summed is read
again.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path

from zckpt.codes import CHECKSUM
from zckpt.engine.copy import Piece
from zckpt.engine.plan import FilePlan, Strided
from zckpt.errors import DamagedFileError
from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import Sources

STEP_NBYTES = 1 << 19
"""Read and summed at once: small enough for the cache of a core, large enough that threads seldom wait for a turn."""

REST_NBYTES = 1 << 20
"""The rest of a record is read if it is at most this: reading it takes less than a millisecond."""

REST_SHARE = 4
"""Or if it is at most this part of the record: a partition's padding, a tensor that is left out."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Bytes of a file and the CRC-32 that the file states for them.

    Parameters
    ----------
    name : str
        Of the record or tensor, for messages.
    path : str
    offset, nbytes : int, bytes
    crc32 : int
    always : bool
        Whether it is checked even if nothing of it was read by those who hand on parts.
    """

    name: str
    path: str
    offset: int
    nbytes: int
    crc32: int
    always: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that were read or written, and their CRC-32; None: nobody summed them."""

    path: str
    offset: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class Checked:
    """What was held against checksums.

    Parameters
    ----------
    records : int
    nbytes : int, bytes
        Of these records.
    """

    records: int = 0
    nbytes: int = 0


class WatchedSources(Sources):
    """Sources that keep the parts that were read of the files in `watched`."""

    def __init__(self, watched: frozenset[str]) -> None:
        super().__init__()
        self.watched = watched
        self.parts: list[Part] = []

    def read(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer; errors are those of `read_into`."""
        if path not in self.watched:
            super().read(path, offset, buffer)
            return
        crc = 0
        for at in range(0, len(buffer), STEP_NBYTES):
            view = buffer[at : at + STEP_NBYTES]
            super().read(path, offset + at, view)
            crc = crc32(view, crc)
        self.parts.append(Part(path, offset, len(buffer), crc))

    def touch(self, path: str, offset: int, nbytes: int) -> None:
        """Note that some of these bytes are read, not all of them and not here."""
        if path in self.watched:
            self.parts.append(Part(path, offset, nbytes, None))


@dataclass(frozen=True, slots=True)
class _Task:
    """A record that is to be checked, and the parts of it that are summed, in order and none over another."""

    sum: Sum
    parts: tuple[Part, ...]


class Checks:
    """Puts parts together and says which records are damaged.

    Parameters
    ----------
    sums : iterable of Sum
        No two of a file share a byte.
    """

    def __init__(self, sums: Iterable[Sum] = ()) -> None:
        ordered = sorted(sums, key=lambda one: (one.path, one.offset))
        self._sums = {path: list(some) for path, some in groupby(ordered, key=lambda one: one.path)}
        self._ends = {path: [one.offset + one.nbytes for one in some] for path, some in self._sums.items()}
        self._parts: dict[Sum, list[Part]] = {}
        self._nbytes: dict[Sum, int] = {}
        self._done: set[Sum] = set()
        self._wrong: list[tuple[Sum, int]] = []
        self.watched = frozenset(self._sums)

    def cut(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield pieces, those that are moved as they are cut where a record begins or ends."""
        for piece in pieces:
            source = piece.copies[0].sources[0]
            if not piece.is_bytewise or source.path not in self.watched:
                yield piece
                continue
            end = source.offset + piece.nbytes
            places = [source.offset, *self._bounds(source.path, source.offset, end), end]
            if len(places) == 2:
                yield piece
                continue
            for low, high in pairwise(places):
                yield _bytes_of(piece, low - source.offset, high - low)

    def _bounds(self, path: str, start: int, end: int) -> list[int]:
        """Return where records begin or end between two places in a file."""
        sums = self._sums[path]
        first, found = bisect_right(self._ends[path], start), set[int]()
        while first < len(sums) and sums[first].offset < end:
            found |= {sums[first].offset, sums[first].offset + sums[first].nbytes}
            first += 1
        return sorted(at for at in found if start < at < end)

    def add(self, parts: Iterable[Part]) -> None:
        """Add parts. A record is done with as soon as they tile it."""
        for part in parts:
            one = self._sum_of(part)
            if one is not None and part.nbytes and one not in self._done:
                self._parts.setdefault(one, []).append(part)
                self._nbytes[one] = self._nbytes.get(one, 0) + part.nbytes
                if self._nbytes[one] >= one.nbytes:
                    self._try(one)

    def _sum_of(self, part: Part) -> Sum | None:
        """Return the record in which a part lies; None if it is in none, or in several."""
        sums = self._sums.get(part.path, ())
        at = bisect_right(self._ends.get(part.path, ()), part.offset)
        if at == len(sums) or part.offset < sums[at].offset:
            return None
        return sums[at] if part.offset + part.nbytes <= sums[at].offset + sums[at].nbytes else None

    def _try(self, one: Sum) -> None:
        """Check a record if its parts tile it."""
        tiles = _tiles(self._parts[one])
        if sum(part.nbytes for part in tiles) == one.nbytes:
            self._note(one, crc_of(one.path, one.offset, one.offset + one.nbytes, tiles, Sources()))
        else:
            self._nbytes[one] = 0  # some overlap: not tried again before as many bytes have come

    def _note(self, one: Sum, found: int) -> None:
        self._done.add(one)
        self._parts.pop(one, None)
        self._nbytes.pop(one, None)
        if found != one.crc32:
            self._wrong.append((one, found))

    def finish(self, run: Callable[..., Iterable[list[int]]] = map) -> Checked:
        """Read what is little of a record and was not read, and tell what was checked.

        Parameters
        ----------
        run : callable
            As `map`: runs tasks, in this process or others.

        Raises
        ------
        DamagedFileError
            A record is damaged.
        """
        tasks = []
        for one in (one for some in self._sums.values() for one in some if one not in self._done):
            parts = self._parts.get(one, [])
            rest = one.nbytes - _covered(parts)
            if one.always or (parts and rest <= max(REST_NBYTES, one.nbytes // REST_SHARE)):
                tasks.append(_Task(one, tuple(_tiles(parts))))
        of_files = [list(some) for _, some in groupby(tasks, key=lambda task: task.sum.path)]
        for some, found in zip(of_files, run(_run, of_files), strict=True):
            for task, crc in zip(some, found, strict=True):
                self._note(task.sum, crc)
        if self._wrong:
            raise _damaged(self._wrong)
        return Checked(len(self._done), sum(one.nbytes for one in self._done))


def _bytes_of(piece: Piece, start: int, nbytes: int) -> Piece:
    """Return a part of a piece that is moved as it is, as bytes."""
    copy = piece.copies[0]
    source = copy.sources[0]
    part = replace(
        copy,
        shape=(nbytes,),
        sources=(Strided(source.path, source.offset + start, (1,)),),
        source_dtype="uint8",
        target_dtype="uint8",
        offset=copy.offset + start,
        strides=(1,),
    )
    return Piece(piece.offset + start, nbytes, (part,))


def part_of(piece: Piece, crc: int) -> Part:
    """Return what of a source file a piece is that was moved as it is, given its CRC-32."""
    source = piece.copies[0].sources[0]
    return Part(source.path, source.offset, piece.nbytes, crc)


def _tiles(parts: Iterable[Part]) -> list[Part]:
    """Return parts that are summed, in order, of which none begins before another ends."""
    found: list[Part] = []
    end = 0
    summed = (part for part in parts if part.crc32 is not None and part.nbytes)
    for part in sorted(summed, key=lambda part: (part.offset, -part.nbytes)):
        if not found or part.offset >= end:
            found.append(part)
            end = part.offset + part.nbytes
    return found


def _covered(parts: Iterable[Part]) -> int:
    """Return how many bytes lie in any of the parts."""
    covered = end = 0
    for part in sorted(parts, key=lambda part: part.offset):
        covered += max(part.offset + part.nbytes - max(part.offset, end), 0)
        end = max(end, part.offset + part.nbytes)
    return covered


def _run(tasks: list[_Task]) -> list[int]:
    """Return the CRC-32 of records of one file; may run in another process."""
    with Sources() as sources:
        return [
            crc_of(one.path, one.offset, one.offset + one.nbytes, parts, sources)
            for one, parts in ((task.sum, task.parts) for task in tasks)
        ]


def crc_of(path: str, start: int, end: int, tiles: Iterable[Part], sources: Sources) -> int:
    """Return the CRC-32 of bytes [start, end) of a file.

    Parameters
    ----------
    path : str
    start, end : int, bytes
    tiles : iterable of Part
        Parts of them, in order and none over another. What lies between them is read.
    sources : Sources
    """
    crc, at, buffer = crc32(b""), start, bytearray(0)
    for part in (*tiles, Part(path, end, 0, crc32(b""))):
        while at < part.offset:
            buffer = buffer or bytearray(min(STEP_NBYTES, end - start))
            view = memoryview(buffer)[: part.offset - at]
            sources.read(path, at, view)
            crc = crc32(view, crc)
            at += len(view)
        crc = combine(crc, part.crc32 or 0, part.nbytes)
        at += part.nbytes
    return crc


def patch_checksums(path: Path, one: FilePlan, written: Iterable[Part]) -> None:
    """Compute each checksum that a target states of itself and put it where it belongs.

    Parameters
    ----------
    path : Path
        Under which the file is written.
    one : FilePlan
    written : iterable of Part
        Of the file, as far as they were summed.
    """
    parts = sorted(written, key=attrgetter("offset"))
    starts = [part.offset for part in parts]
    with path.open("r+b") as file, Sources() as sources:
        for checksum in one.file.checksums:
            within = parts[bisect_left(starts, checksum.start) : bisect_left(starts, checksum.end)]
            tiles = _tiles(part for part in within if part.offset + part.nbytes <= checksum.end)
            crc = crc_of(str(path), checksum.start, checksum.end, tiles, sources)
            for offset in checksum.offsets:
                os.pwrite(file.fileno(), crc.to_bytes(4, "little"), offset)


def _damaged(wrong: list[tuple[Sum, int]]) -> DamagedFileError:
    first, found = min(wrong, key=lambda one: (one[0].path, one[0].offset))
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return DamagedFileError(
        f"{first.name}{others}: not as it was written",
        path=first.path,
        expected=f"CRC-32 {first.crc32:08x}",
        found=f"{found:08x}",
        advice="copy the file again from where it came from; `zckpt verify --deep` names all that is damaged, "
        "--no-checksums salvages the rest",
        code=CHECKSUM,
    )
