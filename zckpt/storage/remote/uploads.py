"""Files on their way into a store, none of which is seen under its name before all of them are there.

    S3          each file is an upload in parts, which is completed when all parts of all files have come
    others      each goes under a temporary name, `.NAME.zckpt-partial`, from its beginning to its end, and is renamed

`Uploads` is what both have in common: `sink` for each file, `finish` when all have come, so that they can be read back
from where `url` says; `put` for small files that make others recognisable; `name` at the very end; `abort` removes all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from zckpt.errors import TargetError
from zckpt.storage.remote.attempts import ShortBodyError, attempt
from zckpt.storage.remote.s3 import S3Store
from zckpt.storage.remote.sftp import SftpStore
from zckpt.storage.remote.stores import Store
from zckpt.storage.remote.web import HttpStore, WebdavStore


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

    def shown(self, name: str) -> str:
        """Return a file's URL, for messages."""
        top = self.store.address.shown
        return "/".join([top if self.is_directory else top.rpartition("/")[0], name])

    def at(self, name: str) -> str:
        """Return the key of a file by its name below the target, or beside it."""
        return f"{self.root}/{name}"

    @abstractmethod
    def begin(self) -> None:
        """Remove what a run that was killed has left."""

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
    def abort(self) -> None:
        """Remove what has come."""


class S3Uploads(Uploads):
    """Uploads in parts."""

    def __init__(self, store: S3Store, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        self.s3 = store
        self._open: dict[str, S3Sink] = {}
        self._finished: list[str] = []

    def begin(self) -> None:
        """Abort uploads to the same keys; whose run still goes on fails with its next part."""
        self._sweep()

    def _sweep(self) -> None:
        """Abort what is unfinished: of runs that were killed, and where the answer was lost that named an upload."""
        place, shown = self.s3.place(self.key), self.store.address.shown
        bucket = {"Bucket": place["Bucket"]}
        try:
            found = attempt(lambda: self._listed(place), shown, writing=True)
        except TargetError:  # who may write need not be able to list; the store's own rules remove such remains
            return
        for one in found.get("Uploads", ()):
            if one["Key"] == place["Key"] or one["Key"].startswith(f"{place['Key']}/"):
                which = {**bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
                with suppress(TargetError):
                    attempt(partial(self.s3.call, "abort_multipart_upload", **which), shown, writing=True)

    def _listed(self, place: dict[str, str]) -> Any:  # noqa: ANN401  # what botocore returns
        return self.s3.call("list_multipart_uploads", Bucket=place["Bucket"], Prefix=place["Key"])

    def sink(self, name: str) -> S3Sink:
        """Begin an upload."""
        found = self._open[name] = S3Sink(self.s3, self.at(name), self.shown(name))
        return found

    def put(self, name: str, data: bytes) -> None:
        """Send a whole object."""
        arguments = {**self.s3.place(self.at(name)), "Body": data}
        attempt(lambda: self.s3.call("put_object", **arguments), self.shown(name), writing=True)
        self._finished.append(name)

    def finish(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Remove what is replaced, so that no old object is ever with a new one, and complete uploads."""
        for key in old:
            self._delete(key, self.store.address.shown)
        for name in names:
            self._open[name].complete()
            self._finished.append(name)
            del self._open[name]

    def url(self) -> str:
        """Return the target's."""
        return self.store.address.url

    @property
    def is_folder(self) -> bool:
        """Whether the target is a directory."""
        return self.is_directory

    def _delete(self, key: str, shown: str) -> None:
        attempt(lambda: self.s3.call("delete_object", **self.s3.place(key)), shown, writing=True)

    def name(self, names: Sequence[str], old: Sequence[str]) -> None:  # noqa: ARG002
        """Leave nothing behind: they have their names."""
        self._sweep()

    def abort(self) -> None:
        """Abort uploads, and remove objects that were completed."""
        left: list[str] = []
        for name, one in self._open.items():
            if not one.abort():
                left.append(self.shown(name))
        for name in self._finished:
            try:
                self._delete(self.at(name), self.shown(name))
            except TargetError:
                left.append(self.shown(name))
        self._open.clear()
        self._finished.clear()
        self._sweep()
        if left:
            raise TargetError("could not be removed", path=left[0], found=f"{len(left)} of them",
                              advice="abort its unfinished uploads, and remove it")  # fmt: skip


class S3Sink:
    """One upload in parts."""

    def __init__(self, store: S3Store, key: str, shown: str) -> None:
        self._store = store
        self._place = store.place(key)
        self._shown = shown
        self._etags: dict[int, str] = {}
        self._nbytes: dict[int, int] = {}
        found = self._call("create_multipart_upload")
        self._place["UploadId"] = found["UploadId"]

    def _call(self, method: str, **arguments: object) -> Any:  # noqa: ANN401
        return attempt(lambda: self._store.call(method, **self._place, **arguments), self._shown, writing=True)

    def send(self, number: int, data: bytearray) -> None:
        """Send a part; sending it twice does no harm."""
        found = self._call("upload_part", PartNumber=number + 1, Body=bytes(data))
        self._etags[number + 1] = found["ETag"]
        self._nbytes[number + 1] = len(data)

    def complete(self) -> None:
        """Make an object of the parts."""
        every = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": every})
        except TargetError:
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        """Tell whether there is an object of as many bytes: the answer to a request may be lost that was done."""
        try:
            found = self._store.call("head_object", Bucket=self._place["Bucket"], Key=self._place["Key"])
        except Exception:  # noqa: BLE001  # the first error says more
            return False
        return bool(found["ContentLength"] == sum(self._nbytes.values()))

    def abort(self) -> bool:
        """Remove all parts; return whether the store has done so."""
        try:
            self._call("abort_multipart_upload")
        except TargetError as error:
            return "NoSuchUpload" in str(error) or "nothing there" in str(error)
        return True


class NamedUploads(Uploads):
    """Files under temporary names, which are renamed."""

    def __init__(self, store: Store, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        parent, _, name = key.rpartition("/")
        self._partial = f"{parent}/.{name}.zckpt-partial"
        self._named: list[str] = []

    def begin(self) -> None:
        """Remove what has the temporary name."""
        self._remove(self._partial)

    def _temporary(self, name: str) -> str:
        return f"{self._partial}/{name}"

    def sink(self, name: str) -> FileSink:
        """Return where a file goes, in a directory of a temporary name."""
        return FileSink(self.store, self._temporary(name), self.shown(name))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file under a temporary name."""
        self.sink(name).write(len(data), lambda: iter([bytearray(data)]))

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
                self._move(self._partial, self.key)
                return
            for key in old:
                self._remove(key)
            for name in names:
                target = self.at(name)
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._move(self._temporary(name), target)
                self._named.append(target)

        try:
            renamed()
        except Exception as error:
            raise TargetError("could not be named", path=shown, found=f"{type(error).__name__}: {error}") from error
        self._remove(self._partial)

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

    def abort(self) -> None:
        """Remove the temporary names, and what has been named."""
        for key in [*self._named, self._partial]:
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
    if isinstance(store, S3Store):
        return S3Uploads(store, key, is_directory=is_directory)
    return NamedUploads(store, key, is_directory=is_directory)
