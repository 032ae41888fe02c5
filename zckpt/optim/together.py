"""Directories that the ranks of a process group write together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zckpt.durable import written_directory


@contextmanager
def written_together(path: Path, group: dist.ProcessGroup, *, overwrite: bool) -> Iterator[Path]:
    """Let all ranks write into one new directory, which rank 0 makes and names; a failure of one is one of all."""
    made = written_directory(path, overwrite=overwrite) if dist.get_rank(group) == 0 else None
    partial = None
    error: BaseException | None = None
    try:
        partial = None if made is None else made.__enter__()
    except Exception as failure:  # noqa: BLE001  # told to all ranks
        error = failure
    told = _agree((None if partial is None else str(partial), error), group)
    directory, failed = told[0]
    if failed is not None:
        raise failed
    try:
        yield Path(directory)
    except Exception as failure:  # noqa: BLE001  # told to all ranks
        error = failure
    failures = [one for one in _agree(error, group) if one is not None]
    if made is not None:
        first = failures[0] if failures else None
        if not made.__exit__(type(first) if first else None, first, None) and first is not None:
            raise first
    if failures:
        raise failures[0]
    dist.barrier(group=group)


def _agree(mine: object, group: dist.ProcessGroup) -> list[Any]:
    """Return what each rank has to say."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told
