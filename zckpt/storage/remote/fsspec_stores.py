"""Stores through fsspec: all whose schemes it knows, SFTP among them, with what every file system of fsspec has.

What is written goes from its beginning to its end under a name, and is moved (`named_uploads`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from glob import escape
from typing import Any, TypeVar
from urllib.parse import urlsplit

from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.attempts import ShortBodyError, attempt
from zckpt.storage.remote.stores import Entries, Listed, Store

Result = TypeVar("Result")

_THREADED = frozenset({"memory", "hf", "file", "webdav", "webdavs", "dav", "davs"})
"""Schemes whose libraries do not mind threads, besides those that have an event loop."""

CHANNELS = 6
"""Of one SFTP connection; servers allow ten by default."""

SILENT_SECONDS = 20
"""Without a byte from an SFTP server, after which something is asked for again."""


class FsspecStore(Store):
    """A file system of fsspec."""

    moves_folders = False
    """Whether a directory gets another name in one step."""

    def __init__(self, address: Address) -> None:
        self._turn = threading.Lock()
        super().__init__(address)

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self.address.url)
        if self.address.scheme == "hf":
            root = root.removeprefix("models/")  # which its keys do not have, as those of data sets have theirs
        if fs.async_impl:  # what fails beside a request, this one raises
            fs.loop.set_exception_handler(lambda *_: None)
        return fs, root

    @contextmanager
    def turn(self, *, fresh: bool = True) -> Iterator[Any]:
        """Yield the file system, which knows nothing from before; to one thread at a time, unless it minds none."""
        fs = self.client
        with nullcontext() if fs.async_impl or self.address.scheme in _THREADED else self._turn:
            if fresh:
                fs.invalidate_cache()
            yield fs

    def _find(self) -> Entries:
        with self.turn() as fs:
            try:
                info = fs.info(self.root)
            except FileNotFoundError:
                info = {"type": "directory"}  # of a store that has names only
            if info["type"] == "file":
                return {self.root: info}
            found: Entries = fs.find(self.root, detail=True)
            return found

    def _beside(self, folder: str) -> Entries:
        with self.turn() as fs:
            return {info["name"]: info for info in fs.ls(folder, detail=True)}

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        with self.turn(fresh=False) as fs:
            data: bytes = fs.cat_file(one.key, start=offset, end=offset + nbytes)
            return data

    def _remove(self, key: str) -> None:
        with self.turn() as fs, suppress(FileNotFoundError):
            fs.rm_file(key)

    def _read(self, key: str) -> bytes | None:
        with self.turn() as fs:
            found: bytes | None = fs.cat_file(key) if fs.exists(key) else None
            return found

    def _put(self, key: str, data: bytes) -> None:
        self.send(key, len(data), [bytearray(data)])

    # --- for what is written

    def _asked(self, function: Callable[[Any], Result]) -> Result:
        """Return what the file system answers; `attempt`ed."""

        def once() -> Result:
            with self.turn() as fs:
                return function(fs)

        return attempt(once, self.address.shown, writing=True)

    def remove_folder(self, key: str) -> None:
        """Remove what is below a directory, and it; or a file."""

        def removed(fs: Any) -> None:  # noqa: ANN401
            if fs.exists(key) and escape(key) == key:
                fs.rm(key, recursive=True)
            elif fs.exists(key):  # `rm` may take it for a pattern, and remove what fits
                every = fs.find(key, withdirs=True, detail=True)
                for name in sorted(every, reverse=True):
                    (fs.rmdir if every[name]["type"] == "directory" else fs.rm_file)(name)

        self._asked(removed)

    def below(self, key: str) -> list[str]:
        """Return the files below a directory."""
        return self._asked(lambda fs: fs.find(key) if fs.exists(key) else [])

    def described(self, key: str) -> Listed | None:
        """Return what the store says of one file; None: it is not there."""

        def info(fs: Any) -> Mapping[str, Any] | None:  # noqa: ANN401
            with suppress(FileNotFoundError):
                found: Mapping[str, Any] = fs.info(key)
                return found
            return None

        found = self._asked(info)
        return None if found is None else self._listed(key, found, key)

    def send(self, key: str, nbytes: int, parts: Iterable[bytearray]) -> str:
        """Write a file from its beginning to its end, and the directories that it is in. Not `attempt`ed.

        Returns which version the store says that it is.
        """
        self.make_folder_of(key)
        self._write(key, nbytes, parts)
        there = self.described(key)
        size = None if there is None else there.nbytes
        if there is None or size != nbytes:
            raise ShortBodyError(f"received {size} of {nbytes} bytes")
        return there.version

    def make_folder_of(self, key: str) -> None:
        """Make the directory that a file is to be in. Not `attempt`ed."""
        with self.turn() as fs:
            fs.makedirs(key.rpartition("/")[0], exist_ok=True)

    def _write(self, key: str, nbytes: int, parts: Iterable[bytearray]) -> None:  # noqa: ARG002
        with self.turn() as fs, fs.open(key, "wb") as file:
            for part in parts:
                file.write(bytes(part))

    def move(self, one: str, other: str) -> None:
        """Let something have another name, in the place of what has it. Not `attempt`ed."""
        from fsspec import AbstractFileSystem

        fs = self.client
        if fs.exists(other):
            fs.rm_file(other)
        if escape(one) == one or type(fs).cp_file is AbstractFileSystem.cp_file:  # the latter has a `mv` of its own
            fs.mv(one, other)
        else:  # which `mv` may take for a pattern
            fs.cp_file(one, other)
            fs.rm_file(one)


class SftpStore(FsspecStore):
    """SFTP, by paramiko. A channel of its connection answers one thread at a time; there are a few."""

    moves_folders = True

    def _open(self) -> tuple[Any, str]:
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()  # of another process, if there were any
        self._channels = threading.BoundedSemaphore(CHANNELS)
        fs, root = attempt(self._connected, self.address.shown)
        fs.ftp.get_channel().settimeout(SILENT_SECONDS)
        return fs, root

    def _connected(self) -> tuple[Any, str]:
        from fsspec import filesystem

        place = urlsplit(f"//{self.address.host}")
        own = zip(("username", "password", "port"), (*self.address.credentials, place.port), strict=True)
        given = {key: value for key, value in own if value}
        return filesystem("sftp", host=place.hostname, timeout=10, **given), "/" + "/".join(self.address.parts)

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """Yield a channel that nobody else uses; one that has failed is not used again."""
        fs = self.client
        with self._channels:
            try:
                one = self._idle.get_nowait()
            except queue.Empty:
                one = fs.client.open_sftp()
                one.get_channel().settimeout(SILENT_SECONDS)
            yield one
            self._idle.put(one)

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        with self.channel() as channel, channel.open(one.key, "rb") as file:
            return b"".join(file.readv([(offset, nbytes)]))

    def _write(self, key: str, nbytes: int, parts: Iterable[bytearray]) -> None:  # noqa: ARG002
        with self.channel() as channel, channel.open(key, "wb") as file:
            file.set_pipelined(True)
            for part in parts:
                file.write(part)

    def move(self, one: str, other: str) -> None:
        """As for any; the server replaces what is there."""
        self.client.mv(one, other)
