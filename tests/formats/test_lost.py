"""What boxes of a tensor leave out, held against NumPy; and boxes of which too many cells would come."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusing
from zckpt.errors import LayoutError
from zckpt.formats.lost import absent_boxes


@given(st.data())
def test_boxes_and_what_they_leave_out_cover_each_element_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    grid = [[]]
    for ends in cuts:
        grid = [[*cell, (low, high - low)] for cell in grid for low, high in pairwise(ends)]
    cells = [(tuple(low for low, _ in cell), tuple(size for _, size in cell)) for cell in grid]
    there = [cell for cell in cells if data.draw(st.booleans())]
    counts = np.zeros(shape, int)
    for low, sizes in there + absent_boxes("w", shape, there):
        counts[tuple(slice(start, start + size) for start, size in zip(low, sizes, strict=True))] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize("count", [16, 64])
def test_boxes_of_no_grid_are_refused(count):
    boxes = [((2 * at,) * 4, (1,) * 4) for at in range(count)]
    with refusing(
        LayoutError, f"what is there of w does not tell what is lost: expected boxes of one grid, found {count} boxes"
    ):
        absent_boxes("w", (1000,) * 4, boxes)
