"""Views of slots against numpy: every operation, and any after any other, of any cut, read as it would be written."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_plan import indices
from tests.refusals import refusing
from tests.strategies import extents, storages, tilings
from zckpt.engine.copy import read_extent
from zckpt.errors import LayoutError
from zckpt.state import CutFiles, CutSpans, Extent, Slot, Span
from zckpt.state.views import concat, narrow, pad, reshape, transpose, unstacked
from zckpt.storage.files import Sources

MOST = 4096
"""Elements of the file: each is its own number."""

Viewed = tuple[Slot, np.ndarray]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("views") / "numbers"
    np.arange(MOST, dtype=np.int32).tofile(file)
    return str(file)


@st.composite
def leaves(draw: st.DrawFn, path: str) -> Viewed:
    """Draw a slot in some places of the file: boxes and ranges of them, with strides, or a rule."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    first, numel = 4 * draw(st.integers(0, 99)), math.prod(shape)
    kind = draw(st.sampled_from(["rule", "strided", "cut"]))
    values = np.arange(numel, dtype=np.int32).reshape(shape) + first // 4
    if kind == "rule":
        width = draw(st.integers(1, numel))
        count = -(-numel // width)
        files = CutFiles((path,) * count, tuple(first + 4 * width * n for n in range(count)), "int32")
        return trimmed(draw, Slot("weight", "int32", shape, CutSpans(files, shape, 0, width)), values)
    spans = []
    for extent in draw(tilings(shape)):
        strides = None
        if kind == "strided" and extent.numel == math.prod(extent.sizes):
            strides, _ = draw(storages(extent.sizes))
            view = np.lib.stride_tricks.as_strided(
                np.arange(MOST, dtype=np.int32), extent.sizes, [4 * n for n in strides]
            )
            box = tuple(slice(o, o + n) for o, n in zip(extent.offsets, extent.sizes, strict=True))
            values[box] = view + first // 4
        elif extent.numel:
            values.reshape(-1)[indices(extent, shape)] = np.arange(extent.numel) + first // 4
        spans.append(Span(extent, path, first, "int32", strides))
    return trimmed(draw, Slot("weight", "int32", shape, tuple(spans)), values)


def trimmed(draw, slot: Slot, values: np.ndarray) -> Viewed:
    """Draw whether a slot has fewer rows than its spans: those of a padded vocabulary reach over its end."""
    rows = draw(st.sampled_from([slot.shape[0], slot.shape[0], (slot.shape[0] + 1) // 2]))
    return replace(slot, shape=(rows, *slot.shape[1:])), values[:rows]


def operate(draw, path: str, viewed: Viewed) -> Viewed:
    """Draw an operation, and do it to a slot and to what numpy has of it."""
    slot, values = viewed
    axis = draw(st.integers(0, len(slot.shape) - 1))
    size = slot.shape[axis]
    kind = draw(st.sampled_from(["narrow", "transpose", "reshape", "concat", "pad", "unstacked"]))
    if kind == "narrow":
        start = draw(st.integers(0, size - 1))
        count = draw(st.integers(1, size - start))
        return narrow(slot, axis, start, count), values.take(range(start, start + count), axis)
    if kind == "transpose":
        order = draw(st.permutations(range(len(slot.shape))))
        return transpose(slot, order), values.transpose(order)
    if kind == "reshape":
        left, shape = slot.numel, []
        while left > 1 and len(shape) < 3:
            shape.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
            left //= shape[-1]
        shape.insert(draw(st.integers(0, len(shape))), left)
        return reshape(slot, tuple(shape)), values.reshape(shape)
    if kind == "concat" and slot.numel < 200:
        other, more = viewed
        if draw(st.booleans()):
            other, more = operate(draw, path, viewed)
        parts = [viewed, viewed]
        if len(other.shape) == len(slot.shape) and [*other.shape[:axis], *other.shape[axis + 1 :]] == [
            *slot.shape[:axis],
            *slot.shape[axis + 1 :],
        ]:
            parts = draw(st.permutations([viewed, (other, more)]))
        return concat([one for one, _ in parts], axis), np.concatenate([one for _, one in parts], axis)
    if kind == "unstacked" and len(slot.shape) > 1 and slot.factors is None:
        axes = draw(st.integers(1, len(slot.shape) - 1))
        index = tuple(draw(st.integers(0, n - 1)) for n in slot.shape[:axes])
        found = unstacked(slot, axes)
        assert list(found) == list(np.ndindex(*slot.shape[:axes]))
        return found[index], values[index]
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    widths = [(before, after) if n == axis else (0, 0) for n in range(len(slot.shape))]
    return pad(slot, axis, before, after), np.pad(values, widths)


@given(st.data())
def test_views_are_what_numpy_makes_of_them(path, data):
    viewed = data.draw(leaves(path))
    for _ in range(data.draw(st.integers(1, 5))):
        if viewed[1].size > 600:
            break
        viewed = operate(data.draw, path, viewed)
    slot, expected = viewed
    assert slot.shape == expected.shape
    with Sources() as sources:
        whole = read_extent(slot, Extent.whole(slot.shape), sources)
        assert np.array_equal(whole.reshape(slot.shape), expected)
        extent = data.draw(extents(slot.shape))
        assert np.array_equal(read_extent(slot, extent, sources), expected.reshape(-1)[indices(extent, slot.shape)])
    assert len(slot.spans) == len(list(slot.spans))


def test_a_rule_stays_one_and_only_the_spans_that_are_asked_for_are_made():
    files = CutFiles(tuple(f"{rank}" for rank in range(1000)), (0,) * 1000, "float32")
    slot = Slot("weight", "float32", (1000, 8), CutSpans(files, (1000, 8), 0, 8))
    view = concat([transpose(narrow(slot, 0, 990, 8), (1, 0)), transpose(narrow(slot, 0, 0, 8), (1, 0))], 1)
    assert not isinstance(view.spans, tuple)
    assert [one.path for one in view.spans.within({"3", "500", "991"})] == ["991", "3"]
    assert len(reshape(slot, (10, 800)).spans.reaching(800, 808)) == 1  # type: ignore[attr-defined]


def test_what_does_not_fit_is_refused():
    slot = Slot("weight", "float32", (4, 6), ())
    with refusing(LayoutError, "has no indexes 3 to 5"):
        narrow(slot, 0, 3, 2)
    with refusing(LayoutError, "not have that many elements"):
        reshape(slot, (5, 5))
