"""Which bytes of each file are elements of what: spans of slots, copies, padding. Pure: no I/O."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Union

from zckpt.state import Checkpoint, CutFiles, CutSpans, PaddingRule, Slot, Span
from zckpt.state.dtypes import itemsize
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, LEFT_OUT, STATE

if TYPE_CHECKING:
    from zckpt.state import cuts

Range = tuple[int, int]
"""Bytes [low, high) of a file."""

FEWEST_COLUMNS = 1 << 13
"""Spans; of fewer, the ranges are found one by one before numpy is loaded, which finds them for all at once."""

ORDER = (STATE, CARRIED, COPY, IMPLIED, LEFT_OUT)
"""Which fate bytes have that two things claim: the first."""


Ranges = Union[list[Range], "cuts.Ranges"]
"""Sorted, none over another. Thousands of them, as ZeRO-3's last ranks have, are an array."""

MANY = 1 << 8
"""Ranges from which on an array is faster."""

FEW = 1 << 4
"""Ranges of one rule in a file up to which they join the others: every array is looked into for each tensor."""


@dataclass(slots=True)
class Known:
    """Byte ranges of one file that have one fate, sorted, with the slot that each is of; `merged` do not touch."""

    ranges: list[tuple[int, int, str]] = field(default_factory=list)
    cut: list[tuple[str, cuts.Ranges]] = field(default_factory=list)
    merged: Ranges = field(default_factory=list)

    def close(self) -> None:
        """Sort the ranges, and merge those that touch; to be called once all are there."""
        few = MANY if sum(len(rows) for _, rows in self.cut) < MANY else FEW
        self.ranges += [(low, high, slot) for slot, rows in self.cut if len(rows) < few for low, high in rows.tolist()]
        self.cut = [(slot, rows) for slot, rows in self.cut if len(rows) >= few]
        self.ranges.sort()
        self.merged = merge([(low, high) for low, high, _ in self.ranges])
        if self.cut:
            import numpy as np

            self.merged = merge(np.concatenate([_array(self.merged), *(rows for _, rows in self.cut)]))

    def slots(self, low: int, high: int) -> Iterator[str]:
        """Yield the slots of ranges that lie within [low, high) in part."""
        at = max(bisect_right(self.ranges, (low, low, "\U0010ffff")) - 1, 0)
        for index in range(at, len(self.ranges)):
            begin, end, slot = self.ranges[index]
            if begin >= high:
                break
            if end > low:
                yield slot
        for slot, ranges in self.cut:
            if ((ranges[:, 0] < high) & (ranges[:, 1] > low)).any():
                yield slot

    def rest(self, ranges: Ranges) -> Ranges:
        """Return what of these ranges is not covered."""
        if isinstance(ranges, list) and isinstance(self.merged, list):
            return _rest(ranges, self.merged)
        return without(_array(ranges), _array(self.merged))


def _rest(ranges: Iterable[Range], merged: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for low, high in ranges:
        begin = low
        at = max(bisect_right(merged, (low, low)) - 1, 0)
        while begin < high and at < len(merged):
            start, end = merged[at]
            if start >= high:
                break
            if start > begin:
                found.append((begin, start))
            begin = max(begin, end)
            at += 1
        if begin < high:
            found.append((begin, high))
    return found


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what of ranges is in none of others; both sorted, none over another."""
    if isinstance(ranges, list) and isinstance(others, list):
        return _rest(ranges, others)
    import numpy as np

    from zckpt.state import cuts

    a, b = _array(ranges), _array(others)
    bounds = np.sort(np.concatenate((a.ravel(), b.ravel())), kind="stable")  # two that are sorted: merged
    inside, outside = (
        np.searchsorted(one[:, 0], bounds, "right") > np.searchsorted(one[:, 1], bounds, "right") for one in (a, b)
    )
    low = np.flatnonzero(inside & ~outside)
    found = cuts.merged_ranges(bounds[low], bounds[low + 1])
    return found if len(found) >= MANY else [(low, high) for low, high in found.tolist()]


def total(ranges: Ranges) -> int:
    """Return the number of bytes in ranges."""
    if isinstance(ranges, list):
        return sum(high - low for low, high in ranges)
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _array(ranges: Ranges) -> cuts.Ranges:
    if not isinstance(ranges, list):
        return ranges
    import numpy as np

    return np.array(ranges, np.int64).reshape(-1, 2)


class Coverage:
    """The bytes of each file that slots, their copies and padding lie in, by fate: state, copy, implied.

    What rules say is worked out file by file, when it is asked for: thousands of files of thousands of ranges are not
    kept.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._found: dict[str, dict[str, array[int]]] = {}  # low, high and slot, one after the other
        self._slots: list[str] = []
        self._numbers: dict[str, int] = {}
        rules: dict[tuple[int, str], list[CutSpans]] = {}
        for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]:
            for slot in parameter.slots.values():
                for spans in (slot.spans, *slot.replicas):
                    if isinstance(spans, CutSpans):
                        rules.setdefault((id(spans.files), slot.name), []).append(spans)
                        continue
                    for span in spans:
                        self._add(span.path, STATE, *reach(span), slot.name)
        for duplicate in checkpoint.duplicates:
            for span in spans_of(duplicate.slot):
                self._add(span.path, COPY, *reach(span), duplicate.slot.name)
        self._padding: list[PaddingRule] = []
        for runs in checkpoint.padding_spans:
            if isinstance(runs, PaddingRule) and runs.is_large:
                self._padding.append(runs)
                continue
            for run in runs:
                self._add(run.path, IMPLIED, run.offset, run.offset + run.nbytes, "padding")
        self._rules: list[tuple[str, CutFiles, cuts.Cuts]] = []
        self._follow(rules)

    def _follow(self, rules: Mapping[tuple[int, str], Sequence[CutSpans]]) -> None:
        """Add what rules say: at once where there are few spans, else as columns that are asked for each file."""
        counts = accumulate(len(one) for found in rules.values() for one in found)
        if all(count < FEWEST_COLUMNS for count in counts):
            for (_, name), found in rules.items():
                for span in (span for one in found for span in one):
                    self._add(span.path, STATE, *reach(span), name)
            return
        from zckpt.state.cuts import Cuts

        for (_, name), found in rules.items():
            made = Cuts(found)
            if self._rules and self._rules[-1][2] == made:
                made = self._rules[-1][2]  # the slots of an optimizer lie alike
            self._rules.append((name, found[0].files, made))

    def _add(self, path: str, fate: str, low: int, high: int, slot: str) -> None:
        if low < high:
            number = self._numbers.setdefault(slot, len(self._slots))
            if number == len(self._slots):
                self._slots.append(slot)
            self._found.setdefault(path, {}).setdefault(fate, array("q")).extend((low, high, number))

    def of(self, path: str) -> dict[str, Known]:
        """Return what is known of a file."""
        found: dict[str, Known] = {}
        for fate, numbers in self._found.get(path, {}).items():
            slots = map(self._slots.__getitem__, numbers[2::3])
            found[fate] = Known(list(zip(numbers[::3], numbers[1::3], slots, strict=True)))
        for name, files, rules in self._rules:
            index = files.index(path)
            if index is not None and len(ranges := rules.of(index)):
                rows = files.offsets[index] + ranges * itemsize(files.dtype)
                found.setdefault(STATE, Known()).cut.append((name, rows))
        for runs in self._padding:
            for rows in runs.within(path):
                if len(rows):
                    found.setdefault(IMPLIED, Known()).cut.append(("padding", rows))
        for known in found.values():
            known.close()
        return found


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


def merge(ranges: Ranges) -> Ranges:
    """Return sorted ranges that do not touch and cover the same bytes; given ones are in any order, and may overlap."""
    if not isinstance(ranges, list):
        from zckpt.state import cuts

        return cuts.merged_ranges(ranges[:, 0], ranges[:, 1])
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            if high > found[-1][1]:
                found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def shares(nbytes: int, ranges: dict[str, list[Ranges]]) -> dict[str, int]:
    """Return how many bytes of a file have each fate; those that no range covers are the format's own: implied.

    Parameters
    ----------
    nbytes : int, bytes
        Size of the file.
    ranges : dict of str to list of ranges
        By fate, in any order, overlapping or not.
    """
    found: dict[str, int] = {}
    every: Ranges = []
    before = 0
    for fate in ORDER:
        some = [every, *ranges.get(fate, [])]
        if all(isinstance(one, list) for one in some):
            every = merge([pair for one in some for pair in one])
        else:
            import numpy as np

            every = merge(np.concatenate([_array(one) for one in some]))
        now = total(every)
        if now > before:
            found[fate] = now - before
        before = now
    found[IMPLIED] = found.get(IMPLIED, 0) + nbytes - before
    return {fate: count for fate, count in found.items() if count}
