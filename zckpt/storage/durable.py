"""Targets that appear whole or not at all: the one way in which anything is written.

own         what is there may be replaced, or nothing is begun (`ownership`)
write       under a temporary name, which no other run has (`partial`)
prove       by whoever writes, before the end
name        all is synced to disk and gets its name in one step (`naming`)

A run that is killed leaves temporary names behind, never a target in part; the next run to the same target takes over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from zckpt.errors import TargetError
from zckpt.storage.disk import sync, sync_all
from zckpt.storage.naming import (
    interrupted,
    name_directory,
    name_files,
    old_name,
    remove,
    settle_directory,
    settle_files,
)
from zckpt.storage.ownership import Owned, check_target
from zckpt.storage.partial import claimed, is_named, partial_name


def check_space(directory: Path, nbytes: int) -> None:
    """Raise TargetError unless the file system of `directory` has room for `nbytes` bytes."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise TargetError(
            "not enough space",
            path=directory,
            expected=f"{nbytes} bytes free",
            found=free,
            advice="free some or write elsewhere",
        )


@contextmanager
def written_files(targets: Sequence[Path], *, overwrite: bool) -> Iterator[list[Path]]:
    """Yield temporary names for files of one directory; on success sync them and give them their names.

    On any failure, interrupts included, the temporary files are removed and no target has changed. Only where the
    disk fails while several files are being named, `interrupted` tells so, and the next run names the rest.

    Parameters
    ----------
    targets : sequence of Path
        The last one is the target itself; where none of them is there, it appears last.
    overwrite : bool
        Replace regular files.

    Raises
    ------
    TargetError
        One cannot be written; another run is writing it, or has written it meanwhile.
    """
    for target in targets:
        settle_files(target)
    partials = [partial_name(target) for target in targets]
    held: list[tuple[int, Path]] = []
    with ExitStack() as stack:
        try:
            for target, partial in zip(targets, partials, strict=True):
                held.append((stack.enter_context(claimed(partial, directory=False)), partial))
                check_target(target, overwrite=overwrite)
            yield partials
            _check_kept(held)
            sync_all(partials)
            name_files(partials, targets, overwrite=overwrite)
        except BaseException:
            if not interrupted(targets[-1]):
                for descriptor, partial in held:
                    if is_named(descriptor, partial):
                        partial.unlink(missing_ok=True)
            raise
        for parent in {target.parent for target in targets}:
            sync(parent)


@contextmanager
def written_directory(target: Path, *, overwrite: bool, owned: Owned) -> Iterator[Path]:
    """Yield a temporary, empty directory; on success sync all in it and give it the target's name.

    Parameters
    ----------
    target : Path
    overwrite : bool
        Replace a directory that `owned` tells.
    owned : Owned
        Which directories may be replaced.

    Raises
    ------
    TargetError
        It cannot be written; another run is writing it, or has written it meanwhile.
    """
    partial = partial_name(target)
    with claimed(partial, directory=True) as descriptor:
        try:
            settle_directory(target)
            check_target(target, overwrite=overwrite, owned=owned)
            yield partial
            _check_kept([(descriptor, partial)])
            sync_all([*partial.rglob("*"), partial])
            name_directory(partial, target, overwrite=overwrite, owned=owned)
        except BaseException:
            if is_named(descriptor, partial):  # and not what it has taken the place of
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _check_kept(held: Sequence[tuple[int, Path]]) -> None:
    """Raise TargetError unless each temporary name still stands for what was written."""
    for descriptor, partial in held:
        if not is_named(descriptor, partial):
            raise TargetError("is gone, or something else has its name", path=partial, advice="write it again")


def recover(target: Path) -> None:
    """Put right what a killed run has left of a directory, unless another run is writing it.

    One that was set aside gets its name back; what was not written to its end is removed.
    """
    partial = partial_name(target)
    if not os.path.lexists(partial) and not os.path.lexists(old_name(target)):
        return
    with suppress(TargetError), claimed(partial, directory=True):
        settle_directory(target)
        remove(partial)
