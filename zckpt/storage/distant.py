"""Which files are names and sizes only, and have their bytes elsewhere. Every read of a file asks here.

A remote store is laid out below a directory of this process as a tree of files without bytes (`remote.mount`), so that
all that asks for names and sizes need know of no store. What is read of such a file comes through its `Distant`.
Nothing else can read one: it is opened with `O_PATH`, so that a read that went round this module fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

MARK = "zckpt-remote-"
"""How the names of directories begin that have files without bytes."""

_PLACE = re.compile(rf"/{MARK}[A-Za-z0-9_]+/\d+/[a-z][a-z0-9+.\-]*/[^/]+/.")

_MOUNT = re.compile(rf".*/{MARK}[A-Za-z0-9_]+/\d+/")

FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_CLOEXEC", 0)
"""Opened for its size alone."""

Range = tuple[str, int, int]
"""Bytes of a file that are going to be read: path, offset, number of bytes."""


class Distant(Protocol):
    """A file whose bytes are elsewhere."""

    identity: str

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at byte `offset`, which the file has.

        Raises SourceError: they cannot be had, or the file is another one by now.
        """


_FILES: dict[str, Distant] = {}

_AHEAD: list[Callable[[list[Range]], AbstractContextManager[None]]] = []


def found(path: str) -> Distant | None:
    """Return what has the bytes of a file; None: they are where its name is.

    A worker in another process, or on another machine, is given paths below the directory of who planned its work. It
    goes to the store itself.

    Raises
    ------
    SourceError
        There is no such file in the store, or what had it is closed.
    """
    if MARK not in path:
        return None
    path = os.path.abspath(path)  # noqa: PTH100  # pathlib keeps `..`
    if path in _FILES:
        return _FILES[path]
    if _PLACE.search(path) is None:
        return None
    from zckpt.storage.remote.mount import adopt

    return adopt(path)


def place(path: str | os.PathLike[str]) -> Path:
    """Return a path by which two names of one place are the same, in whichever mount; links are followed."""
    whole = Path(path).resolve()
    found = _MOUNT.match(str(whole)) if MARK in str(path) else None
    return whole if found is None else Path(f"/{MARK}/{str(whole)[found.end() :]}")


def is_remote(path: Path) -> bool:
    """Tell whether a path stands for a place in a store."""
    return MARK in str(path) and _MOUNT.match(str(path)) is not None


def check_unchanged() -> None:
    """Raise ChangedError if a file that was read from a store is another one by now, where no range says so."""
    if _FILES:
        from zckpt.storage.remote.mount import check_sources

        check_sources()


def add(path: str, file: Distant) -> None:
    """Note where the bytes of a file are."""
    _FILES[path] = file


def forget(path: str) -> None:
    """Note that a file is gone."""
    _FILES.pop(path, None)


def ahead(ranges: Iterable[Range]) -> AbstractContextManager[None]:
    """Return a context within which these bytes are read: those that are elsewhere are fetched at once as it begins."""
    distant = [one for one in ranges if found(one[0]) is not None]
    return _AHEAD[0](distant) if distant and _AHEAD else nullcontext()


def fetch_with(function: Callable[[list[Range]], AbstractContextManager[None]]) -> None:
    """Let `ahead` call this."""
    _AHEAD[:] = [function]
