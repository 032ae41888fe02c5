"""Cutting a group among ranks and putting it together again gives what there was."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusing
from tests.strategies import alignments, groups, world_sizes
from zckpt.errors import LayoutError, UsageError
from zckpt.state.partition import (
    FLAT_ALIGNMENT,
    FlatShare,
    alignment_padding,
    flat_padding,
    flat_partition_numel,
    flat_shares,
    flat_starts,
    greedy_order,
    greedy_partition,
    round_robin_order,
    shard_numel,
    shard_paddings,
    shard_share,
    sub_groups,
)

PAD = -1

TOTALS = st.integers(0, 10_000) | st.integers(2**53, 2**70)
"""Also above what floating-point numbers count one by one."""

WORLDS = world_sizes | st.integers(1, 4096)


def flat_buffer(numels: list[int], pads: list[int] | None, partition: int, world_size: int) -> list[object]:
    """Write a group's buffer as the optimizer does: each element as (parameter, index), padding as PAD."""
    buffer: list[object] = []
    for index, numel in enumerate(numels):
        buffer += [(index, i) for i in range(numel)]
        buffer += [PAD] * (pads[index] if pads else 0)
    return buffer + [PAD] * (partition * world_size - len(buffer))


def partitions(numels: list[int], multiple: int | None, world_size: int) -> tuple[list[int], int, list[list[object]]]:
    """Return where parameters start, the size of a partition, and what every rank's partition holds."""
    pads = None if multiple is None else alignment_padding(numels, multiple)
    starts = flat_starts(numels, pads)
    partition = flat_partition_numel(starts[-1], world_size)
    buffer = flat_buffer(numels, pads, partition, world_size)
    return starts, partition, [buffer[rank * partition : (rank + 1) * partition] for rank in range(world_size)]


def reassembled(
    numels: list[int], starts: list[int], partition: int, held: list[list[object]]
) -> dict[tuple[int, int], list[object]]:
    """Put together what the fragments of all ranks say; every element maps to all that was found for it."""
    found: dict[tuple[int, int], list[object]] = {}
    for rank, content in enumerate(held):
        for fragment in flat_shares(numels, starts, partition, rank):
            for i in range(fragment.numel):
                element = (fragment.index, fragment.start + i)
                found.setdefault(element, []).append(content[fragment.position + i])
    return found


def each_once(numels: list[int]) -> dict[tuple[int, int], list[object]]:
    return {(index, i): [(index, i)] for index, numel in enumerate(numels) for i in range(numel)}


@given(groups(), world_sizes, alignments)
def test_flat_partitions_hold_every_element_once(group, world_size, multiple):
    numels = [math.prod(shape) for shape in group]
    assert reassembled(numels, *partitions(numels, multiple, world_size)) == each_once(numels)


@given(st.integers(0, 300), st.integers(1, 64))
def test_round_robin_deals_each_parameter_once(count, world_size):
    assert sorted(round_robin_order(count, world_size)) == list(range(count))


@given(groups(), world_sizes, st.booleans())
def test_fragments_are_those_that_a_search_finds_and_padding_is_the_rest(group, world_size, is_padded):
    numels = [math.prod(shape) for shape in group]
    starts = flat_starts(numels, alignment_padding(numels, 4) if is_padded else None)
    partition = flat_partition_numel(starts[-1], world_size)
    for rank in range(world_size):
        low, high = rank * partition, (rank + 1) * partition
        places = [(max(s, low), min(s + n, high), i, s) for i, (n, s) in enumerate(zip(numels, starts, strict=False))]
        expected = [FlatShare(i, begin - s, begin - low, end - begin) for begin, end, i, s in places if begin < end]
        found = list(flat_shares(numels, starts, partition, rank))
        assert found == expected
        if not is_padded:
            assert sum(one.numel for one in found) + flat_padding(starts[-1], partition, rank) == partition


@given(TOTALS, WORLDS)
def test_flat_partition_is_the_smallest_aligned_one_that_holds_the_group(total, world_size):
    partition = flat_partition_numel(total, world_size)
    assert partition % FLAT_ALIGNMENT == 0
    assert (partition - FLAT_ALIGNMENT) * world_size < total or partition == 0
    assert partition * world_size >= total
    assert sum(flat_padding(total, partition, r) for r in range(world_size)) == partition * world_size - total


@given(groups(), st.sampled_from([2, 4, 8, 16]))
def test_aligned_parameters_start_on_a_multiple(group, multiple):
    numels = [math.prod(shape) for shape in group]
    pads = alignment_padding(numels, multiple)
    assert all(start % multiple == 0 for start in flat_starts(numels, pads)[:-1])
    assert all(0 <= pad < multiple for pad in pads)


def test_nothing_is_padded_after_the_last_parameter():
    """DeepSpeed 0.19: only a parameter that another one follows has a pad."""
    assert alignment_padding([5, 8, 3], 4) == [3, 0, 0]
    assert alignment_padding([], 4) == []


@given(TOTALS, WORLDS)
def test_shards_of_a_parameter_follow_each_other_and_only_padding_is_missing(numel, world_size):
    per_rank, at = shard_numel(numel, world_size), 0
    assert numel <= per_rank * world_size < numel + world_size
    for rank in range(world_size):
        start, size = shard_share(numel, world_size, rank)
        assert start == at
        assert 0 <= size <= per_rank
        at += size
    assert at == numel


@given(st.lists(st.integers(0, 40), max_size=12), world_sizes)
def test_padding_of_shards_is_what_they_do_not_hold(numels, world):
    expected = [sum(shard_numel(n, world) - shard_share(n, world, rank)[1] for n in numels) for rank in range(world)]
    assert shard_paddings(numels, world) == expected


def test_more_ranks_than_elements_leaves_trailing_ranks_all_padding():
    partition = flat_partition_numel(3, 8)
    assert partition == 2
    assert [flat_padding(3, partition, rank) for rank in range(8)] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert list(flat_shares([3], [0, 3], partition, 1)) == [FlatShare(0, 2, 0, 1)]
    assert list(flat_shares([3], [0, 3], partition, 5)) == []
    assert [shard_share(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 1), (2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("count", "world_size", "expected"),
    [(7, 3, [0, 3, 6, 1, 4, 2, 5]), (5, 1, [0, 1, 2, 3, 4]), (3, 8, [0, 1, 2])],
)
def test_round_robin_deals_parameters_to_ranks_like_cards(count, world_size, expected):
    assert round_robin_order(count, world_size) == expected


CUTS = {
    "flat": flat_partition_numel,
    "shards": shard_numel,
    "shard": lambda numel, world_size: shard_share(numel, world_size, 0),
    "round robin": round_robin_order,
    "dealt": lambda numel, world_size: greedy_partition([[numel]], world_size),
}


@pytest.mark.parametrize("world_size", [0, -1])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_world_without_ranks_is_refused(cut, world_size):
    with refusing(UsageError, f"expected at least 1, found {world_size}"):
        cut(10, world_size)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), st.integers(1, 17), st.integers(1, 300))
def test_sub_groups_close_as_soon_as_they_are_large_enough(numels, world_size, most):
    cut = sub_groups(numels, world_size, most)
    assert [index for one in cut for index in one] == list(range(len(numels)))
    sizes = [[shard_numel(numels[index], world_size) for index in one] for one in cut]
    assert all(one for one in cut)
    assert all(sum(one[:-1]) < most for one in sizes) or len(cut) == 1
    assert all(sum(one) >= most for one in sizes[:-1])


# --- whole parameters, assigned largest first ------------------------------------------------------------------------

dealings = st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=4)
"""Sizes of the parameters of some groups, many of them equal and some zero."""


def dealt_by_torchs_rule(groups: list[list[int]], world_size: int) -> list[list[list[int]]]:
    """The rule word for word: sort each group, then give each parameter to the first of the least loaded ranks."""
    sizes = [0] * world_size
    held: list[list[list[int]]] = [[[] for _ in groups] for _ in range(world_size)]
    for number, numels in enumerate(groups):
        for index, numel in sorted(enumerate(numels), key=lambda item: item[1], reverse=True):
            rank = sizes.index(min(sizes))
            held[rank][number].append(index)
            sizes[rank] += numel
    return held


@given(dealings, world_sizes)
def test_greedy_partition_is_torchs_rule(groups, world_size):
    assert greedy_partition(groups, world_size) == dealt_by_torchs_rule(groups, world_size)


@given(dealings, world_sizes)
def test_order_of_dealing_follows_from_what_ranks_hold(groups, world_size):
    held = greedy_partition(groups, world_size)
    sizes = [[[groups[number][i] for i in mine] for number, mine in enumerate(rank)] for rank in held]
    for number, order in enumerate(greedy_order(sizes)):
        found = [held[rank][number][at] for rank, at in order]
        assert found == sorted(range(len(groups[number])), key=lambda i: -groups[number][i])


def test_real_partition_of_two_groups_over_two_ranks():
    """Sizes and dealing of fixtures/other/zro_dp2_adamw: the second group goes on from the load of the first."""
    weights = [5, 296, 104, 104, 96, 512, 512, 15]
    others = [1, 7, 8, 8, 13, 8, 64, 8, 5]
    assert greedy_partition([weights, others], 2) == [
        [[5, 1, 7], [4, 2, 3, 5, 7, 1, 8, 0]],
        [[6, 2, 3, 4, 0], [6]],
    ]


@pytest.mark.parametrize(
    "held",
    [
        [[[1, 2]], [[2]]],  # not largest first
        [[[2]], [[3]]],  # the larger one goes to the first rank
        [[[3, 1]], [[]]],  # the second rank is given nothing
        [[[]], [[4]]],
        [[[4]], [[4, 1]], [[]]],
    ],
    ids=str,
)
def test_what_was_not_dealt_that_way_is_refused(held):
    with refusing(LayoutError, "not assigned largest first"):
        greedy_order(held)
