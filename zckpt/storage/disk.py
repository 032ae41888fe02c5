"""What makes bytes lie on the disk: writeback that begins early, and waiting for its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

SYNCED_AT_ONCE = 16
"""Threads that wait for the disk at the end; a universal checkpoint is thousands of small files."""

_SYNC_FILE_RANGE_WRITE = 2
"""Start writing pages that are dirty and not being written yet; from linux/fs.h."""


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the operating system begin to write a range of a file to disk, without waiting; a hint, and Linux only.

    A sync at the end then has little left to wait for: data goes to disk while more is being copied.
    """
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def sync_all(paths: Sequence[Path]) -> None:
    """Wait until files and directories are on disk; many small ones at once, which a journal takes together."""
    with ThreadPoolExecutor(min(SYNCED_AT_ONCE, max(len(paths), 1)), thread_name_prefix="zckpt-sync") as pool:
        for done in [pool.submit(sync, path) for path in paths]:
            done.result()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
