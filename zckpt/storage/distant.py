"""How the bytes of files are had that only stand in for others (`stand_ins`). Every read of a file asks here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from zckpt.storage.stand_ins import FILES, MARK, PLACE, Distant

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
