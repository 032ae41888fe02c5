"""A remote place as a tree of local files that have names and sizes, and no bytes.

TEMPORARY/zckpt-remote-XXXX/7/s3/bucket/run/global_step5/...      of the seventh mount of this process

What asks for names, sizes and directories works on the tree as on any; what reads is sent to the store (`distant`).
The tree is private to this process and is removed with the mount, at the latest when the process ends. In everything
that a user reads, its paths are the URLs that they stand for (`errors.shown`).
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from zckpt.errors import SourceError, UsageError, show_as_urls
from zckpt.storage import distant
from zckpt.storage.remote.addresses import Address, address_of
from zckpt.storage.remote.cache import RemoteFile, fetched
from zckpt.storage.remote.schemes import store_of
from zckpt.storage.remote.stores import ChangedError, Listed, Store, changed

_NUMBERS = itertools.count()

_LIVE: dict[str, Mount] = {}
"""What is mounted, by its tree."""

_BASE: list[tuple[int, Path]] = []
"""The process that made it, and the directory that has all trees of it."""


def _base() -> Path:
    pid = os.getpid()
    if not _BASE or _BASE[0][0] != pid:
        made = Path(os.path.realpath(tempfile.mkdtemp(prefix=distant.MARK)))
        _BASE[:] = [(pid, made)]
        show_as_urls(str(made))
        distant.fetch_with(_ahead)
        atexit.register(_remove, pid, made)
    return _BASE[0][1]


def _remove(pid: int, base: Path) -> None:
    if os.getpid() == pid:  # a process that was forked leaves it to its parent
        shutil.rmtree(base, ignore_errors=True)


def local_of(url: str) -> Path | None:
    """Return the path of a `file://` URL; None: it is another one.

    Raises
    ------
    UsageError
        It names a file of another machine.
    """
    from urllib.parse import unquote, urlsplit

    if not url.startswith(("file://", "local://")):
        return None
    split = urlsplit(url)
    if split.netloc not in ("", "localhost"):
        raise UsageError("is a file of another machine", path=url, advice="give the URL of what serves it")
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
        self.files: dict[str, tuple[Listed, RemoteFile]] = {}
        self._tree = _base() / str(next(_NUMBERS))
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
        whole = [one for one in found if not one.parts]
        self.path.parent.mkdir(parents=True)
        if whole or (missing and not found):
            if whole:
                self._add(self.path, whole[0])
            beside = [one for one in self.store.listed_beside() if one.parts[0] != self.path.name]
            self._lay_out(self.path.parent, beside)
        else:
            self.path.mkdir()
            self._lay_out(self.path, found)

    def _lay_out(self, root: Path, every: Iterable[Listed]) -> None:
        folders = {root}
        for one in every:
            path = root.joinpath(*one.parts)
            if path.parent not in folders:
                path.parent.mkdir(parents=True, exist_ok=True)
                folders.add(path.parent)
            self._add(path, one)

    def _add(self, path: Path, one: Listed) -> None:
        _stand_in(path, one)
        shown = self._url_of(path)
        fetch = partial(_fetch_from, self.store, one, shown)
        file = RemoteFile(one.nbytes, fetch, f"{one.nbytes}-{one.version}", shown)
        file.origin = self.store, one
        self.files[str(path)] = one, file
        distant.add(str(path), file)

    def _url_of(self, path: Path) -> str:
        scheme, *rest = path.relative_to(self._tree).parts
        return f"{scheme}://{'/'.join(rest)}"

    def check_unchanged(self) -> None:
        """List once more where ranges do not say of which version they are.

        Raises
        ------
        ChangedError
            A file is another one by now, or is gone.
        """
        if self.store.checks_versions or not self.files:
            return
        now = {one.key: (one.nbytes, one.version) for one in self.store.listed()}
        for path, (one, _) in self.files.items():
            if Path(path).is_relative_to(self.path) and now.get(one.key) != (one.nbytes, one.version):
                raise changed(path)

    def add_bytes(self, path: Path, data: bytes) -> None:
        """Add a file that is in memory."""

        def fetch(offset: int, nbytes: int) -> bytes:
            return data[offset : offset + nbytes]

        one = Listed((), "", len(data), "", None)
        self.remove(path)
        _stand_in(path, one)
        file = RemoteFile(len(data), fetch, "", self._url_of(path))
        self.files[str(path)] = one, file
        distant.add(str(path), file)

    def remove(self, path: Path) -> None:
        """Let a name be free, here and not in the store."""
        if self.files.pop(str(path), None) is not None:
            distant.forget(str(path))
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

    def keys_below(self, path: Path) -> list[str]:
        """Return what is below a directory, those first that come last when it is written."""
        found = [one for name, (one, _) in self.files.items() if Path(name).is_relative_to(path)]
        return [one.key for one in sorted(found, key=lambda one: one.nbytes)]

    def close(self) -> None:
        """Remove the tree; nothing of it can be read any more."""
        for path, (_, file) in self.files.items():
            distant.forget(path)
            file.close()
        self.files.clear()
        self.store.close()
        _LIVE.pop(str(self._tree), None)
        shutil.rmtree(self._tree, ignore_errors=True)


def adopt(path: str) -> RemoteFile:
    """Return a file by a path that another process has made up for it, and make that up here as well.

    Raises
    ------
    SourceError
        It was this process's, and is closed; or the store has it no longer, or in another size.
    """
    head, mark, rest = path.partition(f"/{distant.MARK}")
    name, _, scheme, host, *parts = rest.split("/")
    base = Path(f"{head}{mark}{name}")
    if _BASE and _BASE[0][1] == base:
        raise SourceError("is closed", path=path, advice="keep what zckpt.open returned for as long as you read it")
    show_as_urls(str(base))
    distant.fetch_with(_ahead)
    address = address_of(f"{scheme}://{'/'.join([host, *parts])}")
    store = store_of(address)
    one = next((one for one in store.listed() if not one.parts), None)
    there = Path(path)
    if one is None or (there.exists() and there.stat().st_size != one.nbytes):
        raise changed(address.shown)
    if not there.exists():  # on another machine
        base.mkdir(mode=0o700, exist_ok=True)
        there.parent.mkdir(parents=True, exist_ok=True)
        _stand_in(there, one)
        atexit.register(_remove, os.getpid(), base)
    fetch = partial(_fetch_from, store, one, address.shown)
    file = RemoteFile(one.nbytes, fetch, f"{one.nbytes}-{one.version}", address.shown)
    distant.add(path, file)
    return file


def _fetch_from(store: Store, one: Listed, shown: str, offset: int, nbytes: int) -> bytes:
    return store.fetch(one, offset, nbytes, shown)


def _stand_in(path: Path, one: Listed) -> None:
    """Make a file of its size, which nobody can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o000)
        try:
            os.ftruncate(descriptor, one.nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SourceError("this machine's files have no such names", path=path, found=error.strerror) from error
    if one.modified is not None:
        os.utime(path, (one.modified, one.modified))


def mount_of(path: Path) -> Mount:
    """Return what a path is at, below or beside of.

    Raises
    ------
    SourceError
        It is closed.
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


@contextmanager
def mounted(url: str, *, missing: bool = False) -> Iterator[Mount]:
    """Mount a place while the context lasts; errors are those of `Mount`."""
    mount = Mount(url, missing=missing)
    try:
        yield mount
    finally:
        mount.close()


def _ahead(ranges: list[distant.Range]) -> AbstractContextManager[None]:
    found = ((distant.found(path), offset, nbytes) for path, offset, nbytes in ranges)
    return fetched((file, offset, nbytes) for file, offset, nbytes in found if isinstance(file, RemoteFile))


__all__ = ["ChangedError", "Mount", "mounted"]
