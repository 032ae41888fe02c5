"""A rule for spans gives the spans that spelling them out does, whatever the sizes, ranks and pads."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusing
from zckpt.errors import LayoutError
from zckpt.state import CutFiles, CutSpans, Extent, Slot, Span
from zckpt.state.boxes import SpanIndex
from zckpt.state.cuts import Cuts, merged_ranges
from zckpt.state.partition import (
    alignment_padding,
    flat_partition_numel,
    flat_shares,
    flat_starts,
    shard_numel,
    shard_share,
)

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
WORLDS = st.integers(1, 13)


HERE = Path()


def files(world: int, folder: Path = HERE) -> CutFiles:
    paths = tuple(str(folder / f"{rank}.pt") for rank in range(world))
    return CutFiles(paths, tuple(1000 * rank for rank in range(world)), "float32")


def span(made: CutFiles, shape: tuple[int, ...], rank: int, start: int, numel: int, position: int) -> Span:
    return Span(Extent.flat(shape, start, numel), made.paths[rank], made.offsets[rank] + 4 * position, made.dtype)


Cut = list[tuple[CutSpans, list[Span]]]


def flat_cut(shapes: list[tuple[int, ...]], world: int, align: int | None = None, *, folder: Path = HERE) -> Cut:
    """Return for each parameter of a flat group its rule, and its spans one by one."""
    numels = [math.prod(shape) for shape in shapes]
    starts = flat_starts(numels, alignment_padding(numels, align) if align else None)
    partition, made = flat_partition_numel(starts[-1], world), files(world, folder)
    spelled: list[list[Span]] = [[] for _ in shapes]
    for rank in range(world):
        for one in flat_shares(numels, starts, partition, rank):
            spelled[one.index].append(span(made, shapes[one.index], rank, one.start, one.numel, one.position))
    return [(CutSpans(made, shape, starts[i], partition), spelled[i]) for i, shape in enumerate(shapes)]


def shard_cut(shapes: list[tuple[int, ...]], world: int, _: int | None = None, *, folder: Path = HERE) -> Cut:
    """Return the same for parameters that are cut one by one."""
    made, at, found = files(world, folder), 0, []
    for shape in shapes:
        numel, spelled = math.prod(shape), []
        for rank in range(world):
            start, count = shard_share(numel, world, rank)
            spelled += [span(made, shape, rank, start, count, at)] if count else []
        found.append((CutSpans(made, shape, 0, shard_numel(numel, world), at), spelled))
        at += shard_numel(numel, world)
    return found


@pytest.mark.parametrize("cut", [flat_cut, shard_cut])
@given(shapes=SHAPES, world=WORLDS, align=st.sampled_from([None, 4, 8]), data=st.data())
def test_a_rule_reaches_what_the_spans_spelled_out_do(cut, shapes, world, align, data):  # type: ignore[no-untyped-def]
    for rule, spelled in cut(shapes, world, align):
        assert list(rule) == spelled
        assert len(rule) == len(spelled)
        assert rule == tuple(spelled)
        assert hash(rule) == hash(tuple(spelled))
        assert rule[:2] == tuple(spelled[:2])
        assert [rule[i] for i in range(-len(rule), 0)] == spelled
        low = data.draw(st.integers(0, rule.numel))
        extent = Extent.flat(rule.shape, low, data.draw(st.integers(0, rule.numel - low)))
        near, table = (SpanIndex(Slot("w", "float32", rule.shape, one)).reaching(extent) for one in (rule, (*spelled,)))
        end = low + extent.numel
        exact = [s for s in spelled if s.extent.start < end and low < s.extent.start + s.extent.numel and low < end]
        assert list(near.spans) == exact
        assert set(exact) <= set(table.spans)


@pytest.mark.parametrize("cut", [flat_cut, shard_cut])
@given(shapes=SHAPES, world=WORLDS, align=st.sampled_from([None, 4]))
def test_the_columns_of_many_rules_give_what_each_file_has(cut, shapes, world, align):  # type: ignore[no-untyped-def]
    made = cut(shapes, world, align)
    held: dict[int, set[int]] = {}
    for _, spelled in made:
        for one in spelled:
            rank = int(one.path.partition(".")[0])
            at = (one.offset - 1000 * rank) // 4
            held.setdefault(rank, set()).update(range(at, at + one.extent.numel))
    cuts = Cuts([rule for rule, _ in made])
    found = {rank: ranges for rank in range(world) if (ranges := cuts.of(rank).tolist())}
    assert {rank: {e for low, high in ranges for e in range(low, high)} for rank, ranges in found.items()} == held
    for ranges in found.values():
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_a_rule_that_goes_beyond_its_files_is_refused():
    with refusing(LayoutError, "beyond"):
        CutSpans(files(3), (10,), 0, 3)
    with refusing(LayoutError, "beyond"):
        CutSpans(files(3), (1,), 0, 0)
    assert list(CutSpans(files(3), (9,), 0, 3))[-1].extent.start == 6


def test_no_ranges_merge_to_none():
    import numpy as np

    empty = np.array([3, 5], np.int64)
    assert merged_ranges(empty, empty).tolist() == []
