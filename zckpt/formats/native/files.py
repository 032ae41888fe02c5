"""Names and marks of the format's files: what a directory is told by, without reading it."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path

from zckpt.errors import SourceError
from zckpt.storage.files import entries_of, is_directory, read_head
from zckpt.storage.ownership import Owned

DOCUMENT_NAME = "checkpoint.json"
SECTIONS = ("parameters", "buffers", "unnamed")
"""Of the document, and of a checkpoint: those that have slots."""

_RANK = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
_MARK = re.compile(rb'"format"\s*:\s*"zckpt"')
_OF_RANK = re.compile(rb'"zckpt_id"\s*:\s*"')
_IDENTITY = re.compile(rb'"(?:id|zckpt_id)"\s*:\s*"([0-9a-f]{1,64})"')

HEAD_NBYTES = 4096
"""The mark is the first member of the document, as zckpt writes it."""

RANK_ROLE = "rank"
"""Of the files that hold the elements, and digests of them."""


def rank_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def is_own(name: str) -> bool:
    """Tell whether a directory of this format has a file of this name of its own."""
    return name == DOCUMENT_NAME or _RANK.fullmatch(name) is not None


def is_native(path: Path) -> bool:
    """Tell whether a directory is of this format, be it complete or what is left of a save that did not finish."""
    return is_directory(path) and (bool(rank_files(path)) or _MARK.search(_head(path / DOCUMENT_NAME)) is not None)


OWNED = Owned(is_own, is_native)
"""The directories of this format."""


def rank_files(path: Path) -> list[str]:
    """Return the names in a directory that are names of ranks' files, sorted; none where it cannot be read."""
    return [entry.name for entry in entries_of(path, lenient=True) if _RANK.fullmatch(entry.name)]


def identity_of(path: Path) -> str | None:
    """Return the id that ties a directory's files together, be it complete or not; None where none is found."""
    for name in (DOCUMENT_NAME, *rank_files(path)[:1]):
        found = _IDENTITY.search(_head(path / name))
        if found is not None:
            return found[1].decode()
    return None


def is_rank_file(path: Path) -> bool:
    """Tell whether a file is one rank's, of whatever name: it has pieces of tensors, with an optimizer's among them."""
    return path.is_file() and _OF_RANK.search(_head(path)) is not None


def _head(path: Path) -> bytes:
    """Return what a file begins with; nothing of what cannot be read."""
    try:
        return read_head(str(path), HEAD_NBYTES)
    except SourceError:
        return b""


SHARE: ContextVar[tuple[int, int] | None] = ContextVar("share", default=None)


def headers_shared(rank: int, world_size: int) -> AbstractContextManager[None]:
    """Let ranks that open a directory together look at some of its files each; if one refuses, all must.

    `rank`, `world_size`: of those who open it.
    """
    from zckpt.state.context import during

    return during(SHARE, (rank, world_size))
