"""Targets that appear whole or not at all: the one way in which anything is written.

    own         what has the target's name may be replaced, or nothing is begun (`ownership`)
    write       under a temporary name, which no other run has
    prove       by whoever writes, before the end
    name        all is synced to disk and gets its name in one step, or in steps of which a kill leaves no mixture

A run that is killed leaves temporary names behind, never a target in part; the next run to the same target takes over:
it removes them, or goes on with what was done, where there is a `journal` of that and the user says so.

A directory and its successor exchange names. Where the file system has no such step, the old one waits as
`.NAME.zckpt-old` while its successor is renamed; if a run is killed just then, the next one gives it its name back.

Several files are named together: when all of them are on disk, `.NAME.zckpt-naming` lists them, in the directory of the
last. From then on they are what is there to be, and the next run names those that a killed one did not. At no moment
is a new file with an old one: the others of the old ones are removed before the last, which is the target itself, is
replaced, and the others of the new ones follow it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from zckpt.errors import TargetError, TargetExistsError
from zckpt.storage.disk import exchange, rename_new, sync, sync_all
from zckpt.storage.files import write_all
from zckpt.storage.journal import Journal, forget, journal_name
from zckpt.storage.ownership import (
    REMOVED,
    Owned,
    check_replaceable,
    check_target,
    check_unfinished,
    claimed,
    directories_above,
    held,
    is_abandoned,
    is_named,
    partial_name,
)
from zckpt.storage.room import write_errors

LIST_NBYTES = 1 << 16
"""Of a list of files; a longer one is none."""

QUIET_S = 3600.0
"""Longer than a save writes nothing, and than clocks of nodes and of a server of files differ."""


@contextmanager
def written(
    targets: Sequence[Path], *, overwrite: bool, owned: Owned | None = None, journal: Journal | None = None
) -> Iterator[list[Path]]:
    """Yield temporary names for targets; on success sync them and give them their names.

    On any failure, interrupts included, what has a temporary name is removed, but for that of which the journal keeps
    what was done, and no target has changed. Only where the disk fails while several files are being named,
    `interrupted` tells so, and the next run names the rest.

    Parameters
    ----------
    targets : sequence of Path
        Files of one directory: the last one is the target itself; where none of them is there, it appears last. Or a
        directory, whose temporary one is empty but for what the journal has.
    overwrite : bool
        Replace regular files, or a directory that `owned` tells.
    owned : Owned, optional
        A directory is written, and this is what may be replaced; None: files are.
    journal : Journal, optional
        What is done is recorded, and may be gone on with.

    Raises
    ------
    TargetError
        One cannot be written; another run is writing it, or has written it meanwhile, or was killed and is to be gone
        on with.
    """
    partials, held, last = [partial_name(target) for target in targets], list[tuple[int, Path]](), targets[-1]
    with write_errors(last), ExitStack() as stack:
        for target in targets if owned is None else ():  # of a killed run that was naming them together
            if os.path.lexists(_naming_name(target)):
                with _list_of(target):
                    _naming_name(target).unlink()
        stack.enter_context(directories_above(last))
        try:
            for target, partial in zip(targets, partials, strict=True):
                known = None if os.path.lexists(journal_name(target)) else owned
                left = None if journal is None else journal.left
                claim = claimed(partial, directory=owned is not None, left=left, owned=known)
                held.append((stack.enter_context(claim), partial))
                if owned is not None:
                    _settle_directory(target, owned)
                check_target(target, overwrite=overwrite, owned=owned)
                _keep_mode(partial, target, besides=0o600 if owned is None else 0o700)
            if journal is None:
                forget(last)  # the journal of a run whose remains this one has removed
            else:
                journal.begin()
            yield partials
            _sync_and_name(held, targets, overwrite=overwrite, owned=owned, journal=journal)
        except BaseException as error:
            if owned is None and interrupted(last):
                forget(last)  # all is written
            elif journal is None or not journal.keeps(error):
                for partial in (partial for descriptor, partial in held if is_named(descriptor, partial)):
                    _remove(partial)  # and not what it has taken the place of
            raise
        if owned is None:
            sync(last.parent)
        if journal is not None:
            journal.end()


def _sync_and_name(
    held: Sequence[tuple[int, Path]],
    targets: Sequence[Path],
    *,
    overwrite: bool,
    owned: Owned | None,
    journal: Journal | None,
) -> None:
    partials = [partial for _, partial in held]
    for descriptor, partial in held:
        if not is_named(descriptor, partial):
            raise TargetError("has disappeared, or something else has its name", path=partial, advice="write it again")
    below = [
        [partial] if owned is None else [*(one for one in partial.rglob("*") if not one.is_symlink()), partial]
        for partial in partials
    ]
    try:
        sync_all([path for some in below for path in some])
    except OSError:
        if journal is not None:  # a system says once that a disk has failed, and not of which bytes
            journal.distrust()
        raise
    for target, partial, some in zip(targets, partials, below, strict=True):
        for path in some:
            _keep_mode(path, target / path.relative_to(partial))
    if owned is None:
        _name_files(partials, targets, overwrite=overwrite)
    else:
        _name_directory(partials[0], targets[0], overwrite=overwrite, owned=owned)


def _keep_mode(partial: Path, target: Path, *, besides: int = 0) -> None:
    """Let who may read and write what is replaced, and no one else, do so with what replaces it.

    `besides` is what the run itself needs until then.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = target.lstat().st_mode
        if not stat.S_ISLNK(mode):
            partial.chmod(mode & 0o777 | besides)


def recover(target: Path, owned: Owned) -> None:
    """Put right what a killed run has left of a directory that `owned` tells, unless another run is writing it.

    One that was set aside gets its name back; what was not written to its end is removed.
    """
    partial = partial_name(target)
    if not os.path.lexists(partial) and not os.path.lexists(old_name(target)):
        return
    with suppress(TargetError), claimed(partial, directory=True, owned=owned):
        _settle_directory(target, owned)
        forget(target)
        _remove(partial)


def remove_leftovers(directory: Path, owned: Owned) -> None:
    """Remove what killed runs have left of directories, of whatever names; what cannot be removed stays.

    `recover` puts right what was left of one target, when that is written again. Where each save has a name of its own,
    as steps have, that may be never, and what is left be as large as any checkpoint. Removed is a `.NAME.zckpt-partial`
    of this user's that no run holds, in which everything is the format's, and of which no journal says that it can be
    gone on with. Where a file system has no locks, nobody can tell a run that is alive: then nothing is removed. NFS
    and Lustre have locks of files that all nodes see, and of directories such that one node sees: what somebody wrote
    into within `QUIET_S` stays, too.

    `directory`: in which they were to be; it need not exist; `owned`: what tells a finished one; of one that is not,
    names do.
    """
    with suppress(OSError, TargetError):
        for left in list(directory.iterdir()):
            target = _target_of(left, partial_name)
            if target is None or os.path.lexists(journal_name(target)):
                continue
            with suppress(OSError, TargetError):
                every = [left, *left.rglob("*")] if left.is_dir() and not left.is_symlink() else [left]
                if max(path.lstat().st_mtime for path in every) < time.time() - QUIET_S and is_abandoned(left):
                    check_unfinished(left, owned)
                    recover(target, owned)


def remove(path: Path) -> None:
    """Remove a file or a directory, which is moved out of sight first: a kill leaves all of it, or nothing of its name.

    What is left under `REMOVED` is for `finish_removals`. Raises OSError: it cannot be moved, and is as it was.
    """
    hidden = path.with_name(REMOVED)
    hidden.mkdir(exist_ok=True)
    if hidden.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(hidden))
    if os.path.lexists(hidden / path.name):
        _remove(hidden / path.name)
    path.rename(hidden / path.name)
    sync(path.parent)
    finish_removals(hidden)


def finish_removals(hidden: Path) -> None:
    """Remove what removals, this one or one that was killed, have moved out of sight, as far as that goes."""
    _remove(hidden)


class _Waiting(NamedTuple):
    """A file that is to be named, and what tells it from any other that has its temporary name."""

    name: str
    nbytes: int
    inode: int


def old_name(target: Path) -> Path:
    """Return the name under which a directory waits while its successor is renamed into place."""
    return target.parent / f".{target.name}.zckpt-old"


def target_of_old(path: Path) -> Path | None:
    """Return the target of which something is the old directory, by its name; None: of none."""
    return _target_of(path, old_name)


def _target_of(path: Path, name_of: Callable[[Path], Path]) -> Path | None:
    name = path.stem.removeprefix(".")
    target = path.with_name(name) if name not in ("", ".") else path
    return target if name_of(target) == path else None


def _naming_name(target: Path) -> Path:
    """Return the name of the list of files that are being named together with `target`, the last of them."""
    return target.parent / f".{target.name}.zckpt-naming"


def interrupted(target: Path) -> str | None:
    """Return what to know of a target whose naming was cut short by a kill; None: it was not."""
    if os.path.lexists(_naming_name(target)):
        return "a run was killed while it was naming this file and others: the next run to this target names the rest"
    if os.path.lexists(old_name(target)) and not os.path.lexists(target):
        return f"a run was killed while replacing it: the old one is {old_name(target)}"
    return None


# --- a directory


def _settle_directory(target: Path, owned: Owned) -> None:
    """Give a directory its name back that a killed run set aside; called by who has the temporary name."""
    old = old_name(target)
    if os.path.lexists(target) and os.path.lexists(old):
        check_unfinished(old, owned)
        _remove(old)  # that run had named its successor
    elif old.is_dir() and not old.is_symlink():
        rename_new(old, target)


def _name_directory(partial: Path, target: Path, *, overwrite: bool, owned: Owned) -> None:
    """Give a directory its name, and remove what had it."""
    check_target(target, overwrite=overwrite, owned=owned)
    try:
        rename_new(partial, target)
    except FileExistsError as error:
        if not overwrite:
            raise TargetExistsError("already exists", path=target, advice="choose another name") from error
        with held(target):  # from when it has the temporary name until it is gone, no other run takes that
            _replace(partial, target, owned)
    else:
        sync(target.parent)


def _replace(partial: Path, target: Path, owned: Owned) -> None:
    before = partial
    if exchange(partial, target):
        try:
            check_replaceable(partial, owned)  # in the meantime, somebody may have put something there
        except TargetError:
            exchange(partial, target)
            raise
    else:
        before = old_name(target)
        _settle_directory(target, owned)
        target.rename(before)
        try:
            rename_new(partial, target)
        except BaseException:
            if not os.path.lexists(target):
                before.rename(target)
            raise
    sync(target.parent)
    _remove(before)


def _remove(path: Path) -> None:
    """Remove what has a temporary name, as far as that goes; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- files


def _name_files(partials: Sequence[Path], targets: Sequence[Path], *, overwrite: bool) -> None:
    """Give files of one directory their names; `interrupted` tells of it until all have theirs."""
    for target in targets:
        check_target(target, overwrite=overwrite)
    last = targets[-1]
    if len(targets) == 1 and overwrite:
        partials[0].replace(last)
        return
    if len(targets) == 1:
        try:
            rename_new(partials[0], last)
        except FileExistsError as error:
            raise TargetExistsError("already exists", path=last, advice="choose another name") from error
        return
    if {target.parent for target in targets} != {last.parent}:
        raise TargetError("files in several directories cannot be renamed together", path=last)
    found = [partial.lstat() for partial in partials]
    waiting = [_Waiting(t.name, one.st_size, one.st_ino) for t, one in zip(targets, found, strict=True)]
    with _list_of(last) as listed:
        try:
            write_all(listed, memoryview(json.dumps(waiting).encode()), 0)
            os.fsync(listed)
            sync(last.parent)
        except BaseException:
            _naming_name(last).unlink()
            raise
        try:
            _name_all(last.parent, waiting)
        except OSError as error:
            raise TargetError(
                "was written, but could not be renamed",
                path=last,
                found=str(error),
                advice="it is kept: the next run to this target renames it",
            ) from error
        except BaseException:  # an interrupt: what is half named is named to its end
            _name_all(last.parent, waiting)
            _naming_name(last).unlink()
            raise
        _naming_name(last).unlink()


def _list_of(last: Path) -> AbstractContextManager[int]:
    """Hold the list of files that are being named together; those are named first that a killed run left in it."""
    return claimed(_naming_name(last), directory=False, left=lambda found: _go_on(found, last.parent))


def _go_on(listed: int, directory: Path) -> None:
    """Name the files of a list that a killed run left; one that was not written to its end says nothing."""
    try:
        waiting = [_Waiting(*one) for one in json.loads(os.pread(listed, LIST_NBYTES, 0))]
    except (ValueError, TypeError):
        return
    if waiting and all(type(one.name) is str and Path(one.name).name == one.name for one in waiting):
        _name_all(directory, waiting)


def _name_all(directory: Path, every: Sequence[_Waiting]) -> None:
    """Name those that have no name yet; called again after a kill at any moment, it names the rest."""
    *others, last = every
    if _is_waiting(directory, last) and last.name in os.listdir(directory):  # noqa: PTH208  # `lexists` hides errors
        for one in others:
            if _is_waiting(directory, one):
                check_replaceable(directory / one.name)
                (directory / one.name).unlink(missing_ok=True)
        sync(directory)
        _name_one(directory, last)
        sync(directory)
    for one in [*others, last]:
        _name_one(directory, one)
    sync(directory)


def _name_one(directory: Path, one: _Waiting) -> None:
    if _is_waiting(directory, one):
        check_replaceable(directory / one.name)
        partial_name(directory / one.name).replace(directory / one.name)


def _is_waiting(directory: Path, one: _Waiting) -> bool:
    """Tell whether the temporary name still is the file's that was to be named."""
    try:
        found = partial_name(directory / one.name).lstat()
    except ValueError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):  # it has its name, or can have none
            raise
        return False
    return (found.st_size, found.st_ino) == (one.nbytes, one.inode)
