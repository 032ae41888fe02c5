"""What the operating system does to names and bytes on a disk, and what can be done where it does not.

Names that change in one step: `renameat2` of Linux. Writeback that begins early, and waiting for its end. What writing
needs is loaded when something is written: everything that only reads checkpoints starts without.

Where the file system can, a range of a file becomes a range of another without being copied: both files share blocks
on disk until one of them is written to. XFS, Btrfs, bcachefs, OCFS2, and NFS 4.2 and SMB
where their server does. A range begins and ends at blocks in both files, so the distance of the two offsets must be a
multiple of a block. What no file system would do is not asked for, and who cannot is not asked again.

What is larger than memory and read once can go past the page cache (O_DIRECT).

    of a file    |    xxxxxxxxxxxxxxxxxxxxxx   |      any bytes
    read         |xxxxxxxxxxxxxxxxxxxxxxxxxxxxx|      whole blocks, into memory that begins at a page
    written      |    bbxxxxxxxxxxxxxxxxxxbb   |      x: whole blocks, directly; b: what is left of them, buffered

Offsets, sizes and memory are multiples of a page, and so of a device's blocks: open(2). A file system that has no such
reads or writes is read and written through the page cache, and `unavailable` tells so. What is small is, too.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from struct import pack

from zckpt.storage.files import FLAGS, LEAST_DIRECT_NBYTES, NOT_DIRECT, PAGE_NBYTES, aligned, opened_directly, write_all
from zckpt.storage.stand_ins import found, is_remote

SYNCED_AT_ONCE = 16
"""Threads that wait for the disk at the end; a universal checkpoint is thousands of small files."""

_SYNC_FILE_RANGE_WRITE = 2
"""Start writing pages that are dirty and not being written yet; from linux/fs.h."""

_HERE = -100
"""AT_FDCWD: a relative path begins at the working directory; from linux/fcntl.h."""

_NOREPLACE, _EXCHANGE = 1, 2
"""From linux/fs.h."""

_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM})
"""What a kernel, a file system (EINVAL: NFS and others) or a container says that does not know of it."""


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the operating system begin to write a range of a file to disk, without waiting; a hint, and Linux only.

    A sync at the end then has little left to wait for: data goes to disk while more is being copied.
    """
    function = of_libc("sync_file_range", "iqqI")
    if function is not None:
        function(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=8)
def of_libc(name: str, kinds: str) -> Callable[..., int] | None:
    """Return a function of Linux's C library, whose arguments are of these types of ctypes; None: there is none."""
    if sys.platform != "linux":
        return None
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        types = {"i": ctypes.c_int, "q": ctypes.c_int64, "I": ctypes.c_uint, "s": ctypes.c_char_p, "p": ctypes.c_void_p}
        function.argtypes = [types[kind] for kind in kinds]
    return function


def sync_all(paths: Sequence[Path]) -> None:
    """Wait until files and directories are on disk; many small ones at once, which a journal takes together."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(SYNCED_AT_ONCE, max(len(paths), 1)), thread_name_prefix="zckpt-sync") as pool:
        for _ in pool.map(sync, paths):  # where one fails, those that wait are cancelled
            pass


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Let two names that exist stand for each other's file or directory, in one step.

    Returns
    -------
    bool
        False: the file system cannot; nothing has changed.

    Raises
    ------
    OSError
        It can, and it went wrong.
    """
    return _renamed(one, other, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename; raise FileExistsError, whatever else happens at the same time, if the target is there.

    Where a file system cannot promise that, the target is looked for just before.
    """
    if _renamed(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def _renamed(source: Path, target: Path, flags: int) -> bool:
    function = of_libc("renameat2", "isisI")
    if function is None:
        return False
    import ctypes

    if function(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


BLOCK_NBYTES = 1 << 12
"""Of the file systems named above, unless they were made otherwise: they refuse then, and the bytes are copied."""

LEAST_NBYTES = 1 << 16
"""Of what is cloned: less is copied as fast, and each range is something that a file system must keep account of."""

_FICLONERANGE = 0x4020940D
"""From linux/fs.h: _IOW(0x94, 13, struct file_clone_range), as most architectures number it."""

_NEVER = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.ENOTTY, errno.ENOSYS, errno.EPERM})
"""What is said of two file systems; any other answer is about the range."""

_refused: set[tuple[int, int]] = set()
"""Devices, of a source and a target, between which nothing is cloned."""


_CLONING = frozenset({0x58465342, 0x9123683E, 0xCA451A4E, 0x7461636F, 0x6969, 0xFE534D42})
"""XFS, Btrfs, bcachefs, OCFS2, NFS and SMB, as statfs names them; from linux/magic.h."""


def may_clone(path: str) -> bool:
    """Tell whether a file lies on a file system of a kind that clones."""
    return _clones(os.path.dirname(path) or ".")  # noqa: PTH120  # asked of every tensor


@lru_cache(maxsize=1 << 10)
def _clones(folder: str) -> bool:
    function = of_libc("statfs", "sp")
    if function is None:
        return False
    import ctypes

    found = (ctypes.c_long * 64)()  # a struct statfs, which begins with the number of its kind, and then some
    return function(os.fsencode(folder), ctypes.byref(found)) == 0 and found[0] & 0xFFFFFFFF in _CLONING


def cloneable(offset: int, target_offset: int, nbytes: int) -> tuple[int, int]:
    """Return which of `nbytes` bytes can be cloned from one offset to another, first and end; none: (0, 0)."""
    low = -offset % BLOCK_NBYTES
    high = nbytes - (offset + nbytes) % BLOCK_NBYTES
    if (offset - target_offset) % BLOCK_NBYTES or high - low < LEAST_NBYTES:
        return 0, 0
    return low, high


def clone(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> tuple[int, int]:
    """Clone what can be of a range of an open file.

    Parameters
    ----------
    source, target : int
        Descriptors.
    offset, target_offset, nbytes : int, bytes

    Returns
    -------
    tuple of int, bytes
        First and end of what is in the target now, counted from the range's beginning: the rest is to be copied. Equal
        where nothing was cloned.
    """
    low, high = cloneable(offset, target_offset, nbytes)
    if low == high or sys.platform != "linux":
        return 0, 0
    devices = os.fstat(source).st_dev, os.fstat(target).st_dev
    if devices in _refused:
        return 0, 0
    import fcntl

    try:
        fcntl.ioctl(target, _FICLONERANGE, pack("qQQQ", source, offset + low, high - low, target_offset + low))
    except OSError as error:
        if error.errno in _NEVER:
            _refused.add(devices)
        return 0, 0
    return low, high


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
