"""What a plan will take, before anything is written: room, memory, reads, and time by a short sample.

Room and memory are looked at before every run, and what cannot fit is refused. Reads are counted, and time is
estimated, under `dry_run`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from zckpt.engine.plan import Copy, FilePlan, Plan
from zckpt.engine.together import GAP_NBYTES, ranges_of
from zckpt.engine.workers import BATCH_NBYTES
from zckpt.errors import TargetError, shown
from zckpt.immutable import immutable, mutable
from zckpt.state import ZEROS, Document, Result, itemsize, nbytes_of
from zckpt.state.spans import reach_of
from zckpt.storage.journal import left_by
from zckpt.storage.memory import LEAST_NBYTES, buffers_within, check_memory, free_memory
from zckpt.storage.ownership import nearest
from zckpt.storage.room import Room, check_room, read_rate, room, write_rate
from zckpt.storage.stand_ins import is_remote

SAMPLE_NBYTES = 32 << 20
"""Read, and written, to see how fast that is: enough to leave the caches of a disk, and below a second for most."""

SAMPLED_FILES = 16
"""Of the source, spread over all that are read."""

READ_AT_ONCE = 2
"""Strided elements are read with all that is between them where that is not more than this many times as much."""


@mutable
class Reads:
    """What is read of a source file."""

    requests: int = 0  # byte ranges; those that lie end to end, or almost, and are needed one after the other are one
    nbytes: int = 0  # of these ranges
    low: int = 0  # bytes; where the first begins and the last ends
    high: int = 0
    _last: tuple[int, int] | None = None

    def add(self, offset: int, nbytes: int, count: int = 1) -> None:
        """Note ranges: one, or `count` that lie apart from each other from `offset` on and have `nbytes` together."""
        end = offset + nbytes
        self.low, self.high = (min(self.low, offset), max(self.high, end)) if self.requests else (offset, end)
        if self._last is not None and count == 1:
            low, high = self._last
            if low <= offset <= high + GAP_NBYTES:
                self.nbytes += max(end - high, 0)
                self._last = low, max(end, high)
                return
        self.requests += count
        self.nbytes += nbytes
        self._last = offset, end


@immutable(kw_only=True)
class Foresight(Result):
    """What a run will take, and what there is of it; None: unknown."""

    num_files: int  # that are made; the record of a fingerprint is not among them
    num_directories: int
    free_nbytes: int | None  # of the target's file system
    free_inodes: int | None
    read_requests: int
    requested_nbytes: int
    reads: Document  # by source file: `requests` and `nbytes`
    buffers_nbytes: int  # what copy buffers take together: the budget, or what a limit of memory leaves of it
    free_memory_nbytes: int | None
    memory_limit: str | None  # the limit that leaves least
    read_nbytes_per_second: float | None  # of a sample; what was written of it was synced, and is gone
    write_nbytes_per_second: float | None
    seconds: float | None  # about so long takes what is written, proofs aside


def directories(names: Iterable[Path], target: Path) -> int:
    """Return how many directories are made for files: the target, and those between it and a file."""
    found = {target}
    for parent in {name.parent for name in names}:
        found.update(one for one in (parent, *parent.parents) if target in one.parents)
    return len(found)


def check_fits(plan: Plan, names: Sequence[Path], target: Path, *, is_file: bool) -> None:
    """Raise unless the target's file system has room for the files of a plan, and the process memory to write them.

    `names`: all files that are made; `is_file`: no directory is. Raises TargetError: it has not; UsageError: a limit
    leaves too little memory; OSError: the target's directory is not there.
    """
    if plan.write_nbytes > LEAST_NBYTES:  # a name in `latest` fits wherever a process does
        check_memory()
    if is_remote(target):
        return
    made = len(names) + (0 if is_file else directories(names, target))
    left = left_by(names if is_file else [target])
    nbytes, files = max(plan.write_nbytes - left.nbytes, 0), max(made - (left.files or 0), 0)
    check_room(nearest(target), nbytes, files, replaced=os.path.lexists(target))


def foresee(
    plan: Plan, reads: dict[str, Reads], names: Sequence[Path], target: Path, *, is_file: bool, memory: int
) -> Foresight:
    """Look at what a plan will take; `reads`: of its files; `memory` bounds copy buffers; the rest as for `check_fits`.

    Raises SourceError: a file cannot be read.
    """
    try:
        check_fits(plan, names, target, is_file=is_file)
        found: Room | None = None if is_remote(target) else room(nearest(target))
    except TargetError:
        raise
    except OSError:  # its directory is not there, or of no file system that says
        found = None
    paths = sorted(reads)
    step = max(len(paths) / SAMPLED_FILES, 1)
    chosen = [paths[int(at * step)] for at in range(min(SAMPLED_FILES, len(paths)))]
    sample = list[tuple[str, int, int]]()  # in the middle of what is read of some files
    for path in chosen:
        one = reads[path]
        nbytes = min(SAMPLE_NBYTES // len(chosen), one.high - one.low)
        sample.append((path, one.low + (one.high - one.low - nbytes) // 2, nbytes))
    read = read_rate(sample) if sample else None
    write = write_rate(nearest(target), min(SAMPLE_NBYTES, plan.write_nbytes)) if found and plan.write_nbytes else None
    seconds = None if write is None else plan.write_nbytes / write + (plan.read_nbytes / read if read else 0.0)
    limit, free = free_memory() or (None, None)
    return Foresight(
        num_files=len(names),
        num_directories=0 if is_file else directories(names, target),
        free_nbytes=None if found is None else found.nbytes,
        free_inodes=None if found is None else found.files,
        read_requests=sum(one.requests for one in reads.values()),
        requested_nbytes=nbytes_of(reads.values()),
        reads={shown(path): {"requests": one.requests, "nbytes": one.nbytes} for path, one in reads.items()},
        buffers_nbytes=buffers_within(memory),
        free_memory_nbytes=free,
        memory_limit=limit,
        read_nbytes_per_second=read,
        write_nbytes_per_second=write,
        seconds=seconds,
    )


def note_reads(found: defaultdict[str, Reads], one: FilePlan) -> None:
    """Add what a target file's plan reads of each source file, in the order in which it comes to them."""
    cuts = [each.cut for each in one.fills if each.cut is not None]
    for path, offset, nbytes in ranges_of(cuts, BATCH_NBYTES):
        found[path].add(offset, nbytes)
    for copy in (copy for each in one.fills if each.cut is None for copy in each.copies):
        for path, offset, nbytes, count in _ranges(copy):
            found[path].add(offset, nbytes, count)
    for path, offset, nbytes in (window for pack in one.file.packs for window in pack.ranges()):
        found[path].add(offset, nbytes)


def _ranges(copy: Copy) -> Iterator[tuple[str, int, int, int]]:
    """Yield what a copy reads: file, offset, bytes, in how many ranges."""
    size = itemsize(copy.source_dtype)
    nbytes = copy.numel * size
    for source in copy.sources:
        if source.path == ZEROS:
            continue
        reach = reach_of(copy.shape, source.strides, size)
        if reach <= READ_AT_ONCE * nbytes:
            yield source.path, source.offset, reach, 1
            continue
        dense = size
        for n, step in zip(reversed(copy.shape), reversed(source.strides), strict=True):
            if step != dense:
                break
            dense *= n
        yield source.path, source.offset, nbytes, nbytes // dense
