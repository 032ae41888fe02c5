"""S3, and what speaks as it does, by botocore.

What is read is asked for of the version that was listed, by its ETag. What is written is an upload in parts, which is
no object before it is completed. A part that is a range of another object, unchanged, is copied by the store, where it
can; whether it can is found out once, with an upload that is aborted.

What a run that was killed has left is gone on with by content: a part that the store has under the same number, of the
same size and with the MD5 of what would be sent, is not sent again. When all parts of all files have come, a note
beside the target lists them, so that a run that was killed while it completed them need not make any of them again.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache, partial
from hashlib import md5
from typing import Any

from zckpt.errors import TargetError
from zckpt.state import nbytes_of
from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.attempts import attempt, status_of
from zckpt.storage.remote.cache import RemoteFile
from zckpt.storage.remote.stores import Entries, Listed, Sent, Store, UploadsBase, changed
from zckpt.storage.stand_ins import FILES

CONNECTIONS = 32
"""Open at once to one store; as many requests are under way at most."""

CONNECT_SECONDS, SILENT_SECONDS = 5, 15
"""What a server may take to answer at all, and between two bytes that it sends."""

MOST_COPIED_NBYTES = 5 << 30
"""What S3 copies by one request."""

_MD5 = re.compile(r"[0-9a-f]{32}")
_OF_PARTS = re.compile(r"[0-9a-f]{32}-\d+")
"""The ETag of an object that was made of parts: the MD5 of their MD5s, and how many they are."""


@lru_cache(maxsize=4)
def _client(_pid: int, _environment: tuple[tuple[str, str], ...]) -> Any:  # noqa: ANN401  # botocore has no types
    """Return one for each process and each environment, with its connections; making one takes a while."""
    import botocore.session
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=SILENT_SECONDS,
        max_pool_connections=CONNECTIONS,
        retries={"total_max_attempts": 1},  # `attempt` makes them
        response_checksum_validation="when_required",  # some servers send that of the object with a range
    )
    return botocore.session.get_session().create_client("s3", config=config)


class S3Store(Store):
    """Buckets of S3; a key begins with the bucket."""

    checks_versions = True

    def __init__(self, address: Address) -> None:
        self._asking = threading.Lock()
        self._copies: bool | None = None
        super().__init__(address)

    def _open(self) -> tuple[Any, str]:
        said = tuple(sorted((key, value) for key, value in os.environ.items() if key.startswith("AWS_")))
        return _client(os.getpid(), said), "/".join([self.address.host, *self.address.parts])

    def call(self, method: str, **arguments: object) -> Any:  # noqa: ANN401  # what botocore returns
        """Make one request; errors are botocore's."""
        return getattr(self.client, method)(**arguments)

    def ask(self, method: str, arguments: Mapping[str, object], shown: str | None = None) -> Any:  # noqa: ANN401
        """Make one request of those by which something is written; errors are those of `attempt`."""
        return attempt(lambda: self.call(method, **arguments), shown or self.address.shown, writing=True)

    def pages(
        self, method: str, name: str, arguments: Mapping[str, str], *markers: str, writing: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yield what is listed, page by page; each is `attempt`ed."""
        following: dict[str, str] = {}
        while True:
            once = partial(self.call, method, **{**arguments, **following})
            page = attempt(once, self.address.shown, writing=writing)
            yield from page.get(name, ())
            following = {key: page[f"Next{key}"] for key in markers if page.get(f"Next{key}")}
            if not page.get("IsTruncated") or not following:
                return

    def place(self, key: str) -> dict[str, str]:
        """Return the bucket of a key, and what the bucket calls it."""
        bucket, _, rest = key.partition("/")
        return {"Bucket": bucket, "Key": rest}

    def copies(self, ask: Callable[[], bool]) -> bool:
        """Tell whether it makes parts of ranges of its objects; `ask` finds out, and is called once."""
        with self._asking:
            if self._copies is None:
                self._copies = ask()
            return self._copies

    def _below(self, folder: str, **more: str) -> Entries:
        place = self.place(folder)
        which = {"Bucket": place["Bucket"], "Prefix": f"{place['Key']}/" if place["Key"] else "", **more}
        every = self.pages("list_objects_v2", "Contents", which, "ContinuationToken", writing=False)
        return {f"{place['Bucket']}/{one['Key']}": {**one, "size": one["Size"]} for one in every}

    def _find(self) -> Entries:
        found, place = self._below(self.root), self.place(self.root)
        if found or not place["Key"]:
            return found
        try:
            one = self.call("head_object", **place)
        except Exception as error:
            if status_of(error) == 404:
                return {}
            raise
        return {self.root: {**one, "size": one["ContentLength"]}}

    def _beside(self, folder: str) -> Entries:
        return self._below(folder, Delimiter="/")

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        etag = one.version.strip('"')
        try:
            found = self.call("get_object", **self.place(one.key), Range=f"bytes={offset}-{offset + nbytes - 1}",
                              IfMatch=f'"{etag}"')  # fmt: skip
        except Exception as error:
            if is_precondition(error):
                raise changed(one.key) from error
            raise
        with closing(found["Body"]) as body:
            if found.get("ETag", etag).strip('"') != etag:  # of servers that do not know If-Match
                raise changed(one.key)
            data: bytes = body.read()
            return data

    def body(self, which: Mapping[str, str]) -> bytes:
        """Return an object, or a range of it. Not `attempt`ed."""
        with closing(self.call("get_object", **which)["Body"]) as body:
            data: bytes = body.read()
            return data

    def _remove(self, key: str) -> None:
        self.call("delete_object", **self.place(key))

    def _put(self, key: str, data: bytes) -> None:
        self.call("put_object", **self.place(key), Body=data)

    def _read(self, key: str) -> bytes | None:
        try:
            return self.body(self.place(key))
        except Exception as error:
            if status_of(error) in (403, 404):
                return None  # of what is not there, who may not list learns nothing
            raise


def is_precondition(error: BaseException) -> bool:
    """Tell whether a request was refused since an object is another one by now."""
    return status_of(error) == 412 or "PreconditionFailed" in str(error) or "pre-conditions" in str(error)


class S3Sink:
    """One upload in parts; `upload` is the id of one that is gone on with."""

    def __init__(self, store: S3Store, key: str, shown: str, upload: str | None = None) -> None:
        self._store = store
        self._object = store.place(key)
        self._shown = shown
        self.parts: dict[int, tuple[str, int]] = {}
        """ETag and bytes of those that have come, by their numbers from 1 on."""
        self.there: dict[int, dict[str, Any]] = {}
        """What the store has of an upload that is gone on with."""
        self._copied: set[int] = set()
        self.upload: str = upload or store.ask("create_multipart_upload", self._object, shown)["UploadId"]
        self._place = {**self._object, "UploadId": self.upload}

    def _call(self, method: str, **arguments: object) -> Any:  # noqa: ANN401
        return self._store.ask(method, {**self._place, **arguments}, self._shown)

    @property
    def part_nbytes(self) -> int | None:
        """Of parts that were sent before, the size, so that they fit those that are made now; None: any."""
        return max((part["Size"] for part in self.there.values()), default=None) if len(self.there) > 1 else None

    def send(self, number: int, data: bytearray) -> None:
        """Send a part, unless the store has it; sending it twice does no harm."""
        there = self.there.get(number + 1)
        if there is not None and there["Size"] == len(data):
            etag = there["ETag"].strip('"')
            if _MD5.fullmatch(etag) and md5(data, usedforsecurity=False).hexdigest() == etag:
                self.parts[number + 1] = there["ETag"], len(data)
                return
        found = self._call("upload_part", PartNumber=number + 1, Body=bytes(data))
        self.parts[number + 1] = found["ETag"], len(data)

    def copy(self, number: int, path: str, offset: int, nbytes: int) -> bool:
        """Let the store make a part of what one of its objects has, of the version that was listed.

        Returns
        -------
        bool
            False: the file is elsewhere, or the store does not do that, and is not asked again.
        """
        file = FILES.get(path)
        if not isinstance(file, RemoteFile) or nbytes > MOST_COPIED_NBYTES:
            return False
        store, one = file.store, file.listed
        if not isinstance(store, S3Store) or self._store.client is not store.client:
            return False
        arguments: dict[str, object] = {
            "PartNumber": number + 1,
            "CopySource": store.place(one.key),
            "CopySourceRange": f"bytes={offset}-{offset + nbytes - 1}",
            "CopySourceIfMatch": one.version,
        }
        if not self._store.copies(lambda: self._is_copied(arguments)):
            return False
        try:
            answer = self._call("upload_part_copy", **arguments)
        except TargetError as error:
            if error.__cause__ is not None and is_precondition(error.__cause__):
                raise changed(path) from error
            raise
        self.parts[number + 1] = answer["CopyPartResult"]["ETag"], nbytes
        self._copied.add(number + 1)
        return True

    def _is_copied(self, arguments: Mapping[str, object]) -> bool:
        """Tell whether the store copies ranges; of another upload: some take the request for a part without bytes."""
        place = dict(self._object)
        place["UploadId"] = self._store.call("create_multipart_upload", **place)["UploadId"]
        try:
            answer = self._store.call("upload_part_copy", **place, **arguments)
            return bool(answer.get("CopyPartResult", {}).get("ETag"))
        except Exception:  # noqa: BLE001  # whatever it is, the bytes can come by here
            return False
        finally:
            with suppress(Exception):
                self._store.call("abort_multipart_upload", **place)

    def check(self) -> None:
        """Raise TargetError unless the parts that the store has made are as large as they should be."""
        pages = self._store.pages("list_parts", "Parts", self._place, "PartNumberMarker") if self._copied else ()
        there = {part["PartNumber"]: part["Size"] for part in pages}
        wrong = min((one for one in self._copied if there.get(one) != self.parts[one][1]), default=None)
        if wrong is not None:
            raise TargetError(
                f"part {wrong} was not copied correctly", path=self._shown,
                expected=f"{self.parts[wrong][1]} bytes", found=there.get(wrong),
            )  # fmt: skip
        self._copied.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that have come."""
        return sum(nbytes for _, nbytes in self.parts.values())

    def complete(self) -> None:
        """Make an object of the parts."""
        self.check()
        every = [{"PartNumber": number, "ETag": etag} for number, (etag, _) in sorted(self.parts.items())]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": every})
        except TargetError:
            if not self.is_completed():
                raise

    def is_completed(self, *, surely: bool = False) -> bool:
        """Tell whether the upload is an object: the answer to a request may be lost that was done, or a run killed.

        The upload is gone then, and there is an object of as many bytes; its ETag is that of the parts where it is of
        that form. `surely`: or else the object is read, and is of them; it is nobody else's of the same size.
        """
        try:
            self._call("list_parts")
        except TargetError as error:
            if not _is_gone(error):
                return False
        else:
            return False
        try:
            found = self._store.ask("head_object", self._object, self._shown)
        except TargetError:  # the first error says more
            return False
        etag, own = found.get("ETag", "").strip('"'), ""
        each = [one.strip('"') for _, (one, _) in sorted(self.parts.items())]
        if all(map(_MD5.fullmatch, each)):  # what S3 gives an object of these parts
            own = f"{md5(b''.join(map(bytes.fromhex, each)), usedforsecurity=False).hexdigest()}-{len(each)}"
        is_encrypted = bool(found.get("SSEKMSKeyId") or found.get("SSECustomerAlgorithm"))  # then no ETag is an MD5
        is_told = etag == own or (_OF_PARTS.fullmatch(etag) is not None and not is_encrypted)
        same = etag == own if is_told else not surely or self._has_parts()
        return bool(found["ContentLength"] == self.nbytes) and same

    def _has_parts(self) -> bool:
        """Read the object; tell whether it is what the parts' ETags say, if these are MD5s."""
        at = 0
        for _, (etag, nbytes) in sorted(self.parts.items()):
            which = {**self._object, "Range": f"bytes={at}-{at + nbytes - 1}"}
            read = partial(self._store.body, which)
            if md5(attempt(read, self._shown), usedforsecurity=False).hexdigest() != etag.strip('"'):
                return False
            at += nbytes
        return True

    def abort(self) -> bool:
        """Remove all parts; return whether the store has done so."""
        try:
            self._call("abort_multipart_upload")
        except TargetError as error:
            return _is_gone(error)
        return True


def _is_gone(error: TargetError) -> bool:
    """Tell whether a request was refused since there is no such upload."""
    return error.found == "nothing there" or "NoSuchUpload" in str(error)


class S3Uploads(UploadsBase):
    """Uploads in parts."""

    store: S3Store
    kept_in = "unfinished uploads"

    def __init__(self, store: S3Store, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        self.is_folder = is_directory
        self._open: dict[str, S3Sink] = {}
        self._finished: list[str] = []
        self._found: dict[str, str] = {}
        self._has_note = False

    def begin(self, *, resume: bool = False, keep: bool = False) -> None:  # noqa: ARG002  # the store keeps all
        """Abort uploads to the same keys, or note them; whose run still goes on fails with its next part."""
        if resume:
            self._found = {one["Key"]: one["UploadId"] for one in self._unfinished() or ()}
        else:
            self._forget()
            self._sweep()

    def left(self) -> int:
        """Return how many bytes are in unfinished uploads; where the store does not say, how many this run has sent."""
        every = self._unfinished()
        if every is None:
            return nbytes_of(self._open.values())
        return sum(part["Size"] for which in every for part in self._parts(which))

    def _unfinished(self) -> list[dict[str, str]] | None:
        """Return the uploads to the target's keys; None: who may write is not allowed to list them, or none answers."""
        place = self.store.place(self.key)
        which = {"Bucket": place["Bucket"], "Prefix": place["Key"]}
        try:
            found = list(self.store.pages("list_multipart_uploads", "Uploads", which, "KeyMarker", "UploadIdMarker"))
        except TargetError:
            return None
        every = ({"Bucket": place["Bucket"], "Key": one["Key"], "UploadId": one["UploadId"]} for one in found)
        return [one for one in every if f"{one['Key']}/".startswith(f"{place['Key']}/")]

    def _parts(self, which: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        with suppress(TargetError):  # it is gone by now
            yield from self.store.pages("list_parts", "Parts", which, "PartNumberMarker")

    def _sweep(self) -> None:
        """Abort what is unfinished: of runs that were killed, and where the answer was lost that named an upload."""
        for which in self._unfinished() or ():
            with suppress(TargetError):
                self.store.ask("abort_multipart_upload", which)

    def sink(self, name: str) -> S3Sink:
        """Begin an upload, or go on with one."""
        place = self.store.place(self.at(name))
        upload = self._found.pop(place["Key"], None)
        one = self._open[name] = S3Sink(self.store, self.at(name), self.shown(name), upload)
        if upload is not None:
            one.there = {part["PartNumber"]: part for part in self._parts({**place, "UploadId": upload})}
        return one

    def sent(self) -> Sent:
        """Return of each upload its id and its parts."""
        for one in self._open.values():
            one.check()
        return {name: (one.upload, one.parts) for name, one in self._open.items()}

    def adopt(self, sent: Sent) -> None:
        """Take over uploads whose parts have all come."""
        for name, (upload, parts) in sent.items():
            one = self._open[name] = S3Sink(self.store, self.at(name), self.shown(name), upload)
            one.parts = {int(number): (etag, nbytes) for number, (etag, nbytes) in parts.items()}

    def completed(self, sent: Sent) -> list[str]:
        """Return which of the files of a note are objects already."""
        self.adopt(sent)
        found = [name for name in sent if self._open[name].is_completed(surely=True)]
        self._open.clear()
        return found

    def put(self, name: str, data: bytes) -> None:
        """Send a whole object."""
        self.store.put(self.at(name), data, self.shown(name))
        self._finished.append(name)

    def note(self, data: bytes) -> None:
        """Put an object beside the target."""
        self._has_note = True
        super().note(data)

    def noted(self) -> bytes | None:
        """Return the object beside the target."""
        found = super().noted()
        self._has_note = self._has_note or found is not None
        return found

    def finish(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Remove what is replaced, so that no old object is ever with a new one, and complete uploads."""
        for key in old:
            self.store.remove(key)
        for name in names:
            self._open[name].complete()
            self._finished.append(name)
            del self._open[name]

    def url(self) -> str:
        """Return the target's."""
        return self.store.address.url

    def name(self, names: Sequence[str], old: Sequence[str]) -> None:  # noqa: ARG002
        """Leave nothing behind: they have their names."""
        self._forget()
        self._sweep()

    def _forget(self) -> None:
        """Remove the note."""
        if self._has_note:
            self.store.remove(self.kept_note)
            self._has_note = False

    def abort(self, *, everything: bool = True) -> None:
        """Abort uploads, and remove objects that were completed."""
        left: list[str] = []
        for name, one in self._open.items():
            if not one.abort():
                left.append(self.shown(name))
        for name in self._finished:
            try:
                self.store.remove(self.at(name))
            except TargetError:
                left.append(self.shown(name))
        self._open.clear()
        self._finished.clear()
        if everything:
            self._sweep()
            with suppress(TargetError):  # of nothing that is there any more
                self._forget()
        if left:
            raise TargetError("could not be removed", path=left[0], found=f"{len(left)} of them",
                              advice="abort its unfinished uploads, and remove it")  # fmt: skip
