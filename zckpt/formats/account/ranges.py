"""Which bytes of each file are elements of what: spans of slots, copies, padding. Pure: no I/O."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Union

from zckpt.state import ZEROS, Checkpoint, CutFiles, CutSpans, PaddingRule, Slot, Span, by_key
from zckpt.state.boxes import Range, merge, total, without
from zckpt.state.dtypes import itemsize
from zckpt.state.inventory import CARRIED, COPY, IMPLIED, LEFT_OUT, STATE
from zckpt.torchfile import pieces

if TYPE_CHECKING:
    from zckpt.state import cuts

FEWEST_COLUMNS = 1 << 13
"""Spans; of fewer, the ranges are found one by one before numpy is loaded, which finds them for all at once."""

ORDER = (STATE, CARRIED, COPY, IMPLIED, LEFT_OUT)
"""Which fate bytes have that two things claim: the first."""


Ranges = Union[list[Range], "cuts.Ranges"]
"""Sorted, none touching another. Thousands of them, as ZeRO-3's last ranks have, are an array."""

MANY = 1 << 8
"""Ranges from which on an array is faster."""


class Known:
    """What is known of the bytes of one file: by fate and slot, ranges in any order."""

    def __init__(self, found: Mapping[str, Mapping[str, Sequence[Ranges]]]) -> None:
        self._slots: dict[str, dict[str, _Covered]] = {}
        self._covered: dict[str, _Covered] = {}
        """By fate, what has it or one before it."""
        every: Ranges = []
        for fate in (fate for fate in ORDER if fate in found):
            of = {slot: _union(ranges) for slot, ranges in found[fate].items()}
            every = _union([every, *of.values()])
            self._slots[fate], self._covered[fate] = {slot: _Covered(of[slot]) for slot in of}, _Covered(every)

    @property
    def is_long(self) -> bool:
        """Whether it takes time to tell them from others'."""
        return sum(len(one.lows) for one in self._covered.values()) >= MANY

    @cached_property
    def key(self) -> object:
        """What tells the bytes of this file from those of others."""
        digest = blake2b(digest_size=16)
        for fate, slots in self._slots.items():
            for slot, one in slots.items():
                digest.update(f"{fate} {slot} {len(one.lows)} ".encode() + one.lows.tobytes() + one.highs.tobytes())
        return digest.digest()

    def shares(self, ranges: Iterable[Range]) -> dict[str, int]:
        """Return how many bytes of some ranges have each fate that any of them has; the rest are no one's."""
        found: dict[str, int] = {}
        before = 0
        for fate, covered in self._covered.items():
            now = sum(covered.below(high) - covered.below(low) for low, high in ranges)
            if now > before:
                found[fate], before = now - before, now
        return found

    def slots(self, fate: str, low: int, high: int) -> list[str]:
        """Return the slots of ranges that lie within [low, high) in part, as they begin."""
        found = []
        for slot, one in self._slots[fate].items():
            first = bisect_right(one.highs, low)
            if first < len(one.lows) and one.lows[first] < high:
                found.append((one.lows[first], slot))
        return [slot for _, slot in sorted(found)]


class _Covered:
    """Ranges, and how many bytes lie in each and those before it."""

    def __init__(self, ranges: Ranges) -> None:
        self.lows: array[int] | memoryview[int]
        self.highs: array[int] | memoryview[int]
        self._before: Sequence[int]
        if isinstance(ranges, list):
            self.lows, self.highs = array("q", [low for low, _ in ranges]), array("q", [high for _, high in ranges])
            self._before = list(accumulate(high - low for low, high in ranges))
        else:
            columns = (ranges[:, 0], ranges[:, 1], (ranges[:, 1] - ranges[:, 0]).cumsum())
            self.lows, self.highs, self._before = (memoryview(one.data) for one in columns)

    def below(self, at: int) -> int:
        """Return how many bytes before one lie in the ranges."""
        last = bisect_right(self.lows, at) - 1
        return self._before[last] - max(self.highs[last] - at, 0) if last >= 0 else 0


class Coverage:
    """The bytes of each file that slots, their copies, what is carried and padding lie in, by fate.

    What rules say is worked out file by file, when it is asked for: thousands of files of thousands of ranges are not
    kept.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._found: dict[str, dict[str, array[int]]] = {}  # low, high and slot, one after the other
        self._slots: list[str] = []
        self._numbers: dict[str, int] = {}
        rules: dict[tuple[int, str, str], list[CutSpans]] = {}
        for parameter in checkpoint.holders():
            for slot in parameter.slots.values():
                for spans in slot.sets:
                    if isinstance(spans, CutSpans):
                        rules.setdefault((id(spans.files.paths), spans.files.dtype, slot.name), []).append(spans)
                        continue
                    for span in (one for one in spans if one.path != ZEROS):
                        self._add(span.path, STATE, *span.reach, slot.name)
        for key, value in (*checkpoint.metadata.items(), *checkpoint.optimizer_metadata.items()):
            for span in (span for one in pieces(value) for span in one.slot.spans if span.path != ZEROS):
                self._add(span.path, CARRIED, *span.reach, key)
        for duplicate in checkpoint.duplicates:
            for span in spans_of(duplicate.slot):
                self._add(span.path, COPY, *span.reach, duplicate.slot.name)
        self._padding: list[PaddingRule] = []
        for runs in checkpoint.padding_spans:
            if isinstance(runs, PaddingRule) and runs.is_large:
                self._padding.append(runs)
                continue
            for run in runs:
                self._add(run.path, IMPLIED, run.offset, run.offset + run.nbytes, "padding")
        self._rules: list[tuple[str, CutFiles, cuts.Cuts]] = []
        self._apart: list[tuple[str, CutFiles, cuts.CutsApart]] = []
        self._alike: dict[object, Known] = {}
        """Of files in which all rules have the same."""
        self._follow(rules)

    def _follow(self, rules: Mapping[tuple[int, str, str], Sequence[CutSpans]]) -> None:
        """Add what rules say: at once where there are few spans, else as columns that are asked for each file."""
        counts = accumulate(len(one) for found in rules.values() for one in found)
        if all(count < FEWEST_COLUMNS for count in counts):
            for (*_, name), found in rules.items():
                for span in (span for one in found for span in one):
                    self._add(span.path, STATE, *span.reach, name)
            return
        from zckpt.state.cuts import Cuts, CutsApart

        for (*_, name), found in rules.items():
            if any(one.files is not found[0].files for one in found):
                self._apart.append((name, found[0].files, CutsApart(found)))
                continue
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

    def of(self, path: str) -> Known:
        """Return what is known of a file."""
        found: dict[str, dict[str, list[Ranges]]] = defaultdict(lambda: defaultdict(list))
        for fate, numbers in self._found.get(path, {}).items():
            pairs = zip(numbers[::3], numbers[1::3], strict=True)
            listed = by_key(zip(numbers[2::3], pairs, strict=True))
            found[fate].update((self._slots[slot], [ranges]) for slot, ranges in listed.items())
        padding = [ranges for runs in self._padding for ranges in runs.within(path)]
        if padding:
            found[IMPLIED]["padding"] += padding
        lying = [
            (name, rules, index, files.offsets[index], itemsize(files.dtype))
            for name, files, rules in self._rules
            if (index := files.index(path)) is not None
        ]
        apart = [(name, rules, index) for name, files, rules in self._apart if (index := files.index(path)) is not None]
        is_alike = not found and all(index in rules.full for _, rules, index, *_ in lying)
        is_alike = is_alike and all(index in rules.full for _, rules, index in apart)
        alike: object = path
        if is_alike:
            alike = (*((name, id(rules), *at) for name, rules, _, *at in lying),
                     *((name, id(rules), rules.which(index)) for name, rules, index in apart))  # fmt: skip
        if alike in self._alike:
            return self._alike[alike]
        same: dict[tuple[int, int], cuts.Ranges] = {}
        for name, rules, index, offset, width in lying:
            if (id(rules), index) not in same:
                same[id(rules), index] = rules.of(index)
            found[STATE][name].append(offset + same[id(rules), index] * width)
        for name, separate, index in apart:
            found[STATE][name].append(separate.nbytes_of(index))
        known = Known(found)
        if is_alike:
            self._alike[alike] = known
        return known


def spans_of(slot: Slot) -> Iterator[Span]:
    """Yield all spans of a slot, those of its replicas too."""
    return chain.from_iterable(slot.sets)


def _union(several: Sequence[Ranges]) -> Ranges:
    if all(isinstance(one, list) for one in several) or sum(map(len, several)) < MANY:
        pairs = [one if isinstance(one, list) else one.tolist() for one in several]
        return merge((low, high) for one in pairs for low, high in one)
    if len(several) == 1:  # what is worked out for all at once is in order
        return several[0]
    import numpy as np

    from zckpt.state import cuts

    every = np.concatenate([np.array(one, np.int64).reshape(-1, 2) for one in several])
    return cuts.merged_ranges(every[:, 0], every[:, 1])


def shares(known: Known, elements: list[Range], taken: Mapping[str, list[Range]]) -> dict[str, int]:
    """Return how many bytes of a file have each fate.

    `elements`: what of it is elements, in any order, overlapping or not; `taken`: by fate: what is not what `known`
    says.
    """
    found: dict[str, int] = {}
    held, rest, before = list[Range](), merge(elements), 0
    of = known.shares(rest)
    for number, fate in enumerate(ORDER):
        if fate in taken:
            held = merge([*held, *taken[fate]])
            rest = without(rest, held)
            of = known.shares(rest)
        now = total(rest) if fate == LEFT_OUT else sum(of.get(one, 0) for one in ORDER[: number + 1])
        now += total(held)
        if now > before:
            found[fate] = now - before
        before = now
    return found


def whole(found: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """Return how many bytes of a file have each fate: those that no range covers are the format's own, implied."""
    rest = nbytes - sum(found.values())
    every = {**found, IMPLIED: found.get(IMPLIED, 0) + rest}
    return {fate: count for fate, count in every.items() if count}
