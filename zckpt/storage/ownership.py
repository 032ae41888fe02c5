"""What may stand where a target is to be, and what of it may be replaced.

A file takes the place of a regular file, which the user named. A directory takes the place of a directory that is
empty, or in which everything is what its format writes. Nothing else is ever replaced: no symbolic link, for its owner
may mean what it points to; no device, FIFO or socket; no directory that holds something else, however little.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zckpt.errors import TargetError, TargetExistsError

FINGERPRINT_NAME = "fingerprint.json"
"""A file that a directory of any format may have."""

SHOWN_NAMES = 4

_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


def _any(_: Path) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Owned:
    """What tells a directory that may be replaced as a whole.

    Parameters
    ----------
    is_own : callable
        Tells a file of the format by its name within the directory.
    is_marked : callable
        Tells a directory of the format by more than names, where names would not do.
    """

    is_own: Callable[[str], bool]
    is_marked: Callable[[Path], bool] = _any


def kind_of(mode: int) -> str:
    """Return what a file of this mode is."""
    return next((kind for is_it, kind in _KINDS if is_it(mode)), "something else")


def check_target(target: Path, *, overwrite: bool, owned: Owned | None = None) -> None:
    """Raise unless `target` may be written.

    Parameters
    ----------
    target : Path
    overwrite : bool
        Replace what may be replaced.
    owned : Owned, optional
        A directory is to be written, and this is what it may replace; None: a file is to be written.

    Raises
    ------
    TargetExistsError
        It is there, and `overwrite` is false or it is nothing that may be replaced.
    TargetError
        It has no name of its own, or its parent is not a directory that exists.
    """
    if target.name in ("", ".."):
        raise TargetError("cannot be written", path=target, expected="a name", advice="name a file or directory in it")
    if not target.parent.is_dir():
        raise TargetError(
            "cannot be written", path=target, expected=f"a directory {target.parent}", advice="create it first"
        )
    if not overwrite and os.path.lexists(target):
        raise TargetExistsError("exists already", path=target, advice="choose another name or give --overwrite")
    check_replaceable(target, owned)


def check_replaceable(target: Path, owned: Owned | None = None) -> None:
    """Raise TargetExistsError if something is there that a target may not replace. Parameters are `check_target`'s."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise TargetError("cannot be written", path=target, found=getattr(error, "strerror", str(error))) from error
    wanted, found = "a file" if owned is None else "a directory", kind_of(mode)
    if found == "a symbolic link":
        raise TargetExistsError(
            "is a symbolic link, which is not replaced",
            path=target,
            found=f"a link to {target.readlink()}",
            advice="name what it points to, or remove it",
        )
    if found != wanted:
        raise TargetExistsError(
            "cannot be replaced", path=target, expected=wanted, found=found, advice="choose another name"
        )
    if owned is not None:
        _check_owned(target, owned)


def _check_owned(directory: Path, owned: Owned) -> None:
    try:
        names = list(_below(directory))
    except OSError as error:
        raise TargetError("cannot be read, so it is not replaced", path=error.filename, found=error.strerror) from error
    others = [name for name, is_file in names if not (is_file and (name == FINGERPRINT_NAME or owned.is_own(name)))]
    if names and not others and not owned.is_marked(directory):
        others = [name for name, _ in names]
    if others:
        raise TargetExistsError(
            "holds other files, which replacing it would remove",
            path=directory,
            found=", ".join(sorted(others)[:SHOWN_NAMES]) + (" ..." if len(others) > SHOWN_NAMES else ""),
            advice="choose a new directory",
        )


def _below(directory: Path) -> Iterator[tuple[str, bool]]:
    """Yield the name of everything below a directory, and whether it is a regular file; of directories, empty ones."""
    for at, folders, files in os.walk(directory, onerror=_raise):
        here = Path(at)
        if here != directory and not folders and not files:
            yield f"{here.relative_to(directory).as_posix()}/", False
        for name in folders:
            if (here / name).is_symlink():  # `os.walk` does not go into it
                yield (here / name).relative_to(directory).as_posix(), False
        for name in files:
            path = here / name
            yield path.relative_to(directory).as_posix(), stat.S_ISREG(path.lstat().st_mode)


def _raise(error: OSError) -> None:
    raise error
