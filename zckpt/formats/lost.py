"""Lost files: what is known of them without reading them, so that the rest of a checkpoint can be salvaged.

A reader that misses a file calls `stand_in`, which refuses as a rule. Where what is left is to be salvaged, it gives a
path that begins with `LOST`, under which the reader goes on with what tells what the file held: a sibling, an index, a
mesh. So spans say of every element where it would lie; those of such a path are holes, which nothing reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, SourceError
from zckpt.state import Checkpoint, Shape
from zckpt.state.boxes import Box, intersection, row_major
from zckpt.state.context import during
from zckpt.state.spans import LOST

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.torchfile import Tensor

Lost = dict[str, tuple[str, ...]]

_LOST: ContextVar[Lost | None] = ContextVar("lost", default=None)

MOST_RANKS = 1 << 16
"""Whose files are given stand-ins: how many there should be, a file says."""


@contextmanager
def salvaging(*, wanted: bool) -> Iterator[Lost]:
    """Let files be lost within this context, if that is wanted; yield them, as `Checkpoint.lost` has them."""
    found: Lost = {}
    with during(_LOST, found if wanted else None):
        yield found


def stand_in(error: SourceError, path: str | os.PathLike[str], names: Iterable[str] = ()) -> str:
    """Return the path that stands for a lost file; raise the error where nothing may be lost.

    `names`: of tensors in it of which nothing else is known.
    """
    found = _LOST.get()
    if found is None:
        error.advice = f"{f'{error.advice}; ' if error.advice else ''}`zckpt inspect --salvage` shows what is left"
        raise error
    found[os.fspath(path)] = tuple(names)
    return LOST + os.fspath(path)


def missing(path: Path, what: str, found: Mapping[int, Path], world_size: int) -> ShardError | None:
    """Return the error for files of ranks of which some are missing; no more memory is used than files are there."""
    if len(found) == world_size and max(found) == world_size - 1:
        return None
    rank = next(rank for rank in range(len(found) + 1) if rank not in found)
    return ShardError(
        f"the {what} of rank {rank} is missing",
        path=path,
        expected=f"{world_size} files",
        found=f"{len(found)}, such as {found[min(found)].name}" if found else "none",
        code=MISSING_FILE,
        ranks=[rank],
    )


def is_lost(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path stands for a lost file."""
    return os.fspath(path).startswith(LOST)


def tensor_of(dtype: str, shape: Shape, key: str = "") -> Tensor:
    """Return the node of a tensor of which no bytes are there, as in a lost file; `key`: of its storage."""
    from zckpt.torchfile import Storage, Tensor

    return Tensor(Storage(key, dtype, 0, "cpu", 0), dtype, shape, row_major(shape), 0, "little")


def absent_boxes(label: str, shape: Shape, boxes: Sequence[Box]) -> list[Box]:
    """Return what boxes of a tensor leave out, as cells of the grid that they are cells of.

    Raises LayoutError: they are of no grid, for it would have far more cells.
    """
    axes = []
    for dim, whole in enumerate(shape):
        ends = {0, whole, *(low[dim] for low, _ in boxes), *(low[dim] + sizes[dim] for low, sizes in boxes)}
        axes.append([(low, high - low) for low, high in pairwise(sorted(ends))])
    if math.prod(map(len, axes)) > MOST_RANKS:
        raise LayoutError(f"what is there of {label} does not tell what is lost", expected="boxes of one grid",
                          found=f"{len(boxes)} boxes that are not", parameters=[label])  # fmt: skip
    cells = [(tuple(low for low, _ in cell), tuple(size for _, size in cell)) for cell in product(*axes)]
    there = {*boxes}
    return [cell for cell in cells if cell not in there and not any(intersection(cell, box) for box in boxes)]


def settle(checkpoint: Checkpoint, lost: Lost) -> None:
    """Say what is lost, and let a whole copy of what is lost in part be what is read."""
    checkpoint.lost = lost
    checkpoint.warnings += [f"{path} is lost, including everything in it that is not a tensor" for path in lost]
    for at, one in enumerate(checkpoint.duplicates if lost else ()):
        owner = checkpoint.find(one.name)
        if one.kind != "tied" and owner is not None and one.original.lost and not one.slot.lost:
            name = one.original.name
            if owner.slots.get(name) is one.original:
                owner.slots[name] = replace(one.slot, name=name)
                checkpoint.duplicates[at] = replace(one, slot=one.original, original=owner.slots[name])
