"""Bytes between a disk and memory past the page cache (O_DIRECT), for what is larger than memory and read once.

    of a file    |    xxxxxxxxxxxxxxxxxxxxxx   |      any bytes
    read         |xxxxxxxxxxxxxxxxxxxxxxxxxxxxx|      whole blocks, into memory that begins at a page
    written      |    bbxxxxxxxxxxxxxxxxxxbb   |      x: whole blocks, directly; b: what is left of them, buffered

Offsets, sizes and memory are multiples of a page, and so of a device's blocks: open(2). A file system that has no such
reads or writes is read and written through the page cache, and `unavailable` tells so. What is small is, too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from zckpt.storage.distant import found
from zckpt.storage.files import FLAGS, LEAST_DIRECT_NBYTES, NOT_DIRECT, PAGE_NBYTES, aligned, opened_directly, write_all
from zckpt.storage.stand_ins import is_remote


class OpenTarget:
    """A file that is written by one worker, whole blocks of it directly if it is to be.

    `descriptor`: of the file, for what is not written directly; the caller closes it; `nbytes`: moved at once where
    what is written does not lie in memory as in the file.
    """

    def __init__(self, descriptor: int, path: str, nbytes: int, *, is_direct: bool) -> None:
        self.descriptor = descriptor
        self._direct = opened_directly(path, os.O_WRONLY) if is_direct else None
        self._nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        self._moved: memoryview | None = None

    def write(self, data: memoryview, offset: int, phase: int | None = None) -> None:
        """Write bytes at an offset; `phase` is how far behind a page they begin in memory, where that is known.

        Raises OSError: the system cannot.
        """
        low = -offset % PAGE_NBYTES
        high = len(data) - (offset + len(data)) % PAGE_NBYTES
        if self._direct is None or high - low < LEAST_DIRECT_NBYTES:
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
                if error.errno not in NOT_DIRECT:
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
    written = None if directory is None or is_remote(directory) else directory
    for path in (path for path in sources if found(path) is None):
        tried.setdefault(os.path.dirname(path), path)  # noqa: PTH120  # of thousands
    without = [folder or "." for folder, path in sorted(tried.items()) if not _reads(path)]
    if without:
        others = f" and {len(without) - 1} more" if len(without) > 1 else ""
        lines.append(f"{without[0]}{others} is read through the page cache: its file system has no O_DIRECT")
    if not tried and written is None:
        lines.append(f"--direct: {'no source' if directory is None else 'neither source nor target'} is on a disk here")
    if written is not None and not _writes(written):
        lines.append(f"{written} is written through the page cache: its file system has no O_DIRECT")
    return lines


def _reads(path: str) -> bool:
    return _moves(path, FLAGS, lambda descriptor: os.preadv(descriptor, [aligned(PAGE_NBYTES)], 0))


def _writes(directory: Path) -> bool:
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=directory, prefix=".zckpt-sample-") as file:
        return _moves(file.name, os.O_WRONLY, lambda descriptor: os.pwrite(descriptor, aligned(PAGE_NBYTES), 0))
    return False


def _moves(path: str, flags: int, page: Callable[[int], int]) -> bool:
    """Tell whether a page of a file, or what there is of it, is read or written directly."""
    descriptor = opened_directly(path, flags)
    if descriptor is None:
        return False
    try:
        return page(descriptor) >= 0
    except OSError:
        return False
    finally:
        os.close(descriptor)
