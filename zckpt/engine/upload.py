"""A plan run into a store: files are made as parts, in memory, and sent; none of them is on a disk here.

    parts       a file cut into ranges of one size, each with the pieces and literals that reach into it
    made        in memory, several at once; a piece that reaches into two parts is made for both
    sent        in any order, or, where a store takes a file from its beginning to its end only, in order

A checksum that a file states of itself is known when all it is of was made. A part that states one waits in memory for
it; where parts go in order, such a file is made twice, the first time for its checksums.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Protocol, runtime_checkable

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter, reporting
from zckpt.engine.checking import Checked, Checks, Seen, WatchedSources, crc_of
from zckpt.engine.copy import elements, overflowed, pieces, ranges_read
from zckpt.engine.plan import FilePlan, Piece, Plan
from zckpt.engine.targets import Checksum, Literal, end_of, start_of
from zckpt.engine.together import Pack
from zckpt.engine.workers import Portions, Workers
from zckpt.engine.write import DIRECT_NBYTES
from zckpt.immutable import immutable
from zckpt.storage import stand_ins
from zckpt.storage.crc32 import crc32
from zckpt.storage.files import Sources
from zckpt.storage.memory import Room, buffers_within

LEAST_PART_NBYTES = 5 << 20
"""What S3 takes as the smallest part but the last."""

MOST_PART_NBYTES = 64 << 20

MOST_PARTS = 9_000
"""Of one file; S3 takes 10,000."""

PIECE_NBYTES = 1 << 19
"""Of what is put together in memory: what is made for two parts is little."""

SENDERS = range(2, 17)
"""Fewest and most parts on their way at once."""

LEAST_MEMORY_NBYTES = 2 * SENDERS[0] * LEAST_PART_NBYTES
"""Of parts together, whatever they may take: each is there twice while it is sent."""

Item = Piece | Pack | Literal


class PartSink(Protocol):
    """Where the parts of a file go, in any order; called from several threads, once for each part."""

    def copy(self, number: int, path: str, offset: int, nbytes: int) -> bool:
        """Let the store make a part of bytes that a file in it has; return whether it has done so."""

    @property
    def part_nbytes(self) -> int | None:
        """Bytes of a part, where some of the file were sent before; None: any."""

    def send(self, number: int, data: bytearray) -> None:
        """Send a part, of which the first has the number 0."""


@runtime_checkable
class StreamSink(Protocol):
    """Where a file goes that is taken from its beginning to its end only; called once."""

    def write(self, nbytes: int, parts: Callable[[], Iterator[bytearray]]) -> None:
        """Send all parts in order; `parts` makes them, again if it is called again."""


Sink = PartSink | StreamSink


@immutable
class Part:
    """Bytes [offset, offset + nbytes) of a file, and what reaches into them."""

    number: int
    offset: int
    nbytes: int
    items: tuple[Item, ...]

    @property
    def moved_nbytes(self) -> int:
        """Bytes of tensors that begin in it."""
        return sum(item.moved_nbytes for item in self.items if item.offset >= self.offset)


def upload(
    plan: Plan,
    sinks: Sequence[Sink | None],
    *,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    checks: Checks | None = None,
    direct: bool = False,
) -> Checked:
    """Send the files of a plan.

    Parameters
    ----------
    plan : Plan
    sinks : sequence of Sink or None
        One for each file of the plan, in its order; None: it is sent otherwise.
    memory : int, bytes
        Upper bound of what parts take together, but for `LEAST_MEMORY_NBYTES` and for one part of a file of 9000.
    reporter : Reporter, optional
    checks : Checks, optional
        Hold what is copied against the checksums of the sources.
    direct : bool
        Read long ranges of files here past the page cache, where the file systems can.

    Raises
    ------
    DamagedFileError
        A source file ends too early, or is not what its checksum says.
    TargetError
        What a sink raises.
    """
    checks = checks or Checks()
    memory = buffers_within(memory)
    step = min(max(memory // 12, LEAST_PART_NBYTES), MOST_PART_NBYTES)
    count = min(max(memory // (2 * step + DIRECT_NBYTES * direct), SENDERS[0]), SENDERS[-1])
    workers = Workers(range(count, count + 1), here=True, at_once=count)
    with reporting(reporter, plan.copy_nbytes) as progress, workers:
        how = _How(checks, DIRECT_NBYTES if direct else 0, Room(max(memory, LEAST_MEMORY_NBYTES)), workers)

        def work() -> Iterator[Work]:
            for one, sink in zip(plan.files, sinks, strict=True):
                size = max(step, -(-one.file.nbytes // MOST_PARTS))
                if isinstance(sink, StreamSink):
                    yield partial(_send_file, one, sink, size, how)
                elif sink is not None:
                    before = sink.part_nbytes
                    if before is not None and LEAST_PART_NBYTES <= before <= max(size, MOST_PART_NBYTES):
                        size = before
                    held = Held(one.file.checksums, size)
                    for part in parts(one, size, checks):
                        yield partial(_send_part, part, held, sink, how)

        for _, (read, nbytes) in workers.run(lambda one: one(), work(), Portions()):
            checks.add(read)
            progress.advance(nbytes)
        return checks.finish(workers.map)


@immutable
class _How:
    """How parts are made: against which checksums, with direct reads of how many bytes or 0, within which memory."""

    checks: Checks
    direct: int
    room: Room
    workers: Workers

    def taken(self, nbytes: int) -> AbstractContextManager[None]:
        """Take the memory of a part: it is there twice while it is sent."""
        return self.room.taken(2 * nbytes + self.direct)


class _EndedError(BaseException):
    """Another file has failed, or the user: nobody waits for what is raised, and nobody is to try again."""


Work = Callable[[], tuple[list[Seen], int]]


def whole(one: FilePlan) -> bytes:
    """Return a file that is small."""
    (part,) = parts(one, max(one.file.nbytes, 1), Checks())
    held = Held(one.file.checksums, max(one.file.nbytes, 1))
    ((_, data),) = held.add(part, _made(part, Checks())[0])
    return bytes(data)


def parts(one: FilePlan, step: int, checks: Checks) -> Iterator[Part]:
    """Cut a file into parts of `step` bytes; an empty file is one empty part."""
    fills = sorted(one.fills, key=lambda fill: fill.hole.offset)
    of_fills = (
        piece
        for fill in fills
        for piece in sorted(checks.cut(pieces(fill, PIECE_NBYTES, LEAST_PART_NBYTES)), key=start_of)
    )
    literals = iter(sorted(one.file.literals, key=start_of))
    items: Iterator[Item] = heapq.merge(literals, of_fills, *(pack.pieces() for pack in one.file.packs), key=start_of)
    following = next(items, None)
    within: list[Item] = []
    for number, low in enumerate(range(0, max(one.file.nbytes, 1), step)):
        high = min(low + step, one.file.nbytes)
        within = [item for item in within if end_of(item) > low]
        while following is not None and following.offset < high:
            within.append(following)
            following = next(items, None)
        yield Part(number, low, high - low, tuple(within))


def _made(part: Part, checks: Checks, direct: int = 0) -> tuple[bytearray, list[Seen]]:
    """Return the bytes of a part, what nothing reaches being zero; and what was read of watched files."""
    buffer = bytearray(part.nbytes)
    view = memoryview(buffer)
    some = [item for item in part.items if isinstance(item, Piece)]
    with WatchedSources(checks.watched, direct) as sources, stand_ins.ahead(ranges_read(some)):
        for item in part.items:
            low, high = max(item.offset, part.offset), min(end_of(item), end_of(part))
            into = view[low - part.offset : high - part.offset]
            if isinstance(item, Piece) and item.is_bytewise:
                source = item.copies[0].sources[0]
                sources.read(source.path, source.offset + low - item.offset, into)
                continue
            if isinstance(item, Literal):
                data = memoryview(item.data)
            elif isinstance(item, Pack):
                data = item.read(sources)
            else:
                data = elements(item, sources)
                if item.offset >= part.offset:  # one that reaches into two parts is made twice
                    sources.seen += overflowed(item, data, sources)
            into[:] = data[low - item.offset : high - item.offset]
    return buffer, sources.seen


def passing(part: Part, checks: Checks) -> tuple[str, int, int] | None:
    """Return which range of a file elsewhere a part is, unchanged: path, offset, bytes; None: of none.

    Bytes that are to be held against a checksum have to come by here.
    """
    if part.nbytes < LEAST_PART_NBYTES:
        return None
    begins, at = set[tuple[str, int]](), part.offset
    for item in part.items:
        if not isinstance(item, Piece) or not item.is_bytewise or item.offset > at:
            return None
        source = item.copies[0].sources[0]
        begins.add((source.path, source.offset - item.offset))  # of the file there, at the beginning of that here
        at = max(at, end_of(item))
    path, start = next(iter(begins), ("", 0))
    if len(begins) != 1 or at < end_of(part) or path in checks.watched or stand_ins.found(path) is None:
        return None
    return path, start + part.offset, part.nbytes


def _send_part(part: Part, held: Held, sink: PartSink, how: _How) -> tuple[list[Seen], int]:
    whole_range = None if held.checksums else passing(part, how.checks)  # or its bytes have to be seen
    if whole_range is not None and sink.copy(part.number, *whole_range):
        return [], part.moved_nbytes
    with how.taken(part.nbytes):
        data, seen = _made(part, how.checks, how.direct)
        for number, ready in held.add(part, data):
            sink.send(number, ready)
    return seen, part.moved_nbytes


def _send_file(one: FilePlan, sink: StreamSink, step: int, how: _How) -> tuple[list[Seen], int]:
    every: list[Seen] = []
    moved = 0
    held = Held(one.file.checksums, step)

    def made() -> Iterator[bytearray]:
        nonlocal moved
        every.clear()
        moved = 0
        for part in parts(one, step, how.checks):
            if how.workers.is_ending:  # all of the file is not waited for
                raise _EndedError
            data, seen = _made(part, how.checks, how.direct)
            every.extend(seen)
            moved += part.moved_nbytes
            held.patch(part.number, data)
            yield data

    with how.taken(min(step, one.file.nbytes)):
        for part in parts(one, step, how.checks) if held.checksums else ():
            held.sum(part, _made(part, how.checks, how.direct)[0])
        sink.write(one.file.nbytes, made)
    return every, moved


class Held:
    """The parts of one file that wait for checksums which they state; the sums of the others' bytes.

    `checksums`: None is of bytes that another one is of, or that state one; `step`: of a part.
    """

    def __init__(self, checksums: Sequence[Checksum], step: int) -> None:
        self._lock = threading.Lock()
        self._step = step
        self.checksums = sorted(checksums, key=attrgetter("start"))
        self._missing = [one.end - one.start for one in self.checksums]
        self._sums: list[list[Seen]] = [[] for _ in self.checksums]
        self._waiting = Counter(number for one in self.checksums for number in self._places(one))
        self._patches: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._data: dict[int, bytearray] = {}
        for index, one in enumerate(self.checksums):
            if one.start == one.end:
                self._state(index)

    def _places(self, one: Checksum) -> set[int]:
        return {at // self._step for offset in one.offsets for at in (offset, offset + 3)}

    def sum(self, part: Part, data: bytearray) -> None:
        """Note the bytes of a part."""
        if not self.checksums:
            return
        view, low, high = memoryview(data), part.offset, end_of(part)
        sums = []
        first = bisect_right(self.checksums, low, key=attrgetter("end"))
        for index in range(first, bisect_left(self.checksums, high, key=attrgetter("start"))):
            start, end = max(self.checksums[index].start, low), min(self.checksums[index].end, high)
            sums.append((index, Seen("", start, end - start, crc32(view[start - low : end - low]))))
        with self._lock:
            for index, seen in sums:
                self._sums[index].append(seen)
                self._missing[index] -= seen.nbytes
                if not self._missing[index]:
                    self._state(index)

    def _state(self, index: int) -> None:
        """Put a checksum where it belongs."""
        one = self.checksums[index]
        crc = crc_of("", one.start, one.end, sorted(self._sums[index], key=start_of), Sources())
        self._sums[index].clear()
        for offset in one.offsets:
            for at, value in enumerate(crc.to_bytes(4, "little"), offset):
                self._patches[at // self._step].append((at % self._step, value))
        self._waiting.subtract(self._places(one))

    def patch(self, number: int, data: bytearray) -> None:
        """State the checksums that belong into a part."""
        for at, value in self._patches.get(number, ()):
            data[at] = value

    def add(self, part: Part, data: bytearray) -> list[tuple[int, bytearray]]:
        """Take a part; return those that nothing is missing in any more."""
        if not self.checksums:
            return [(part.number, data)]
        self.sum(part, data)
        with self._lock:
            self._data[part.number] = data
            ready = [number for number in self._data if not self._waiting[number]]
            found = [(number, self._data.pop(number)) for number in ready]
        for number, one in found:
            self.patch(number, one)
        return found
