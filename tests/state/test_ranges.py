"""Ranges are sets of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zckpt.state.boxes import Range, merge, total, without

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda one: (one[0], sum(one))), max_size=8)


def numbers(ranges: list[Range]) -> set[int]:
    return {number for low, high in ranges for number in range(low, high)}


@given(RANGES, RANGES)
def test_they_are_the_same_numbers(some, others):
    merged = merge(some)
    assert numbers(merged) == numbers(some)
    assert all(one[1] < other[0] for one, other in pairwise(merged))
    assert total(merged) == len(numbers(some))
    assert numbers(without(some, merge(others))) == numbers(some) - numbers(others)
    assert without(merged, []) == merged
