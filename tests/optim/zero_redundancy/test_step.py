"""The step: what a sharded optimizer does to parameters is what the unsharded one does, bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed_engine.optimizers import FusedLayoutAdam, Lion
from tests.gloo import on_ranks, run
from tests.live import of_all_ranks
from tests.logical import assert_same_tree
from tests.optim.zero_redundancy.training import (
    OPTIMIZERS,
    Net,
    assert_same_parameters,
    backward,
    groups,
    make,
    train_twins,
    twins,
    unsharded,
)
from tests.pairwise import some
from zckpt.optim import ZeroRedundancyOptimizer
from zckpt.optim.zero_redundancy import exchange

pytestmark = pytest.mark.interop

VIEWS = [(False,), (True,)]
"""Whether parameters are views of the buckets that are sent."""


@pytest.mark.parametrize(
    ("world_size", "view"), some([(2, True), (3, False), (5, False)], [(1, True), (2, False), (4, True)])
)
@pytest.mark.every(2)
def test_steps_as_the_unsharded_optimizer(world_size, view):
    run(steps_as_the_unsharded_optimizer, world_size, view)


def steps_as_the_unsharded_optimizer(rank, world_size, view: bool) -> None:
    for kind in [*OPTIMIZERS][:: 2 if world_size > 3 else 1]:
        _, ours, _, theirs = pair = twins(kind, parameters_as_bucket_view=view)
        train_twins(pair, what=kind)
        ours.consolidate_state_dict(to=world_size - 1)
        if rank == world_size - 1:
            assert_same_tree(ours.state_dict(), theirs.state_dict(), kind)


@on_ranks(3, each=VIEWS)
def test_large_parameters_are_sent_as_they_are_and_small_ones_packed(view):
    model = Net(wide=25000)
    other = copy.deepcopy(model)
    ours = make("adamw", model, parameters_as_bucket_view=view)
    train_twins((model, ours, other, unsharded("adamw", other)))
    assert view or {len(bucket.parameters) > 1 for bucket in ours._exchange.buckets} == {True, False}


@on_ranks(3, each=VIEWS)
def test_several_element_types(view):
    """The first parameter is empty."""
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16] * 3
    parameters = [torch.nn.Parameter(torch.randn(n, 3).to(dtype)) for n, dtype in enumerate(dtypes)]
    others = copy.deepcopy(parameters)
    ours = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.1)
    theirs = torch.optim.AdamW(others, lr=0.1)
    for step in range(3):
        for every in (parameters, others):
            for number, parameter in enumerate(every):
                unit = 1j if parameter.is_complex() else 1
                parameter.grad = torch.full_like(parameter, unit * (1 + step - number))
        ours.step()
        theirs.step()
    assert_same_tree(parameters, others)


@on_ranks(3, each=VIEWS)
def test_more_ranks_than_parameters(rank, world_size, view):
    x = torch.nn.Parameter(torch.ones(3))
    ours = ZeroRedundancyOptimizer([x], torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.1)
    x.grad = torch.ones(3)
    ours.step()
    assert ours.shares == [3] + [0] * (world_size - 1)
    assert x[0] < 1
    ours.consolidate_state_dict(to=world_size - 1)
    if rank == world_size - 1:
        assert ours.state_dict()["state"][0]["step"] == 1


@on_ranks(3, each=VIEWS)
def test_group_added_later(view):
    model, other = Net(), Net()
    both = groups(model), groups(other)
    ours = ZeroRedundancyOptimizer([both[0][0]], torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.1)
    theirs = torch.optim.AdamW([both[1][0]], lr=0.1)
    pair = model, ours, other, theirs
    train_twins(pair, range(2))
    before = dict(ours._param_to_rank)
    for optimizer, (_, added) in ((ours, both[0]), (theirs, both[1])):
        optimizer.add_param_group(added)
    assert all(ours._param_to_rank[p] == r for p, r in before.items())
    train_twins(pair, range(2, 4))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        ours.add_param_group({"params": [model.scale]})


@on_ranks(3, each=VIEWS)
def test_trainability_that_changes(view):
    """What was frozen in all steps is not sent."""
    model = Net()
    model.first.requires_grad_(False)
    other, trained = copy.deepcopy(model), set()
    ours = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.1)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.1)
    for step in range(7):
        train_twins((model, ours, other, theirs), [step])
        trained |= {p for p in model.parameters() if p.requires_grad}
        assert view or trained == {p for bucket in ours._exchange.buckets for p in bucket.parameters}
        for net in (model, other):
            net.first.requires_grad_(step >= 2)
            net.last.requires_grad_(step % 3 == 0)


@on_ranks(3)
def test_closure_and_its_loss():
    model, ours, other, theirs = twins("sgd_nesterov")

    def closure(net: Net, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        return backward(net, 1)

    for _ in range(3):
        loss = ours.step(partial(closure, model, ours))
        assert torch.equal(loss, theirs.step(partial(closure, other, theirs)))
    assert_same_parameters(model, other)


class Keyed(torch.optim.SGD):
    """Its step takes a number and no closure, and notes it in the group."""

    def step(self, number: int = 0) -> int:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["number"] = number
        return number


@on_ranks(3)
def test_inner_steps_of_other_signatures():
    model = Net()
    ours = ZeroRedundancyOptimizer(groups(model), Keyed, lr=0.1)
    backward(model, 0)
    assert ours.step(number=7) == 7
    assert [group["number"] for group in ours.param_groups] == [7, 7]
    for optimizer_class in (Lion, FusedLayoutAdam):
        model, other = Net(), Net()
        ours = ZeroRedundancyOptimizer(groups(model), optimizer_class, lr=1e-3)
        train_twins((model, ours, other, optimizer_class(groups(other), lr=1e-3)))


@on_ranks(3)
def test_schedulers_and_changes_of_hyperparameters():
    _, ours, _, theirs = pair = twins("adamw")
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=9) for one in (ours, theirs)]
    for step in range(8):
        train_twins(pair, [step])
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in (ours, theirs):
            optimizer.param_groups[1]["weight_decay"] = 0.01 * step
    assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"] != (0.9, 0.999)


@on_ranks(3)
def test_parameters_taken_out_of_their_bucket():
    model, ours, other, _ = pair = twins("adamw", parameters_as_bucket_view=True)
    train_twins(pair, range(2))
    for net in (model, other):
        for parameter in net.first.parameters():
            parameter.data = parameter.data * 2
    train_twins(pair, range(2, 4))
    assert ours._exchange.is_intact()


@on_ranks(3)
def test_shares_nearly_equal_are_gathered_at_once(rank, world_size):
    """As on GPUs; on gloo it would do, too, if more slowly."""
    even = [[torch.nn.Parameter(torch.full((n,), -1.0)) for n in (100, 7)] for _ in range(world_size)]
    uneven = [[torch.nn.Parameter(torch.full((n,), -1.0))] for n in range(10, 10 + 10 * world_size, 10)]
    for shares, gathered in ((even, 1), (uneven, 0)):
        made = exchange.bucket_view_exchange(shares, gather=True)
        assert (len(made.gathered), len(made.buckets)) == ((1, 0) if gathered else (0, world_size))
        for parameter in shares[rank]:
            parameter.data.fill_(rank)
        exchange.run(made, dist.group.WORLD, rank, world_size)
        assert made.is_intact()
        for owner, parameters in enumerate(shares):
            assert all(torch.equal(p, torch.full_like(p, owner)) for p in parameters)


@on_ranks(3)
def test_zero_grad_and_step_hooks():
    model, ours, _, _ = twins("adamw")
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    backward(model, 0)
    ours.step()
    assert seen == ["before", "after"]
    ours.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    backward(model, 0)
    ours.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())


@on_ranks(4)
def test_group_ranks_are_told_from_global_ranks(rank):
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        with pytest.raises(ValueError, match="not in the process group"):
            ZeroRedundancyOptimizer([torch.ones(1)], torch.optim.SGD, process_group=group, lr=1.0)
        return
    for view in (False, True):
        _, ours, _, theirs = pair = twins("adamw", process_group=group, parameters_as_bucket_view=view)
        train_twins(pair)
        assert (ours.rank, ours.global_rank, ours.world_size) == (rank // 2, rank, 2)
        ours.consolidate_state_dict(to=1)
        if rank == 3:
            assert_same_tree(ours.state_dict()["state"], theirs.state_dict()["state"])
        else:
            assert len(ours.state_dict()["state"]) < len(theirs.state_dict()["state"])
        assert of_all_ranks(ours.shares, group) == [ours.shares] * 2


def test_packs_hold_every_parameter_once_and_no_more_than_they_may():
    sizes = [5, 0, exchange.DIRECT_NBYTES // 4, 7] + [exchange.DIRECT_NBYTES // 8] * 40
    parameters = [torch.zeros(n) for n in sizes]
    packs = exchange.plain_exchange([parameters]).buckets
    held = [p for pack in packs for p in pack.parameters]
    assert {id(p) for p in held} == {id(p) for p in parameters if p.numel()}
    assert len(held) == len(sizes) - 1
    assert all(sum(p.nbytes for p in b.parameters) <= exchange.BUCKET_NBYTES for b in packs)
