"""Files on their way into a store under temporary names, which are renamed: all stores but S3.

    .NAME.zckpt-partial/            the files
    .NAME.zckpt-journal/00000001    lines, each of a file: that it has come, or that it is about to be sent again
    .NAME.zckpt-journal/note        that all have come

What a run that was killed has left is gone on with file by file: one that has come whole is made again and not sent, if
its bytes are the same. When all have come, the note lists them, so that a run that was killed while it named them need
not make any of them again.

A file is told by a digest of its bytes as they were sent, and by what the store has said of it when it had come: of how
many bytes it is, of which version. Where either is another, it has not come. Lines have a CRC-32; one that is not whole
is none. They are written as soon as they are of `RECORD_NBYTES` of files: of small files, that much may be sent twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from zckpt.errors import TargetError
from zckpt.storage.crc32 import content_of, line_of
from zckpt.storage.remote.attempts import attempt
from zckpt.storage.remote.fsspec_stores import FsspecStore
from zckpt.storage.remote.stores import Sent, UploadsBase

RECORD_NBYTES = 4 << 20

READ_NBYTES = 8 << 20
"""Of a file that is read back, at once."""

_new_digest = partial(blake2b, digest_size=16)


class Finished(NamedTuple):
    """A file that has come whole."""

    nbytes: int
    digest: str
    version: str


class NamedUploads(UploadsBase):
    """Files under temporary names, which are renamed."""

    store: FsspecStore

    def __init__(self, store: FsspecStore, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        self.kept_in = self.partial.rpartition("/")[2]
        self.journal = self.partial.removesuffix("partial") + "journal"
        self.kept_note = f"{self.journal}/note"
        self.keeps = self._resumes = False
        self._named: list[str] = []
        self.files_sent: dict[str, Finished | None] = {}
        self.recorded: dict[str, Finished] = {}
        """Files that have come, whichever run has sent them."""
        self._lock = threading.Lock()  # of the record
        self._lines: list[bytes] = []
        self._nbytes = self._number = 0
        self._unwritten: set[str] = set()

    def begin(self, *, resume: bool = False, keep: bool = False) -> None:
        """Remove what has the temporary name, or go on with those of its files that have come."""
        self.keeps, self._resumes = keep, resume
        if resume:
            self._read_record()
        else:
            self.store.remove_folder(self.partial)
            self.store.remove_folder(self.journal)
            self.recorded, self._number, self._named = {}, 0, []

    def left(self) -> int:
        """Return how many bytes have come in whole files of which the record tells."""
        if not self.keeps:
            self._read_record()
        with self._lock:
            with suppress(TargetError):  # of the same store, as a rule, whose first error is what there is to say
                self._flush()
            return sum(one.nbytes for name, one in self.recorded.items() if name not in self._unwritten)

    def record(self, name: str, one: Finished | None) -> None:
        """Note that a file has come; None, before anything of it is sent: that it is about to be another."""
        with self._lock:
            if one is None:
                del self.recorded[name]
            else:
                self.recorded[name] = one
                self._unwritten.add(name)
            self._lines.append(line_of([name, *(one or ())]))
            self._nbytes += RECORD_NBYTES if one is None else one.nbytes
            if self._nbytes >= RECORD_NBYTES:
                self._flush()

    def _flush(self) -> None:
        if self._lines:
            self.store.put(f"{self.journal}/{self._number + 1:08d}", b"".join(self._lines))
            self._number += 1
            self._nbytes = 0
            self._lines.clear()
            self._unwritten.clear()

    def _read_record(self) -> None:
        """Read what is recorded of files that are there as they came."""
        found: dict[str, Finished] = {}
        for key in sorted(self.store.below(self.journal)):
            with suppress(ValueError, TypeError):  # of a name that is none of the record's, or not as it was put there
                self._number = int(key.rpartition("/")[2])
                for content in map(content_of, (self.store.read(key) or b"").splitlines()):
                    if content is not None:
                        name, *about = content
                        found.pop(name, None)
                        found |= {name: Finished(*about)} if about else {}
        self.recorded = {name: one for name, one in found.items() if self._is_there(name, one)}

    def _is_there(self, name: str, one: Finished) -> bool:
        found = self.store.described(self.temporary(name))
        return found is not None and (found.nbytes, found.version) == (one.nbytes, one.version)

    def sent(self) -> Sent:
        """Return what is known of files that have come."""
        return {name: None if one is None else list(one) for name, one in self.files_sent.items()}

    def adopt(self, sent: Sent) -> None:
        """Take over what has temporary names, or a name. Raises TargetError: something is not as it came."""
        for name, about in sent.items():
            if about is not None and self.at(name) not in self._named and not self._is_there(name, Finished(*about)):
                raise TargetError("changed since it was sent", path=f"{self.store.address.shown} ({name})",
                                  advice="--restart starts over")  # fmt: skip

    def completed(self, sent: Sent) -> list[str]:
        """Return which files of a note have their names: those without a temporary one whose bytes are those sent."""
        found = []
        for name, about in sent.items():
            if about is None or self.store.described(self.temporary(name)) is not None:
                continue
            there, (nbytes, digest, _), read = self.store.described(self.at(name)), about, _new_digest()
            if there is not None and there.nbytes == nbytes:
                for at in range(0, nbytes, READ_NBYTES):
                    some = min(READ_NBYTES, nbytes - at)
                    read.update(self.store.fetch(there, at, some, self.store.address.shown))
                if read.hexdigest() == digest:
                    found.append(name)
        self._named = [self.at(name) for name in found]
        return found

    def remains(self) -> bytes | None:
        """Return the note, if something still has a temporary name."""
        return self.noted() if self.store.below(self.partial) else None

    def temporary(self, name: str) -> str:
        """Return the key of a file that has not its name yet."""
        return f"{self.partial}/{name}"

    def sink(self, name: str) -> FileSink:
        """Return where a file goes, in a directory of a temporary name."""
        self.files_sent[name] = None
        return FileSink(self, name)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file under a temporary name."""
        self.store.put(self.temporary(name), data, self.shown(name))

    def finish(self, names: Sequence[str], old: Sequence[str]) -> None:  # noqa: ARG002  # they keep their names
        """Remove what another run has sent of other files, as with other options: the rest is opened next."""
        if self.files_sent:
            self._remove_others(names)

    def url(self) -> str:
        """Return that of the temporary directory."""
        head, _, name = self.store.address.url.rstrip("/").rpartition("/")
        return f"{head}/.{name}.zckpt-partial"

    def name(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Rename the directory, or the files."""
        store = self.store
        try:
            if self.is_directory and store.moves_folders:
                self._remove_others(names)
                store.remove_folder(self.key)
                store.move(self.partial, self.key)
            else:
                for key in old:
                    store.remove_folder(key)
                for name in (one for one in names if self.at(one) not in self._named):
                    store.make_folder_of(self.at(name))
                    store.move(self.temporary(name), self.at(name))
                    self._named.append(self.at(name))
        except Exception as error:
            raise TargetError("could not be renamed", path=store.address.shown,
                              found=f"{type(error).__name__}: {error}") from error  # fmt: skip
        store.remove_folder(self.partial)
        store.remove_folder(self.journal)

    def _remove_others(self, names: Sequence[str]) -> None:
        """Remove what has a temporary name of this target, and is none of these files."""
        own = {self.temporary(name).strip("/") for name in names}
        for key in self.store.below(self.partial) if self._resumes else ():
            if key.strip("/") not in own:
                self.store.remove_folder(key)

    def abort(self, *, everything: bool = True) -> None:
        """Remove the temporary names, and what has been named."""
        for key in [*self._named, self.partial, self.journal] if everything else ():
            try:
                self.store.remove_folder(key)
            except Exception as error:
                raise TargetError(
                    "could not be removed", path=self.store.address.shown, found=key, advice="remove it"
                ) from error


class FileSink(NamedTuple):
    """A file that is written from its beginning to its end, unless a record has it."""

    uploads: NamedUploads
    name: str

    def write(self, nbytes: int, parts: Callable[[], Iterator[bytearray]]) -> None:
        """Write a file, from its beginning again if that fails."""
        uploads, name = self
        there, digest = uploads.recorded.get(name), _new_digest()
        if there is not None:
            for part in parts():
                digest.update(part)
            if (there.nbytes, there.digest) == (nbytes, digest.hexdigest()):
                uploads.files_sent[name] = there
                return
            uploads.record(name, None)

        def seen() -> Iterator[bytearray]:
            for part in parts():
                digest.update(part)
                yield part

        def once() -> Finished:
            nonlocal digest
            digest = _new_digest()
            data: Iterable[bytearray] = seen() if uploads.keeps else parts()
            version = uploads.store.send(uploads.temporary(name), nbytes, data)
            return Finished(nbytes, digest.hexdigest(), version)

        one = attempt(once, uploads.shown(name), writing=True)
        if uploads.keeps:
            uploads.files_sent[name] = one
            uploads.record(name, one)
