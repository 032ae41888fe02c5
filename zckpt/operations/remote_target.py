"""A target in a store: sent without a copy here, read back, and recognisable only when all of it is there.

own         as for a directory: what is there may be replaced, or nothing is begun
send        all files of the plan with elements in them, while none has its name or is an object yet
finish      they become objects (S3), or have temporary names (others)
prove       what was sent is opened again, from the store
name        old files are removed, temporary names become names, and small files that make a checkpoint of the others
            (metadata, an index, `latest`) come last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.engine import Reporter
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.plan import Plan
from zckpt.engine.targets import Lazily
from zckpt.errors import ZckptError
from zckpt.storage.ownership import FINGERPRINT_NAME, Owned, check_target
from zckpt.storage.remote.mount import check_sources, mount_of, mounted

if TYPE_CHECKING:
    pass

SMALL_NBYTES = 1 << 28
"""A file of metadata is sent as a whole, and last, if it is at most this."""


def write_remote(
    plan: Plan,
    path: Path,
    owned: Owned | None,
    more: Sequence[Path],
    overwrite: bool,
    memory: int,
    reporter: Reporter | None,
    checks: Checks | None,
    prove: Callable[[Path, Sequence[Path]], None] | None,
    prove_files: Callable[[Sequence[Path]], None] | None,
) -> Checked:
    """Write the files of a plan into a store; parameters and errors are those of `write_target`.

    Parameters
    ----------
    path : Path
        The target's, below the tree of `mount`.
    """
    from zckpt.engine.upload import upload, whole
    from zckpt.storage.remote.uploads import uploads_of

    mount = mount_of(path)
    base = path if owned is not None else path.parent
    names = [path.name] if owned is None and len(plan.names) == 1 else list(plan.names)
    for one in [path] if owned is not None else [*more, *(base / name for name in names)]:
        check_target(one, overwrite=overwrite, owned=owned)
    small = {
        name: whole(one)
        for name, one in zip(names, plan.files, strict=True)
        if not one.fills and not one.file.packs and one.file.nbytes <= SMALL_NBYTES
    }
    large = sorted((name for name in names if name not in small), key=lambda name: base / name == path)
    old = mount.keys_below(path) if owned is not None else []
    uploads = uploads_of(mount.store, mount.key_of(path), is_directory=owned is not None)
    try:
        uploads.begin()
        sinks = {name: uploads.sink(name) for name in large}
        sent = _only(plan, [name in sinks for name in names])
        kept = [sinks[name] for name in names if name in sinks]
        checked = upload(sent, kept, memory=memory, reporter=reporter, checks=checks)
        check_sources()
        uploads.finish(large, old)
        extra: dict[str, bytes] = {}
        if prove is not None or prove_files is not None:
            with mounted(uploads.url(), missing=True) as there:
                folder = there.path if uploads.is_folder else there.path.parent
                folder.mkdir(parents=True, exist_ok=True)
                for name, data in small.items():
                    there.add_bytes(folder / name, data)
                companions = [folder / one.name for one in more]
                for one in companions:
                    there.remove(one)
                whole_path = folder if owned is not None else folder / path.name
                if prove is not None:
                    prove(whole_path, companions)
                if prove_files is not None:
                    prove_files([folder / name for name in names])
                written = companions if owned is None else [folder / FINGERPRINT_NAME]
                extra = {one.name: one.read_bytes() for one in written if one.exists() and one.name not in small}
        for name, data in {**extra, **small}.items():
            uploads.put(name, data)
        uploads.name([*extra, *large, *small], old)
    except BaseException as error:
        try:
            uploads.abort()
        except ZckptError as left:
            if isinstance(error, ZckptError):
                error.advice = str(left)
        raise
    return checked


def _only(plan: Plan, kept: Sequence[bool]) -> Plan:
    """Return the plan of some of the files."""
    files = Lazily(lambda: (one for one, is_kept in zip(plan.files, kept, strict=True) if is_kept), sum(kept))
    return replace(plan, files=files, names=tuple(compress(plan.names, kept)))
