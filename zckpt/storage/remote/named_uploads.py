"""Files on their way into a store under temporary names, which are renamed: all stores but S3.

What a run that was killed has left is gone on with file by file: one that has come whole (`finished`) is made again and
not sent, if its bytes are the same. When all have come, a note among them lists them, so that a run that was killed
while it named them need not make any of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from zckpt.errors import TargetError
from zckpt.storage.remote.attempts import ShortBodyError, attempt
from zckpt.storage.remote.finished import Finished, Record, new_digest
from zckpt.storage.remote.fsspec_stores import FsspecStore
from zckpt.storage.remote.uploads import NOTE, Sent, Uploads

READ_NBYTES = 8 << 20
"""Of a file that is read back, at once."""


class NamedUploads(Uploads):
    """Files under temporary names, which are renamed."""

    store: FsspecStore

    def __init__(self, store: FsspecStore, key: str, *, is_directory: bool) -> None:
        super().__init__(store, key, is_directory=is_directory)
        self.kept_in = self.partial.rpartition("/")[2]
        self.journal = self.partial.removesuffix("partial") + "journal"
        self._named: list[str] = []
        self.files_sent: dict[str, Finished | None] = {}
        self._record = Record(self._write_record)
        self._keeps = self._resumes = False

    def begin(self, *, resume: bool = False, keep: bool = False) -> None:
        """Remove what has the temporary name, or go on with those of its files that have come."""
        self._keeps, self._resumes = keep, resume
        if resume:
            self._read_record()
        else:
            self.store.remove_folder(self.partial)
            self.store.remove_folder(self.journal)
            self._record = Record(self._write_record)

    def left(self) -> int:
        """Return how many bytes have come in whole files."""
        if self._keeps:
            with suppress(TargetError):  # of the same store, as a rule, whose first error is what there is to say
                self._record.flush()
        else:
            self._read_record()
        return self._record.written_nbytes

    def _write_record(self, number: int, data: bytes) -> None:
        self._write(f"{self.journal}/{number:08d}", data)

    def _read_record(self) -> None:
        """Read what is recorded of files that are there as they came."""
        self._record = Record(self._write_record)
        for key in sorted(self.store.below(self.journal)):
            with suppress(ValueError):  # of a name that is none of the record's
                number = int(key.rpartition("/")[2])
                self._record.read(number, self.store.read(key) or b"")
        for name, one in list(self._record.files.items()):
            if not self._is_there(name, one):
                del self._record.files[name]

    def _is_there(self, name: str, one: Finished) -> bool:
        found = self.store.described(self.temporary(name))
        return found is not None and (found.nbytes, found.version) == (one.nbytes, one.version)

    def _write(self, key: str, data: bytes, shown: str | None = None) -> None:
        send = partial(self.send, key, len(data), [bytearray(data)])
        attempt(send, shown or self.store.address.shown, writing=True)

    def send(self, key: str, nbytes: int, parts: Iterable[bytearray]) -> str:
        """Write a file; return which version the store says that it is. Not `attempt`ed."""
        self.store.write(key, nbytes, parts)
        there = self.store.described(key)
        size = None if there is None else there.nbytes
        if there is None or size != nbytes:
            raise ShortBodyError(f"{size} bytes of {nbytes} have come")
        return there.version

    def sent(self) -> Sent:
        """Return what is known of files that have come."""
        return {name: None if one is None else list(one) for name, one in self.files_sent.items()}

    def adopt(self, sent: Sent) -> None:
        """Take over what has temporary names, or a name.

        Raises
        ------
        TargetError
            Something is not as it came.
        """
        for name, about in sent.items():
            if about is not None and self.at(name) not in self._named and not self._is_there(name, Finished(*about)):
                raise TargetError("is not as it was sent", path=f"{self.store.address.shown} ({name})",
                                  advice="--restart begins anew")  # fmt: skip

    def completed(self, sent: Sent) -> list[str]:
        """Return which files of a note have their names: those without a temporary one whose bytes are those sent."""
        found = []
        for name, about in sent.items():
            if about is None or self.store.described(self.temporary(name)) is not None:
                continue
            there, (nbytes, digest, _), read = self.store.described(self.at(name)), about, new_digest()
            if there is not None and there.nbytes == nbytes:
                for at in range(0, nbytes, READ_NBYTES):
                    some = min(READ_NBYTES, nbytes - at)
                    read.update(self.store.fetch(there, at, some, self.store.address.shown))
                if read.hexdigest() == digest:
                    found.append(name)
        self._named = [self.at(name) for name in found]
        return found

    def discard(self, sent: Sent) -> list[str]:
        """Remove files of a note that have their names."""
        found = self.completed(sent)
        for key in self._named:
            self.store.remove_folder(key)
        self._named.clear()
        return found

    def note(self, data: bytes) -> None:
        """Write a file beside the temporary directory."""
        self._write(f"{self.journal}/{NOTE}", data)

    def noted(self) -> bytes | None:
        """Return what the file holds."""
        return self.store.read(f"{self.journal}/{NOTE}")

    def remains(self) -> bytes | None:
        """Return the note, if something still has a temporary name."""
        return self.noted() if self.store.below(self.partial) else None

    def temporary(self, name: str) -> str:
        """Return the key of a file that has not its name yet."""
        return f"{self.partial}/{name}"

    def sink(self, name: str) -> FileSink:
        """Return where a file goes, in a directory of a temporary name."""
        self.files_sent[name] = None
        return FileSink(self, name, self._record if self._keeps else None)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file under a temporary name."""
        self._write(self.temporary(name), data, self.shown(name))

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
        try:
            self._rename(names, old)
        except Exception as error:
            raise TargetError("could not be named", path=self.store.address.shown,
                              found=f"{type(error).__name__}: {error}") from error  # fmt: skip
        self.store.remove_folder(self.partial)
        self.store.remove_folder(self.journal)

    def _remove_others(self, names: Sequence[str]) -> None:
        """Remove what has a temporary name of this target, and is none of these files."""
        own = {self.temporary(name).strip("/") for name in names}
        for key in self.store.below(self.partial) if self._resumes else ():
            if key.strip("/") not in own:
                self.store.remove_folder(key)

    def _rename(self, names: Sequence[str], old: Sequence[str]) -> None:
        if self.is_directory and self.store.moves_folders:
            self._remove_others(names)
            self.store.remove_folder(self.key)
            self.store.move(self.partial, self.key)
            return
        for key in old:
            self.store.remove_folder(key)
        for name in names:
            target = self.at(name)
            if target not in self._named:
                self.store.make_folder_of(target)
                self.store.move(self.temporary(name), target)
                self._named.append(target)

    def abort(self, *, everything: bool = True) -> None:
        """Remove the temporary names, and what has been named."""
        if not everything:
            return
        for key in [*self._named, self.partial, self.journal]:
            try:
                self.store.remove_folder(key)
            except Exception as error:
                raise TargetError(
                    "could not be removed", path=self.store.address.shown, found=key, advice="remove it"
                ) from error


class FileSink:
    """A file that is written from its beginning to its end, unless a record has it."""

    def __init__(self, uploads: NamedUploads, name: str, record: Record | None) -> None:
        self._uploads, self._name, self._record = uploads, name, record

    def write(self, nbytes: int, parts: Callable[[], Iterator[bytearray]]) -> None:
        """Write a file, from its beginning again if that fails."""
        uploads, name, record = self._uploads, self._name, self._record
        key, shown = uploads.temporary(name), uploads.shown(name)
        if record is None:
            attempt(lambda: uploads.send(key, nbytes, parts()), shown, writing=True)
            return
        there, digest = record.files.get(name), new_digest()
        if there is not None:
            for part in parts():
                digest.update(part)
            if (there.nbytes, there.digest) == (nbytes, digest.hexdigest()):
                uploads.files_sent[name] = there
                return
            record.forget(name)

        def once() -> Finished:
            digest = new_digest()

            def seen() -> Iterator[bytearray]:
                for part in parts():
                    digest.update(part)
                    yield part

            version = uploads.send(key, nbytes, seen())
            return Finished(nbytes, digest.hexdigest(), version)

        uploads.files_sent[name] = one = attempt(once, shown, writing=True)
        record.add(name, one)
