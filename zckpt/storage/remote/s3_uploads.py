"""Files on their way into S3: uploads in parts, which are no objects before they are completed.

What a run that was killed has left is gone on with by content: a part that the store has under the same number, of the
same size and with the MD5 of what would be sent, is not sent again. When all parts of all files have come, a note
beside the target lists them, so that a run that was killed while it completed them need not make any of them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from zckpt.errors import TargetError
from zckpt.storage.remote.attempts import attempt, status_of
from zckpt.storage.remote.s3 import S3Store
from zckpt.storage.remote.s3_sink import S3Sink, listed
from zckpt.storage.remote.uploads import NOTE, Sent, Uploads


class S3Uploads(Uploads):
    """Uploads in parts."""

    def __init__(self, store: S3Store, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        self.s3 = store
        self._open: dict[str, S3Sink] = {}
        self._finished: list[str] = []
        self._found: dict[str, str] = {}
        self._has_note = False

    def begin(self, *, resume: bool = False, keep: bool = False) -> None:  # noqa: ARG002  # the store keeps all
        """Abort uploads to the same keys, or note them; whose run still goes on fails with its next part."""
        if resume:
            self._found = {one["Key"]: one["UploadId"] for one in self._unfinished() or ()}
        else:
            self._sweep()

    kept_in = "unfinished uploads"

    def left(self) -> int:
        """Return how many bytes are in unfinished uploads; where the store does not say, how many this run has sent."""
        every = self._unfinished()
        if every is None:
            return sum(one.nbytes for one in self._open.values())
        found = (self._parts({**self._bucket(), "Key": one["Key"], "UploadId": one["UploadId"]})
                 for one in every)  # fmt: skip
        return sum(part["Size"] for parts in found for part in parts)

    def _bucket(self) -> dict[str, str]:
        return {"Bucket": self.s3.place(self.key)["Bucket"]}

    def _unfinished(self) -> list[dict[str, Any]] | None:
        """Return the uploads to the target's keys; None: who may write is not allowed to list them, or none answers."""
        place = self.s3.place(self.key)
        try:
            found = list(listed(self.s3, "list_multipart_uploads", "Uploads", ("KeyMarker", "UploadIdMarker"),
                                {**self._bucket(), "Prefix": place["Key"]}, self.store.address.shown))  # fmt: skip
        except TargetError:
            return None
        return [one for one in found if one["Key"] == place["Key"] or one["Key"].startswith(f"{place['Key']}/")]

    def _parts(self, place: dict[str, str]) -> Iterator[dict[str, Any]]:
        with suppress(TargetError):  # it is gone by now
            shown = self.store.address.shown
            yield from listed(self.s3, "list_parts", "Parts", ("PartNumberMarker",), place, shown)

    def _sweep(self) -> None:
        """Abort what is unfinished: of runs that were killed, and where the answer was lost that named an upload."""
        for one in self._unfinished() or ():
            which = {**self._bucket(), "Key": one["Key"], "UploadId": one["UploadId"]}
            with suppress(TargetError):
                attempt(
                    partial(self.s3.call, "abort_multipart_upload", **which), self.store.address.shown, writing=True
                )

    def sink(self, name: str) -> S3Sink:
        """Begin an upload, or go on with one."""
        place = self.s3.place(self.at(name))
        upload = self._found.pop(place["Key"], None)
        one = self._open[name] = S3Sink(self.s3, self.at(name), self.shown(name), upload)
        if upload is not None:
            one.there = {part["PartNumber"]: part for part in self._parts({**place, "UploadId": upload})}
        return one

    def sent(self) -> Sent:
        """Return of each upload its id and its parts."""
        for one in self._open.values():
            one.check()
        return {name: one.state() for name, one in self._open.items()}

    def adopt(self, sent: Sent) -> None:
        """Take over uploads whose parts have all come."""
        for name, (upload, parts) in sent.items():
            one = self._open[name] = S3Sink(self.s3, self.at(name), self.shown(name), upload)
            one.parts = {int(number): (etag, nbytes) for number, (etag, nbytes) in parts.items()}

    def completed(self, sent: Sent) -> list[str]:
        """Return which of the files of a note are objects already."""
        self.adopt(sent)
        found = [name for name in sent if self._open[name].is_completed(surely=True)]
        self._open.clear()
        return found

    def discard(self, sent: Sent) -> list[str]:
        """Remove objects that a run has completed, and its note; return their names."""
        found = self.completed(sent)
        for name in found:
            self._delete(self.at(name), self.shown(name))
        self.forget()
        return found

    def put(self, name: str, data: bytes) -> None:
        """Send a whole object."""
        arguments = {**self.s3.place(self.at(name)), "Body": data}
        attempt(lambda: self.s3.call("put_object", **arguments), self.shown(name), writing=True)
        self._finished.append(name)

    def note(self, data: bytes) -> None:
        """Put an object beside the target."""
        place = self.s3.place(f"{self.partial}/{NOTE}")
        self._has_note = True
        attempt(lambda: self.s3.call("put_object", **place, Body=data), self.store.address.shown, writing=True)

    def noted(self) -> bytes | None:
        """Return the object beside the target."""
        place = self.s3.place(f"{self.partial}/{NOTE}")

        async def read() -> bytes:
            found = await self.s3.fs._call_s3("get_object", **place)
            async with found["Body"] as body:
                data: bytes = await body.read()
                return data

        def once() -> bytes | None:
            from fsspec.asyn import sync

            try:
                data: bytes = sync(self.s3.fs.loop, read)
            except Exception as error:
                if isinstance(error, FileNotFoundError | PermissionError) or status_of(error) in (403, 404):
                    return None  # of what is not there, who may not list learns nothing
                raise
            return data

        found = attempt(once, self.store.address.shown, writing=True)
        self._has_note = self._has_note or found is not None
        return found

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
        self.forget()
        self._sweep()

    def forget(self) -> None:
        """Remove the note."""
        if self._has_note:
            self._delete(f"{self.partial}/{NOTE}", self.store.address.shown)
            self._has_note = False

    def abort(self, *, everything: bool = True) -> None:
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
        if everything:
            self._sweep()
            with suppress(TargetError):  # of nothing that is there any more
                self.forget()
        if left:
            raise TargetError("could not be removed", path=left[0], found=f"{len(left)} of them",
                              advice="abort its unfinished uploads, and remove it")  # fmt: skip
