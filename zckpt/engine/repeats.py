"""Tensors that say the same elements again and again, as torch's `expand` makes them: strides of 0. Pure.

A file of a kilobyte can say a tensor of 10**12 elements. Whoever looks at elements looks at each stored one once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError
from zckpt.state import Extent, Slot, Span

MOST_NBYTES = 1 << 34
"""Bytes of elements, most of them repeated, that are read one by one where each has its place in what is found."""

MOST_REPEATED = 16
"""Times: a tensor that repeats its elements less often is not much larger than its file."""


def stored_once(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return slots of one shape without the elements that all of them repeat along the same dimensions.

    The elements of each are in the order in which they come first.
    """
    spans = [_whole(slot) for slot in slots]
    if any(span is None or span.strides is None for span in spans):
        return tuple(slots)
    found = [span for span in spans if span is not None]
    alike = [all(span.strides is not None and span.strides[i] == 0 for span in found) for i in range(_rank(found[0]))]
    if not any(alike):
        return tuple(slots)
    shape = tuple(min(n, 1) if same else n for n, same in zip(slots[0].shape, alike, strict=True))
    return tuple(
        replace(slot, shape=shape, spans=(replace(span, extent=Extent.whole(shape)),))
        for slot, span in zip(slots, found, strict=True)
    )


def refuse_endless(slot: Slot, name: str) -> None:
    """Refuse a tensor whose elements are too many to be read, since it repeats a few of them.

    Raises
    ------
    UnsupportedError
        It is larger than `MOST_NBYTES`, and less than one in `MOST_REPEATED` of its elements is stored.
    """
    (once,) = stored_once([slot])
    if slot.nbytes > MOST_NBYTES and once.numel * MOST_REPEATED <= slot.numel:
        raise UnsupportedError(
            f"{name} repeats {once.numel} stored elements as {slot.numel}, which are not read one by one",
            path=slot.spans[0].path,
            expected=f"at most {MOST_NBYTES} bytes of such a tensor",
            found=slot.nbytes,
            advice="save it again after .contiguous(), or leave it out",
        )


def _whole(slot: Slot) -> Span | None:
    """Return the span that holds all of a slot, if one does."""
    if len(slot.spans) != 1 or slot.replicas:
        return None
    (span,) = slot.spans
    return span if span.extent == Extent.whole(slot.shape) and slot.numel else None


def _rank(span: Span) -> int:
    return len(span.extent.sizes)
