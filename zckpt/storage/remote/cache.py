"""The bytes of one remote file, in few requests: what is asked for is held in blocks, and what is large passes by.

The first bytes and the last ones are where formats say what is in a file: they are fetched as blocks of `EDGE_NBYTES`,
and a file that is not much larger than both is fetched as a whole. What is asked for in small steps one after the other
is read ahead of, more each time. `fetched` holds what is known to be needed soon, fetched in large ranges at once.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from zckpt.errors import DamagedFileError
from zckpt.state import by_key
from zckpt.state.boxes import merge
from zckpt.storage.recent import Recent

if TYPE_CHECKING:
    from zckpt.storage.remote.stores import Listed, Store

EDGE_NBYTES = 1 << 16
"""Of the beginning and the end of a file, fetched when any of it is asked for."""

SMALL_NBYTES = 2 * EDGE_NBYTES
"""A file of at most this size is fetched as a whole."""

LARGE_NBYTES = 1 << 20
"""What is asked for in one piece of this size is not held: it is an element's, which is read once."""

READ_AHEAD_NBYTES = 1 << 22
"""At most so much is read ahead of small reads that follow each other."""

HELD_NBYTES = 1 << 26
"""Of the blocks of all files together."""

GAP_NBYTES = 1 << 18
"""What lies between two ranges that are needed is fetched too, if it is at most this: a request costs more."""

REQUEST_NBYTES = 1 << 23
"""Fetched by one request; larger ranges are fetched by several at once."""

FETCHERS = 24
"""Requests under way at once."""


@lru_cache(maxsize=1)
def _fetchers(_: int) -> ThreadPoolExecutor:
    """Return the threads of a process that wait for stores."""
    return ThreadPoolExecutor(FETCHERS, thread_name_prefix="zckpt-fetch")


class RemoteFile:
    """A file of a store, of which ranges can be read."""

    def __init__(self, store: Store, listed: Listed, shown: str) -> None:
        self.store = store
        self.listed = listed
        self.nbytes = listed.nbytes
        self.identity = f"{listed.nbytes}-{listed.version}"
        self.shown = shown
        self._fetching = threading.Lock()
        self._lock = threading.Lock()  # of what is held; nobody waits for a store under it
        self._blocks: dict[int, bytes] = {}
        self._starts: list[int] = []
        self._windows: list[tuple[int, memoryview]] = []
        self._next = -1
        self._step = EDGE_NBYTES

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`.

        Raises DamagedFileError: the file ends before the buffer is full; SourceError: they cannot be had, or the file
        is another one by now.
        """
        end = offset + len(buffer)
        if end > self.nbytes:
            raise DamagedFileError(
                "the file ends too early", path=self.shown, expected=f"at least {end} bytes", found=self.nbytes,
                advice="copy it again from its origin",
            )  # fmt: skip
        with self._lock:
            for start, window in self._windows:  # that were fetched ahead
                if start <= offset and end <= start + len(window):
                    buffer[:] = window[offset - start : end - start]
                    return
        if len(buffer) >= LARGE_NBYTES:
            steps = range(0, len(buffer), REQUEST_NBYTES)
            fetch_all([(self, offset + at, buffer[at : at + REQUEST_NBYTES]) for at in steps])
            return
        at = offset
        while at < end:
            start, data = self._block(at, end)
            count = min(end, start + len(data)) - at
            buffer[at - offset : at - offset + count] = memoryview(data)[at - start : at - start + count]
            at += count

    def fetch_once(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by one request."""
        buffer[:] = self.store.fetch(self.listed, offset, len(buffer), self.shown)

    def hold(self, start: int, data: memoryview) -> None:
        """Hold what was fetched ahead, until it is released."""
        with self._lock:
            self._windows.append((start, data))

    def release(self, data: memoryview) -> None:
        """Hold it no longer."""
        with self._lock:
            self._windows = [one for one in self._windows if one[1] is not data]

    # --- blocks

    def _block(self, at: int, end: int) -> tuple[int, bytes]:
        """Return a block with the byte at `at`, and where it starts; it is fetched up to `end` at least."""
        with self._fetching:
            with self._lock:
                index = bisect_right(self._starts, at) - 1
                if index >= 0:
                    start = self._starts[index]
                    data = self._blocks[start]
                    if at < start + len(data):
                        return start, data
                start, stop = self._missing(at, end, index)
            data = self.store.fetch(self.listed, start, stop - start, self.shown)
            with self._lock:
                self._blocks[start] = data
                self._starts.insert(bisect_right(self._starts, start), start)
        _HELD.put((self, start), None, len(data))
        return start, data

    def _missing(self, at: int, end: int, index: int) -> tuple[int, int]:
        """Return which range is fetched for bytes [at, end), of which the first is in no block."""
        low = 0 if index < 0 else self._starts[index] + len(self._blocks[self._starts[index]])
        high = self._starts[index + 1] if index + 1 < len(self._starts) else self.nbytes
        start, stop = at, min(max(end, at + EDGE_NBYTES), high)
        if self.nbytes <= SMALL_NBYTES:
            start, stop = low, high
        elif at < EDGE_NBYTES:
            start, stop = low, min(max(end, EDGE_NBYTES), high)
        elif at >= self.nbytes - EDGE_NBYTES:
            start, stop = max(low, self.nbytes - EDGE_NBYTES), high
        elif at == self._next:
            self._step = min(2 * self._step, READ_AHEAD_NBYTES)
            stop = min(max(end, at + self._step), high)
        self._next = stop
        return start, stop

    def drop(self, start: int) -> None:
        """Hold a block no longer."""
        with self._lock:
            if self._blocks.pop(start, None) is not None:
                self._starts.remove(start)

    def close(self) -> None:
        """Hold nothing any longer."""
        for start in list(self._blocks):
            _HELD.pop((self, start))
        with self._lock:
            self._blocks.clear()
            self._starts.clear()
            self._windows.clear()


_HELD: Recent[tuple[RemoteFile, int], None] = Recent(HELD_NBYTES, lambda block, _: block[0].drop(block[1]))
"""Which blocks are held, of all files."""


def fetch_all(requests: Sequence[tuple[RemoteFile, int, memoryview]]) -> None:
    """Make requests for ranges of files, several at once."""
    if len(requests) == 1:
        file, offset, view = requests[0]
        file.fetch_once(offset, view)
    else:
        list(_fetchers(os.getpid()).map(lambda one: one[0].fetch_once(*one[1:]), requests))


@contextmanager
def fetched(ranges: Iterable[tuple[RemoteFile, int, int]]) -> Iterator[None]:
    """Fetch ranges of files at once, near ones together, and hold them while the context lasts."""
    windows = [(file, start, memoryview(bytearray(end - start))) for file, start, end in _coalesced(ranges)]
    fetch_all([
        (file, start + at, data[at : at + REQUEST_NBYTES])
        for file, start, data in windows
        for at in range(0, len(data), REQUEST_NBYTES)
    ])  # fmt: skip
    for file, start, data in windows:
        file.hold(start, data)
    try:
        yield
    finally:
        for file, _, data in windows:
            file.release(data)


def _coalesced(ranges: Iterable[tuple[RemoteFile, int, int]]) -> Iterator[tuple[RemoteFile, int, int]]:
    """Yield what is fetched as (file, start, end): within each file, over gaps that cost less than a request."""
    of_files = by_key(
        (file, (offset, offset + nbytes + GAP_NBYTES))
        for file, offset, nbytes in ranges
        if nbytes > 0 and offset + nbytes <= file.nbytes  # what is outside is for the read itself to say
    )
    for file, every in of_files.items():
        yield from ((file, low, high - GAP_NBYTES) for low, high in merge(every))
