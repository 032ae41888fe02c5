"""What predicts the bytes of a checkpoint's files: the same elements of the checkpoint before it, and masters.

Both may be of any formats and world sizes: what is asked for is an extent of a slot of a parameter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from zckpt.engine.plan import Copy, fill
from zckpt.engine.targets import Hole
from zckpt.errors import LayoutError
from zckpt.immutable import mutable
from zckpt.state import MASTER, WEIGHT, ZEROS, Checkpoint, Extent, Slot, Span, by_key, itemsize
from zckpt.state.boxes import SpanIndexes
from zckpt.storage.packed.chunks import AS_IT_IS, TO_BFLOAT16, TO_FLOAT16
from zckpt.storage.packed.index import Filed
from zckpt.storage.packed.store import GIVEN
from zckpt.storage.packed.write import Cut, Prediction, Range

CASTS = {"bfloat16": TO_BFLOAT16, "float16": TO_FLOAT16}

LEAST_RANGE_NBYTES = 256
"""Elements of one that lie in pieces in the other are predicted if the pieces are as large as this; a range is 24."""

WIDTHS = (1, 2, 4, 8)

Key = tuple[str, str, str]
"""The path of a state in its checkpoint, a parameter, a slot."""


@mutable
class Known:
    """The slots of a checkpoint that lies in a store, or is going to."""

    number: int
    slots: dict[Key, Slot]
    numbers: Mapping[str, int]  # the files' numbers, by the paths that spans have
    path: Path = Path()
    _indexes: SpanIndexes = field(default_factory=SpanIndexes)

    @classmethod
    def of(
        cls, number: int, states: Mapping[str, Checkpoint], path: Path = Path(), files: Sequence[Filed] = ()
    ) -> Known:
        """Return the slots of what formats find in a checkpoint, by where they find it, and of which files."""
        slots = {
            (at, one.name, key): slot
            for at, state in states.items()
            for one in state.holders()
            for key, slot in one.slots.items()
        }
        return cls(number, slots, {_file_at(path, one.name): count for count, one in enumerate(files)}, path)

    def ranges(self, key: Key, like: Slot, extent: Extent, dtype: str) -> tuple[Range, ...]:
        """Return where the elements of an extent lie, in their order; none: not there, or in too small pieces."""
        slot = self.slots.get(key)
        if slot is None or slot.dtype != dtype or slot.shape != like.shape or slot.replicas or slot.factors:
            return ()
        try:
            copies = fill(Hole(0, slot.name, slot, extent, dtype), self._indexes)
        except LayoutError:
            return ()
        pieces = [piece for one in copies for piece in self._pieces(one, dtype)]
        if sum(nbytes for *_, nbytes in pieces) != extent.numel * itemsize(dtype):
            return ()
        return tuple((self.number, file, offset, nbytes) for _, file, offset, nbytes in sorted(pieces))

    def _pieces(self, copy: Copy, dtype: str) -> Iterable[tuple[int, int, int, int]]:
        """Yield of a copy what lies end to end: where it belongs, the file, and where it is there."""
        (source, *more), size = copy.sources, itemsize(dtype)
        odd = more or copy.unresolved or copy.byteorder != "little" or copy.source_dtype != dtype
        if odd or source.path == ZEROS or source.path not in self.numbers:
            return
        if source.strides[-1:] != (size,) or copy.strides[-1:] != (size,):
            return
        nbytes = copy.shape[-1] * size
        if len(copy.shape) > 1 and nbytes < LEAST_RANGE_NBYTES:
            return
        at = [(copy.offset, source.offset)]
        for count, there, here in zip(copy.shape[:-1], source.strides[:-1], copy.strides[:-1], strict=True):
            at = [(to + n * here, offset + n * there) for to, offset in at for n in range(count)]
        for to, offset in at:
            yield to, self.numbers[source.path], offset, nbytes


def _file_at(path: Path, name: str) -> str:
    """Return where a file of a checkpoint is, which may be that file."""
    return str(path if path.is_file() else path / name)


def cuts_of(own: Known, base: Known | None) -> Callable[[str], Sequence[Cut]]:
    """Return what tells how a file of a checkpoint is cut, by its name; `base`: the one that is in the store."""
    spans = by_key(
        (span.path, (*span.reach, key, slot, span))
        for key, slot in own.slots.items()
        for every in slot.sets
        for span in every
        if span.path in own.numbers and span.extent.numel
    )
    for some in spans.values():
        some.sort(key=lambda one: one[:2])

    def cuts(name: str) -> list[Cut]:
        found, at = [], 0
        for low, high, key, slot, span in spans.pop(_file_at(own.path, name), []):
            if low >= at and itemsize(span.dtype) in WIDTHS:
                found.append(Cut(low, high, itemsize(span.dtype), dict(_predictions(own, base, key, slot, span))))
                at = high
        return found

    return cuts


def _predictions(own: Known, base: Known | None, key: Key, slot: Slot, span: Span) -> Iterable[tuple[str, Prediction]]:
    if not span.is_contiguous or span.byteorder != "little":
        return
    (at, name, slot_name), cast = key, CASTS.get(span.dtype)
    if slot_name == WEIGHT and cast is not None:
        for kind, known in (("own", own), ("base master", base)):
            if known is not None and (ranges := known.ranges((at, name, MASTER), slot, span.extent, "float32")):
                yield kind, Prediction(cast, ranges)
    if base is not None:
        other = {MASTER: WEIGHT, WEIGHT: MASTER}.get(slot_name, slot_name)
        ranges = base.ranges(key, slot, span.extent, span.dtype)
        ranges = ranges or base.ranges((at, name, other), slot, span.extent, span.dtype)
        if ranges:
            yield "base", Prediction(AS_IT_IS, ranges)


def as_tensors(checkpoint: Checkpoint) -> tuple[Known, list[Slot]]:
    """Return the slots of a checkpoint as if each was a file of its elements in row-major order, and these slots."""
    every = Known.of(GIVEN, {".": checkpoint})
    slots, given = dict[Key, Slot](), list[Slot]()
    for key, slot in sorted(every.slots.items(), key=lambda one: one[0]):
        if itemsize(slot.dtype) in WIDTHS and slot.numel:
            path = os.fsdecode(b"%d" % len(given))
            slots[key] = replace(slot, spans=(Span(slot.whole, path, 0, slot.dtype),), replicas=(), factors=None)
            given.append(slot)
    return Known(GIVEN, slots, {str(n): n for n in range(len(given))}), given
