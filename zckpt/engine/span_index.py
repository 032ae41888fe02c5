"""Which spans of a slot may reach into an extent, found without holding each against it. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from zckpt.engine.boxes import bounds
from zckpt.state import Extent, Slot, Span, Spans


class SpanIndex:
    """The spans of a slot by where they lie in the flattened tensor.

    Thousands of holes in a slot of thousands of spans (ZeRO-3, at as many ranks) are so not each held against all.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._sets = [
            spans if isinstance(spans, Spans) else _SpanSet(slot.shape, spans) for spans in (slot.spans, *slot.replicas)
        ]

    def reaching(self, extent: Extent) -> Slot:
        """Return the slot with only those spans that may reach into an extent."""
        low, high = bounds(extent, self.slot.shape)
        spans, *replicas = (one.reaching(low, high) for one in self._sets)
        return replace(self.slot, spans=spans, replicas=tuple(replicas))


class _SpanSet:
    def __init__(self, shape: tuple[int, ...], spans: Sequence[Span]) -> None:
        placed = sorted(((*bounds(span.extent, shape), span) for span in spans), key=lambda one: one[:2])
        self._spans = [span for _, _, span in placed]
        self._lows = [low for low, _, _ in placed]
        self._highs = list(accumulate((high for _, high, _ in placed), max))  # of this one and all before

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        return tuple(self._spans[bisect_right(self._highs, low) : bisect_left(self._lows, high)])
