"""Temporary names beside targets: `.NAME.zckpt-partial`, each of one run, which holds a lock on it.

What has such a name already was left by a run that was killed. It is removed, never written into: it may be a link to
something else by now, and another name of its file may be anybody's.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zckpt.errors import TargetError
from zckpt.storage.ownership import kind_of

try:
    import fcntl
except ImportError:  # Windows has no such locks; two runs to one target are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)

_WITHOUT_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What file systems say that are mounted without locks (Lustre's default): as where there are none at all."""

Left = Callable[[int], None]
"""Called with the descriptor of a file that a killed run left, before it is removed."""


def partial_name(target: Path) -> Path:
    """Return the temporary name beside `target`."""
    return target.with_name(f".{target.name}.zckpt-partial")


@contextmanager
def claimed(name: Path, *, directory: bool, left: Left | None = None) -> Iterator[int]:
    """Create an empty file or directory that no other run has, and hold a lock on it; yield its descriptor.

    Parameters
    ----------
    name : Path
    directory : bool
    left : callable, optional
        Told of a file that a killed run left under the name.

    Raises
    ------
    TargetError
        Another run has it, or it is what this user's runs do not leave.
    """
    descriptor = _claim(name, directory=directory, left=left)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory that is there, so that no run takes it for what a killed one left.

    Raises
    ------
    TargetError
        Another run holds one.
    """
    descriptor = os.open(directory, os.O_RDONLY | _DIRECTORY | _NOFOLLOW)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def is_named(descriptor: int, path: Path) -> bool:
    """Tell whether a name still stands for what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _claim(name: Path, *, directory: bool, left: Left | None) -> int:
    """Return a locked descriptor of what `name` stands for.

    Between opening and locking, another run may have renamed its file to the target or removed it; what was opened
    is then no longer what the name stands for, and must not be touched.
    """
    while True:
        try:
            descriptor, is_new = _opened(name, directory=directory)
        except FileNotFoundError as error:
            if name.parent.is_dir():
                continue
            raise TargetError("its directory is gone", path=name) from error
        except OSError as error:
            if isinstance(error, TargetError):
                raise
            raise TargetError("cannot be created", path=name, found=error.strerror) from error
        try:
            _lock(descriptor, name)
            if is_named(descriptor, name):
                if is_new:
                    return descriptor
                if left is not None:
                    left(descriptor)
                _remove_left(name, directory=directory)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(name: Path, *, directory: bool) -> tuple[int, bool]:
    """Return a descriptor, and whether what it is of was made just now."""
    try:
        if directory:
            name.mkdir()
            return os.open(name, os.O_RDONLY | _DIRECTORY | _NOFOLLOW), True
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666), True
    except FileExistsError:
        _check_left(name, directory=directory)
    flags = os.O_RDONLY | _DIRECTORY if directory else os.O_RDWR
    return os.open(name, flags | _NOFOLLOW | _NONBLOCK), False


def _check_left(name: Path, *, directory: bool) -> None:
    """Raise TargetError unless what is there may have been left by a run of this user."""
    found = name.lstat()
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(found.st_mode):
        raise TargetError(
            "cannot be created", path=name, found=f"{kind_of(found.st_mode)} in its place", advice="remove it"
        )
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise TargetError(
            "cannot be created", path=name, found="one of another user's in its place", advice="let them remove it"
        )


def _lock(descriptor: int, name: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise TargetError("another run is writing this target", path=name) from error
        if error.errno not in _WITHOUT_LOCKS:
            raise


def _remove_left(name: Path, *, directory: bool) -> None:
    try:
        if directory:
            shutil.rmtree(name)  # follows no links
        else:
            name.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise TargetError("cannot be removed", path=name, found=error.strerror, advice="remove it") from error
