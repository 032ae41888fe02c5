"""Cutting a group among ranks and putting it together again gives what there was."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusing
from tests.strategies import alignments, groups, orders, shapes, world_sizes
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
    shard_share,
    sub_groups,
)

PAD = -1


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


@given(groups(), world_sizes, alignments)
def test_round_robin_order_is_undone_by_itself(group, world_size, multiple):
    order = round_robin_order(len(group), world_size)
    numels = [math.prod(group[index]) for index in order]
    found = reassembled(numels, *partitions(numels, multiple, world_size))
    in_the_optimizers_order = {(order[index], i): values for (index, i), values in found.items()}
    held = {element: [(order[index], i) for index, i in values] for element, values in in_the_optimizers_order.items()}
    assert held == each_once([math.prod(shape) for shape in group])


@given(st.data(), groups(), world_sizes)
def test_any_order_of_the_buffer_holds_every_element_once(data, group, world_size):
    order = data.draw(orders(len(group)))
    numels = [math.prod(group[index]) for index in order]
    assert reassembled(numels, *partitions(numels, None, world_size)) == each_once(numels)


@given(groups(), world_sizes)
def test_fragments_and_padding_of_a_rank_fill_its_partition(group, world_size):
    numels = [math.prod(shape) for shape in group]
    starts, partition, _ = partitions(numels, None, world_size)
    for rank in range(world_size):
        held = sum(fragment.numel for fragment in flat_shares(numels, starts, partition, rank))
        assert held + flat_padding(starts[-1], partition, rank) == partition


@given(st.integers(0, 10_000), world_sizes)
def test_flat_padding_of_all_ranks_adds_up(total, world_size):
    partition = flat_partition_numel(total, world_size)
    assert sum(flat_padding(total, partition, r) for r in range(world_size)) == partition * world_size - total


@given(st.integers(0, 10_000), world_sizes)
def test_flat_partition_is_the_smallest_aligned_one_that_holds_the_group(total, world_size):
    partition = flat_partition_numel(total, world_size)
    assert partition % FLAT_ALIGNMENT == 0
    assert (partition - FLAT_ALIGNMENT) * world_size < total or partition == 0
    assert partition * world_size >= total


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


@given(groups(), world_sizes)
def test_fragments_come_in_the_order_of_the_partition_and_are_never_empty(group, world_size):
    numels = [math.prod(shape) for shape in group]
    starts, partition, _ = partitions(numels, None, world_size)
    for rank in range(world_size):
        at = 0
        for fragment in flat_shares(numels, starts, partition, rank):
            assert fragment.position == at
            assert fragment.numel > 0
            at += fragment.numel


@given(shapes(), world_sizes)
def test_shards_of_a_parameter_hold_every_element_once_in_rank_order(shape, world_size):
    numel = math.prod(shape)
    shards = [shard_share(numel, world_size, rank) for rank in range(world_size)]
    assert [i for start, size in shards for i in range(start, start + size)] == list(range(numel))


@given(shapes(), world_sizes)
def test_every_shard_fits_and_only_padding_is_missing(shape, world_size):
    numel = math.prod(shape)
    per_rank = shard_numel(numel, world_size)
    sizes = [shard_share(numel, world_size, rank)[1] for rank in range(world_size)]
    assert all(0 <= size <= per_rank for size in sizes)
    assert sum(per_rank - size for size in sizes) == per_rank * world_size - numel < max(world_size, 1)


def test_more_ranks_than_elements_leaves_trailing_ranks_all_padding():
    partition = flat_partition_numel(3, 8)
    assert partition == 2
    assert [flat_padding(3, partition, rank) for rank in range(8)] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert list(flat_shares([3], [0, 3], partition, 1)) == [FlatShare(0, 2, 0, 1)]
    assert list(flat_shares([3], [0, 3], partition, 5)) == []


def test_shards_of_a_parameter_smaller_than_the_world():
    assert [shard_share(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 1), (2, 0), (2, 0)]


def test_empty_group_has_empty_partitions():
    assert flat_partition_numel(0, 4) == 0
    assert flat_padding(0, 0, 3) == 0
    assert list(flat_shares([], [0], 0, 0)) == []


def test_round_robin_deals_parameters_to_ranks_like_cards():
    assert round_robin_order(7, 3) == [0, 3, 6, 1, 4, 2, 5]


def test_round_robin_of_one_rank_is_the_optimizers_order():
    assert round_robin_order(5, 1) == [0, 1, 2, 3, 4]


def test_round_robin_with_more_ranks_than_parameters_is_the_optimizers_order():
    assert round_robin_order(3, 8) == [0, 1, 2]


@pytest.mark.parametrize("world_size", [0, -1])
@pytest.mark.parametrize("cut", [flat_partition_numel, shard_numel, round_robin_order], ids=lambda f: f.__name__)
def test_world_without_ranks_is_refused(cut, world_size):
    with refusing(UsageError, f"expected at least 1, found {world_size}"):
        cut(10, world_size)


@pytest.mark.parametrize("world_size", [0, -1])
def test_shard_of_a_world_without_ranks_is_refused(world_size):
    with pytest.raises(UsageError):
        shard_share(10, world_size, 0)


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
def test_every_parameter_is_dealt_to_one_rank(groups, world_size):
    held = greedy_partition(groups, world_size)
    for number, numels in enumerate(groups):
        assert sorted(index for rank in held for index in rank[number]) == list(range(len(numels)))


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


def test_parameters_of_one_size_go_round_in_their_order():
    assert greedy_partition([[2, 2, 2, 2, 2]], 2) == [[[0, 2, 4]], [[1, 3]]]


def test_parameters_without_elements_all_go_to_one_rank():
    assert greedy_partition([[0, 0, 0]], 3) == [[[0, 1, 2]], [[]], [[]]]


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


def test_dealing_to_no_ranks_is_refused():
    with refusing(UsageError, "expected at least 1, found 0"):
        greedy_partition([[1]], 0)
