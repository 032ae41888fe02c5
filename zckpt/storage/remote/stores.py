"""What every store can do: say what there is, and give ranges of bytes of it, of the version that it has listed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from zckpt.errors import MissingPackageError, SourceError, UnsupportedError, UsageError
from zckpt.immutable import immutable
from zckpt.storage.remote.addresses import Address, without_secrets
from zckpt.storage.remote.attempts import ShortBodyError, attempt

_VERSIONS = ("ETag", "etag", "generation", "oid", "blob_id", "content_md5", "md5Hash", "mtime", "LastModified",
             "last_modified", "modified", "created")  # fmt: skip
"""Keys under which stores say what tells one version of a file from the next, the best first."""

_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")

Entries = Mapping[str, Mapping[str, Any]]
"""What a store says of files, by their keys: `size` in bytes, and what of `_VERSIONS` and `_TIMES` it knows."""


@immutable
class Listed:
    """A file of a store."""

    parts: tuple[str, ...]  # its path below what was listed; none: it is that itself
    key: str  # what the store's library calls it
    nbytes: int
    version: str  # of all it says about the version of the file, what tells most
    modified: float | None  # seconds


class ChangedError(SourceError):
    """A file of a store is another one than it was when it was listed."""


def changed(shown: str) -> ChangedError:
    """Return the error about a file that changed while it was read."""
    return ChangedError("changed while it was read", path=shown, advice="run it again when nothing writes there")


class Store(ABC):
    """A store, opened where an address says.

    Parameters
    ----------
    address : Address

    Raises
    ------
    UsageError
        There is no such place.
    MissingPackageError
        The package for it is not installed.
    """

    checks_versions = False
    """Whether every range is known to be of the version that was listed."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pid = -1
        self._opened: Any = None
        self.root: str = ""
        _ = self.client

    @property
    def client(self) -> Any:  # noqa: ANN401  # no library of a store has types
        """What speaks with the store; in a process that was forked, another one."""
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
        return self._opened

    # --- what a kind of store says for itself; none of it is `attempt`ed

    @abstractmethod
    def _open(self) -> tuple[Any, str]:
        """Return what speaks with the store, and what it calls the place of the address."""

    @abstractmethod
    def _find(self) -> Entries:
        """Return what there is: the file itself, or all below a directory."""

    @abstractmethod
    def _beside(self, folder: str) -> Entries:
        """Return the files in a directory."""

    @abstractmethod
    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes: ...

    def _remove(self, key: str) -> None:
        """Remove a file, if it is there."""
        raise NotImplementedError

    def _put(self, key: str, data: bytes) -> None:
        """Write a small file."""
        raise NotImplementedError

    def _read(self, key: str) -> bytes | None:
        """Return a small file; None: it is not there."""
        raise NotImplementedError

    def _name(self, key: str) -> str:
        """Return the name that a key stands for."""
        return key

    def remove_folder(self, key: str) -> None:  # noqa: B027
        """Remove a directory in which no file is left, where a store has any."""

    def close(self) -> None:  # noqa: B027
        """Let go of connections that nobody else uses."""

    # --- what follows

    def listed(self) -> list[Listed]:
        """List a file, or all files below a directory, in as few requests as the store has.

        Raises SourceError: there is nothing, or it cannot be listed.
        """
        shown = self.address.shown
        entries = attempt(self._find, shown)
        if not entries:
            raise SourceError("cannot be opened", path=shown, found="nothing there")
        return [self._listed(key, info) for key, info in entries.items() if _is_file(key, info)]

    def listed_beside(self) -> list[Listed]:
        """List the files in the directory of a file; none where that cannot be done."""
        folder = self.root.rpartition("/")[0]
        try:
            entries = self._beside(folder)
        except Exception:  # noqa: BLE001  # who may read one file need not be able to list its neighbours
            return []
        found = [self._listed(key, info, folder) for key, info in entries.items() if _is_file(key, info)]
        return [one for one in found if len(one.parts) == 1]

    def _listed(self, key: str, info: Mapping[str, Any], root: str | None = None) -> Listed:
        root = self.root if root is None else root
        rest = self._name(key.strip("/").removeprefix(root.strip("/")).removeprefix("/"))
        parts = tuple(rest.split("/")) if rest else ()
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise UnsupportedError(
                "holds an object whose name cannot be a file name", path=self.address.shown, found=repr(rest),
                advice="copy the checkpoint to a separate prefix",
            )  # fmt: skip
        size = info.get("size")
        if size is None:
            raise UnsupportedError(
                "the server does not state its size", path="/".join([self.address.shown, *parts]),
                expected="Content-Length and ranges", advice="download it, and read the copy",
            )  # fmt: skip
        version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
        times = [info[name] for name in _TIMES if info.get(name)]
        stamps = [time.timestamp() if hasattr(time, "timestamp") else time for time in times]
        seconds = next((float(stamp) for stamp in stamps if isinstance(stamp, int | float)), None)
        return Listed(parts, key, int(size), version, seconds)

    def fetch(self, one: Listed, offset: int, nbytes: int, shown: str) -> bytes:
        """Return a range of a file, in one request at a time.

        Raises ChangedError: the file is another one by now; SourceError: it cannot be read.
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

    def remove(self, key: str) -> None:
        """Remove a file, if it is there.

        Raises TargetError: the store refuses.
        """
        attempt(lambda: self._remove(key), self.address.shown, writing=True)

    def put(self, key: str, data: bytes, shown: str | None = None) -> None:
        """Write a small file, `shown` in messages; errors are those of `remove`."""
        attempt(lambda: self._put(key, data), shown or self.address.shown, writing=True)

    def read(self, key: str) -> bytes | None:
        """Return a small file that was `put`, None if it is not there; errors are those of `remove`."""
        return attempt(lambda: self._read(key), self.address.shown, writing=True)


def _is_file(key: str, info: Mapping[str, Any]) -> bool:
    """Tell a file from a directory, and from the empty object by which some programs mark one."""
    return info.get("type", "file") == "file" and not key.endswith("/")
