"""Slots whose spans are boxes of a finer shape: every element comes to its place once, through files as well."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import plans
from tests.engine.test_plan import each_once, hole_of, indices, run
from tests.plans import read_slot, write_directory
from tests.refusals import refusing
from tests.strategies import boxes, extents, storages
from zckpt.engine.plan import fill, plan
from zckpt.errors import LayoutError
from zckpt.state import ZEROS, Extent, Slot, Span
from zckpt.state.views import zeros

SIZES = st.sampled_from([1, 2, 2, 3, 4, 5])


@st.composite
def factored_slots(draw: st.DrawFn) -> tuple[Slot, dict[str, np.ndarray]]:
    """Draw a slot, each axis of which is one to three factors, cut in boxes of these; and the files' elements."""
    axes = draw(st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=3))
    axes = [[size for size in axis if size > 1] or [1] for axis in axes]
    factors = tuple(size for axis in axes for size in axis)
    assume(math.prod(factors) <= 600)
    elements = np.arange(math.prod(factors)).reshape(factors)
    spans, files = [], {}
    for number, (offsets, sizes) in enumerate(draw(boxes(factors))):
        strides, count = draw(storages(sizes))
        path, storage = f"shard{number}", np.full(count, -1, np.int32)
        view = np.lib.stride_tricks.as_strided(storage, sizes, [4 * stride for stride in strides])
        view[...] = elements[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        extent = Extent(offsets, sizes, 0, math.prod(sizes))
        spans.append(Span(extent, path, 0, "int32", strides))
        files[path] = storage
    shape = tuple(math.prod(axis) for axis in axes)
    return Slot("exp_avg", "int32", shape, tuple(spans), factors=factors), files


@given(st.data(), factored_slots())
def test_every_element_comes_to_its_place_once(data, drawn):
    slot, files = drawn
    extent = data.draw(extents(slot.shape))
    copies = fill(hole_of(slot, extent))
    assert run(copies, files, extent.numel) == each_once(indices(extent, slot.shape))


@given(factored_slots())
def test_one_that_lacks_a_box_is_refused(drawn):
    slot, _ = drawn
    assume(len(slot.spans) > 1)
    with refusing(LayoutError, "some elements are missing"):
        fill(hole_of(replace(slot, spans=slot.spans[1:])))
    with refusing(LayoutError, "more than once"):
        fill(hole_of(replace(slot, spans=(*slot.spans, slot.spans[0]))))


def test_elements_are_written_and_read_where_rows_of_boxes_lie_between_each_other():
    """Heads of three tensors, transposed, between zeros that lie in no file."""
    heads, width, columns = 3, 4, 10
    queries = np.arange(columns * heads * width, dtype=np.float32)
    queries.tofile("queries")
    keys = -np.arange(heads * width * columns, dtype=np.float32)
    keys.tofile("keys")

    def span(index, path, strides):
        extent = Extent((0, index, 0, 0), (heads, 1, width, columns), 0, heads * width * columns)
        return Span(extent, path, 0, "float32", strides)

    slot = Slot("weight", "float32", (heads * 3 * width, columns), (
        span(0, "queries", (width, 0, 1, heads * width)),
        span(1, "keys", (width * columns, 0, columns, 1)),
        span(2, ZEROS, (0, 0, 0, 0)),
    ), factors=(heads, 3, width, columns))  # fmt: skip
    expected = np.stack((
        queries.reshape(columns, heads, width).transpose(1, 2, 0), keys.reshape(heads, width, columns),
        np.zeros((heads, width, columns), np.float32),
    ), axis=1).reshape(slot.shape)  # fmt: skip
    assert np.array_equal(read_slot(slot), expected)
    made = plan([plans.file_of(plans.hole_of(slot), name="model")])
    assert made.read_nbytes == slot.nbytes * 2 // 3
    assert made.sources == {"queries", "keys"}
    write_directory(made, "out")
    assert np.array_equal(np.fromfile("out/model", np.float32).reshape(slot.shape), expected)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_zeros_of_any_shape_are_read_from_no_file(shape):
    slot = zeros(Slot("step", "float32", shape, ()), shape)
    assert np.array_equal(read_slot(slot), np.zeros(shape, np.float32))
