"""A target that several processes write together, or that is in a store; nothing is seen of it before all is there.

first       checks what is there, removes what a killed run has left, and begins
every       writes its files, and says what it has sent to a store: straight from memory
first       gives all a name; in a store, makes objects of all of that, or names of temporary names, and then sends the
            small files that make a checkpoint of it
failure     each removes what it has sent, and the first whatever is left of a process that is gone

To who writes a file it is a directory like any other: `write_target` sends what goes to a store.

What one process writes to a store is sent without a copy here, and read back:

own         as for a directory: what is there may be replaced, or nothing is begun
resume      what a run that was killed has left is gone on with or removed, as the user says
send        all files of the plan with elements in them, while none has its name or is an object yet
finish      they become objects (S3), or have temporary names (others)
prove       what was sent is opened again, from the store
name        old files are removed, temporary names become names, and small files that make a checkpoint of the others
            (metadata, an index, `latest`) come last
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.engine.checking import Checked
from zckpt.engine.plan import Plan
from zckpt.errors import Interrupted, SourceError, TargetError, WorkerError, ZckptError, about
from zckpt.storage.durable import written
from zckpt.storage.journal import Journal, Purpose, purpose_of
from zckpt.storage.ownership import Owned, check_target, partial_name
from zckpt.storage.remote.mount import check_sources, mount_of
from zckpt.storage.remote.stores import Sent
from zckpt.storage.room import write_errors
from zckpt.storage.stand_ins import InMemory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zckpt.operations.target import Copied, Proof
    from zckpt.storage.remote.mount import Mount
    from zckpt.storage.remote.schemes import Uploads

SHARED: dict[Path, SharedTarget] = {}
"""By their directories, those in stores, and those that this process writes with others that it knows."""

_NOTE = ".zckpt-note"
"""A file of the partial directory, by which what a kill has left is known for ours."""


def shared_target(place: Path | str, *, last: Sequence[str] = ()) -> SharedTarget:
    """Open a directory for what this process writes of it; a string is a URL.

    `last`: names of files that the first process writes and that come last; small enough for memory. Raises
    SourceError, TargetError: the store cannot be reached, or is read only.
    """
    return SharedTarget(place) if isinstance(place, Path) else StoredTarget(place, last=last)


class SharedTarget:
    """What one process writes of a directory on a file system that all share."""

    _note: bytes | None = None

    def __init__(self, target: Path) -> None:
        self._target = target
        self.path = partial_name(target)
        """The directory in which this process writes."""
        self._written = ExitStack()  # names it at its end
        self.in_memory: dict[str, bytes] = {}
        """Small files by name, which come last, in this order."""

    def begin(self, *, overwrite: bool, owned: Owned, note: bytes | None = None) -> None:
        """Begin, on the first process, before any other writes something; the others may ask for the note.

        Raises TargetError: something is there that is not to be replaced, or nothing can be written.
        """
        with write_errors(self._target):
            [self.path] = self._written.enter_context(written([self._target], overwrite=overwrite, owned=owned))
            if note is not None:
                (self.path / _NOTE).write_bytes(note)
        self._note = note

    def join(self, path: Path) -> None:
        """Write where the first process does, whatever this one was told; all do, which know each other."""
        self.path = path
        SHARED[path] = self

    def noted(self) -> bytes:
        """Return the note with which the first process has begun. Raises TargetError: there is none."""
        if self._note is None:
            self._note = self._read_note()
        if self._note is None:
            raise TargetError("no save to it is running", path=self.path)
        return self._note

    def _read_note(self) -> bytes | None:
        with suppress(OSError):
            return (self.path / _NOTE).read_bytes()
        return None

    def sent(self) -> Sent:
        """Return what this process has sent to a store, for the first."""
        return {}

    def finish(self, every: Sequence[Sent]) -> None:
        """Make what all have written readable, on the first process; `every` is in the order of the processes."""

    def readable(self) -> AbstractContextManager[Path]:
        """Return a context that yields a directory in which this process reads what was finished."""
        return nullcontext(self.path)

    def add(self, name: str, data: bytes) -> None:
        """Let a small file come before those that come last."""
        (self.path / name).write_bytes(data)

    def commit(self, every: Sequence[Sent]) -> None:  # noqa: ARG002
        """Name all, on the first process; what is not finished is finished before."""
        with write_errors(self._target):
            (self.path / _NOTE).unlink(missing_ok=True)
            self._written.close()

    def abort(self, error: BaseException) -> None:
        """Remove what this process has written, of which `error` is the end; on the first, all."""
        with suppress(TargetError):  # which says what `error` does
            self._written.__exit__(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Let go of it."""
        SHARED.pop(self.path, None)


@contextmanager
def finished(uploads: Uploads, small: Mapping[str, bytes]) -> Iterator[tuple[Mount, Path]]:
    """Yield a directory in which what is finished in a store can be read, and small files that are in memory."""
    from zckpt.storage.remote.mount import mounted

    with mounted(uploads.url(), missing=True) as there:
        folder = there.path if uploads.is_folder else there.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in small.items():
            there.add(folder / name, InMemory(data), len(data))
        yield there, folder


class StoredTarget(SharedTarget):
    """What one process writes of a directory in a store."""

    def __init__(self, url: str, *, last: Sequence[str] = ()) -> None:
        from zckpt.storage.remote.mount import Mount

        self._mount = Mount(url, missing=True)
        try:
            self.path = self._mount.path
            self._uploads = self._mount.uploads(self.path, is_directory=True)
        except BaseException:
            self._mount.close()
            raise
        self._last = last
        self.in_memory = {}
        self._old: list[str] = []
        self._finished: list[str] = []
        self._is_first = False
        SHARED[self.path] = self

    def begin(self, *, overwrite: bool, owned: Owned, note: bytes | None = None) -> None:
        """As for any; errors are those of the store, too."""
        check_target(self.path, overwrite=overwrite, owned=owned)
        self._is_first = True
        self._old = self._mount.keys_below(self.path)
        self._uploads.begin()
        if note is not None:
            self._uploads.note(note)
        self._note = note

    def join(self, path: Path) -> None:
        """Do nothing: each has its own names."""

    def _read_note(self) -> bytes | None:
        return self._uploads.noted()

    def write(self, plan: Plan, path: Path, **how: Unpack[Copied]) -> Checked:
        """Send a file; one that comes last waits in memory."""
        from zckpt.engine.checking import Checked
        from zckpt.engine.upload import upload, whole

        name = path.relative_to(self.path).as_posix()
        if name in self._last:
            (one,) = plan.files
            self.in_memory[name] = whole(one)
            return Checked()
        return upload(plan, [self._uploads.sink(name)], **how)

    def sent(self) -> Sent:
        """Return what this process has sent, for the first."""
        return self._uploads.sent()

    def finish(self, every: Sequence[Sent]) -> None:
        """Make what all have sent readable, on the first process; `every` is in the order of the processes.

        The first one's last file comes last: of formats without a document, it is the one that says most.
        """
        backwards = [item for sent in reversed(every) for item in sent.items()]
        waiting = {name: one for name, one in backwards if name not in self._finished}
        self._uploads.adopt(waiting)
        names = list(waiting)
        self._uploads.finish(names, [] if self._finished else self._old)
        self._finished += names

    @contextmanager
    def readable(self) -> Iterator[Path]:
        """Yield a directory in which this process reads what was finished, and what is in its memory."""
        with finished(self._uploads, self.in_memory) as (_, folder):
            yield folder

    def add(self, name: str, data: bytes) -> None:
        """Let a small file come before those that come last."""
        self.in_memory = {name: data, **self.in_memory}

    def commit(self, every: Sequence[Sent]) -> None:
        """Finish what is not finished, and name all, on the first process."""
        self.finish(every)
        for name, data in self.in_memory.items():
            self._uploads.put(name, data)
        self._uploads.name([*self._finished, *self.in_memory], self._old)

    def abort(self, error: BaseException) -> None:  # noqa: ARG002
        """Remove what this process has sent; on the first, all."""
        with suppress(ZckptError):  # the store cannot be reached: what is left is no checkpoint, and the next run's
            self._uploads.abort(everything=self._is_first)

    def close(self) -> None:
        """Let go of the store."""
        SHARED.pop(self.path, None)
        self._mount.close()


SMALL_NBYTES = 1 << 28
"""A file of metadata is sent as a whole, and last, if it is at most this."""


def write_remote(
    plan: Plan,
    path: Path,
    owned: Owned | None,
    overwrite: bool,
    proof: Proof | None,
    journal: Journal | None,
    **how: Unpack[Copied],
) -> Checked:
    """Write the files of a plan into a store; parameters and errors are those of `write_target`.

    `path`: the target's, below the tree of `mount`.
    """
    from zckpt.engine.upload import upload, whole
    from zckpt.operations.target import record_of

    shared = next((SHARED[one] for one in (path, *path.parents) if one in SHARED), None)
    if isinstance(shared, StoredTarget):
        return shared.write(plan, path, **how)
    mount = mount_of(path)
    base = path if owned is not None else path.parent
    names = [path.name] if owned is None and len(plan.names) == 1 else list(plan.names)
    uploads = mount.uploads(path, is_directory=owned is not None)
    keeping = journal if journal is not None and journal.is_worth_it else None  # of what goes on after a kill
    sent, resumes, objects = (None, False, []) if keeping is None else _left(uploads, keeping, path)
    mount.forget(base, objects)
    record = record_of(path, owned, proof)
    for one in [path] if owned is not None else [*filter(None, [record]), *(base / name for name in names)]:
        check_target(one, overwrite=overwrite, owned=owned)
    small = {
        name: whole(one)
        for name, one in zip(names, plan.files, strict=True)
        if not one.fills and not one.file.packs and one.file.nbytes <= SMALL_NBYTES
    }
    large = sorted((name for name in names if name not in small), key=lambda name: base / name == path)
    old = mount.keys_below(path) if owned is not None else []
    checked, is_sent = Checked(), False
    try:
        uploads.begin(resume=resumes, keep=keeping is not None)
        if sent is not None:
            uploads.adopt(sent)
        else:
            sinks = {name: uploads.sink(name) for name in large}
            checked = upload(plan, [sinks.get(name) for name in names], **how)
        check_sources()
        if journal is not None:
            journal.check_sources()
        is_sent = True  # and need not be made again
        if sent is None and keeping is not None:
            uploads.note(json.dumps({**asdict(keeping.purpose), "sent": uploads.sent()}).encode())
        uploads.finish(large, old)
        extra = {} if proof is None else _proven(uploads, path, record, names, small, proof)
        for name, data in {**extra, **small}.items():
            uploads.put(name, data)
        uploads.name([*extra, *large, *small], old)
    except BaseException as error:
        said = None if keeping is None or is_sent else _kept(error, uploads, keeping)
        if said is None:
            try:
                uploads.abort()
            except ZckptError as left:
                said = str(left)
        if said is not None and isinstance(error, KeyboardInterrupt):
            raise Interrupted.of(error, said) from error
        if said is not None and isinstance(error, ZckptError):
            error.advice = said if error.advice is None else f"{error.advice}; {said}"
        raise
    return checked


def _proven(
    uploads: Uploads,
    path: Path,
    record: Path | None,
    names: Sequence[str],
    small: Mapping[str, bytes],
    proof: Proof,
) -> dict[str, bytes]:
    """Prove what has come, with the small files that have not; return the record that the proof has written."""
    with finished(uploads, small) as (there, folder), about(path):
        record = record and folder / record.name
        if record is not None and not uploads.is_directory:
            there.remove(record)
        target = folder if uploads.is_directory else folder / path.name
        proof.verified = proof.look(target, [folder / one for one in names], record)
        return {} if record is None or record.name in small else {record.name: record.read_bytes()}


def _left(uploads: Uploads, journal: Journal, target: Path) -> tuple[Sent | None, bool, list[str]]:
    """Return what a run that was killed has sent, if that is all, whether it is gone on with, and what it has named."""
    noted = uploads.remains()
    said = None if noted is None else _said(noted)
    if journal.restart:
        return None, False, [] if said is None else uploads.discard(said[1])
    if not journal.resume:
        left = uploads.left() if said is None else None
        if left == 0:
            return None, False, []
        part = f"{left} of {journal.purpose.nbytes} bytes sent, in {uploads.kept_in}"
        raise TargetError("an earlier run to it did not finish", path=target,
                          found="all elements sent, but not renamed" if left is None else part,
                          advice="--resume continues it, --restart starts over")  # fmt: skip
    if said is None:
        return None, True, []
    other = journal.purpose.other(said[0])
    if other is not None:
        raise TargetError(f"the run to resume was started {other}", path=target,
                          advice="--restart starts over")  # fmt: skip
    return said[1], True, uploads.completed(said[1])


def _kept(error: BaseException, uploads: Uploads, journal: Journal) -> str | None:
    """Return what is said of what is left to go on with; None: it is removed."""
    if isinstance(error, SourceError) and type(error) is not SourceError:  # damaged, changed, or contradicts itself
        return None
    if not isinstance(error, KeyboardInterrupt | TargetError | SourceError | WorkerError):
        return None
    left = uploads.left()
    if not left:
        return None
    return (
        f"{left} of {journal.purpose.nbytes} bytes are sent and kept in {uploads.kept_in}: --resume continues with "
        "them, --restart starts over"
    )


def _said(noted: bytes) -> tuple[Purpose, Sent] | None:
    """Return what a note says; None: it is no note of a run."""
    try:
        found = json.loads(noted)
        sent = found.pop("sent")
        return (purpose_of(found), sent) if isinstance(sent, dict) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
