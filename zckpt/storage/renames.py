"""Names that change in one step: `renameat2` of Linux, and what can be done where a file system does not have it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

_HERE = -100
"""AT_FDCWD: a relative path begins at the working directory; from linux/fcntl.h."""

_NOREPLACE, _EXCHANGE = 1, 2
"""From linux/fs.h."""

_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM})
"""What a kernel, a file system (EINVAL: NFS and others) or a container says that does not know of it."""


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
    function = _renameat2()
    if function is None:
        return False
    if function(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


@lru_cache(maxsize=1)
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function
