"""Two layouts of the same slots: equal wherever they are cut, and one bit that is not is found, and named."""

from __future__ import annotations

import math
import os
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.damage import flip
from tests.operations.diff.checkpoints import place as place_of
from tests.plans import Counter, noise, sparse
from tests.refusals import refusing
from tests.strategies import cuts, shapes, tilings
from zckpt.compare.slots import differences, pair
from zckpt.engine.cast import numpy_dtype
from zckpt.engine.scan import BLOCK_NBYTES, SlotSet
from zckpt.engine.workers import BATCH_NBYTES, running_on
from zckpt.errors import DamagedFileError, LayoutError, SourceError, UnsupportedError
from zckpt.state import Extent, Slot, Span
from zckpt.state.dtypes import itemsize

BUDGETS = [1, 4 << 10, 1 << 20, 64 << 20]
MEBIBYTE = 1 << 20


def stored(path, array, *, before=0) -> Slot:
    """Write an array after some other bytes; return the slot that it is."""
    Path(path).write_bytes(b"\xaa" * before + array.tobytes())
    span = Span(Extent.whole(array.shape), str(path), before, array.dtype.name)
    return Slot("weight", array.dtype.name, array.shape, (span,))


def tiled(path, array, tiles: list[Extent]) -> Slot:
    """Write an array to one file, tile by tile; return the slot that it is."""
    spans = []
    with Path(path).open("wb") as file:
        for tile in tiles:
            spans.append(Span(tile, str(path), file.tell(), array.dtype.name))
            box = array[tuple(slice(o, o + s) for o, s in zip(tile.offsets, tile.sizes, strict=True))]
            file.write(box.reshape(-1)[tile.start : tile.start + tile.numel].tobytes())
    return Slot("weight", array.dtype.name, array.shape, tuple(spans))


def ranges(shape: tuple[int, ...], lengths: list[int]) -> list[Extent]:
    """Extents of the whole box, one after the other."""
    starts = np.cumsum([0, *lengths])
    return [Extent.flat(shape, int(start), length) for start, length in zip(starts, lengths, strict=False)]


class Found(NamedTuple):
    """What of a Difference tells which elements differ."""

    label: str
    num_different: int
    numel: int
    first: int | None


def found_in(pairs: list[SlotSet], **options) -> list[Found]:
    found = differences(pairs, **options)
    return [Found(one.label, one.figures.num_different, one.figures.numel, one.figures.first) for one in found]


def compared(a, b, **options) -> list[Found]:
    return found_in([pair("w", a, b, b.dtype)], **options)


# --- any layout -------------------------------------------------------------------------------------------------


@given(st.data(), shapes(), st.sampled_from(["float32", "bfloat16", "int8", "complex128"]))
def test_any_two_layouts_of_the_same_elements_are_equal(data, shape, dtype):
    array = np.arange(math.prod(shape)).reshape(shape).astype(numpy_dtype(dtype))
    a, b = (tiled(name, array, data.draw(tilings(shape))) for name in "ab")
    assert compared(a, b) == []


@given(st.data(), shapes(empty=False))
def test_elements_that_differ_are_counted_whatever_the_layout(data, shape):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    changed = data.draw(st.sets(st.integers(0, array.size - 1), min_size=1))
    other = array.copy()
    other.reshape(-1)[list(changed)] += 0.5
    a, b = (tiled(name, one, data.draw(tilings(shape))) for name, one in (("a", array), ("b", other)))
    assert compared(a, b) == [Found("w", len(changed), array.size, min(changed))]


@given(st.data(), st.integers(1, 40_000))
def test_ranges_of_more_than_one_block(data, numel):
    """A page at a time: spans begin and end within blocks, at their ends, and reach over several."""
    array = noise(numel, "float16")
    at = data.draw(st.integers(0, numel - 1))
    tiles = [ranges((numel,), [n for _, n in data.draw(cuts(numel))]) for _ in "ab"]
    a, b = (tiled(name, array, one) for name, one in zip("ab", tiles, strict=True))
    assert compared(a, b, memory=1) == []
    flip(*place_of(b, at), 3)
    assert compared(a, b, memory=1) == [Found("w", 1, numel, at)]


@pytest.mark.parametrize("first", [1, 1023, 1024, 1025, 2047, 2048, 2049])
def test_span_that_begins_where_a_block_ends(first):
    array = noise(3000)
    a, b = stored("a", array), tiled("b", array, ranges((3000,), [first, 3000 - first]))
    assert compared(a, b, memory=1) == []
    flip("b", 4 * first, 0)
    assert compared(a, b, memory=1) == [Found("w", 1, 3000, first)]


@pytest.mark.parametrize("memory", BUDGETS)
def test_columns_of_several_ranks(memory):
    array = noise(300 * 400).reshape(300, 400)
    columns = [Extent((0, 80 * i), (300, 80), 0, 300 * 80) for i in range(5)]
    a, b = stored("a", array), tiled("b", array, columns)
    assert compared(a, b, memory=memory) == []
    flip("b", 4 * (2 * 300 * 80 + 7 * 80 + 11), 0)
    assert compared(a, b, memory=memory) == [Found("w", 1, array.size, 7 * 400 + 2 * 80 + 11)]


@pytest.mark.parametrize("numel", [1, BLOCK_NBYTES, BLOCK_NBYTES + 1, BATCH_NBYTES + 1])
def test_last_element_counts(numel):
    array = np.zeros(numel, np.uint8)
    a, b = stored("a", array), stored("b", array, before=3)
    assert compared(a, b) == []
    flip("b", 3 + numel - 1, 0)
    assert compared(a, b) == [Found("w", 1, numel, numel - 1)]


def test_scalar_and_empty_slots():
    one, none = np.float32(5).reshape(()), np.zeros((3, 0), np.float32)
    whole = [stored(str(i), array) for i, array in enumerate([one, one, none, none])]
    assert found_in([pair("one", *whole[:2]), pair("none", *whole[2:])]) == []
    Path("1").write_bytes(np.float32(6).tobytes())
    assert found_in([pair("none", *whole[2:]), pair("one", *whole[:2])]) == [Found("one", 1, 1, 0)]
    assert compared(Slot("w", "float32", (0,), ()), Slot("w", "float32", (0,), ())) == []
    assert found_in([]) == []


# --- what equal means -------------------------------------------------------------------------------------------


def test_bits_count_not_values():
    a = np.array([0x7FC00000, 0x7FC00001, 0x00000000, 0x3F800000], np.uint32).view(np.float32)
    b = np.array([0x7FC00000, 0x7FC00002, 0x80000000, 0x3F800000], np.uint32).view(np.float32)
    assert compared(stored("a", a), stored("same", a)) == []
    assert compared(stored("a", a), stored("b", b)) == [Found("w", 2, 4, 1)]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"])
def test_element_is_counted_once_however_many_of_its_bytes_differ(dtype):
    zeros = np.zeros(1000, numpy_dtype(dtype))
    other = zeros.copy()
    other.view(np.uint8).reshape(1000, -1)[[5, 70, 999]] = 1
    found = compared(stored("a", zeros), stored("b", other))
    assert found == [Found("w", 3, 1000, 5)]


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_expected_is_cast_to_the_type_of_found(dtype, memory):
    array = noise(30_001)
    a, b = stored("a", array), stored("b", array.astype(numpy_dtype(dtype)))
    assert compared(a, b, memory=memory) == []
    flip("b", 20_000 * itemsize(dtype), 0)
    assert compared(a, b, memory=memory) == [Found("w", 1, 30_001, 20_000)]


@pytest.mark.parametrize("memory", BUDGETS)
def test_replicas_are_averaged(memory):
    several = [noise(30_000) * (i + 1) for i in range(3)]
    first, *others = (stored(str(i), one) for i, one in enumerate(several))
    a = replace(first, replicas=tuple(one.spans for one in others))
    b = stored("mean", (several[0] + several[1] + several[2]) / np.float32(3))
    assert compared(a, b, memory=memory) == []
    assert len(compared(first, b, memory=memory)) == 1


def test_slots_of_one_label_are_told_apart():
    a, b = stored("a", noise(10)), stored("b", noise(10) + 1)
    assert found_in([pair("w", a, b), pair("w", a, a), pair("w", b, a)]) == [Found("w", 10, 10, 0)] * 2


# --- refusals ---------------------------------------------------------------------------------------------------


def test_two_shapes_are_no_pair():
    with refusing(LayoutError, r"w has two shapes: expected \(2, 3\), found \(3, 2\)"):
        compared(stored("a", noise(6).reshape(2, 3)), stored("b", noise(6).reshape(3, 2)))


@pytest.mark.parametrize("memory", [1, 64 << 20])
@pytest.mark.parametrize("lengths", [[4000, 5999], [4000, 2000]])
def test_side_that_lacks_elements_is_refused(lengths, memory):
    whole, part = (
        stored("a", noise(10_000)),
        tiled("b", noise(10_000), ranges((10_000,), lengths)),
    )
    with refusing(LayoutError, "w: some elements are missing"):
        compared(whole, part, memory=memory)


@pytest.mark.parametrize("memory", [1, 64 << 20])
def test_side_that_has_elements_twice_is_refused(memory):
    tiles = [Extent.flat((10_000,), 0, 7000), Extent.flat((10_000,), 6999, 3001)]
    with refusing(LayoutError, "w: some elements appear more than once"):
        compared(stored("a", noise(10_000)), tiled("b", noise(10_000), tiles), memory=memory)


def test_types_that_are_not_cast_are_refused():
    with refusing(UnsupportedError, "cannot be cast"):
        compared(stored("a", np.zeros(5, np.int64)), stored("b", np.zeros(5, np.float32)))


def test_file_that_lost_its_end_or_is_gone_is_named():
    a, b = stored("a", noise(100)), stored("b", noise(100))
    os.truncate("b", 200)
    with refusing(DamagedFileError, "b: the file ends too early"):
        compared(a, b)
    Path("b").unlink()
    with refusing(SourceError, "cannot be opened"):
        compared(a, b)


# --- who compares, and within what ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        yield pool


def test_processes_find_what_threads_find(processes):
    array = noise(3 * BATCH_NBYTES // 4 + 1)
    other = array.copy()
    other[[7, 5_000_000, -1]] += 1
    a, b = stored("a", array), stored("b", other)
    with running_on(processes):
        there = compared(a, b)
    assert compared(a, b) == there == [Found("w", 3, array.size, 7)]


def test_progress_adds_up_to_what_was_announced():
    large, small = (stored(str(n), np.zeros(n, np.uint8)) for n in (2 * BATCH_NBYTES + 5, 100))
    counter = Counter()
    found_in([pair("large", large, large), pair("small", small, small)], reporter=counter)
    assert counter.told[0] == ("begin", 2 * BATCH_NBYTES + 105)
    assert counter.told[-1] == ("end", 0)
    assert [nbytes for _, nbytes in counter.told[1:-1]] == [BATCH_NBYTES, BATCH_NBYTES, 105]


def test_end_is_reported_after_a_failure():
    a = stored("a", noise(100))
    os.truncate("a", 0)
    counter = Counter()
    with pytest.raises(DamagedFileError):
        compared(a, a, reporter=counter)
    assert counter.told == [("begin", 400), ("end", 0)]


def large_run(directory) -> tuple[Slot, Slot]:
    slot = Slot("w", "float32", (16 * MEBIBYTE,), (Span(Extent.whole((16 * MEBIBYTE,)), "", 0, "float32"),))
    return tuple(
        replace(slot, spans=(replace(slot.spans[0], path=sparse(directory / name, 64 * MEBIBYTE)),)) for name in "ab"
    )


def large_cast(directory) -> tuple[Slot, Slot]:
    a, b = large_run(directory)
    return a, replace(b, dtype="bfloat16", spans=(replace(b.spans[0], dtype="bfloat16"),))


def large_columns(directory) -> tuple[Slot, Slot]:
    rows, columns = 1 << 18, 64
    whole = Span(Extent.whole((rows, columns)), sparse(directory / "whole", rows * columns * 2), 0, "bfloat16")
    spans = [
        Span(Extent((0, 8 * i), (rows, 8), 0, rows * 8), sparse(directory / f"s{i}", rows * 16), 0, "bfloat16")
        for i in range(8)
    ]
    return tuple(Slot("w", "bfloat16", (rows, columns), one) for one in ((whole,), tuple(spans)))


@pytest.mark.parametrize("made", [large_run, large_cast, large_columns], ids=lambda made: made.__name__)
def test_memory_stays_within_its_budget_whatever_the_size(made, tmp_path):
    a, b = made(tmp_path)
    small = stored("small", noise(10))
    compared(small, replace(small, dtype="bfloat16"))  # loads what is loaded once
    tracemalloc.start()
    try:
        assert compared(a, b, memory=8 * MEBIBYTE) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 9 * MEBIBYTE


def test_slot_of_many_spans_is_not_searched_for_each_block():
    """A box for each of 2,000 rows, by as many blocks: their product would take over 20 s of the processor."""
    array = noise(2000 * 1024).reshape(2000, 1024)
    rows = [Extent((row, 0), (1, 1024), 0, 1024) for row in range(2000)]
    a, b = stored("a", array), tiled("b", array, rows)
    started = time.process_time()
    assert compared(a, b, memory=1) == []
    assert time.process_time() - started < 10
