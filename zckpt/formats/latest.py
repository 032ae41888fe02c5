"""The file `latest` of a run: it holds the name of the directory, next to it, that is to be resumed from."""

from __future__ import annotations

from pathlib import Path

from zckpt.storage.files import is_file, read_head

LATEST = "latest"

LATEST_NBYTES = 4096
"""It holds one directory name; a longer file is something else."""


def latest_name(source: Path, file: str = LATEST) -> str | None:
    """Return what a run's `latest`, or the like, holds; None if there is no such file."""
    latest = source / file
    return read_head(str(latest), LATEST_NBYTES).decode("utf-8", "replace").strip() if is_file(latest) else None


def is_name(name: str) -> bool:
    """Tell whether a name can be that of a directory directly in another."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def is_tag(name: str) -> bool:
    """Tell whether a name can be a tag: of a directory below a run's, which may be several levels down."""
    folders = name.split("/")
    return "\0" not in name and not any(one in ("", ".", "..") for one in folders)
