"""What every store can do: say what there is, give ranges of bytes of the version that it has listed, and take files.

None of the files on their way into a store is seen under its name before all of them are there.

    S3          each file is an upload in parts, which is completed when all parts of all files have come
    others      each goes under a temporary name, `.NAME.zckpt-partial`, from its beginning to its end, and is renamed

Both, `s3.S3Uploads` and `named_uploads.NamedUploads`, have these methods:

    begin       removes what a run that was killed has left, or goes on with it; `keep`: another may go on with this one
    sink        where a file goes: an `engine.upload.Sink`
    left        bytes that were sent and can be gone on with; of this run what is known to be kept
    finish      lets files that have come be read from where `url` says, in this order; `old`: keys of what is replaced
    put         sends a small file, which makes others recognisable; on S3 it is there at once
    name        gives files their names, in this order, and removes those of a target that is replaced
    abort       removes what has come; or what this process has sent, and another removes all

Where several processes send the files of one target, each says what it has `sent`, and one of them `adopt`s that and
finishes all. What they have to tell each other, or the next run, through the store is a `note`: of what it lists, the
next run has those `completed` that have their names already, or `discard`s them.
"""

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
                advice = "pip install 'zckpt[remote]'" if error.name else "install the package that is named"
                raise MissingPackageError(
                    f"{self.address.scheme}:// needs a package that is not installed",
                    path=self.address.shown, found=str(error), advice=advice,
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


Sent = dict[str, Any]
"""Of files by their names: plain data."""


class UploadsBase:
    """Files of one target.

    Parameters
    ----------
    store : Store
    key : str
        The target's, as the store's library calls it.
    is_directory : bool
        Whether files go below the target, else beside it.
    """

    kept_in: str
    """Where what has been sent stays until it is gone on with, for messages."""

    is_folder = True
    """Whether `url` is of a directory that has the files, else they are beside it."""

    def __init__(self, store: Store, key: str, *, is_directory: bool) -> None:
        self.store = store
        self.key = key
        self.is_directory = is_directory
        self.root = key if is_directory else key.rpartition("/")[0]
        parent, _, name = key.rpartition("/")
        self.partial = f"{parent}/.{name}.zckpt-partial"
        self.kept_note = f"{self.partial}/note"

    def shown(self, name: str) -> str:
        """Return a file's URL, for messages."""
        top = self.store.address.shown
        return "/".join([top if self.is_directory else top.rpartition("/")[0], name])

    def at(self, name: str) -> str:
        """Return the key of a file by its name below the target, or beside it."""
        return f"{self.root}/{name}"

    def completed(self, sent: Sent) -> list[str]:
        """Return which files of a note have their names already."""
        raise NotImplementedError

    def discard(self, sent: Sent) -> list[str]:
        """Remove those, before all else of theirs is; return their names."""
        found = self.completed(sent)
        for name in found:
            self.store.remove(self.at(name))
        return found

    def note(self, data: bytes) -> None:
        """Leave a small note beside the target, until it is named or aborted."""
        self.store.put(self.kept_note, data)

    def noted(self) -> bytes | None:
        """Return the note beside the target; None: there is none."""
        return self.store.read(self.kept_note)

    def remains(self) -> bytes | None:
        """Return the note of a run that was killed after all had come and before all was named; None: of none."""
        return self.noted()
