"""A remote place as a tree of local files that have names and sizes, and no bytes.

TEMPORARY/zckpt-remote-XXXX/7/s3/bucket/run/global_step5/...      of the seventh mount of this process

What asks for names, sizes and directories works on the tree as on any; what reads is sent to the store (`stand_ins`).
The tree is private to this process and is removed with the mount, at the latest when the process ends. In everything
that a user reads, its paths are the URLs that they stand for (`errors.shown`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import SourceError, UsageError, show_as_stored, show_as_urls
from zckpt.storage.remote.addresses import Address, address_of
from zckpt.storage.remote.cache import RemoteFile
from zckpt.storage.remote.schemes import store_of, uploads_of
from zckpt.storage.remote.stores import Listed, Store, changed
from zckpt.storage.stand_ins import (
    FILES,
    MARK,
    Distant,
    forget_all,
    is_of_this_process,
    remove_base,
    stand_in,
    tree,
)

if TYPE_CHECKING:
    from zckpt.storage.remote.schemes import Uploads

PACKED = "packed"
"""What stands for the scheme of a store that is a directory here (`storage.packed`)."""

_LIVE: dict[str, Mount] = {}
"""What is mounted, by its tree."""


def local_of(url: str) -> Path | None:
    """Return the path of a `file://` URL; None: it is another one.

    Raises UsageError: it names a file of another machine.
    """
    from urllib.parse import unquote, urlsplit

    if not url.startswith(("file://", "local://")):
        return None
    split = urlsplit(url)
    if split.netloc not in ("", "localhost"):
        raise UsageError("is a file on another machine", path=url, advice="give the URL of its server")
    return Path(unquote(split.path))


class Mount:
    """A remote file or directory under a local path.

    Parameters
    ----------
    url : str
    missing : bool
        Whether there may be nothing: a target. Then the path is of a directory that exists, and a name in it.

    Raises
    ------
    SourceError
        There is nothing, or it cannot be listed.
    UsageError, MissingPackageError
        As `store_of`.
    """

    def __init__(self, url: str, *, missing: bool = False) -> None:
        self.address: Address = address_of(url)
        self.store: Store = store_of(self.address)
        self.files: dict[str, Distant] = {}
        self._tree, base = tree()
        show_as_urls(str(base))
        self.path = self._tree.joinpath(self.address.scheme, self.address.host, *self.address.parts)
        self.is_target = missing
        _LIVE[str(self._tree)] = self
        try:
            self._make(missing=missing)
        except BaseException:
            self.close()
            raise

    def _make(self, *, missing: bool) -> None:
        try:
            found = self.store.listed()
        except SourceError as error:
            if not missing or error.found != "nothing there":
                raise
            found = []
        is_file = any(not one.parts for one in found) or (missing and not found)
        (self.path.parent if is_file else self.path).mkdir(parents=True)
        every = [(self.path, one) for one in found]
        if is_file:
            beside = self.store.listed_beside()
            every += [(self.path.parent, one) for one in beside if one.parts[0] != self.path.name]
        for root, one in every:
            path = root.joinpath(*one.parts)
            scheme, *rest = path.relative_to(self._tree).parts
            file = RemoteFile(self.store, one, f"{scheme}://{'/'.join(rest)}")
            self.add(path, file, one.nbytes, one.modified)

    def add(self, path: Path, file: Distant, nbytes: int, modified: float | None = None) -> None:
        """Add a file, in the place of what has its name."""
        self.remove(path)
        _make_file(path, nbytes, modified)
        self.files[str(path)] = FILES[str(path)] = file

    def check_unchanged(self) -> None:
        """List once more where ranges do not say of which version they are.

        Raises ChangedError: a file is another one by now, or is gone.
        """
        if self.store.checks_versions or not self.files:
            return
        now = {one.key: (one.nbytes, one.version) for one in self.store.listed()}
        for path, one in self._listed_below(self.path).items():
            if now.get(one.key) != (one.nbytes, one.version):
                raise changed(path)

    def _listed_below(self, folder: Path) -> dict[str, Listed]:
        every = ((path, file) for path, file in self.files.items() if isinstance(file, RemoteFile))
        return {path: file.listed for path, file in every if Path(path).is_relative_to(folder)}

    def remove(self, path: Path) -> None:
        """Let a name be free, here and not in the store."""
        if self.files.pop(str(path), None) is not None:
            del FILES[str(path)]
            path.unlink()

    def forget(self, root: Path, names: Iterable[str]) -> None:
        """Let names below a directory be free, and that of the directory if nothing else is in it."""
        for path in [root / name for name in names]:
            self.remove(path)
            for folder in path.parents:
                if not folder.is_relative_to(self.path) or any(folder.iterdir()):
                    break
                folder.rmdir()

    def key_of(self, path: Path) -> str:
        """Return what the store's library calls a path at, below or beside that which is mounted."""
        if path == self.path:
            return self.store.root
        if path.is_relative_to(self.path):
            return f"{self.store.root}/{path.relative_to(self.path).as_posix()}"
        return f"{self.store.root.rpartition('/')[0]}/{path.name}"

    def uploads(self, path: Path, *, is_directory: bool) -> Uploads:
        """Return how files get into the store that are below a path, or beside it; errors are those of `uploads_of`."""
        return uploads_of(self.store, self.key_of(path), is_directory=is_directory)

    def keys_below(self, path: Path) -> list[str]:
        """Return what is below a directory, those first that come last when it is written."""
        return [one.key for one in sorted(self._listed_below(path).values(), key=lambda one: one.nbytes)]

    def close(self) -> None:
        """Remove the tree; nothing of it can be read any more."""
        for file in self.files.values():
            if isinstance(file, RemoteFile):
                file.close()
        forget_all(self._tree, list(self.files))
        self.files.clear()
        self.store.close()
        _LIVE.pop(str(self._tree), None)


def adopt(path: str) -> Distant:
    """Return a file by a path that another process has made up for it, and make that up here as well.

    Raises SourceError: it was this process's, and is closed; or the store has it no longer, or in another size.
    """
    head, mark, rest = path.partition(f"/{MARK}")
    name, _, scheme, host, *parts = rest.split("/")
    base = Path(f"{head}{mark}{name}")
    if is_of_this_process(base):
        raise SourceError(
            "is closed", path=path, advice="keep the object that zckpt.open returned while you read from it"
        )
    if not base.exists():  # on another machine
        base.mkdir(mode=0o700, exist_ok=True)
        atexit.register(remove_base, os.getpid(), base)
    if scheme == PACKED:
        from zckpt.storage.packed import store as packed

        show_as_stored(str(base), PACKED)
        return packed.adopt(path, host, parts)
    show_as_urls(str(base))
    address = address_of(f"{scheme}://{'/'.join([host, *parts])}")
    store = store_of(address)
    one = next((one for one in store.listed() if not one.parts), None)
    there = Path(path)
    if one is None or (there.exists() and there.stat().st_size != one.nbytes):
        raise changed(address.shown)
    if not there.exists():  # on another machine
        _make_file(there, one.nbytes, one.modified)
    file = FILES[path] = RemoteFile(store, one, address.shown)
    return file


def _make_file(path: Path, nbytes: int, modified: float | None) -> None:
    try:
        stand_in(path, nbytes, modified)
    except (OSError, OverflowError) as error:  # the latter of a size, or a time, that no file has
        found = getattr(error, "strerror", str(error))
        raise SourceError("this machine's file system cannot hold such names", path=path, found=found) from error


def mount_of(path: Path) -> Mount:
    """Return what a path is at, below or beside of.

    Raises SourceError: it is closed.
    """
    for one in path.parents:
        if str(one) in _LIVE:
            return _LIVE[str(one)]
    raise SourceError("is closed", path=path)


def check_sources() -> None:
    """Raise ChangedError if a file of what is mounted, targets aside, is another one by now."""
    for mount in list(_LIVE.values()):
        if not mount.is_target:
            mount.check_unchanged()


def mounted(url: str, *, missing: bool = False) -> AbstractContextManager[Mount]:
    """Mount a place while the context lasts; errors are those of `Mount`."""
    return closing(Mount(url, missing=missing))
