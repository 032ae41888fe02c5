"""Which bytes of each file are elements of what: spans of slots, copies, padding. Pure: no I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.state import Checkpoint, CutSpans, Slot, Span
from zckpt.state.dtypes import itemsize
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, LEFT_OUT, STATE

Range = tuple[int, int]
"""Bytes [low, high) of a file."""

FEWEST_COLUMNS = 1 << 13
"""Spans; of fewer, the ranges are found one by one before numpy is loaded, which finds them for all at once."""

ORDER = (STATE, CARRIED, COPY, IMPLIED, LEFT_OUT)
"""Which fate bytes have that two things claim: the first."""


@dataclass(slots=True)
class Known:
    """Byte ranges of one file that have one fate, sorted, with the slot that each is of; `merged` do not touch."""

    ranges: list[tuple[int, int, str]] = field(default_factory=list)
    merged: list[Range] = field(default_factory=list)

    def close(self) -> None:
        """Sort the ranges, and merge those that touch; to be called once all are there."""
        self.ranges.sort()
        self.merged = merge((low, high) for low, high, _ in self.ranges)

    def slots(self, low: int, high: int) -> Iterator[str]:
        """Yield the slots of ranges that begin within [low, high), at least of the one that `low` lies in."""
        at = max(bisect_right(self.ranges, (low, low, "\U0010ffff")) - 1, 0)
        for index in range(at, len(self.ranges)):
            begin, end, slot = self.ranges[index]
            if begin >= high:
                return
            if end > low:
                yield slot

    def rest(self, ranges: Iterable[Range]) -> list[Range]:
        """Return what of these ranges is not covered."""
        found: list[Range] = []
        for low, high in ranges:
            begin = low
            at = max(bisect_right(self.merged, (low, low)) - 1, 0)
            while begin < high and at < len(self.merged):
                start, end = self.merged[at]
                if start >= high:
                    break
                if start > begin:
                    found.append((begin, start))
                begin = max(begin, end)
                at += 1
            if begin < high:
                found.append((begin, high))
        return found


Covered = dict[str, dict[str, Known]]
"""By file, and by fate: state, copy, implied."""


def covered(checkpoint: Checkpoint) -> Covered:
    """Return the bytes of each file that slots, their copies and padding lie in."""
    found: Covered = {}

    def add(path: str, fate: str, low: int, high: int, slot: str) -> None:
        if low < high:
            found.setdefault(path, {}).setdefault(fate, Known()).ranges.append((low, high, slot))

    cut: dict[tuple[int, str], list[CutSpans]] = {}
    for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]:
        for slot in parameter.slots.values():
            for spans in (slot.spans, *slot.replicas):
                if isinstance(spans, CutSpans):
                    cut.setdefault((id(spans.files), slot.name), []).append(spans)
                    continue
                for span in spans:
                    add(span.path, STATE, *reach(span), slot.name)
    for path, low, high, name in _cut_ranges(cut):
        add(path, STATE, low, high, name)
    for duplicate in checkpoint.duplicates:
        for span in spans_of(duplicate.slot):
            add(span.path, COPY, *reach(span), duplicate.slot.name)
    for runs in checkpoint.padding_runs:
        for run in runs:
            add(run.path, IMPLIED, run.offset, run.offset + run.nbytes, "padding")
    for by_fate in found.values():
        for known in by_fate.values():
            known.close()
    return found


def _cut_ranges(cut: Mapping[tuple[int, str], Sequence[CutSpans]]) -> Iterator[tuple[str, int, int, str]]:
    """Yield path, first and last byte, and slot of what lies end to end of all parameters that are cut alike."""
    if sum(len(one) for found in cut.values() for one in found) < FEWEST_COLUMNS:
        for (_, name), found in cut.items():
            yield from ((span.path, *reach(span), name) for one in found for span in one)
        return
    from zckpt.state.cuts import Cuts

    before: tuple[Cuts, list[tuple[int, list[Range]]]] | None = None
    for (_, name), found in cut.items():
        files, cuts = found[0].files, Cuts(found)
        if before is None or before[0] != cuts:  # the slots of an optimizer lie alike
            before = cuts, list(cuts.ranges())
        size = itemsize(files.dtype)
        for file, ranges in before[1]:
            for low, high in ranges:
                yield files.paths[file], files.offsets[file] + low * size, files.offsets[file] + high * size, name


def spans_of(slot: Slot) -> Iterator[Span]:
    """Yield all spans of a slot, those of its replicas too."""
    yield from slot.spans
    for spans in slot.replicas:
        yield from spans


def reach(span: Span) -> Range:
    """Return the bytes from the first to the last element of a span."""
    size = itemsize(span.dtype)
    numel = span.extent.numel
    if numel and span.strides is not None:
        numel = 1 + sum((n - 1) * s for n, s in zip(span.extent.sizes, span.strides, strict=True))
    return span.offset, span.offset + numel * size


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return sorted ranges that do not touch and cover the same bytes."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            if high > found[-1][1]:
                found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def shares(nbytes: int, ranges: dict[str, list[Range]]) -> dict[str, int]:
    """Return how many bytes of a file have each fate; those that no range covers are the format's own: implied.

    Parameters
    ----------
    nbytes : int, bytes
        Size of the file.
    ranges : dict of str to list of (int, int)
        By fate, in any order, overlapping or not.
    """
    found: dict[str, int] = {}
    every: list[Range] = []
    before = 0
    for fate in ORDER:
        every = merge([*every, *ranges.get(fate, [])])
        now = sum(high - low for low, high in every)
        if now > before:
            found[fate] = now - before
        before = now
    found[IMPLIED] = found.get(IMPLIED, 0) + nbytes - before
    return {fate: count for fate, count in found.items() if count}
