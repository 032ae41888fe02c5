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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.engine.checking import Checked
from zckpt.engine.plan import Plan
from zckpt.errors import Interrupted, SourceError, TargetError, WorkerError, ZckptError, about
from zckpt.operations.shared_target import SHARED, StoredTarget, finished
from zckpt.storage.journal import Journal, Purpose, purpose_of
from zckpt.storage.ownership import Owned, check_target
from zckpt.storage.remote.mount import check_sources, mount_of
from zckpt.storage.remote.uploads import Sent

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zckpt.operations.how import Copied, Proof
    from zckpt.storage.remote.schemes import Uploads

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
    from zckpt.operations.how import record_of

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
