"""The same directory on several nodes, each of which has the files that its own ranks wrote: what `--root` names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path

from zckpt.codes import TWICE
from zckpt.errors import ShardError, SourceError

ADVICE = "give each directory that holds some of them with --root"
"""What to do where files of ranks are missing."""

_NODES: ContextVar[tuple[Path, Sequence[Path]]] = ContextVar("nodes", default=(Path(), ()))


def on_nodes(directory: Path, others: Sequence[Path]) -> AbstractContextManager[None]:
    """Let a directory have files on other nodes as long as the context lasts. Raises SourceError: one is none."""
    from zckpt.state.context import during

    for root in others:
        if not root.is_dir():
            raise SourceError(
                "is not a directory", path=root, advice="give the same directory from another node with --root"
            )
    return during(_NODES, (directory, others))


def on_each(path: Path) -> list[Path]:
    """Return a path, and what is at the same place on other nodes."""
    directory, others = _NODES.get()
    if not others or not path.is_relative_to(directory):
        return [path]
    inside = path.relative_to(directory)
    return [path, *(there for root in others if (there := root / inside).exists())]


def wherever(path: Path) -> Path:
    """Return where a file is: on the node that has it, or else where it should be. Raises ShardError: two have one."""
    first, *others = on_each(path)
    found = [one for one in (first, *others) if others and one.exists()] or [first]
    for one in found[1:]:
        if not one.samefile(found[0]):
            raise ShardError(
                "is on two nodes",
                path=one,
                expected="one file for each rank",
                found=found[0],
                advice="remove the one that does not belong to this run",
                code=TWICE,
            )
    return found[0]
