"""Spans of a slot that lies flat: every range of elements is where it should be; what lies otherwise is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import cuts, shapes
from zckpt.engine.scan import flat_spans
from zckpt.state import Extent, Slot, Span


def slot(shape: tuple[int, ...], lengths: list[int]) -> Slot:
    """A slot in as many files, each of which begins at another offset."""
    spans, start = [], 0
    for number, length in enumerate(lengths):
        spans.append(Span(Extent.flat(shape, start, length), f"file{number}", 1000 * number, "float32"))
        start += length
    return Slot("weight", "float32", shape, tuple(spans))


@given(st.data(), shapes(empty=False))
def test_any_range_is_read_from_where_its_elements_lie(data, shape):
    numel = math.prod(shape)
    lengths = [length for _, length in data.draw(cuts(numel))]
    made = slot(shape, lengths)
    runs = flat_spans(replace(made, spans=tuple(data.draw(st.permutations(made.spans)))), "float32")
    assert runs is not None
    start = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(0, numel - start))
    found = [
        (path, byte) for path, offset, size in runs.byte_ranges(start, count) for byte in range(offset, offset + size)
    ]
    expected = []
    for span in made.spans:
        for element in range(span.extent.start, span.extent.start + span.extent.numel):
            if start <= element < start + count:
                at = span.offset + 4 * (element - span.extent.start)
                expected += [(span.path, byte) for byte in range(at, at + 4)]
    assert found == expected


WHOLE = slot((4, 3), [5, 7])


@pytest.mark.parametrize(
    "other",
    [
        replace(WHOLE, spans=WHOLE.spans[:1]),
        replace(WHOLE, spans=(*WHOLE.spans, WHOLE.spans[1])),
        replace(WHOLE, spans=(WHOLE.spans[0], replace(WHOLE.spans[1], dtype="bfloat16"))),
        replace(WHOLE, spans=(WHOLE.spans[0], replace(WHOLE.spans[1], byteorder="big"))),
        replace(WHOLE, spans=(Span(Extent.whole((4, 3)), "file", 0, "float32", (1, 4)),)),
        replace(WHOLE, spans=(Span(Extent((0, 0), (4, 2), 0, 8), "file", 0, "float32"),)),
        replace(WHOLE, replicas=(WHOLE.spans,)),
    ],
    ids=["gap", "twice", "type", "byte order", "strides", "box", "replicas"],
)
def test_what_does_not_lie_in_runs(other):
    assert flat_spans(WHOLE, "float32") is not None
    assert flat_spans(other, "float32") is None


def test_runs_of_another_type_are_none():
    assert flat_spans(WHOLE, "bfloat16") is None
