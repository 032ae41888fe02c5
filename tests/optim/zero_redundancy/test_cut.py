"""Which rank steps which part of which bucket: every parameter exactly once, in runs of about equal size."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from zckpt.optim import tensors
from zckpt.optim.zero_redundancy import exchange
from zckpt.optim.zero_redundancy.exchange import OverlapInfo, assign, cut

SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 12))
def test_runs_are_the_whole_without_a_gap_and_none_is_empty(numels, parts):
    runs = cut(numels, parts)
    assert 1 <= len(runs) <= parts
    assert runs[0][0] == 0
    assert runs[-1][1] == len(numels)
    assert all(begin < end for begin, end in runs)
    assert all(one[1] == following[0] for one, following in pairwise(runs))


@given(SIZES, st.integers(1, 12))
def test_runs_are_balanced_as_far_as_parameters_allow(numels, parts):
    largest = max(sum(numels[begin:end]) for begin, end in cut(numels, parts))
    assert largest <= sum(numels) / parts + 2 * max(numels)


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=6), st.integers(1, 6),
       st.booleans(), st.data())  # fmt: skip
def test_every_parameter_is_assigned_once(buckets, world_size, shard, data):
    rank = data.draw(st.integers(0, world_size - 1))
    info = OverlapInfo(world_size, shard_buckets=shard)
    info.params_per_bucket = [[torch.empty(n) for n in sizes] for sizes in buckets]
    found = assign(info, rank)
    for index, parameters in enumerate(info.params_per_bucket):
        owners = [owner for owner in range(world_size) if index in found[owner]]
        assert set(owners) == info.assigned_ranks_per_bucket[index]
        assert len(owners) == 1 or shard
        held = {}
        for owner in owners:
            part = found[owner][index]
            held |= dict(enumerate(part.parameters, part.offset))
        assert [id(held[position]) for position in sorted(held)] == [id(p) for p in parameters]
    assert info.num_bucket_assignments == sum(map(len, found))
    for index, at in info.offsets.items():
        assert info.params_per_rank[rank][at] is found[rank][index].parameters[0]


@given(st.permutations([0, 1, 2]), st.tuples(*[st.integers(0, 4)] * 3), st.booleans())
def test_tensors_in_buckets_lie_as_they_did(order, shape, gaps):
    whole = torch.arange(2.0 * torch.Size(shape).numel()).view(*shape[:2], 2 * shape[2])
    tensor = (whole[..., ::2] if gaps else whole[..., : shape[2]].clone()).permute(order)
    before, elements = tensor.clone(), torch.empty(tensor.numel())
    parameter = torch.nn.Parameter(tensor)
    exchange.flatten(elements, [parameter])
    assert exchange.is_flat(elements, [parameter])
    assert torch.equal(parameter, before)
    if tensors.is_dense(tensor):
        assert parameter.stride() == tensor.stride()
        assert torch.equal(tensors.flat(tensor), elements)
