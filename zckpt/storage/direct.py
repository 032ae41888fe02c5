"""Bytes between a disk and memory past the page cache (O_DIRECT), for what is larger than memory and read once.

    of a file    |    xxxxxxxxxxxxxxxxxxxxxx   |      any bytes
    read         |xxxxxxxxxxxxxxxxxxxxxxxxxxxxx|      whole blocks, into memory that begins at a page
    written      |    bbxxxxxxxxxxxxxxxxxxbb   |      x: whole blocks, directly; b: what is left of them, buffered

Offsets, sizes and memory are multiples of a page, and so of a device's blocks: open(2). A file system that has no such
reads or writes is read and written through the page cache, and `unavailable` tells so. What is small is, too.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zckpt.errors import SourceError
from zckpt.storage.distant import found, is_remote
from zckpt.storage.files import FLAGS, OPEN_SOURCES, PAGE_NBYTES, too_short, write_all

LEAST_NBYTES = 1 << 16
"""Of what is read or written directly: each waits for the device, and takes whole blocks of it."""

_NONE = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What is said where there is no such thing, when a file is opened, read or written."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned(nbytes: int) -> memoryview:
    """Return memory that begins at a page: so many bytes, up to a whole page."""
    return memoryview(mmap.mmap(-1, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def opened(path: str, flags: int) -> int | None:
    """Open a file that was opened before, for direct reads or writes; None: that cannot be."""
    if not _O_DIRECT or found(path) is not None:
        return None
    try:
        return os.open(path, flags | _O_DIRECT)
    except OSError:  # whatever else is wrong, the other descriptor of it says
        return None


class DirectReads:
    """Reads ranges of files directly, where that can be; for one worker. `nbytes`: read at once, at most."""

    def __init__(self, nbytes: int) -> None:
        self._buffer: memoryview | None = None
        self.nbytes = nbytes
        self._descriptors: dict[str, int | None] = {}

    def room(self, nbytes: int) -> memoryview:
        """Return memory for windows of so many bytes, wherever they begin."""
        return aligned(nbytes + PAGE_NBYTES)

    def window(self, path: str, offset: int, nbytes: int, room: memoryview | None = None) -> memoryview | None:
        """Return bytes of a file in `room`; or at most `self.nbytes`, in memory that the next such call uses again.

        They begin as far behind a page as they do in the file. None: they are to be read otherwise. `room` is what the
        method of this name returns. Raises DamagedFileError: the file ends before the last of them; SourceError: it
        cannot be read.
        """
        skipped = offset % PAGE_NBYTES
        descriptor = self._descriptor(path) if nbytes >= LEAST_NBYTES else None
        if descriptor is None:
            return None
        if room is None:
            self._buffer = room = self._buffer or aligned(self.nbytes + PAGE_NBYTES)
        needed, filled = skipped + nbytes, 0
        view = room[: -(-needed // PAGE_NBYTES) * PAGE_NBYTES]
        while filled < needed:
            try:
                count = os.preadv(descriptor, [view[filled:]], offset - skipped + filled)
            except OSError as error:
                if error.errno not in _NONE:
                    raise SourceError("cannot be read", path=path, found=error.strerror) from error
                self._forget(path, None)
                return None
            if filled + count < needed and (count == 0 or (filled + count) % PAGE_NBYTES):
                raise too_short(path, offset + nbytes, offset - skipped + filled + count)
            filled += count
        return view[skipped:needed]

    def _descriptor(self, path: str) -> int | None:
        if path not in self._descriptors:
            if len(self._descriptors) >= OPEN_SOURCES:
                self._forget(next(iter(self._descriptors)))
            self._descriptors[path] = opened(path, FLAGS)
        return self._descriptors[path]

    def _forget(self, path: str, *known: None) -> None:
        """Close a file; with None, note that it is not to be opened again."""
        descriptor = self._descriptors.pop(path)
        if descriptor is not None:
            os.close(descriptor)
        if known:
            self._descriptors[path] = None

    def close(self) -> None:
        """Close all files."""
        for path in list(self._descriptors):
            self._forget(path)


class DirectTarget:
    """A file that is written, whole blocks of it directly, by one worker.

    `descriptor`: of the file, for what is not written directly; the caller closes it; `nbytes`: moved at once where
    what is written does not lie in memory as in the file.
    """

    def __init__(self, descriptor: int, path: str, nbytes: int) -> None:
        self.descriptor = descriptor
        self._direct = opened(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        self._nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        self._moved: memoryview | None = None

    def write(self, data: memoryview, offset: int, phase: int | None = None) -> None:
        """Write bytes at an offset; `phase` is how far behind a page they begin in memory, where that is known.

        Raises OSError: the system cannot.
        """
        low = -offset % PAGE_NBYTES
        high = len(data) - (offset + len(data)) % PAGE_NBYTES
        if self._direct is None or high - low < LEAST_NBYTES:
            write_all(self.descriptor, data, offset)
            return
        lies_well = phase is not None and (phase + low) % PAGE_NBYTES == 0
        write_all(self.descriptor, data[:low], offset)
        for at in range(low, high, self._nbytes):
            self._write_blocks(data[at : min(at + self._nbytes, high)], offset + at, lies_well=lies_well)
        write_all(self.descriptor, data[high:], offset + high)

    def _write_blocks(self, data: memoryview, offset: int, *, lies_well: bool) -> None:
        if not lies_well:
            self._moved = aligned(self._nbytes) if self._moved is None else self._moved
            self._moved[: len(data)] = data
            data = self._moved[: len(data)]
        done = 0
        while self._direct is not None and done < len(data) and done % PAGE_NBYTES == 0:
            try:
                done += os.pwrite(self._direct, data[done:], offset + done)
            except OSError as error:
                if error.errno not in _NONE:
                    raise
                self.close()
        write_all(self.descriptor, data[done:], offset + done)

    def close(self) -> None:
        """Close what was opened here."""
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def unavailable(sources: Iterable[str], directory: Path | None = None) -> list[str]:
    """Return a line for reads, and one for writes, that go through the page cache all the same.

    What is in a store does not: another line says so, if nothing is on a disk. `sources`: files that are read; of each
    directory one is tried; `directory`: in which a target is to be made; there is such a directory. None: nothing is
    written.
    """
    lines = []
    tried: dict[str, str] = {}
    is_here = is_written = directory is not None and not is_remote(directory)
    for path in sources:
        if found(path) is not None:
            continue
        is_here = True
        tried.setdefault(os.path.dirname(path), path)  # noqa: PTH120  # of thousands
    without = [folder or "." for folder, path in sorted(tried.items()) if not _reads(path)]
    if without:
        others = f" and {len(without) - 1} more" if len(without) > 1 else ""
        lines.append(f"{without[0]}{others} is read through the page cache: its file system has no O_DIRECT")
    if not is_here:
        lines.append(f"--direct: {'no source' if directory is None else 'neither source nor target'} is on a disk here")
    if directory is not None and is_written and not _writes(directory):
        lines.append(f"{directory} is written through the page cache: its file system has no O_DIRECT")
    return lines


def _reads(path: str) -> bool:
    descriptor = opened(path, FLAGS)
    try:
        return descriptor is not None and os.preadv(descriptor, [aligned(PAGE_NBYTES)], 0) >= 0
    except OSError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _writes(directory: Path) -> bool:
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=directory, prefix=".zckpt-sample-") as file:
        descriptor = opened(file.name, os.O_WRONLY)
        if descriptor is not None:
            try:
                return os.pwrite(descriptor, aligned(PAGE_NBYTES), 0) == PAGE_NBYTES
            finally:
                os.close(descriptor)
    return False
