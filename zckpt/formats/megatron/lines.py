"""The flat buffers of `torch_dist` as lines of elements, in whatever chunks the files have them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zckpt.formats.dcp.items import TensorItem
from zckpt.state import MASTER, Span
from zckpt.state.dtypes import itemsize

BUCKET = re.compile(
    r"(?:chained_([0-9]+)\.)?optimizer\.distributed\.dp_group_idx_([0-9]+)\.gbuf_idx_([0-9]+)"
    r"\.dtype_\((?:torch\.)?(\w+), *(?:torch\.)?\w+\)\.bucket_idx_([0-9]+)\.(.+)"
)

PARAM = "param"


class UnprovenError(Exception):
    """Why what lies in the buffers is not certain."""


@dataclass(slots=True)
class Line:
    """A bucket: its tensors by slot, each as spans in order and where each begins."""

    numel: int
    slots: dict[str, tuple[list[int], list[Span], str]] = field(default_factory=dict)

    def part(self, slot: str, start: int, numel: int) -> Iterator[tuple[int, int, Span]]:
        """Yield what is where of some elements: first one among them, how many, and a span with their bytes."""
        firsts, spans, _ = self.slots[slot]
        for at in range(max(bisect_right(firsts, start) - 1, 0), len(spans)):
            low, high = max(firsts[at], start), min(firsts[at] + spans[at].extent.numel, start + numel)
            if firsts[at] >= start + numel:
                return
            if low < high:
                yield low - start, high - low, _moved(spans[at], low - firsts[at])


@dataclass(slots=True)
class Buffer:
    """A buffer of a rank: the type of its parameters, and its buckets by number."""

    dtype: str
    buckets: dict[int, Line] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Elements of each bucket."""
        return [self.buckets[number].numel for number in sorted(self.buckets)]


Buffers = dict[int, dict[int, dict[int, Buffer]]]
"""By optimizer of a chain, model-parallel rank, and number."""


def buffers_of(items: Mapping[str, TensorItem]) -> Buffers:
    """Return the buffers that tensors are buckets of.

    Raises
    ------
    UnprovenError
        A key is of another form, or the tensors of a bucket are of different sizes.
    """
    found: Buffers = {}
    for key, item in items.items():
        match = BUCKET.fullmatch(key)
        if match is None or len(item.shape) != 1:
            raise UnprovenError(f"{key[:120]} is no bucket")
        chain, group, number, bucket = int(match[1] or 0), int(match[2]), int(match[3]), int(match[5])
        buffer = found.setdefault(chain, {}).setdefault(group, {}).setdefault(number, Buffer(match[4]))
        line = buffer.buckets.setdefault(bucket, Line(item.shape[0]))
        spans = sorted((span for span in item.spans if span.extent.numel), key=_first)
        if line.numel != item.shape[0] or buffer.dtype != match[4]:
            raise UnprovenError(f"the tensors of bucket {bucket} of buffer {number} are not of one size")
        line.slots[MASTER if match[6] == PARAM else match[6]] = [_first(span) for span in spans], spans, item.dtype
    return found


def _first(span: Span) -> int:
    return span.extent.offsets[0] + span.extent.start


def _moved(span: Span, by: int) -> Span:
    offset = span.offset + by * itemsize(span.dtype) * (span.strides[0] if span.strides else 1)
    return Span(span.extent, span.path, offset, span.dtype, span.strides, span.byteorder, span.unresolved)
