"""Torch files beside a checkpoint that hold values, and nothing that is trained: what a program keeps of its training.

Where it is in its data, random states, counters: files of any name, which no format has to know.
"""

from __future__ import annotations

import os
from pathlib import Path

from zckpt.errors import SourceError
from zckpt.formats.account.inventory import NEVER_EMPTY, below
from zckpt.formats.companions import carry_file
from zckpt.state import Checkpoint
from zckpt.state.dtypes import is_floating
from zckpt.storage.files import real_path
from zckpt.torchfile import Tensor, TorchFile, is_tensor, read_torchfile, walk_tensors
from zckpt.torchfile.trees import each, inner

MOST_NBYTES = 1 << 24
"""Of such a file."""

MOST_TENSOR_NBYTES = 1 << 16
"""Of integers: random states have some thousands."""


def carry_values(checkpoint: Checkpoint) -> None:
    """Carry what such files in the checkpoint's own directory hold, and in folders of it without a checkpoint."""
    own = Path(checkpoint.source)
    if not own.is_dir():
        return
    folders = dict[str, str]()
    known = {*(file.path for file in checkpoint.files), *checkpoint.claims, *checkpoint.leftovers}
    read = {real_path(path, folders) for path in known}
    for path, _, about in sorted(below(own, read, os.path.realpath(own))):
        may_be_torchs = not path.suffix or path.name.endswith(NEVER_EMPTY)
        is_unread = about is None and may_be_torchs and real_path(str(path), folders) not in read
        if is_unread and (file := _of_values(path)) is not None:
            inside = path.relative_to(own)
            carry_file(checkpoint, file, path.stem, inside.with_suffix("").as_posix(), inside.as_posix())


def _of_values(path: Path) -> TorchFile | None:
    """Read a small torch file without other tensors than single numbers, and a few integers; None of any other."""
    try:
        file = read_torchfile(path) if 0 < path.stat().st_size <= MOST_NBYTES else None
    except (OSError, SourceError):
        return None
    if file is None or any(is_tensor(node) and type(node) is not Tensor for node in each(file.root, inner)):
        return None
    are_values = all(
        one.numel <= 1 or (not is_floating(one.dtype) and one.numel * one.itemsize <= MOST_TENSOR_NBYTES)
        for _, one in walk_tensors(file.root)
    )
    return file if are_values else None
