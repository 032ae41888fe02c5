"""What the operating system does to names and bytes on a disk, and what can be done where it does not.

Names that change in one step: `renameat2` of Linux. Writeback that begins early, and waiting for its end. What writing
needs is loaded when something is written: everything that only reads checkpoints starts without.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

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
