"""What may stand where a target is to be, what of it may be replaced, and the temporary name that one run holds.

A file takes the place of a regular file, which the user named. A directory takes the place of a directory that is
empty, or in which everything is what its format writes. Nothing else is ever replaced: no symbolic link, for its owner
may mean what it points to; no device, FIFO or socket; no directory that holds something else, however little.

Until it has its name, a target is `.NAME.zckpt-partial`, and the run that writes it holds a lock on that. What has such
a name already was left by a run that was killed, if it is a file, or a directory beside which a journal is, or in which
all files have names of the format's or temporary ones; another is refused. It is removed, and not written into: it may
be a link to something else by now, and another name of its file may be anybody's. Only a run that goes on with
another's work writes into what that has left (`journal`), which then must be a file of one name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zckpt.errors import TargetError, TargetExistsError
from zckpt.immutable import immutable
from zckpt.storage.disk import sync

FINGERPRINT_NAME = "fingerprint.json"
"""A file that a directory of any format may have."""

REMOVED = ".zckpt-removed"
"""A directory, beside what is being removed, that it is in meanwhile: half of it must not look like all of it."""

SHOWN_NAMES = 4

_KINDS = {
    "-": "a file",
    "d": "a directory",
    "l": "a symbolic link",
    "b": "a block device",
    "c": "a character device",
    "p": "a FIFO",
    "s": "a socket",
}
"""By the letter that `ls` has for it."""

_MARK = ".zckpt-"
"""What temporary names have."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""How a directory is opened, and nothing else."""

_WITHOUT_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What file systems say that are mounted without locks (Lustre's default): as where there are none at all."""

Left = Callable[[int], "bool | None"]
"""Called with the descriptor of what a killed run left, locked; true: it is gone on with, else it is removed."""


@immutable
class Owned:
    """What tells a directory that may be replaced as a whole.

    `is_own`: tells a file of the format by its name within the directory; `is_marked`: tells a directory of the format
    by more than names, where names would not do.
    """

    is_own: Callable[[str], bool]
    is_marked: Callable[[Path], bool] = lambda _: True


def called(pattern: str) -> Callable[[str], bool]:
    """Return what tells names that are, as a whole, of a pattern; it is compiled when it is asked."""
    return lambda name: re.fullmatch(pattern, name) is not None


def kind_of(mode: int) -> str:
    """Return what a file of this mode is."""
    return _KINDS.get(stat.filemode(mode)[0], "something else")


def check_target(target: Path, *, overwrite: bool, owned: Owned | None = None) -> None:
    """Raise unless `target` may be written.

    `overwrite`: replace what may be replaced; `owned`: a directory is to be written, and this is what it may replace;
    None: a file is to be written. Raises TargetExistsError: it is there, and `overwrite` is false or it is nothing that
    may be replaced; TargetError: it has no name of its own, or cannot be in a directory.
    """
    if target.name in ("", ".."):
        raise TargetError("cannot be written", path=target, expected="a name", advice="name a file or directory in it")
    if not (above := nearest(target)).is_dir():
        raise TargetError("cannot be written", path=target, expected=f"a directory {above}", found="something else")
    if not overwrite and os.path.lexists(target):
        raise TargetExistsError("already exists", path=target, advice="choose another name, or give --overwrite")
    check_replaceable(target, owned)


def nearest(target: Path) -> Path:
    """Return the directory that a target is in, or the first above it that there is."""
    return next((above for above in target.parents if os.path.lexists(above)), target.parent)


@contextmanager
def directories_above(target: Path) -> Iterator[None]:
    """Make the directories that a target is in, on disk; on failure remove those made here that nothing is in."""
    made = [above for above in target.parents if not os.path.lexists(above)]
    try:
        for one in reversed(made):
            one.mkdir(exist_ok=True)
            sync(one.parent)
        yield
    except BaseException:
        for one in made:
            with suppress(OSError):
                one.rmdir()
        raise


def check_replaceable(target: Path, owned: Owned | None = None) -> None:
    """Raise TargetExistsError if something is there that a target may not replace. Parameters are `check_target`'s."""
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise TargetError("cannot be written", path=target, found=getattr(error, "strerror", str(error))) from error
    expected, found = "a file" if owned is None else "a directory", kind_of(mode)
    if found == "a symbolic link":
        raise TargetExistsError(
            "is a symbolic link, which zckpt does not replace",
            path=target,
            found=f"a link to {target.readlink()}",
            advice="give the path that it points to, or remove it",
        )
    if found != expected:
        raise TargetExistsError(
            "cannot be replaced", path=target, expected=expected, found=found, advice="choose another name"
        )
    if owned is None:
        return
    try:
        names = list(_below(target))
    except OSError as error:
        raise TargetError(
            "cannot be read, so zckpt does not replace it", path=error.filename, found=error.strerror
        ) from error
    others = [name for name, is_file in names if not (is_file and (name == FINGERPRINT_NAME or owned.is_own(name)))]
    if names and not others and not owned.is_marked(target):
        others = [name for name, _ in names]
    if others:
        raise TargetExistsError(
            "holds other files, which would be removed",
            path=target,
            found=_some(others),
            advice="choose a new directory",
        )
    if not all(os.access(folder, os.W_OK | os.X_OK) for folder in {(target / name).parent for name, _ in names}):
        raise TargetExistsError(
            "holds files that this user may not remove",
            path=target,
            advice="let its owner remove it, or choose another name",
        )


def check_unfinished(directory: Path, owned: Owned) -> None:
    """Raise TargetError if what has a temporary name holds more than a run leaves of a directory that `owned` tells."""
    mode = directory.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise TargetError("cannot be removed", path=directory, found=f"{kind_of(mode)} in its place", advice="move it")
    others = [
        name
        for name, is_file in _below(directory)
        if not name.endswith("/")
        and not (is_file and (name == FINGERPRINT_NAME or _MARK in name or owned.is_own(name)))
    ]
    if others:
        raise TargetError(
            "holds files that zckpt did not write, which would be removed",
            path=directory,
            found=_some(others),
            advice="move it away",
        )


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:SHOWN_NAMES]) + (" ..." if len(names) > SHOWN_NAMES else "")


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


def partial_name(target: Path) -> Path:
    """Return the temporary name of `target`, in the same directory."""
    return target.parent / f".{target.name}.zckpt-partial"


@contextmanager
def claimed(name: Path, *, directory: bool, left: Left | None = None, owned: Owned | None = None) -> Iterator[int]:
    """Create an empty file or directory that no other run has, and hold a lock on it; yield its descriptor.

    What a killed run left under the name is handed to `left` first, which may want it as it is. With `owned`, only what
    that tells is taken for such. Raises TargetError: another run has it, or it is what this user's runs do not leave.

    Between opening and locking, another run may have renamed its file to the target or removed it; what was opened
    is then no longer what the name stands for, and must not be touched.
    """
    while True:
        try:
            descriptor, is_new = _opened(name, directory=directory)
        except FileNotFoundError as error:
            if name.parent.is_dir():
                continue
            raise TargetError("its directory has disappeared", path=name) from error
        except OSError as error:
            if isinstance(error, TargetError):
                raise
            raise TargetError("cannot be created", path=name, found=error.strerror) from error
        try:
            _lock(descriptor, name)
            if is_named(descriptor, name):
                if is_new or (left is not None and left(descriptor)):
                    yield descriptor
                    return
                if owned is not None:
                    check_unfinished(name, owned)
                _remove_left(name, directory=directory)
        finally:
            os.close(descriptor)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory that is there, so that no run takes it for what a killed one left.

    Raises TargetError: another run holds one.
    """
    descriptor = os.open(directory, _FOLDER)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def is_abandoned(directory: Path) -> bool:
    """Tell whether a directory is this user's and certainly held by no run; where there are no locks, none is."""
    descriptor = -1
    try:
        descriptor = os.open(directory, _FOLDER)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def is_named(descriptor: int, path: Path) -> bool:
    """Tell whether a name still stands for what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _opened(name: Path, *, directory: bool) -> tuple[int, bool]:
    """Return a descriptor, and whether what it is of is new."""
    try:
        if directory:
            name.mkdir()
            return os.open(name, _FOLDER), True
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), True
    except FileExistsError:  # of what a run of this user may have left
        found = name.lstat()
        is_such = (stat.S_ISDIR if directory else stat.S_ISREG)(found.st_mode)
        if not is_such or found.st_uid != os.geteuid():
            what, advice = kind_of(found.st_mode), "remove it"
            if is_such:
                what, advice = "one of another user's", "let them remove it"
            raise TargetError("cannot be created", path=name, found=f"{what} in its place", advice=advice) from None
    flags = _FOLDER if directory else os.O_RDWR | os.O_NOFOLLOW
    return os.open(name, flags | os.O_NONBLOCK), False


def _lock(descriptor: int, name: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise TargetError("another run is writing to this target", path=name) from error
        if error.errno not in _WITHOUT_LOCKS:
            raise


def _remove_left(name: Path, *, directory: bool) -> None:
    try:
        if directory:
            import shutil

            shutil.rmtree(name)  # follows no links
        else:
            name.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise TargetError("cannot be removed", path=name, found=error.strerror, advice="remove it") from error
