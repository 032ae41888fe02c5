"""Where a universal checkpoint is: its own directory, or the one that `latest_universal` in its parent names."""

from __future__ import annotations

import os
from pathlib import Path

from zckpt.codes import LATEST
from zckpt.errors import UnknownFormatError
from zckpt.formats.latest import LATEST_NBYTES, is_name
from zckpt.formats.universal.names import FOLDER, LATEST_NAME, MASTER_STEM, OPTIMIZER_NAME, SUFFIX
from zckpt.storage.files import is_file, read_head


def find(source: Path, *, tag: str | None = None) -> Path | None:
    """Return the directory of the universal checkpoint that `source` is or holds; None if it is or holds none.

    A run directory that also has `latest` is one of ordinary checkpoints, unless `tag` names a universal one in it.

    Raises
    ------
    UnknownFormatError
        `latest_universal` names nothing.
    """
    if tag is not None:
        named = source / tag if is_name(tag) else None
        return named if named is not None and _is_universal(named) else None
    if _is_universal(source):
        return source
    latest = source / LATEST_NAME
    if not is_file(latest) or is_file(source / "latest"):
        return None
    name = read_head(str(latest), LATEST_NBYTES).decode("utf-8", "replace").strip()
    if is_name(name) and _is_universal(source / name):
        return source / name
    raise UnknownFormatError(
        "names no universal checkpoint",
        path=latest,
        expected="the name of a directory beside it",
        found=repr(name[:80]),
        code=LATEST,
    )


def _is_universal(directory: Path) -> bool:
    """Tell whether a directory has a folder of parameters, or the optimizer's file that lies among them."""
    folder = directory / FOLDER
    try:
        if not folder.is_dir():
            return False
        if (folder / OPTIMIZER_NAME).is_file():
            return True
        with os.scandir(folder) as entries:
            return any(Path(entry.path, MASTER_STEM + SUFFIX).is_file() for entry in entries if entry.is_dir())
    except OSError:  # a name too long to be one, or one that may not be looked at
        return False
