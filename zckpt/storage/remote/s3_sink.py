"""One file on its way into S3: an upload in parts, which is no object before it is completed.

A part that is a range of another object, unchanged, is copied by the store, where it can; whether it can is found out
once, with an upload that is aborted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import md5
from typing import Any

from zckpt.errors import TargetError
from zckpt.storage import distant
from zckpt.storage.remote.attempts import attempt, status_of
from zckpt.storage.remote.cache import RemoteFile
from zckpt.storage.remote.s3 import S3Store, is_precondition
from zckpt.storage.remote.stores import changed

_MD5 = re.compile(r"[0-9a-f]{32}")
_OF_PARTS = re.compile(r"[0-9a-f]{32}-\d+")
"""The ETag of an object that was made of parts: the MD5 of their MD5s, and how many they are."""

MOST_COPIED_NBYTES = 5 << 30
"""What S3 copies by one request."""


def listed(
    store: S3Store, method: str, name: str, markers: Sequence[str], arguments: Mapping[str, str], shown: str
) -> Iterator[dict[str, Any]]:
    """Yield what a store lists in pages."""
    following: dict[str, str] = {}
    while True:
        page = attempt(partial(store.call, method, **{**arguments, **following}), shown, writing=True)
        yield from page.get(name, ())
        following = {key: page[f"Next{key}"] for key in markers if page.get(f"Next{key}")}
        if not page.get("IsTruncated") or not following:
            return


class S3Sink:
    """One upload in parts; `upload` is the id of one that is gone on with."""

    def __init__(self, store: S3Store, key: str, shown: str, upload: str | None = None) -> None:
        self._store = store
        self._key = key
        self._place = store.place(key)
        self._shown = shown
        self.parts: dict[int, tuple[str, int]] = {}
        """ETag and bytes of those that have come, by their numbers from 1 on."""
        self.there: dict[int, dict[str, Any]] = {}
        """What the store has of an upload that is gone on with."""
        self._copied: set[int] = set()
        self._place["UploadId"] = upload or self._call("create_multipart_upload")["UploadId"]

    def _call(self, method: str, **arguments: object) -> Any:  # noqa: ANN401
        return attempt(lambda: self._store.call(method, **self._place, **arguments), self._shown, writing=True)

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
        file = distant.found(path)
        origin = file.origin if isinstance(file, RemoteFile) else None
        if origin is None or nbytes > MOST_COPIED_NBYTES:
            return False
        store, one = origin
        if not isinstance(store, S3Store) or not self._store.same_as(store):
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
        place = {key: self._place[key] for key in ("Bucket", "Key")}
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
        if not self._copied:
            return
        pages = listed(self._store, "list_parts", "Parts", ("PartNumberMarker",), self._place, self._shown)
        there = {part["PartNumber"]: part["Size"] for part in pages}
        wrong = min((one for one in self._copied if there.get(one) != self.parts[one][1]), default=None)
        if wrong is not None:
            raise TargetError(
                f"part {wrong} is not as it was to be copied", path=self._shown,
                expected=f"{self.parts[wrong][1]} bytes", found=there.get(wrong),
            )  # fmt: skip
        self._copied.clear()

    def state(self) -> tuple[str, dict[int, tuple[str, int]]]:
        """Return the upload's id and its parts."""
        return self._place["UploadId"], self.parts

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
            self._store.call("list_parts", **self._place)
        except Exception as error:  # noqa: BLE001
            if (
                status_of(error) != 404
                and not isinstance(error, FileNotFoundError)
                and "NoSuchUpload" not in str(error)
            ):
                return False
        else:
            return False
        try:
            found = self._store.call("head_object", Bucket=self._place["Bucket"], Key=self._place["Key"])
        except Exception:  # noqa: BLE001  # the first error says more
            return False
        etag = found.get("ETag", "").strip('"')
        is_encrypted = bool(found.get("SSEKMSKeyId") or found.get("SSECustomerAlgorithm"))  # then no ETag is an MD5
        if etag == self._etag() or (_OF_PARTS.fullmatch(etag) and not is_encrypted):
            return bool(found["ContentLength"] == self.nbytes) and etag == self._etag()
        return bool(found["ContentLength"] == self.nbytes) and (not surely or self._has_parts())

    def _has_parts(self) -> bool:
        """Read the object; tell whether it is what the parts' ETags say, if these are MD5s."""
        at = 0
        for _, (etag, nbytes) in sorted(self.parts.items()):
            read = partial(self._store.fs.cat_file, self._key, start=at, end=at + nbytes)
            if md5(attempt(read, self._shown), usedforsecurity=False).hexdigest() != etag.strip('"'):
                return False
            at += nbytes
        return True

    def _etag(self) -> str:
        """Return the ETag that S3 gives an object of these parts."""
        each = [etag.strip('"') for _, (etag, _) in sorted(self.parts.items())]
        if not all(map(_MD5.fullmatch, each)):
            return ""
        return f"{md5(b''.join(map(bytes.fromhex, each)), usedforsecurity=False).hexdigest()}-{len(each)}"

    def abort(self) -> bool:
        """Remove all parts; return whether the store has done so."""
        try:
            self._call("abort_multipart_upload")
        except TargetError as error:
            return "NoSuchUpload" in str(error) or "nothing there" in str(error)
        return True
