"""Stepping in DDP's communication hook: on gloo, in all of its modes, as an optimizer that steps after backward."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

from tests.deepspeed_engine.optimizers import FusedLayoutAdam
from tests.gloo import on_ranks, run
from tests.live import equal
from tests.logical import assert_same_tree
from tests.optim.zero.reference import assert_alike
from tests.optim.zero_redundancy.training import Net, assert_same_parameters, backward, groups, make, unsharded
from tests.pairwise import each, some
from zckpt.optim import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from zckpt.optim.zero_redundancy.exchange import OverlapStatus

pytestmark = pytest.mark.interop

HOOKS = (hook_with_zero_step, hook_with_zero_step_interleaved)
SMALL = 4e-4  # MB, of which the model makes several buckets


Trained = tuple[DDP, torch.optim.Optimizer]


def pair_of(hook: Any = hook_with_zero_step, *, reduce: Any = allreduce_hook, **options: Any) -> list[Trained]:
    """Return a DDP with an optimizer that steps in its hook from the first iteration on, and what it has to equal."""
    shard = options.pop("shard_buckets", False)
    group = options.get("process_group")
    ddp, other = (DDP(Net(), **{"bucket_cap_mb": SMALL, **options}) for _ in range(2))
    ours = make("adamw", ddp, overlap_with_ddp=True, process_group=group)
    ddp.register_comm_hook(group, hook(reduce, ddp, ours, shard, from_first_iteration=True))
    other.register_comm_hook(group, reduce)
    return [(ddp, ours), (other, unsharded("adamw", other))]


def train(pairs: Iterable[Trained], steps: Iterable[int], rank: int, parts: int = 1) -> None:
    """Take some steps, each with several backwards; one of the optimizers steps in the last one already."""
    for ddp, optimizer in pairs:
        for step in steps:
            optimizer.zero_grad()
            for part in range(parts):
                with ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                    backward(ddp, parts * step + part, rank)
            if not isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.step()


def train_alike(pairs: list[Trained], steps: Iterable[int], rank: int, what: str = "", **options: Any) -> None:
    """Let both take some steps, and fail unless they are the same."""
    train(pairs, steps, rank, **options)
    assert_same_parameters(pairs[0][0], pairs[1][0], what)


MODES: list[dict[str, Any]] = [
    {}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True},
    {"static_graph": True, "gradient_as_bucket_view": True}, {"bucket_cap_mb": 25},
]  # fmt: skip
WAYS = [*itertools.product(HOOKS, (False, True))]


@pytest.mark.parametrize("world_size", some([3], [1, 2, 4]))
@pytest.mark.parametrize("part", some([0], [1, 2, 3]))
def test_as_an_optimizer_that_steps_after_backward(world_size, part):
    run(as_an_optimizer_that_steps_after_backward, world_size, part)


def as_an_optimizer_that_steps_after_backward(rank, world_size, part: int) -> None:
    """In every mode of DDP, each with another hook and sharing."""
    for number, mode in enumerate(MODES, part):
        hook, shard = WAYS[number % len(WAYS)]
        pairs = pair_of(hook, shard_buckets=shard, **mode)
        what = f"{hook.__name__}, {shard}, {mode}"
        train_alike(pairs, range(4), rank, what)
        (ddp, ours), (_, theirs) = pairs
        assert ours._overlap_info.status == OverlapStatus.INITIALIZED
        held = [p for assigned in ours._bucket_assignments_per_rank for a in assigned.values() for p in a.parameters]
        assert len(held) == len(set(held)) == len(list(ddp.parameters()))
        ours.consolidate_state_dict()
        if rank == 0:
            assert_same_tree(ours.state_dict()["state"], theirs.state_dict()["state"], what)


@on_ranks(2)
def test_first_iterations_change_nothing_unless_asked_to(rank):
    for static, lost in ((False, 2), (True, 3)):
        model, other = Net(), Net()
        ddp = DDP(model, static_graph=static)
        ours = make("adamw", ddp, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, ours))
        train([(ddp, ours)], range(lost), rank)
        assert equal(model, other)
        train([(ddp, ours)], [lost], rank)
        assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@on_ranks(2)
def test_learning_rates_take_effect(rank):
    for hook in HOOKS:
        pairs = pair_of(hook)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pairs]
        for step in range(6):
            train_alike(pairs, [step], rank)
            for scheduler in schedulers:
                scheduler.step()
        for group in pairs[0][1].param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        train(pairs[:1], [7], rank)
        assert equal(pairs[0][0], pairs[1][0])


@on_ranks(2, each=each((0, 1, 2, 5), (True, False)))
def test_state_is_saved_and_loaded(rank, before, whole):
    """At any time: before DDP has settled on its buckets, and after; whole, or each rank its own part."""
    pairs = pair_of()
    train(pairs, range(before), rank)
    (_, ours), (_, theirs) = pairs
    saved = copy.deepcopy(theirs.state_dict() if whole else ours.state_dict())
    fresh = pair_of()
    for (was, _), (ddp, optimizer), state in zip(pairs, fresh, (saved, theirs.state_dict()), strict=True):
        ddp.load_state_dict(was.state_dict())
        optimizer.load_state_dict(state)
    train_alike(fresh, range(before, before + 4), rank)
    fresh[0][1].load_state_dict(fresh[1][1].state_dict())
    train_alike(fresh, range(20, 22), rank)
    if before == 5:
        with pytest.raises(ValueError, match="before the first iteration"):
            ours.load_state_dict(make("adamw", Net()).state_dict())


def elsewhere(group, bucket):  # without annotations, which DDP compares to classes
    """Return gradients in another tensor than the bucket's, as a hook may."""
    mine = bucket.buffer().double() / dist.get_world_size(group)
    future = dist.all_reduce(mine, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].float())


@on_ranks(2, each=each(WAYS, [(allreduce_hook, 2), (fp16_compress_hook, 1), (elsewhere, 1)]))
def test_other_reductions_and_accumulated_gradients(rank, way, reduced):
    (hook, shard), (reduce, parts) = way, reduced
    train_alike(pair_of(hook, reduce=reduce, shard_buckets=shard), range(5), rank, parts=parts)


@on_ranks(2, each=each((1, 2, 4), HOOKS))
def test_uneven_inputs(rank, world_size, fewest, hook):
    pairs = pair_of(hook, broadcast_buffers=False)
    for pair in pairs:
        with pair[0].join():
            train([pair], range(fewest + 2 * rank), rank)
    (ddp, _), (other, _) = pairs
    assert rank != world_size - 1 or equal(ddp, other)
    assert_alike(ddp)


@on_ranks(2)
def test_parameters_taken_out_of_their_bucket(rank):
    pairs = pair_of()
    train(pairs, range(4), rank)
    for ddp, _ in pairs:
        ddp.module.first.weight.data = ddp.module.first.weight.data * 2
    train_alike(pairs, range(4, 7), rank)


@on_ranks(2)
def test_optimizer_that_counts_steps_in_its_groups(rank):
    class Counting(FusedLayoutAdam):
        """Counts as apex does: once for each call of `step`."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            super().step()

    for hook in HOOKS:
        ddp = DDP(Net(), bucket_cap_mb=SMALL)
        ours = ZeroRedundancyOptimizer(groups(ddp), Counting, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, ours, from_first_iteration=True))
        train([(ddp, ours)], range(5), rank)
        mine = [bool(group["params"]) for group in ours.optim.param_groups]
        assert [g.get("calls") for g, has in zip(ours.param_groups, mine, strict=True) if has] == [5] * sum(mine)


@on_ranks(2)
def test_what_it_refuses_and_warns_of(rank):
    (ddp, ours), _ = pair_of()
    with pytest.raises(ValueError, match="needs an optimizer with overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, make("adamw", ddp))
    assert ours.step() is None
    ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    train([(ddp, ours)], range(4), rank)
    with pytest.raises(RuntimeError, match="after DDP's buckets"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


@on_ranks(2)
def test_torchs_own_hook_runs_it(rank):
    """The surface that torch's hook uses is there. It refuses gloo, on which it may wait for ever, and rarely does."""
    model, other = Net(strange=False), Net(strange=False)
    ddp = DDP(model, bucket_cap_mb=SMALL)
    ours = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with mock.patch.object(dist, "get_backend", return_value="other"):
        ddp.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, ours))
    reference = DDP(other, bucket_cap_mb=SMALL, broadcast_buffers=False)
    reference.register_comm_hook(None, allreduce_hook)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        ours.zero_grad()
        backward(ddp, step, rank)
        theirs.zero_grad()
        backward(reference, step, rank)
        if step >= 2:
            theirs.step()
    assert equal(model, other)


@on_ranks(3, each=each(HOOKS, (False, True)))
def test_group_ranks_are_told_from_global_ranks(rank, hook, shard):
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        train_alike(pair_of(hook, shard_buckets=shard, process_group=group), range(5), rank)
