"""All files below a directory, and copies of them, for what goes with a checkpoint. Follows no links to directories."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from zckpt.engine.plan import Hole, TargetFile
from zckpt.errors import SourceError
from zckpt.state import Extent, Slot, Span


def files_below(root: Path, *, without: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the name within `root` and the path of every file below it, sorted.

    Parameters
    ----------
    root : Path
    without : collection of str
        Names of directories directly in `root` that are left out.

    Raises
    ------
    SourceError
        Something is neither a file nor a directory, or cannot be read.
    """
    for at, folders, names in os.walk(root, onerror=_unreadable):
        here = Path(at)
        if here == root:
            folders[:] = [name for name in folders if name not in without]
        folders.sort()
        for name in folders:
            if (here / name).is_symlink():
                raise SourceError(
                    "is a link to a directory, which is not followed",
                    path=here / name,
                    advice="put the directory there",
                )
        for name in sorted(names):
            path = here / name
            if not path.is_file():
                raise SourceError("is no regular file", path=path, advice="remove it")
            yield path.relative_to(root).as_posix(), path


def copy_of(path: Path, name: str) -> TargetFile:
    """Return a file that has the bytes of another.

    Parameters
    ----------
    path : Path
    name : str
        Within the target.
    """
    nbytes = path.stat().st_size
    extent = Extent.whole((nbytes,))
    slot = Slot("file", "uint8", (nbytes,), (Span(extent, str(path), 0, "uint8"),))
    return TargetFile(name, nbytes, holes=[Hole(0, name, slot, extent, "uint8")] if nbytes else [])


def _unreadable(error: OSError) -> None:
    raise SourceError("cannot be read", path=error.filename, found=error.strerror) from error
