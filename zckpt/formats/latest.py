"""The file `latest` of a run, or Megatron's: it holds the name of the directory, next to it, to be resumed from."""

from __future__ import annotations

import re
from pathlib import Path

from zckpt.storage.files import is_file, read_head

LATEST = "latest"

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's: an iteration, or a name."""

_ITERATION = re.compile("[0-9]{1,18}")

LATEST_NBYTES = 4096
"""It holds one directory name; a longer file is something else."""

NAME_MAX, TAG_MAX = 255, 512
"""Bytes of a name, which file systems have no more room for; and characters of a tag, whose path has an end, too."""


def latest_name(source: Path, file: str = LATEST) -> str | None:
    """Return what a run's `latest`, or the like, holds; None if there is no such file."""
    latest = source / file
    return read_head(str(latest), LATEST_NBYTES).decode("utf-8", "replace").strip() if is_file(latest) else None


def folder_of(text: str) -> str:
    """Return the name of the directory that `TRACKER` names."""
    return f"iter_{int(text):07d}" if _ITERATION.fullmatch(text) else text


def is_name(name: str) -> bool:
    """Tell whether a name can be that of a directory directly in another."""
    is_plain = name not in ("", ".", "..") and "\0" not in name and Path(name).name == name
    return is_plain and len(name.encode("utf-8", "surrogatepass")) <= NAME_MAX


def is_tag(name: str) -> bool:
    """Tell whether a name can be a tag: of a directory below a run's, which may be several levels down."""
    return len(name) <= TAG_MAX and all(map(is_name, name.split("/")))
