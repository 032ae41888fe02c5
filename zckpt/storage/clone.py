"""Ranges of a file that become a range of another without being copied, where the file system has such a step.

Both files then share blocks on disk until one of them is written to: XFS, Btrfs, bcachefs, OCFS2, and NFS 4.2 and SMB
where their server does. A range begins and ends at blocks in both files, so the distance of the two offsets must be a
multiple of a block. What no file system would do is not asked for, and who cannot is not asked again.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import lru_cache
from struct import pack

from zckpt.storage.disk import of_libc

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
