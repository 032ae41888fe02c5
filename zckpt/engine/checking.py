"""CRC-32s of records, put together from those of bytes that were read or written in any order. Knows no format.

Source bytes are held against the CRC-32s that their files state, as they pass by:

    record      |......................................|     bytes of a file with one CRC-32
    seen         [ seen ][ seen ]   [ seen ][ seen ]          what was read, in any order, each with its CRC-32
                                 ^^^                          not read: read too, where it is little of the record

The copier and reads into memory report what they have seen. A record that is not read at all is not checked, for
nothing depends on it; one that is read partly is, if the rest of it costs little. Bytes seen twice count once. What
several ranks have seen of a record, one of them puts together.

A target states CRC-32s of itself. They come from what was written, and only what was not summed then is read again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from zckpt.codes import CHECKSUM
from zckpt.engine.plan import Piece, Strided
from zckpt.engine.targets import Checksum, end_of, start_of
from zckpt.errors import DamagedFileError, UsageError, listed
from zckpt.immutable import immutable
from zckpt.state import by_key, nbytes_of
from zckpt.state.boxes import merge, total
from zckpt.state.context import during
from zckpt.storage.crc32 import combine, crc32
from zckpt.storage.files import Sources, write_all

STEP_NBYTES = 1 << 19
"""Read and summed at once: small enough for the cache of a core, large enough that threads seldom wait for a turn."""

REST_NBYTES = 1 << 20
"""The rest of a record is read if it is at most this: reading it takes less than a millisecond."""

REST_FRACTION = 4
"""Or if it is at most this fraction of the record: a partition's padding, a tensor that is left out."""

MERGED = 1 << 4
"""Ranges of a record from which on those end to end are made one, whenever there are twice as many."""


@immutable
class Sum:
    """Bytes of a file and the CRC-32 that the file states for them.

    `name`: of the record or tensor, for messages; `always`: whether it is checked even if nothing of it was seen.
    """

    name: str
    path: str
    offset: int
    nbytes: int
    crc32: int
    always: bool = False


@immutable
class Seen:
    """Bytes of a file that were read or written, and their CRC-32; None: nobody summed them."""

    path: str
    offset: int
    nbytes: int
    crc32: int | None


@immutable
class Overflowed(Seen):
    """Elements that became infinite or no number, of finite ones; `path` is what is written there, in element type."""

    count: int
    dtype: str


@immutable
class Checked:
    """What was held against checksums.

    `nbytes`: of these records; `overflowed`: which values became infinite or no number, and how many; empty if none
    did.
    """

    records: int = 0
    nbytes: int = 0
    overflowed: str = ""


class WatchedSources(Sources):
    """Sources that note what was read of the files in `watched`."""

    def __init__(self, watched: frozenset[str], direct: int = 0) -> None:
        super().__init__(direct)
        self.watched = watched
        self.seen: list[Seen] = []

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
        self.seen.append(Seen(path, offset, len(buffer), crc))

    def touch(self, path: str, offset: int, nbytes: int) -> None:
        """Note that some of these bytes are read, not all of them and not here."""
        if path in self.watched:
            self.seen.append(Seen(path, offset, nbytes, None))


class Checks:
    """Puts together what was seen, and says which records are damaged.

    `sums`: no two of a file share a byte. `allows_overflow`: whether values may be beyond what the target's type holds;
    `find`: returns the checksums of a file by its path, when it is going to be read.
    """

    def __init__(self, sums: Iterable[Sum] = ()) -> None:
        self.sums = by_key((one.path, one) for one in sorted(sums, key=_place))
        self.find: Callable[[str], Iterable[Sum]] | None = None
        self._seen: dict[Sum, list[Seen]] = {}
        self._nbytes: dict[Sum, int] = {}
        self._done: set[Sum] = set()
        self.wrong: list[tuple[Sum, int]] = []
        """Records that are damaged, and their CRC-32."""
        self._overflowed: list[Overflowed] = []
        self.allows_overflow = False
        self.watched = frozenset(self.sums)

    def expect(self, paths: Iterable[str]) -> None:
        """Find the checksums of files that are going to be read. Raises as `find` does."""
        if self.find is None:
            return
        for path in dict.fromkeys(paths):
            if path not in self.sums:
                self.sums[path] = found = sorted(self.find(path), key=_place)
                self.watched |= {path} if found else set()

    def cut(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield pieces, those that are moved as they are cut where a record begins or ends."""
        for piece in pieces:
            copy = piece.copies[0]
            source, end = copy.sources[0], copy.sources[0].offset + piece.nbytes
            is_watched = piece.is_bytewise and source.path in self.watched
            cuts = self._bounds(source.path, source.offset, end) if is_watched else []
            if not cuts:
                yield piece
                continue
            for low, high in pairwise([source.offset, *cuts, end]):
                at = low - source.offset
                moved = replace(
                    copy,
                    shape=(high - low,),
                    sources=(Strided(source.path, low, (1,)),),
                    source_dtype="uint8",
                    target_dtype="uint8",
                    offset=copy.offset + at,
                    strides=(1,),
                )
                yield replace(piece, offset=piece.offset + at, nbytes=high - low, copies=(moved,))

    def _bounds(self, path: str, start: int, end: int) -> list[int]:
        """Return where records begin or end between two offsets in a file."""
        sums = self.sums[path]
        within = sums[bisect_right(sums, start, key=end_of) : bisect_left(sums, end, key=start_of)]
        return sorted({at for one in within for at in (one.offset, end_of(one)) if start < at < end})

    @property
    def count(self) -> int:
        """Records that are done with."""
        return len(self._done)

    def add(self, seen: Iterable[Seen]) -> None:
        """Note what was seen. A record is done with as soon as that tiles it."""
        for each in seen:
            if isinstance(each, Overflowed):
                self._overflowed.append(each)
                continue
            one = self.at(each.path, each.offset)
            if one is None or one in self._done or not 0 < each.nbytes <= end_of(one) - each.offset:
                continue  # in none, or in several
            if each.nbytes == one.nbytes and each.crc32 is not None:
                self._note(one, each.crc32)
            else:
                some = self._seen.setdefault(one, [])
                some.append(each)
                if len(some) >= MERGED and not len(some) & (len(some) - 1):
                    some[:] = _merged(some)
                self._nbytes[one] = self._nbytes.get(one, 0) + each.nbytes
                if self._nbytes[one] >= one.nbytes:
                    tiles = _tiles(some)
                    if nbytes_of(tiles) == one.nbytes:
                        self._note(one, crc_of(one.path, one.offset, end_of(one), tiles, Sources()))
                    else:
                        self._nbytes[one] = 0  # some overlap: not tried again before as many bytes have come

    def at(self, path: str, offset: int) -> Sum | None:
        """Return the record in which a byte lies; None if it is in none."""
        sums = self.sums.get(path, ())
        at = bisect_right(sums, offset, key=end_of)
        return sums[at] if at < len(sums) and sums[at].offset <= offset else None

    def _note(self, one: Sum, found: int) -> None:
        self._done.add(one)
        self._seen.pop(one, None)
        self._nbytes.pop(one, None)
        if found != one.crc32:
            self.wrong.append((one, found))

    def hand_over(self) -> list[tuple[Sum, list[Seen]]]:
        """Return what was seen of records that are not done with, for who puts it together with what others saw."""
        due = {one: self._seen.pop(one, []) for one in self._due()}
        self._nbytes.clear()
        self._done.update(one for one in due if one.always)
        return list(due.items())

    def take_over(self, one: Sum, seen: Iterable[Seen]) -> None:
        """Take what others have seen of a record."""
        if one.always:
            self._done.discard(one)
        if one not in self._done:
            self._seen.setdefault(one, []).extend(seen)

    def _due(self) -> list[Sum]:
        """Return records that are not done with, and are always checked or were seen, in order."""
        always = {one for some in self.sums.values() for one in some if one.always}
        return sorted((always | self._seen.keys()) - self._done, key=_place)

    def finish(self, run: Callable[..., Iterable[list[int]]] = map) -> Checked:
        """Read what is little of a record and was not read, and tell what was checked.

        `run`: as `map`: runs tasks, in this process or others. Raises DamagedFileError: a record is damaged;
        UsageError: values became infinite or no number, and may not.
        """
        tasks = []
        for one in self._due():
            seen = self._seen.get(one, [])
            rest = one.nbytes - total(merge((each.offset, end_of(each)) for each in seen))
            if one.always or (seen and rest <= max(REST_NBYTES, one.nbytes // REST_FRACTION)):
                tasks.append((one, _tiles(seen)))
        of_files = by_key((task[0].path, task) for task in tasks).values()
        for some, found in zip(of_files, run(_run, of_files), strict=True):
            for (one, _), crc in zip(some, found, strict=True):
                self._note(one, crc)
        self.refuse()
        counts: Counter[tuple[str, str]] = Counter()
        for each in sorted(self._overflowed, key=attrgetter("path", "offset")):
            counts[each.path, each.dtype] += each.count
        overflowed = listed([f"{count} values of {name} overflow {dtype}" for (name, dtype), count in counts.items()])
        if overflowed and not self.allows_overflow:
            raise UsageError(
                f"{overflowed}: finite in the source, but too large for the target type",
                advice="use a larger type (float32, bfloat16); --overflow=allow (in a load, verify=False) makes "
                "them infinite",
            )
        return Checked(len(self._done), nbytes_of(self._done), overflowed)

    def refuse(self) -> None:
        """Raise DamagedFileError if a record that is done with is damaged."""
        if not self.wrong:
            return
        first, found = min(self.wrong, key=lambda one: _place(one[0]))
        others = f" and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
        raise DamagedFileError(
            f"{first.name}{others}: changed since it was written",
            path=first.path,
            expected=f"CRC-32 {first.crc32:08x}",
            found=f"{found:08x}",
            advice="copy the file again from its origin; `zckpt verify --deep` lists all damage; --no-checksums "
            "(in a load, verify=False) takes all as it is, damaged bytes too",
            code=CHECKSUM,
        )


_WATCHING: ContextVar[Checks] = ContextVar("watching")


def watching(checks: Checks) -> AbstractContextManager[None]:
    """Let checks get what is read into memory in this context, unless the call that reads has others."""
    return during(_WATCHING, checks)


def watched_by() -> Checks:
    """Return the checks that get what is read; new ones, which nobody asks, where there are none."""
    return _WATCHING.get(None) or Checks()


def _place(one: Sum) -> tuple[str, int, int]:
    return one.path, one.offset, one.nbytes


def _merged(seen: Iterable[Seen]) -> list[Seen]:
    """Return what was seen in order, what is end to end as one, without what is within another."""
    found: list[Seen] = []
    for each in sorted(seen, key=lambda each: (each.offset, -each.nbytes)):
        last = found[-1] if found else Seen(each.path, each.offset, 0, None)
        end, summed = end_of(last), last.crc32 is not None
        if found and end_of(each) <= end and (summed or each.crc32 is None):
            continue
        if found and each.offset == end and summed == (each.crc32 is not None):
            crc = combine(last.crc32 or 0, each.crc32 or 0, each.nbytes) if summed else None
            found[-1] = Seen(last.path, last.offset, last.nbytes + each.nbytes, crc)
        else:
            found.append(each)
    return found


def _tiles(seen: Iterable[Seen]) -> list[Seen]:
    """Return what is summed, in order, of which none begins before another ends."""
    found: list[Seen] = []
    end = 0
    summed = (each for each in seen if each.crc32 is not None and each.nbytes)
    for each in sorted(summed, key=lambda each: (each.offset, -each.nbytes)):
        if not found or each.offset >= end:
            found.append(each)
            end = end_of(each)
    return found


def _run(tasks: list[tuple[Sum, list[Seen]]]) -> list[int]:
    """Return the CRC-32 of records of one file, given what of each is summed; may run in another process."""
    with Sources() as sources:
        return [crc_of(one.path, one.offset, end_of(one), tiles, sources) for one, tiles in tasks]


def crc_of(path: str, start: int, end: int, tiles: Iterable[Seen], sources: Sources) -> int:
    """Return the CRC-32 of bytes [start, end) of a file.

    `tiles`: what is summed of them, in order and none over another. What lies between is read.
    """
    crc, at, buffer = crc32(b""), start, bytearray(0)
    for each in (*tiles, Seen(path, end, 0, crc32(b""))):
        while at < each.offset:
            buffer = buffer or bytearray(min(STEP_NBYTES, end - start))
            view = memoryview(buffer)[: each.offset - at]
            sources.read(path, at, view)
            crc = crc32(view, crc)
            at += len(view)
        crc = combine(crc, each.crc32 or 0, each.nbytes)
        at += each.nbytes
    return crc


def patch_checksums(path: Path, checksums: Iterable[Checksum], written: Iterable[Seen]) -> None:
    """Compute each checksum that a target states of itself and put it where it belongs.

    `path`: under which the file is written; `written`: of the file, as far as they were summed.
    """
    seen = sorted(written, key=start_of)
    with path.open("r+b") as file, Sources() as sources:
        for checksum in checksums:
            low, high = (bisect_left(seen, at, key=start_of) for at in (checksum.start, checksum.end))
            tiles = _tiles(each for each in seen[low:high] if end_of(each) <= checksum.end)
            crc = crc_of(str(path), checksum.start, checksum.end, tiles, sources)
            for offset in checksum.offsets:
                write_all(file.fileno(), memoryview(crc.to_bytes(4, "little")), offset)
