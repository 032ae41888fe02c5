"""A store through fsspec: what there is, and ranges of bytes of it, with what every file system of fsspec has.

Those that can say which version of an object a range is of, and those whose libraries hide whether a range was
understood at all, have a class of their own (`s3`, `web`, `sftp`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from zckpt.errors import MissingPackageError, SourceError, UnsupportedError, UsageError
from zckpt.storage.remote.addresses import Address, without_secrets
from zckpt.storage.remote.attempts import ShortBodyError, attempt

_VERSIONS = ("ETag", "etag", "generation", "oid", "blob_id", "content_md5", "md5Hash", "mtime", "LastModified",
             "last_modified", "modified", "created")  # fmt: skip
"""Keys under which stores say what tells one version of a file from the next, the best first."""

_THREADED = frozenset({"memory", "hf", "file", "webdav", "webdavs", "dav", "davs"})
"""Schemes whose libraries do not mind threads, besides those that have an event loop."""

_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a store.

    Parameters
    ----------
    parts : tuple of str
        Its path below what was listed; none: it is that itself.
    key : str
        What the store's library calls it.
    nbytes : int, bytes
    version : str
        Of all it says about the version of the file, what tells most.
    modified : float or None, seconds
    """

    parts: tuple[str, ...]
    key: str
    nbytes: int
    version: str
    modified: float | None


class ChangedError(SourceError):
    """A file of a store is another one than it was when it was listed."""


def changed(shown: str) -> ChangedError:
    """Return the error about a file that changed while it was read."""
    return ChangedError("has changed while it was read", path=shown, advice="run it again when nobody writes there")


class Store:
    """A file system of fsspec, opened where an address says.

    Parameters
    ----------
    address : Address

    Raises
    ------
    UsageError
        There is no such scheme.
    MissingPackageError
        The package for it is not installed.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pid = -1
        self._turn = threading.Lock()
        self._opened: Any = None
        self.root: str = ""
        _ = self.fs

    @property
    def fs(self) -> Any:  # noqa: ANN401  # fsspec has no types
        """The file system; in a process that was forked, another one."""
        if self._pid != os.getpid():
            try:
                self._opened, self.root = self._open()
            except ImportError as error:
                raise MissingPackageError(
                    f"{self.address.scheme}:// needs a package that is not installed",
                    path=self.address.shown, found=str(error), advice="pip install 'zckpt[remote]'",
                ) from error  # fmt: skip
            except SourceError:
                raise
            except ValueError as error:
                raise UsageError("no such place", path=self.address.shown, found=without_secrets(str(error))) from error
            self.root = self.root.rstrip("/")
            self._pid = os.getpid()
            if self._opened.async_impl:  # what fails beside a request, this one raises
                self._opened.loop.set_exception_handler(lambda *_: None)
        return self._opened

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self.address.url, **self.settings)
        if self.address.scheme == "hf":
            root = root.removeprefix("models/")  # which its keys do not have, as those of data sets have theirs
        return fs, root

    # --- what there is

    def listed(self) -> list[Listed]:
        """List a file, or all files below a directory, in as few requests as the store has.

        Raises
        ------
        SourceError
            There is nothing, or it cannot be listed.
        """
        shown = self.address.shown
        entries = attempt(self._find, shown)
        if not entries:
            raise SourceError("cannot be opened", path=shown, found="nothing there")
        return [self._listed(key, info) for key, info in entries.items() if _is_file(key, info)]

    def listed_beside(self) -> list[Listed]:
        """List the files in the directory of a file; none where that cannot be done."""
        parent = self.root.rpartition("/")[0]
        try:
            self.fs.invalidate_cache()
            entries = {info["name"]: info for info in self.fs.ls(parent, detail=True)}
        except Exception:  # noqa: BLE001  # who may read one file need not be able to list its neighbours
            return []
        found = [self._listed(key, info, parent) for key, info in entries.items() if _is_file(key, info)]
        return [one for one in found if len(one.parts) == 1]

    def _find(self) -> Mapping[str, Mapping[str, Any]]:
        self.fs.invalidate_cache()
        try:
            info = self.fs.info(self.root)
        except FileNotFoundError:
            info = {"type": "directory"}  # of a store that has names only
        if info["type"] == "file":
            return {self.root: info}
        found: Mapping[str, Mapping[str, Any]] = self.fs.find(self.root, detail=True)
        return found

    def described(self, key: str) -> Listed | None:
        """Return what the store says of one file; None: it is not there. Not `attempt`ed."""
        with self.turn() as fs:
            fs.invalidate_cache()
            try:
                info = fs.info(key)
            except FileNotFoundError:
                return None
        return self._listed(key, info, key)

    def _listed(self, key: str, info: Mapping[str, Any], root: str | None = None) -> Listed:
        root = self.root if root is None else root
        rest = key.strip("/").removeprefix(root.strip("/")).removeprefix("/")
        parts = tuple(rest.split("/")) if rest else ()
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise UnsupportedError(
                "holds an object whose name no file can have", path=self.address.shown, found=repr(rest),
                advice="copy what belongs together to a prefix of its own",
            )  # fmt: skip
        size = info.get("size")
        if size is None:
            raise UnsupportedError(
                "the server does not say how large it is", path="/".join([self.address.shown, *parts]),
                expected="Content-Length and ranges", advice="download it, and read it from there",
            )  # fmt: skip
        version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
        times = (info.get(name) for name in _TIMES)
        return Listed(parts, key, int(size), version, next(filter(None, map(_seconds, times)), None))

    # --- bytes of it

    def fetch(self, one: Listed, offset: int, nbytes: int, shown: str) -> bytes:
        """Return a range of a file, in one request at a time.

        Raises
        ------
        ChangedError
            The file is another one by now.
        SourceError
            It cannot be read.
        """

        def once() -> bytes:
            data = self._fetch(one, offset, nbytes)
            if len(data) != nbytes:
                raise ShortBodyError(f"{len(data)} bytes of {nbytes}")
            return data

        try:
            return attempt(once, shown)
        except ChangedError:
            raise changed(shown) from None

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        with self.turn() as fs:
            data: bytes = fs.cat_file(one.key, start=offset, end=offset + nbytes)
            return data

    @contextmanager
    def turn(self) -> Iterator[Any]:
        """Yield the file system; to one thread at a time, unless its library minds none."""
        fs = self.fs
        with nullcontext() if fs.async_impl or self.address.scheme in _THREADED else self._turn:
            yield fs

    # --- removing

    def remove(self, key: str) -> None:
        """Remove a file, if it is there.

        Raises
        ------
        TargetError
            The store refuses.
        """

        def once() -> None:
            with suppress(FileNotFoundError):
                self._remove(key)

        attempt(once, self.address.shown, writing=True)

    def _remove(self, key: str) -> None:
        with self.turn() as fs:
            fs.rm_file(key)

    def remove_folder(self, key: str) -> None:
        """Remove a directory in which no file is left; some stores have none."""

        def once() -> None:
            with self.turn() as fs, suppress(FileNotFoundError):
                fs.invalidate_cache()
                if fs.isdir(key):
                    fs.rm(key, recursive=True)

        attempt(once, self.address.shown, writing=True)

    checks_versions = False
    """Whether every range is known to be of the version that was listed."""

    settings: ClassVar[Mapping[str, object]] = {}
    """What its library is given besides the URL."""


def _is_file(key: str, info: Mapping[str, Any]) -> bool:
    """Tell a file from a directory, and from the empty object by which some programs mark one."""
    return info.get("type", "file") == "file" and not key.endswith("/")


def _seconds(time: object) -> float | None:
    if isinstance(time, int | float):
        return float(time)
    stamp = getattr(time, "timestamp", None)
    return float(stamp()) if stamp is not None else None
