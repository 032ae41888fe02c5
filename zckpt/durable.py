"""Targets that appear whole or not at all.

A target is written under a temporary name beside its own, `.NAME.zckpt-partial`, synced to disk and renamed.
A run that is killed leaves that name behind, never the target's; the next run to the same target takes it over.
The partial name is locked while a run writes, so that two runs to one target do not write over each other.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

from zckpt.errors import TargetError, TargetExistsError

try:
    import fcntl
except ImportError:  # Windows has no such locks; two runs to one target are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

SYNCED_AT_ONCE = 16
"""Threads that wait for the disk at the end; a universal checkpoint is thousands of small files."""

_SYNC_FILE_RANGE_WRITE = 2
"""Start writing pages that are dirty and not being written yet; from linux/fs.h."""


def partial_name(target: Path) -> Path:
    """Return the temporary name beside `target`."""
    return target.with_name(f".{target.name}.zckpt-partial")


def _old_name(target: Path) -> Path:
    """Return the name under which a directory waits while its successor is renamed into place."""
    return target.with_name(f".{target.name}.zckpt-old")


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise unless `target` may be written.

    Raises
    ------
    TargetExistsError
        It is there, and `overwrite` is false.
    TargetError
        It has no name of its own, or its parent is not a directory that exists.
    """
    if target.name in ("", ".."):
        raise TargetError("cannot be written", path=target, expected="a name", advice="name a file or directory in it")
    if not target.parent.is_dir():
        raise TargetError(
            "cannot be written", path=target, expected=f"a directory {target.parent}", advice="create it first"
        )
    if not overwrite and os.path.lexists(target):
        raise TargetExistsError("exists already", path=target, advice="choose another name or give --overwrite")


def check_space(directory: Path, nbytes: int) -> None:
    """Raise TargetError unless the file system of `directory` has room for `nbytes` bytes."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise TargetError(
            "not enough space",
            path=directory,
            expected=f"{nbytes} bytes free",
            found=free,
            advice="free some or write elsewhere",
        )


@contextmanager
def written_files(targets: Sequence[Path], *, overwrite: bool) -> Iterator[list[Path]]:
    """Yield temporary names for files; on success sync and rename them in order, the last one last.

    On any failure, interrupts included, the temporary files are removed and no target has changed unless its
    rename had already happened.

    Raises
    ------
    TargetError
        Another run is writing one of the targets, or has written it meanwhile.
    """
    partials = [partial_name(target) for target in targets]
    locked: list[Path] = []
    with ExitStack() as stack:
        try:
            for target, partial in zip(targets, partials, strict=True):
                stack.enter_context(_locked(partial, directory=False))
                locked.append(partial)
                check_target(target, overwrite=overwrite)
            yield partials
            _sync_all(partials)
            for target in targets:
                check_target(target, overwrite=overwrite)
            for partial, target in zip(partials, targets, strict=True):
                partial.replace(target)
        except BaseException:
            for partial in locked:
                partial.unlink(missing_ok=True)
            raise
        for parent in {target.parent for target in targets}:
            _sync(parent)


@contextmanager
def written_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary, empty directory; on success sync all in it and give it the target's name.

    An existing target is moved aside for the moment of the rename and removed afterwards.

    Raises
    ------
    TargetError
        Another run is writing the target, or has written it meanwhile.
    """
    partial, old = partial_name(target), _old_name(target)
    with _locked(partial, directory=True):
        try:
            check_target(target, overwrite=overwrite)
            yield partial
            _sync_all([*partial.rglob("*"), partial])
            check_target(target, overwrite=overwrite)
            if os.path.lexists(target):
                _remove(old)
                target.replace(old)
            try:
                partial.replace(target)
            except BaseException:
                if os.path.lexists(old) and not os.path.lexists(target):
                    old.replace(target)
                raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(target.parent)
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(partial: Path, *, directory: bool) -> Iterator[None]:
    """Create `partial` empty, or take over what a killed run left, and hold a lock on it."""
    descriptor = _lock(partial, directory=directory)
    try:
        if directory:
            for child in partial.iterdir():
                _remove(child)
        else:
            os.truncate(descriptor, 0)
        yield
    finally:
        os.close(descriptor)


def _lock(partial: Path, *, directory: bool) -> int:
    """Return a locked descriptor of what `partial` names.

    Between opening and locking, another run may have renamed its file to the target or removed it; what was opened
    is then no longer what the name stands for, and must not be touched.
    """
    while True:
        try:
            if directory:
                partial.mkdir(exist_ok=True)
                descriptor = os.open(partial, os.O_RDONLY)
            else:
                descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError as error:
            if partial.parent.is_dir():
                continue
            raise TargetError("its directory is gone", path=partial) from error
        except OSError as error:
            raise TargetError("cannot be created", path=partial, found=error.strerror) from error
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, partial):
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise TargetError("another run is writing this target", path=partial) from error
            raise
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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


def _sync_all(paths: Sequence[Path]) -> None:
    """Wait until files and directories are on disk; many small ones at once, which a journal takes together."""
    with ThreadPoolExecutor(min(SYNCED_AT_ONCE, max(len(paths), 1)), thread_name_prefix="zckpt-sync") as pool:
        for done in [pool.submit(_sync, path) for path in paths]:
            done.result()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
