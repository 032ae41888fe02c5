"""Files on their way into a store, none of which is seen under its name before all of them are there.

    S3          each file is an upload in parts, which is completed when all parts of all files have come
    others      each goes under a temporary name, `.NAME.zckpt-partial`, from its beginning to its end, and is renamed

`Uploads` is what both have in common: `sink` for each file, `finish` when all have come, so that they can be read back
from where `url` says; `put` for small files that make others recognisable; `name` at the very end; `abort` removes all.
Where several processes send the files of one target, each says what it has `sent`, and one of them `adopt`s that and
finishes all. What they have to tell each other through the store is a `note`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zckpt.errors import TargetError
from zckpt.storage.remote.attempts import ShortBodyError, attempt
from zckpt.storage.remote.sftp import SftpStore
from zckpt.storage.remote.stores import Store
from zckpt.storage.remote.web import HttpStore, WebdavStore

NOTE = "note"

Sent = dict[str, Any]
"""Of files by their names: plain data."""


class Uploads(ABC):
    """Files of one target.

    Parameters
    ----------
    store : Store
    key : str
        The target's, as the store's library calls it.
    is_directory : bool
        Whether files go below the target, else beside it.
    """

    def __init__(self, store: Store, key: str, *, is_directory: bool) -> None:
        self.store = store
        self.key = key
        self.is_directory = is_directory
        self.root = key if is_directory else key.rpartition("/")[0]
        parent, _, name = key.rpartition("/")
        self.partial = f"{parent}/.{name}.zckpt-partial"

    def shown(self, name: str) -> str:
        """Return a file's URL, for messages."""
        top = self.store.address.shown
        return "/".join([top if self.is_directory else top.rpartition("/")[0], name])

    def at(self, name: str) -> str:
        """Return the key of a file by its name below the target, or beside it."""
        return f"{self.root}/{name}"

    @abstractmethod
    def begin(self, *, resume: bool = False) -> None:
        """Remove what a run that was killed has left, or go on with it where that can be done."""

    can_resume = False
    """Whether there is something to go on with after a kill."""

    def left(self) -> int:
        """Return how many bytes a run that was killed has sent, of those that can be gone on with."""
        return 0

    @abstractmethod
    def sent(self) -> Sent:
        """Return what this process has sent and not finished, by name: whatever `adopt` needs of it."""

    @abstractmethod
    def adopt(self, sent: Sent) -> None:
        """Take over what another process has sent."""

    def completed(self, sent: Sent) -> list[str]:  # noqa: ARG002
        """Return which files of a note have their names already: none, where nothing is gone on with."""
        return []

    def discard(self, sent: Sent) -> list[str]:  # noqa: ARG002
        """Remove those that have, and the note; return their names."""
        return []

    @abstractmethod
    def note(self, data: bytes) -> None:
        """Leave a small note beside the target, until it is named or aborted."""

    @abstractmethod
    def noted(self) -> bytes | None:
        """Return the note beside the target; None: there is none."""

    @abstractmethod
    def sink(self, name: str) -> Any:  # noqa: ANN401  # an engine.upload.Sink
        """Return where a file goes."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Send a small file; where files get their names one by one, this one is there at once."""

    @abstractmethod
    def finish(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Let files that have come be read, in this order; `old` are keys of a target that is replaced."""

    @abstractmethod
    def url(self) -> str:
        """Return where files that are finished can be read: of a directory that has them, or of the target."""

    @property
    @abstractmethod
    def is_folder(self) -> bool:
        """Whether `url` is of a directory that has the files, else they are beside it."""

    @abstractmethod
    def name(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Give files their names, in this order; remove those of a target that is replaced, which have `old` keys."""

    @abstractmethod
    def abort(self, *, everything: bool = True) -> None:
        """Remove what has come; or what this process has sent, and another removes all."""


class NamedUploads(Uploads):
    """Files under temporary names, which are renamed."""

    def __init__(self, store: Store, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        self._named: list[str] = []
        self._sent: list[str] = []

    def begin(self, *, resume: bool = False) -> None:  # noqa: ARG002  # there is nothing to go on with
        """Remove what has the temporary name."""
        self._remove(self.partial)

    def sent(self) -> Sent:
        """Return the names of files that have come."""
        return dict.fromkeys(self._sent)

    def adopt(self, sent: Sent) -> None:
        """Do nothing: they have temporary names."""

    def note(self, data: bytes) -> None:
        """Write a file of a temporary name."""
        self._sink(NOTE).write(len(data), lambda: iter([bytearray(data)]))

    def noted(self) -> bytes | None:
        """Return what the file holds."""

        def read() -> bytes | None:
            with self.store.turn() as fs:
                fs.invalidate_cache()
                key = self._temporary(NOTE)
                found: bytes | None = fs.cat_file(key) if fs.exists(key) else None
                return found

        return attempt(read, self.store.address.shown, writing=True)

    def _temporary(self, name: str) -> str:
        return f"{self.partial}/{name}"

    def sink(self, name: str) -> FileSink:
        """Return where a file goes, in a directory of a temporary name."""
        self._sent.append(name)
        return self._sink(name)

    def _sink(self, name: str) -> FileSink:
        return FileSink(self.store, self._temporary(name), self.shown(name))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file under a temporary name."""
        self._sink(name).write(len(data), lambda: iter([bytearray(data)]))

    def finish(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Do nothing: they can be read as they come."""

    def url(self) -> str:
        """Return that of the temporary directory."""
        head, _, name = self.store.address.url.rstrip("/").rpartition("/")
        return f"{head}/.{name}.zckpt-partial"

    @property
    def is_folder(self) -> bool:
        """Whether it is a directory: always."""
        return True

    def name(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Rename the directory, or the files."""
        fs, shown = self.store.fs, self.store.address.shown

        def renamed() -> None:
            if self.is_directory and isinstance(self.store, SftpStore | WebdavStore):
                self._remove(self.key)
                self._move(self.partial, self.key)
                return
            for key in old:
                self._remove(key)
            for name in names:
                target = self.at(name)
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._move(self._temporary(name), target)
                self._named.append(target)

        try:
            if fs.exists(self._temporary(NOTE)):
                fs.rm(self._temporary(NOTE))
            renamed()
        except Exception as error:
            raise TargetError("could not be named", path=shown, found=f"{type(error).__name__}: {error}") from error
        self._remove(self.partial)

    def _move(self, one: str, other: str) -> None:
        if isinstance(self.store, WebdavStore):
            self.store.fs.client.move(one, other, overwrite=True)
        else:
            if not isinstance(self.store, SftpStore) and self.store.fs.exists(other):
                self.store.fs.rm(other)
            self.store.fs.mv(one, other)

    def _remove(self, key: str) -> None:
        fs = self.store.fs
        fs.invalidate_cache()
        if fs.exists(key):
            fs.rm(key, recursive=True)

    def abort(self, *, everything: bool = True) -> None:
        """Remove the temporary names, and what has been named."""
        if not everything:
            return
        for key in [*self._named, self.partial]:
            try:
                self._remove(key)
            except Exception as error:
                raise TargetError(
                    "could not be removed", path=self.store.address.shown, found=key, advice="remove it"
                ) from error


class FileSink:
    """A file that is written from its beginning to its end."""

    def __init__(self, store: Store, key: str, shown: str) -> None:
        self._store, self._key, self._shown = store, key, shown

    def write(self, nbytes: int, parts: Callable[[], Iterator[bytearray]]) -> None:
        """Write a file, from its beginning again if that fails."""
        attempt(lambda: self._write(nbytes, parts()), self._shown, writing=True)

    def _write(self, nbytes: int, parts: Iterator[bytearray]) -> None:
        store = self._store
        with store.turn() as fs:
            fs.makedirs(self._key.rpartition("/")[0], exist_ok=True)
        if isinstance(store, SftpStore):
            with store.channel() as channel, channel.open(self._key, "wb") as file:
                file.set_pipelined(True)
                for part in parts:
                    file.write(part)
        elif isinstance(store, WebdavStore):
            client = store.fs.client
            headers = {"Content-Length": str(nbytes)}
            found = client.http.request("PUT", client.join_url(self._key), content=map(bytes, parts), headers=headers)
            found.raise_for_status()
        else:
            with store.turn() as fs, fs.open(self._key, "wb") as file:
                for part in parts:
                    file.write(bytes(part))
        with store.turn() as fs:
            fs.invalidate_cache()
            size = fs.info(self._key)["size"]
        if size != nbytes:
            raise ShortBodyError(f"{size} bytes of {nbytes} have come")


def uploads_of(store: Store, key: str, *, is_directory: bool) -> Uploads:
    """Return how files get into a store.

    Raises
    ------
    TargetError
        Nothing can be written there.
    """
    if isinstance(store, HttpStore):
        raise TargetError("cannot be written", path=store.address.shown, found="a web server, which is read only",
                          advice="write to a store: S3, SFTP, WebDAV, ...")  # fmt: skip
    from zckpt.storage.remote.s3 import S3Store
    from zckpt.storage.remote.s3_uploads import S3Uploads

    if isinstance(store, S3Store):
        return S3Uploads(store, key, is_directory=is_directory)
    return NamedUploads(store, key, is_directory=is_directory)
