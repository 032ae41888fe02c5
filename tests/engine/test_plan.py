"""Spans that cover a hole become copies that put every element in its place, once; any other spans are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import part_of
from tests.refusals import refusing
from tests.strategies import extents, shapes, storages, tilings
from zckpt.engine import plan as planning
from zckpt.engine.plan import Copy, fill, plan
from zckpt.engine.targets import Hole, Lazily, TargetFile
from zckpt.errors import LayoutError
from zckpt.state import Extent, Slot, Span
from zckpt.state.boxes import SpanIndex, boxes_of, intersection, row_major
from zckpt.state.dtypes import itemsize

FILE = "shard"
SIZE = 4
"""Bytes of the element type that these tests use where its size does not matter."""

OFFSET = 100
"""Byte of the target at which the hole lies."""


def indices(extent: Extent, shape: tuple[int, ...]) -> np.ndarray:
    """Return which elements of the flattened tensor an extent holds, in its order. The reference, by numpy alone."""
    return part_of(np.arange(math.prod(shape)).reshape(shape), extent)


def flat_span(extent: Extent, path: str = FILE, offset: int = 0) -> Span:
    return Span(extent, path, offset, "int32")


def slot_of(shape: tuple[int, ...], *spans: Span) -> Slot:
    return Slot("exp_avg", "int32", shape, spans)


def hole_of(slot: Slot, extent: Extent | None = None, dtype: str = "int32") -> Hole:
    return Hole(OFFSET, "exp_avg/wte.weight", slot, extent or Extent.whole(slot.shape), dtype)


def run(copies: list[Copy], files: dict[str, np.ndarray], numel: int, dtype: str = "int32") -> list[list[int]]:
    """Do by hand what copies say; return for each element of the hole the values that were written to it."""
    written: list[list[int]] = [[] for _ in range(numel)]
    for copy in copies:
        (source,) = copy.sources
        for index in np.ndindex(copy.shape):
            here = source.offset + sum(i * s for i, s in zip(index, source.strides, strict=True))
            there = copy.offset + sum(i * s for i, s in zip(index, copy.strides, strict=True)) - OFFSET
            assert here % itemsize(copy.source_dtype) == there % itemsize(dtype) == 0
            written[there // itemsize(dtype)].append(int(files[source.path][here // itemsize(copy.source_dtype)]))
    return written


def each_once(values: np.ndarray) -> list[list[int]]:
    return [[int(value)] for value in values]


def packed(tiles: list[Extent], shape: tuple[int, ...]) -> tuple[list[Span], np.ndarray]:
    """Lay extents end to end in one file; return their spans and the file's elements."""
    spans, content = [], []
    for tile in tiles:
        spans.append(flat_span(tile, offset=sum(map(len, content)) * SIZE))
        content.append(indices(tile, shape))
    return spans, np.concatenate(content or [np.zeros(0, int)])


# --- complete covers -------------------------------------------------------------------------------------------


@given(st.data(), shapes())
def test_any_extents_are_filled_from_any_tiling(data, shape):
    spans, content = packed(data.draw(tilings(shape)), shape)
    slot = slot_of(shape, *spans)
    for extent in (data.draw(extents(shape)), *data.draw(tilings(shape))):
        found = run(fill(hole_of(slot, extent)), {FILE: content}, extent.numel)
        assert found == each_once(indices(extent, shape))


@given(st.data(), shapes(empty=False))
def test_boxes_that_are_stored_in_another_order_are_put_in_row_major_order(data, shape):
    whole = Extent.whole(shape)
    strides, stored = data.draw(storages(shape))
    content = np.full(stored, -1)
    np.lib.stride_tricks.as_strided(content, shape, [s * content.itemsize for s in strides])[...] = np.arange(
        whole.numel
    ).reshape(shape)
    slot = slot_of(shape, Span(whole, FILE, 0, "int32", strides))
    extent = data.draw(extents(shape))
    assert run(fill(hole_of(slot, extent)), {FILE: content}, extent.numel) == each_once(indices(extent, shape))


@given(shapes(empty=False))
def test_expanded_tensor_is_written_out(shape):
    strides = tuple(0 for _ in shape)
    slot = slot_of(shape, Span(Extent.whole(shape), FILE, 0, "int32", strides))
    found = run(fill(hole_of(slot)), {FILE: np.array([7])}, math.prod(shape))
    assert found == [[7]] * math.prod(shape)


@given(st.data(), shapes(), st.sampled_from(["float64", "bfloat16", "float8_e5m2"]))
def test_places_in_the_target_are_counted_in_its_own_element_type(data, shape, dtype):
    spans, content = packed(data.draw(tilings(shape)), shape)
    copies = fill(hole_of(slot_of(shape, *spans), dtype=dtype))
    assert run(copies, {FILE: content}, math.prod(shape), dtype) == each_once(np.arange(math.prod(shape)))
    assert all(copy.target_dtype == dtype for copy in copies)


def test_zero_slices_of_a_tensor_parallel_slice():
    """Rank (tp 1, dp 1) of two by two: the second half of the right half of a 4 x 6 matrix."""
    shape = (4, 6)
    tiles = [Extent((0, 3 * tp), (4, 3), 6 * dp, 6) for tp in range(2) for dp in range(2)]
    spans = [flat_span(tile, f"tp{i // 2}dp{i % 2}") for i, tile in enumerate(tiles)]
    files = {span.path: indices(tile, shape) for span, tile in zip(spans, tiles, strict=True)}
    assert run(fill(hole_of(slot_of(shape, *spans))), files, 24) == each_once(np.arange(24))


def test_rows_of_a_fused_projection_that_are_interleaved_over_ranks():
    """q, k and v of two tensor-parallel ranks: each rank's file has its share of all three, one after the other."""
    shape = (12, 5)
    spans, files = [], {}
    for rank in range(2):
        tiles = [Extent((4 * part + 2 * rank, 0), (2, 5), 0, 10) for part in range(3)]
        spans += [flat_span(tile, f"tp{rank}", 10 * SIZE * part) for part, tile in enumerate(tiles)]
        files[f"tp{rank}"] = np.concatenate([indices(tile, shape) for tile in tiles])
    assert run(fill(hole_of(slot_of(shape, *spans))), files, 60) == each_once(np.arange(60))


def test_element_outside_of_what_is_wanted_is_not_copied():
    slot = slot_of((10,), flat_span(Extent.flat((10,), 0, 4)), flat_span(Extent.flat((10,), 4, 6), offset=400))
    copy = only_copy(slot, Extent.flat((10,), 5, 3))
    assert (copy.sources[0].offset, copy.shape) == (404, (3,))


@pytest.mark.parametrize("strides", [None, ()])
def test_number_is_one_element(strides):
    copy = only_copy(slot_of((), Span(Extent.whole(()), FILE, 12, "int32", strides)))
    assert (copy.shape, copy.sources[0].offset, copy.offset, copy.nbytes) == ((1,), 12, OFFSET, 4)
    assert copy.is_bytewise


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
def test_tensor_without_elements_needs_no_span_and_no_copy(shape):
    assert fill(hole_of(slot_of(shape))) == []
    assert fill(hole_of(slot_of(shape, flat_span(Extent.whole(shape))))) == []


def test_spans_without_elements_are_let_pass():
    empty = [flat_span(Extent.flat((4,), at, 0), offset=999) for at in (0, 2, 4)]
    assert only_copy(slot_of((4,), *empty, flat_span(Extent.whole((4,))))).numel == 4


# --- covers that are not complete, or more than that ------------------------------------------------------------


@given(st.data(), shapes(empty=False))
def test_any_missing_element_is_refused_and_any_doubled_one(data, shape):
    """Also where there are as many elements as there should be, but one is missing and another there twice."""
    tiles = [tile for tile in data.draw(tilings(shape)) if tile.numel]
    lost = data.draw(st.integers(0, len(tiles) - 1))
    shorter = [*tiles[:lost], replace(tiles[lost], numel=tiles[lost].numel - 1), *tiles[lost + 1 :]]
    assert_refused(shape, shorter, "some elements are missing")
    twice = data.draw(st.sampled_from(tiles))
    again = replace(twice, start=twice.start + data.draw(st.integers(0, twice.numel - 1)), numel=1)
    assert_refused(shape, data.draw(st.permutations([*tiles, again])), "more than once")
    if twice != tiles[lost]:
        assert_refused(shape, [*shorter, again], "more than once")


def assert_refused(shape: tuple[int, ...], tiles: list[Extent], words: str) -> None:
    with refusing(LayoutError, words):
        fill(hole_of(slot_of(shape, *map(flat_span, tiles))))


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((4, 4), [Extent.whole((4, 4))] * 2),
        ((4, 4), [Extent((0, 0), (4, 3), 0, 12), Extent((0, 2), (4, 2), 0, 8)]),
        ((4, 4), [Extent.flat((4, 4), 0, 12), Extent((2, 0), (2, 4), 0, 8)]),
        ((4, 4), [Extent.flat((4, 4), 0, 8), Extent((1, 0), (2, 4), 0, 8)]),  # as many elements as there should be
        ((2, 2), [Extent.whole((2, 2)), Extent.flat((2, 2), 0, 1)]),
        ((), [Extent.whole(())] * 2),
    ],
)
def test_ranges_and_boxes_that_overlap_are_refused(shape, tiles):
    spans = [flat_span(tile) for tile in tiles]
    strided = replace(spans[0], strides=row_major(tiles[0].sizes)[::-1]) if tiles[0] == Extent.whole(shape) else None
    for first in filter(None, (spans[0], strided)):
        with refusing(LayoutError, "exp_avg/wte.weight: some elements appear more than once"):
            fill(hole_of(slot_of(shape, first, *spans[1:])))


def test_nothing_at_all_is_refused_with_advice():
    said = (
        "exp_avg/wte.weight: some elements are missing: expected 10 elements, found 0; "
        "a rank's file is missing, or belongs to another run"
    )
    with refusing(LayoutError, f"^{said}$"):
        plan([TargetFile("a", 300, holes=[hole_of(slot_of((10,)))])])


# --- as few copies as there can be ------------------------------------------------------------------------------


def only_copy(slot: Slot, extent: Extent | None = None) -> Copy:
    (copy,) = fill(hole_of(slot, extent))
    return copy


@given(shapes(empty=False))
def test_contiguous_tensor_is_one_run(shape):
    for strides in (None, row_major(shape)):
        copy = only_copy(slot_of(shape, Span(Extent.whole(shape), FILE, 0, "int32", strides)))
        assert copy.is_bytewise
        assert copy.shape == (math.prod(shape),)


def halved(shape: tuple[int, ...], dim: int) -> list[Copy]:
    """The copies of a tensor that two files have a half of, cut along a dimension."""
    sizes = tuple(size // 2 if at == dim else size for at, size in enumerate(shape))
    places = [tuple(half * size if at == dim else 0 for at, size in enumerate(sizes)) for half in range(2)]
    tiles = [Extent(offsets, sizes, 0, math.prod(sizes)) for offsets in places]
    return fill(hole_of(slot_of(shape, *map(flat_span, tiles))))


def test_a_half_is_one_run_or_one_strided_copy_whose_dimensions_are_joined_where_both_sides_are_contiguous():
    assert [copy.is_bytewise for copy in halved((4, 6), 0)] == [True, True]
    left, right = halved((4, 6), 1)
    assert (left.shape, left.strides, left.sources[0].strides) == ((4, 3), (24, 4), (12, 4))
    assert right.offset - left.offset == 12
    assert [copy.shape for copy in halved((2, 4, 3, 5), 1)] == [(2, 30), (2, 30)]


@given(st.data(), shapes(empty=False))
def test_range_of_a_tensor_is_one_run(data, shape):
    low = data.draw(st.integers(0, math.prod(shape) - 1))
    copy = only_copy(slot_of(shape, flat_span(Extent.whole(shape))), Extent.flat(shape, low, math.prod(shape) - low))
    assert copy.is_bytewise


@pytest.mark.parametrize(
    ("stored", "byteorder", "target", "is_bytewise"),
    [("int32", "little", "int64", False), ("int32", "big", "int32", False), ("int8", "big", "int8", True)],
)
def test_cast_and_other_byte_order_are_not_bytewise_but_of_single_bytes(stored, byteorder, target, is_bytewise):
    slot = Slot("x", stored, (4,), (Span(Extent.whole((4,)), FILE, 0, stored, None, byteorder),))
    assert fill(hole_of(slot, dtype=target))[0].is_bytewise == is_bytewise


# --- averaged replicas ------------------------------------------------------------------------------------------


def averaged(*sets: list[Span]) -> Slot:
    return Slot("weight", "int32", (6,), tuple(sets[0]), tuple(tuple(one) for one in sets[1:]))


def halves(path: str, at: int = 3, **changes: str) -> list[Span]:
    tiles = [Extent.flat((6,), 0, at), Extent.flat((6,), at, 6 - at)]
    return [replace(flat_span(tile, path, tile.start * SIZE), **changes) for tile in tiles]


def test_replicas_become_copies_with_several_sources():
    copies = fill(hole_of(averaged(halves("a"), halves("b"), halves("c"))))
    assert [[source.path for source in copy.sources] for copy in copies] == [["a", "b", "c"]] * 2
    assert [(copy.shape, copy.offset) for copy in copies] == [((3,), OFFSET), ((3,), OFFSET + 12)]
    assert not any(copy.is_bytewise for copy in copies)


def test_replica_in_another_place_of_its_file_is_averaged():
    moved = [replace(span, offset=span.offset + 64) for span in halves("b")]
    first, second = fill(hole_of(averaged(halves("a"), moved)))
    assert [source.offset for source in first.sources] == [0, 64]
    assert [source.offset for source in second.sources] == [12, 76]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (halves("b")[:1], "some elements are missing"),
        (halves("b", at=2), "stored differently"),
        (halves("b", dtype="float32"), "stored differently"),
        (halves("b", byteorder="big"), "stored differently"),
    ],
)
def test_replicas_that_differ_in_more_than_their_values_are_refused(other, words):
    with refusing(LayoutError, words):
        fill(hole_of(averaged(halves("a"), other)))


# --- what a plan says of itself ---------------------------------------------------------------------------------


def test_plan_counts_what_it_reads_and_writes():
    whole = Extent.whole((6,))
    mean = Slot("weight", "int32", (6,), (flat_span(whole),), ((flat_span(whole, "b"),),))
    plain = slot_of((6,), flat_span(whole))
    made = plan(
        [TargetFile("a", 300, holes=[hole_of(mean)]), TargetFile("b", 200, holes=[hole_of(plain, dtype="int16")])]
    )
    assert made.read_nbytes == 2 * 24 + 24
    assert made.copy_nbytes == 24 + 12
    assert made.write_nbytes == 500


# --- slots of many spans ----------------------------------------------------------------------------------------


@given(st.data(), shapes())
def test_index_has_every_span_that_reaches_into_an_extent(data, shape):
    spans = [Span(tile, "f", 0, "float32") for tile in data.draw(tilings(shape))]
    extent = data.draw(extents(shape))
    near = SpanIndex(Slot("weight", "float32", shape, tuple(spans))).reaching(extent).spans
    boxes = boxes_of(extent)
    assert all(
        span in near for span in spans for one in boxes_of(span.extent) if any(intersection(one, b) for b in boxes)
    )


@given(st.data(), st.integers(1, 100))
def test_index_has_no_range_that_does_not_reach(data, numel):
    spans = [Span(Extent.flat((numel,), i, 1), "f", i, "uint8") for i in data.draw(st.permutations(range(numel)))]
    low = data.draw(st.integers(0, numel - 1))
    high = data.draw(st.integers(low + 1, numel))
    near = SpanIndex(Slot("weight", "uint8", (numel,), tuple(spans))).reaching(Extent.flat((numel,), low, high - low))
    assert [span.offset for span in near.spans] == list(range(low, high))


@pytest.mark.parametrize("kept", [True, False])
def test_files_that_come_lazily_are_made_once_where_they_are_few(kept, monkeypatch):
    monkeypatch.setattr(planning, "KEPT_NBYTES", 3 * planning.COPY_NBYTES - (not kept))
    made = []

    def files():
        for number in range(3):
            made.append(number)
            extent = Extent.whole((4,))
            yield TargetFile(f"t{number}", 116, holes=[hole_of(slot_of((4,), flat_span(extent)))])

    planned = plan(Lazily(files, 3))
    assert [[one.file.name for one in planned.files] for _ in range(2)] == [["t0", "t1", "t2"]] * 2
    assert made == [0, 1, 2] * (1 if kept else 3)
