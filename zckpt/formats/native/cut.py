"""How tensors are dealt to the files of ranks: end to end, and cut in equal runs of bytes. Pure functions of integers.

    | a a a a | b b b b b b | c | d d d d |        the tensors, one after the other
    |   file 0    |   file 1    |  file 2   |      at most one cut for each file but the last

So files are of one size to within an element, whatever the tensors are, a file holds all slots of a run of
parameters, and there are never many more pieces than tensors: reading at another world size stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, start + numel) of a flattened tensor, which lie in one file."""

    file: int
    start: int
    numel: int


def deal(tensors: Sequence[tuple[int, int]], world_size: int, *, before: int = 0) -> Iterator[list[Run]]:
    """Yield the runs of each tensor, in order; a tensor without elements has one of none.

    Parameters
    ----------
    tensors : sequence of (numel, itemsize)
        In elements, and bytes of one element.
    world_size : int, files
    before : int, bytes
        What the first file holds already, and is counted as its own.
    """
    total = before + sum(numel * size for numel, size in tensors)
    ends = [total * (file + 1) // world_size for file in range(world_size)]
    file, at = 0, before
    for numel, size in tensors:
        runs: list[Run] = []
        start = 0
        while start < numel or not runs:
            while file < world_size - 1 and ends[file] - at < (size if numel else 1):
                file += 1
            room = (ends[file] - at) // size if file < world_size - 1 else numel
            runs.append(Run(file, start, min(numel - start, room)))
            start += runs[-1].numel
            at += runs[-1].numel * size
        yield runs
