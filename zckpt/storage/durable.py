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

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zckpt.errors import TargetError, TargetExistsError
from zckpt.storage.disk import exchange, rename_new, sync, sync_all
from zckpt.storage.journal import Journal, forget, journal_name
from zckpt.storage.ownership import (
    Owned,
    check_replaceable,
    check_target,
    check_unfinished,
    claimed,
    held,
    is_named,
    partial_name,
)

LIST_NBYTES = 1 << 16
"""Of a list of files; a longer one is none."""


@contextmanager
def written_files(targets: Sequence[Path], *, overwrite: bool, journal: Journal | None = None) -> Iterator[list[Path]]:
    """Yield temporary names for files of one directory; on success sync them and give them their names.

    On any failure, interrupts included, the temporary files are removed, but for those of which the journal keeps what
    was done, and no target has changed. Only where the disk fails while several files are being named, `interrupted`
    tells so, and the next run names the rest.

    Parameters
    ----------
    targets : sequence of Path
        The last one is the target itself; where none of them is there, it appears last.
    overwrite : bool
        Replace regular files.
    journal : Journal, optional
        What is done is recorded, and may be gone on with.

    Raises
    ------
    TargetError
        One cannot be written; another run is writing it, or has written it meanwhile, or was killed and is to be gone
        on with.
    """
    for target in targets:  # of a killed run that was naming them together
        if os.path.lexists(_naming_name(target)):
            with _list_of(target):
                _naming_name(target).unlink()
    with _written(targets, overwrite=overwrite, owned=None, journal=journal) as partials:
        yield partials


@contextmanager
def written_directory(target: Path, *, overwrite: bool, owned: Owned, journal: Journal | None = None) -> Iterator[Path]:
    """Yield a temporary directory, which is empty but for what the journal has; on success sync and name it.

    `overwrite`: replace a directory that `owned` tells; `owned`: which directories may be replaced. Raises TargetError:
    as for `written_files`.
    """
    with _written([target], overwrite=overwrite, owned=owned, journal=journal) as partials:
        yield partials[0]


@contextmanager
def _written(
    targets: Sequence[Path], *, overwrite: bool, owned: Owned | None, journal: Journal | None
) -> Iterator[list[Path]]:
    partials, held, last = [partial_name(target) for target in targets], list[tuple[int, Path]](), targets[-1]
    left = None if journal is None else journal.left
    with ExitStack() as stack:
        try:
            for target, partial in zip(targets, partials, strict=True):
                known = None if os.path.lexists(journal_name(target)) else owned
                claim = claimed(partial, directory=owned is not None, left=left, owned=known)
                held.append((stack.enter_context(claim), partial))
                if owned is not None:
                    _settle_directory(target, owned)
                check_target(target, overwrite=overwrite, owned=owned)
                _keep_mode(partial, target, besides=0o600 if owned is None else 0o700)
            _begin(last, journal)
            yield partials
            _check_kept(held)
            below = [[partial] if owned is None else [*partial.rglob("*"), partial] for partial in partials]
            _sync_all([path for some in below for path in some], journal)
            for target, partial, some in zip(targets, partials, below, strict=True):
                for path in some:
                    _keep_mode(path, target / path.relative_to(partial))
            if owned is None:
                _name_files(partials, targets, overwrite=overwrite)
            else:
                _name_directory(partials[0], last, overwrite=overwrite, owned=owned)
        except BaseException as error:
            if owned is None and interrupted(last):
                forget(last)  # all is written
            elif journal is None or not journal.keeps(error):
                for partial in (partial for descriptor, partial in held if is_named(descriptor, partial)):
                    _remove(partial)  # and not what it has taken the place of
            raise
        for parent in {target.parent for target in targets if owned is None}:
            sync(parent)
        if journal is not None:
            journal.end()


def _check_kept(held: Sequence[tuple[int, Path]]) -> None:
    """Raise TargetError unless each temporary name still stands for what was written."""
    for descriptor, partial in held:
        if not is_named(descriptor, partial):
            raise TargetError("is gone, or something else has its name", path=partial, advice="write it again")


def _keep_mode(partial: Path, target: Path, *, besides: int = 0) -> None:
    """Let who may read and write what is replaced, and no one else, do so with what replaces it.

    `besides` is what the run itself needs until then.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = target.lstat().st_mode
        if not stat.S_ISLNK(mode):
            partial.chmod(mode & 0o777 | besides)


def _begin(target: Path, journal: Journal | None) -> None:
    """Let a journal begin; without one, forget that of a run whose remains this one has removed."""
    if journal is None:
        forget(target)
    else:
        journal.begin()


def _sync_all(paths: Sequence[Path], journal: Journal | None) -> None:
    """Sync; what a disk has failed to take is not gone on with, for a system says so once, and not of which bytes."""
    try:
        sync_all(paths)
    except OSError:
        if journal is not None:
            journal.distrust()
        raise


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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A file that is to be named, and what tells it from any other that has its temporary name."""

    name: str
    nbytes: int
    inode: int


def old_name(target: Path) -> Path:
    """Return the name under which a directory waits while its successor is renamed into place."""
    return target.with_name(f".{target.name}.zckpt-old")


def target_of_old(path: Path) -> Path | None:
    """Return the target of which something is the old directory, by its name; None: of none."""
    name = path.name.removesuffix(".zckpt-old").removeprefix(".")
    target = path.with_name(name) if name else path
    return target if old_name(target) == path else None


def _naming_name(target: Path) -> Path:
    """Return the name of the list of files that are being named together with `target`, the last of them."""
    return target.with_name(f".{target.name}.zckpt-naming")


def interrupted(target: Path) -> str | None:
    """Return what to know of a target whose naming was cut short by a kill; None: it was not."""
    if os.path.lexists(_naming_name(target)):
        return "a run was killed while it was naming this file and others: the next run to this target names the rest"
    if os.path.lexists(old_name(target)) and not os.path.lexists(target):
        return f"a run was killed while it was replacing it: what was there is {old_name(target)}"
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
            raise TargetExistsError("exists already", path=target, advice="choose another name") from error
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
    elif len(targets) == 1:
        try:
            rename_new(partials[0], last)
        except FileExistsError as error:
            raise TargetExistsError("exists already", path=last, advice="choose another name") from error
    else:
        _name_together(partials, targets)


def _list_of(last: Path) -> AbstractContextManager[int]:
    """Hold the list of files that are being named together; those are named first that a killed run left in it."""
    return claimed(_naming_name(last), directory=False, left=lambda found: _go_on(found, last.parent))


def _name_together(partials: Sequence[Path], targets: Sequence[Path]) -> None:
    last = targets[-1]
    if {target.parent for target in targets} != {last.parent}:
        raise TargetError("files of several directories are not named together", path=last)
    found = [partial.lstat() for partial in partials]
    waiting = [_Waiting(t.name, one.st_size, one.st_ino) for t, one in zip(targets, found, strict=True)]
    with _list_of(last) as listed:
        try:
            os.write(listed, json.dumps([[one.name, one.nbytes, one.inode] for one in waiting]).encode())
            os.fsync(listed)
            sync(last.parent)
        except BaseException:
            _naming_name(last).unlink()
            raise
        try:
            _name_all(last.parent, waiting)
        except OSError as error:
            raise TargetError(
                "was written and could not be named",
                path=last,
                found=str(error),
                advice="it is kept: the next run to this target names it",
            ) from error
        except BaseException:  # an interrupt: what is half named is named to its end
            _name_all(last.parent, waiting)
            _naming_name(last).unlink()
            raise
        _naming_name(last).unlink()


def _go_on(listed: int, directory: Path) -> None:
    """Name the files of a list that a killed run left; one that was not written to its end says nothing."""
    try:
        every = json.loads(os.pread(listed, LIST_NBYTES, 0))
        waiting = [_Waiting(name, nbytes, inode) for name, nbytes, inode in every]
    except (ValueError, TypeError):
        return
    if waiting and all(type(one.name) is str and Path(one.name).name == one.name for one in waiting):
        _name_all(directory, waiting)


def _name_all(directory: Path, every: Sequence[_Waiting]) -> None:
    """Name those that have no name yet; called again after a kill at any moment, it names the rest."""
    *others, last = every
    if _is_waiting(directory, last) and os.path.lexists(directory / last.name):
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
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_ino) == (one.nbytes, one.inode)
