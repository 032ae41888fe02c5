"""What a file system has room for, and what it says when it is full; how fast it takes and gives bytes, by a sample."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from zckpt.errors import TargetError, WorkerError
from zckpt.immutable import immutable
from zckpt.storage.files import opened

NOTHING_LEFT = "nothing was left behind"

_FULL = f"{NOTHING_LEFT}; other programs used the space, or a quota leaves less (`quota -s`, `lfs quota`)"
_ADVICE = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL}
"""There was room when the run began."""

BOTH_STAY = "the old target stays until the new one is renamed, so both need space"


@immutable
class Room:
    """What a file system has room for.

    `files`: files and directories together; None: as many as there are bytes for.
    """

    nbytes: int
    files: int | None


def room(directory: Path) -> Room:
    """Return what the file system of a directory has room for, for this user.

    Raises OSError: there is no such directory.
    """
    found = os.statvfs(directory)
    return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def check_room(directory: Path, nbytes: int, files: int, *, replaced: bool = False) -> None:
    """Raise unless a file system has room for what is to be written; nothing is, then.

    `directory`: in the file system; `nbytes`: bytes; `files`: files and directories together; `replaced`: whether
    something is there that this is to replace. Raises TargetError: it has not; OSError: there is no such directory.
    """
    found = room(directory)
    advice = "free some or write elsewhere" + (f": {BOTH_STAY}" if replaced else "")
    if found.nbytes < nbytes:
        raise TargetError(
            "not enough space", path=directory, expected=f"{nbytes} bytes free", found=found.nbytes, advice=advice
        )
    if found.files is not None and found.files < files:
        raise TargetError(
            "no space for that many files",
            path=directory,
            expected=f"{files} inodes free",
            found=found.files,
            advice=advice,
        )


def write_rate(directory: Path, nbytes: int) -> float | None:
    """Return the bytes per second at which a file system takes bytes and syncs them; None: it does not take any.

    `directory`: where the sample is written; the file has no name, and is gone when this returns; `nbytes`: of the
    sample.
    """
    import tempfile

    block = os.urandom(min(nbytes, 1 << 20))  # what a file system cannot compress
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".zckpt-sample-") as file:
            begun = perf_counter()
            for at in range(0, nbytes, len(block)):
                os.pwrite(file.fileno(), block, at)
            os.fsync(file.fileno())
            return nbytes / max(perf_counter() - begun, 1e-9)
    except OSError:
        return None


def read_rate(ranges: Iterable[tuple[str, int, int]]) -> float | None:
    """Return the bytes per second at which ranges are read, one after the other; None: there are none.

    `ranges`: file, byte offset, bytes. Raises SourceError: one cannot be read.
    """
    done, begun = 0, perf_counter()
    for path, offset, nbytes in ranges:
        with opened(path) as file:
            file.at(offset, nbytes)
        done += nbytes
    return done / max(perf_counter() - begun, 1e-9) if done else None


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path`, or to give memory for that, into a TargetError."""
    try:
        yield
    except (TargetError, WorkerError):
        raise
    except OSError as error:
        raise TargetError(
            "cannot be written",
            path=path,
            found=error.strerror or str(error),
            advice=_ADVICE.get(error.errno or 0, NOTHING_LEFT),
        ) from error
    except MemoryError as error:
        raise TargetError(
            "cannot be written",
            path=path,
            found="not enough memory",
            advice=f"{NOTHING_LEFT}; give a smaller --memory, or raise the limit",
        ) from error
