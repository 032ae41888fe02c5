"""Files that have a name and a size here, and their bytes elsewhere: in a store, or in the memory of this process.

A place is laid out below a directory of this process as a tree of files without bytes, so that all that asks for names
and sizes need know of no store. What is read of such a file comes through its `Distant`. Nothing else can
read one: it is opened with `O_PATH`, so that a read that went another way fails.

Every read of a file asks here whether it is one.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from zckpt.errors import SourceError

MARK = "zckpt-remote-"
"""How the names of directories begin that have files without bytes."""

PLACE = re.compile(rf"/{MARK}[A-Za-z0-9_]+/\d+/[a-z][a-z0-9+.\-]*/[^/]+/.")
"""In the path of a file of a store: DIRECTORY/NUMBER/SCHEME/HOST/NAME."""

_MOUNT = re.compile(rf".*/{MARK}[A-Za-z0-9_]+/\d+/")

FLAGS = getattr(os, "O_PATH", os.O_RDONLY)
"""Opened for its size alone."""


class Distant(Protocol):
    """A file whose bytes are elsewhere."""

    identity: str

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`, which the file has.

        Raises SourceError: they cannot be had, or the file is another one by now.
        """


FILES: dict[str, Distant] = {}
"""By their paths, those that this process can read."""

DAMAGED: dict[Path, list[SourceError]] = {}
"""By where a store of checkpoints is laid out, what is wrong with those of which nothing is there."""


def place(path: str | os.PathLike[str]) -> Path:
    """Return a path by which two names of one place are the same, in whichever mount; links are followed."""
    whole = Path(path).resolve()
    found = _MOUNT.match(str(whole)) if MARK in str(path) else None
    return whole if found is None else Path(f"/{MARK}/{str(whole)[found.end() :]}")


def is_remote(path: Path) -> bool:
    """Tell whether a path stands for a place in a store."""
    return MARK in str(path) and _MOUNT.match(str(path)) is not None


def new_base(directory: str | None = None) -> Path:
    """Make a directory for trees, private to this user; errors are the system's."""
    return Path(os.path.realpath(tempfile.mkdtemp(prefix=MARK, dir=directory)))


_NUMBERS = itertools.count()

_BASE: list[tuple[int, Path]] = []
"""The process that made it, and the directory that has all trees of it."""


def remove_base(pid: int, base: Path) -> None:
    """Remove a directory of trees, if this is the process that made it."""
    if os.getpid() == pid:  # a process that was forked leaves it to its parent
        shutil.rmtree(base, ignore_errors=True)


def is_of_this_process(base: Path) -> bool:
    """Tell whether a directory has the trees of this process."""
    return bool(_BASE) and _BASE[0][1] == base


def tree() -> tuple[Path, Path]:
    """Return the path of a new tree, which does not exist, and the directory that it is to be in."""
    pid = os.getpid()
    if not _BASE or _BASE[0][0] != pid:  # the directory of all trees of this process, which goes with it
        made = new_base()
        _BASE[:] = [(pid, made)]
        atexit.register(remove_base, pid, made)
    base = _BASE[0][1]
    return base / str(next(_NUMBERS)), base


def stand_in(path: Path, nbytes: int, modified: float | None = None) -> None:
    """Make a file of its size, which nobody can read, and the directories that it is in; errors are the system's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o000)
    try:
        os.ftruncate(descriptor, nbytes)
    finally:
        os.close(descriptor)
    if modified is not None:
        os.utime(path, (modified, modified))


def forget_all(top: Path, files: list[str]) -> None:
    """Remove a tree; nothing of these files can be read any more."""
    for path in files:
        FILES.pop(path, None)
    shutil.rmtree(top, ignore_errors=True)


class InMemory:
    """A small file that is in memory."""

    identity = ""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`, which the file has."""
        buffer[:] = self._data[offset : offset + len(buffer)]


Range = tuple[str, int, int]
"""Bytes of a file that are going to be read: path, offset, number of bytes."""


def found(path: str) -> Distant | None:
    """Return what has the bytes of a file; None: they are where its name is.

    A worker in another process, or on another machine, is given paths below the directory of who planned its work. It
    goes to the store itself.

    Raises SourceError: there is no such file in the store, or what had it is closed.
    """
    if MARK not in path:
        return None
    path = os.path.abspath(path)  # noqa: PTH100  # pathlib keeps `..`
    if path in FILES:
        return FILES[path]
    if PLACE.search(path) is None:
        return None
    path = os.path.realpath(path)  # of a link in a packed checkpoint
    if path in FILES:
        return FILES[path]
    from zckpt.storage.remote.mount import adopt

    return adopt(path)


def check_unchanged() -> None:
    """Raise ChangedError if a file that was read from a store is another one by now, where no range says so."""
    if FILES:
        from zckpt.storage.remote.mount import check_sources

        check_sources()


def ahead(ranges: Iterable[Range]) -> AbstractContextManager[None]:
    """Return a context within which these bytes are read: those in stores are fetched at once as it begins."""
    distant = [(file, offset, nbytes) for path, offset, nbytes in ranges if (file := found(path)) is not None]
    if not distant:
        return nullcontext()
    from zckpt.storage.remote.cache import RemoteFile, fetched

    return fetched((file, offset, nbytes) for file, offset, nbytes in distant if isinstance(file, RemoteFile))
