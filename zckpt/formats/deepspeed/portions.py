"""What lies in a share that is to be written, some elements at once: what codes are made of."""

from __future__ import annotations

from collections.abc import Iterator

from zckpt.engine.computed import Computed
from zckpt.engine.requantise import Floats, Portion
from zckpt.formats.torch_files.writer import NewStorage, SlotContent
from zckpt.torchfile import Tensor

TOGETHER_NUMEL = 1 << 16
"""Elements, about, that are quantised at once: of a share's codes, no more floats than these are in memory."""


def contents_of(moment: Tensor) -> list[SlotContent]:
    """Return what lies in a tensor that is to be written, in order."""
    contents = moment.storage.contents if isinstance(moment.storage, NewStorage) else ()
    ordered = [one for one in contents if isinstance(one, SlotContent)]
    if len(ordered) < len(contents):
        raise ValueError("a share of quantised state has contents that are no slots")
    return ordered


def portions_of(moment: Tensor, together: int) -> Iterator[tuple[Portion, ...]]:
    """Yield what lies in a tensor that is to be written, `together` elements at once; between contents, zeros."""
    ordered = contents_of(moment)
    found: list[Portion] = []
    held = end = 0

    def add(numel: int, start: int = 0, slot: Computed | None = None) -> Iterator[tuple[Portion, ...]]:
        nonlocal found, held
        while numel:
            count = min(numel, together - held)
            found.append(Portion(count, start, slot))
            numel, start, held = numel - count, start + count, held + count
            if held == together:
                yield tuple(found)
                found, held = [], 0

    for one in ordered:
        yield from add(one.start - end)
        slot = one.slot
        if not isinstance(slot, Computed):
            slot = Computed(slot.name, "float32", slot.shape, (), function=Floats(slot))
        yield from add(one.covered.numel, one.covered.start, slot)
        end = one.start + one.covered.numel
    yield from add(moment.numel - end)
    if found:
        yield tuple(found)
