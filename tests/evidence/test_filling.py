"""Ways to fill something with names, against all there are."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from zckpt.evidence import ways

sizes = st.lists(st.integers(1, 4), max_size=7)


@given(sizes, st.integers(0, 12))
def test_some_of_a_list_fill_a_number_in_as_many_ways_as_there_are(numels, whole):
    def steps(index, at):
        yield None, at
        if at + numels[index] <= whole:
            yield index, at + numels[index]

    every = [
        list(chosen)
        for count in range(len(numels) + 1)
        for chosen in combinations(range(len(numels)), count)
        if sum(numels[index] for index in chosen) == whole
    ]
    count, found = ways(len(numels), 0, whole, steps)
    assert count == min(len(every), 2)
    if every:
        assert [index for index in found if index is not None] in every


@given(sizes, st.lists(st.integers(1, 6), max_size=4))
def test_a_list_is_cut_in_as_many_ways_as_there_are(numels, widths):
    """Each part has at most as many elements as it is wide, and at least half of them."""

    def steps(number, begin):
        for end in range(begin + 1, len(numels) + 1):
            if widths[number] / 2 <= sum(numels[begin:end]) <= widths[number]:
                yield end - begin, end

    every = []
    for ends in combinations(range(1, len(numels)), len(widths) - 1) if widths and numels else ():
        bounds = [0, *ends, len(numels)]
        parts = [sum(numels[a:b]) for a, b in pairwise(bounds)]
        if all(width / 2 <= part <= width for part, width in zip(parts, widths, strict=True)):
            every.append([b - a for a, b in pairwise(bounds)])
    if not widths and not numels:
        every = [[]]
    count, found = ways(len(widths), 0, len(numels), steps)
    assert count == min(len(every), 2)
    assert not every or found in every
