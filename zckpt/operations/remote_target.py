"""A target in a store: sent without a copy here, read back, and recognisable only when all of it is there.

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
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path

from zckpt.engine import Reporter
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.plan import Plan
from zckpt.engine.targets import Lazily
from zckpt.errors import Interrupted, SourceError, TargetError, WorkerError, ZckptError
from zckpt.operations.partial import Proof
from zckpt.operations.shared_target import StoredTarget, finished, shared_at
from zckpt.storage.journal import Journal, purpose_of
from zckpt.storage.ownership import FINGERPRINT_NAME, Owned, check_target
from zckpt.storage.purpose import Purpose
from zckpt.storage.remote.mount import check_sources, mount_of
from zckpt.storage.remote.uploads import Sent, Uploads

SMALL_NBYTES = 1 << 28
"""A file of metadata is sent as a whole, and last, if it is at most this."""


def write_remote(
    plan: Plan,
    path: Path,
    owned: Owned | None,
    overwrite: bool,
    memory: int,
    reporter: Reporter | None,
    checks: Checks | None,
    proof: Proof | None,
    journal: Journal | None,
    direct: bool,
) -> Checked:
    """Write the files of a plan into a store; parameters and errors are those of `write_target`.

    Parameters
    ----------
    path : Path
        The target's, below the tree of `mount`.
    """
    from zckpt.engine.upload import upload, whole

    shared = shared_at(path)
    if isinstance(shared, StoredTarget):
        return shared.write(plan, path, memory=memory, reporter=reporter, checks=checks, direct=direct)
    mount = mount_of(path)
    base = path if owned is not None else path.parent
    names = [path.name] if owned is None and len(plan.names) == 1 else list(plan.names)
    uploads = mount.uploads(path, is_directory=owned is not None)
    remains = _Remains(uploads, journal, path)
    mount.forget(base, remains.objects)
    more = proof.companions if proof is not None else ()
    for one in [path] if owned is not None else [*more, *(base / name for name in names)]:
        check_target(one, overwrite=overwrite, owned=owned)
    small = {
        name: whole(one)
        for name, one in zip(names, plan.files, strict=True)
        if not one.fills and not one.file.packs and one.file.nbytes <= SMALL_NBYTES
    }
    large = sorted((name for name in names if name not in small), key=lambda name: base / name == path)
    old = mount.keys_below(path) if owned is not None else []
    with remains.kept_or_removed():
        uploads.begin(resume=remains.resumes, keep=remains.keeps)
        if remains.sent is not None:
            uploads.adopt(remains.sent)
            checked = Checked()
        else:
            sinks = {name: uploads.sink(name) for name in large}
            sent = _only(plan, [name in sinks for name in names])
            kept = [sinks[name] for name in names if name in sinks]
            checked = upload(sent, kept, memory=memory, reporter=reporter, checks=checks, direct=direct)
        check_sources()
        if journal is not None:
            journal.check_sources()
        remains.all_sent()
        uploads.finish(large, old)
        extra = {} if proof is None else _proven(uploads, path.name, names, small, proof)
        for name, data in {**extra, **small}.items():
            uploads.put(name, data)
        uploads.name([*extra, *large, *small], old)
    return checked


def _proven(
    uploads: Uploads,
    name: str,
    names: Sequence[str],
    small: Mapping[str, bytes],
    proof: Proof,
) -> dict[str, bytes]:
    """Prove what has come, with the small files that have not; return further ones that the proof has written."""
    with finished(uploads, small) as (there, folder):
        companions = [folder / one.name for one in proof.companions]
        for path in companions:
            there.remove(path)
        proof.of(folder if uploads.is_directory else folder / name, companions, [folder / one for one in names])
        written = [folder / FINGERPRINT_NAME] if uploads.is_directory else companions
        return {path.name: path.read_bytes() for path in written if path.exists() and path.name not in small}


class _Remains:
    """What a run that was killed has left in a store, and what this one leaves if it fails."""

    def __init__(self, uploads: Uploads, journal: Journal | None, target: Path) -> None:
        self.resumes = False
        self.sent: Sent | None = None
        self.objects: list[str] = []
        self._uploads, self._journal, self._target = uploads, journal, target
        self._is_finishing = False
        self.keeps = journal is not None and journal.is_worth_it
        if journal is not None and self.keeps:
            self._look(journal)

    def _look(self, journal: Journal) -> None:
        noted = self._uploads.remains()
        said = None if noted is None else _said(noted)
        if journal.restart:
            if said is not None:
                self.objects = self._uploads.discard(said[1])
            return
        if said is None and not journal.resume:
            left = self._uploads.left()
            if not left:
                return
            self._refuse(f"{left} of {journal.purpose.nbytes} bytes sent, in {self._uploads.kept_in}")
        if said is not None and not journal.resume:
            self._refuse("all that has elements in it sent, and not named")
        self.resumes = True
        if said is not None:
            other = journal.purpose.other(said[0])
            if other is not None:
                raise TargetError(f"what is to be gone on with was begun {other}", path=self._target,
                                  advice="--restart begins anew")  # fmt: skip
            self.sent = said[1]
            self.objects = self._uploads.completed(said[1])

    def _refuse(self, found: str) -> None:
        raise TargetError("a run to it did not come to its end", path=self._target, found=found,
                          advice="--resume goes on with it, --restart begins anew")  # fmt: skip

    def all_sent(self) -> None:
        """Note that all has come, so that it need not be made again."""
        self._is_finishing = True
        journal = self._journal
        if self.sent is None and journal is not None and self.keeps:
            self._uploads.note(json.dumps({**asdict(journal.purpose), "sent": self._uploads.sent()}).encode())

    @contextmanager
    def kept_or_removed(self) -> Iterator[None]:
        """Leave what was sent where the run can be gone on with and no object is there yet; else remove all."""
        try:
            yield
        except BaseException as error:
            said = self._kept(error)
            if said is not None:
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted.of(error, said) from error
                _advise(error, said)
                raise
            try:
                self._uploads.abort()
            except ZckptError as left:
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted.of(error, str(left)) from error
                _advise(error, str(left))
            raise

    def _kept(self, error: BaseException) -> str | None:
        """Return what is said of what is left; None: it is removed."""
        journal = self._journal
        if journal is None or self._is_finishing or not self.keeps:
            return None
        if isinstance(error, SourceError) and type(error) is not SourceError:  # damaged, changed, or contradicts itself
            return None
        if not isinstance(error, KeyboardInterrupt | TargetError | SourceError | WorkerError):
            return None
        left = self._uploads.left()
        if not left:
            return None
        return (
            f"{left} of {journal.purpose.nbytes} bytes are sent and kept in {self._uploads.kept_in}: "
            "--resume goes on with them, --restart begins anew"
        )


def _advise(error: BaseException, said: str) -> None:
    """Add to what an error says is to be done."""
    if isinstance(error, ZckptError):
        error.advice = said if error.advice is None else f"{error.advice}; {said}"


def _said(noted: bytes) -> tuple[Purpose, Sent] | None:
    """Return what a note says; None: it is no note of a run."""
    try:
        found = json.loads(noted)
        sent = found.pop("sent")
        return purpose_of(found), sent
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _only(plan: Plan, kept: Sequence[bool]) -> Plan:
    """Return the plan of some of the files."""
    files = Lazily(lambda: (one for one, is_kept in zip(plan.files, kept, strict=True) if is_kept), sum(kept))
    return replace(plan, files=files, names=tuple(compress(plan.names, kept)))
