"""Stepping in DDP's communication hook: on gloo, in all of its modes, as an optimizer that steps after backward."""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from tests.optim.zero_redundancy.training import (
    Net,
    assert_same_parameters,
    assert_same_state,
    backward,
    groups,
    make,
    unsharded,
)
from tests.pairwise import each, some
from zckpt.optim import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from zckpt.optim.zero_redundancy.exchange import OverlapStatus

pytestmark = pytest.mark.interop

HOOKS = (hook_with_zero_step, hook_with_zero_step_interleaved)
SMALL = 4e-4  # MB, of which the model makes several buckets


def overlapped(
    model: Net, hook: Any = hook_with_zero_step, kind: str = "adamw", *, reduce: Any = allreduce_hook, **options: Any
) -> tuple[DDP, ZeroRedundancyOptimizer]:
    """Return a DDP with an optimizer that steps in its hook, from the first iteration on."""
    shard = options.pop("shard_buckets", False)
    group = options.pop("process_group", None)
    ddp = DDP(model, process_group=group, **{"bucket_cap_mb": SMALL, **options})
    ours = make(kind, ddp, overlap_with_ddp=True, process_group=group)
    ddp.register_comm_hook(group, hook(reduce, ddp, ours, shard, from_first_iteration=True))
    return ddp, ours


def separate(
    model: Net, kind: str = "adamw", *, reduce: Any = allreduce_hook, **options: Any
) -> tuple[DDP, torch.optim.Optimizer]:
    """Return what `overlapped` has to equal."""
    group = options.get("process_group")
    ddp = DDP(model, **{"bucket_cap_mb": SMALL, **options})
    ddp.register_comm_hook(group, reduce)
    return ddp, unsharded(kind, ddp)


def run_both(pairs: Any, steps: Any, rank: int) -> None:
    """Run some steps; one of the optimizers steps in backward already."""
    for ddp, optimizer in pairs:
        for step in steps:
            optimizer.zero_grad()
            backward(ddp, step, rank)
            if not isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.step()


def as_an_optimizer_that_steps_after_backward(rank, world_size, part: int) -> None:
    """In every other combination of hook, sharing and mode of DDP: the even or the odd ones."""
    modes: list[dict[str, Any]] = [
        {}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True}, {"bucket_cap_mb": 25},
    ]  # fmt: skip
    every = itertools.product(modes, HOOKS, (False, True))
    for mode, hook, shard in (one for number, one in enumerate(every) if (number + number // 4) % 2 == part):
        model, other = Net(), Net()
        pairs = [overlapped(model, hook, shard_buckets=shard, **mode), separate(other, **mode)]
        run_both(pairs, range(4), rank)
        what = f"{hook.__name__}, {shard}, {mode}"
        assert_same_parameters(model, other, what)
        ours = pairs[0][1]
        assert ours._overlap_info.status == OverlapStatus.INITIALIZED
        held = [p for assigned in ours._bucket_assignments_per_rank for a in assigned.values() for p in a.parameters]
        assert len(held) == len(set(held)) == len(list(model.parameters()))
        ours.consolidate_state_dict()
        if rank == 0:
            assert_same_state(ours.state_dict()["state"], pairs[1][1].state_dict()["state"], what)


@pytest.mark.parametrize(("world_size", "part"), some([(3, 0)], [(3, 1), *itertools.product([1, 2, 4], [0, 1])]))
def test_as_an_optimizer_that_steps_after_backward(world_size, part):
    run(as_an_optimizer_that_steps_after_backward, world_size, part)


@on_ranks(2)
def test_first_iterations_change_nothing_unless_asked_to(rank, world_size):
    for static, lost in ((False, 2), (True, 3)):
        model, other = Net(), Net()
        ddp = DDP(model, static_graph=static)
        ours = make("adamw", ddp, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, ours))
        for step in range(lost):
            backward(ddp, step, rank)
        assert equal(model, other)
        ours.zero_grad()
        backward(ddp, lost, rank)
        assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@on_ranks(2)
def test_learning_rates_take_effect(rank, world_size):
    for hook in HOOKS:
        model, other = Net(), Net()
        pairs = [overlapped(model, hook), separate(other)]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pairs]
        for step in range(6):
            run_both(pairs, [step], rank)
            for scheduler in schedulers:
                scheduler.step()
        assert_same_parameters(model, other)
        for group in pairs[0][1].param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        run_both(pairs[:1], [7], rank)
        assert equal(model, other)


@on_ranks(2, each=each((0, 1, 2, 5), (True, False)))
def test_state_is_saved_and_loaded(rank, world_size, before, whole):
    """At any time: before DDP has settled on its buckets, and after; whole, or each rank its own part."""
    model, other = Net(), Net()
    pairs = [overlapped(model), separate(other)]
    run_both(pairs, range(before), rank)
    (_, ours), (_, theirs) = pairs
    saved = copy.deepcopy(theirs.state_dict() if whole else ours.state_dict())
    fresh = [overlapped(model), separate(other)]
    fresh[0][1].load_state_dict(saved)
    fresh[1][1].load_state_dict(theirs.state_dict())
    run_both(fresh, range(before, before + 4), rank)
    assert_same_parameters(model, other)
    fresh[0][1].load_state_dict(fresh[1][1].state_dict())
    run_both(fresh, range(20, 22), rank)
    assert_same_parameters(model, other)
    if before == 5:
        with pytest.raises(ValueError, match="before the first iteration"):
            ours.load_state_dict(make("adamw", model).state_dict())


@on_ranks(2)
def test_gradients_are_accumulated(rank, world_size):
    for hook in HOOKS:
        model, other = Net(), Net()
        pairs = [overlapped(model, hook), separate(other)]
        for step in range(6):
            for ddp, optimizer in pairs:
                optimizer.zero_grad()
                for part in range(2):
                    with ddp.no_sync() if part == 0 else contextlib.nullcontext():
                        backward(ddp, 2 * step + part, rank)
                if ddp is pairs[1][0]:
                    optimizer.step()
        assert_same_parameters(model, other)


@on_ranks(2, each=each(HOOKS, (False, True)))
def test_hook_that_compresses(rank, world_size, hook, shard):
    model, other = Net(), Net()
    pairs = [overlapped(model, hook, reduce=fp16_compress_hook, shard_buckets=shard),
             separate(other, reduce=fp16_compress_hook)]  # fmt: skip
    run_both(pairs, range(6), rank)
    assert_same_parameters(model, other)


@on_ranks(2)
def test_hook_that_answers_elsewhere(rank, world_size):
    """A hook may return gradients in another tensor than the bucket's."""

    def reduce(group, bucket):  # DDP compares annotations to classes
        mine = bucket.buffer().double() / world_size
        future = dist.all_reduce(mine, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].float())

    for hook in HOOKS:
        model, other = Net(), Net()
        pairs = [overlapped(model, hook, reduce=reduce), separate(other, reduce=reduce)]
        run_both(pairs, range(5), rank)
        assert_same_parameters(model, other)


@on_ranks(2, each=each((1, 2, 4), HOOKS))
def test_uneven_inputs(rank, world_size, fewest, hook):
    model, other = Net(), Net()
    pairs = [overlapped(model, hook, broadcast_buffers=False), separate(other, broadcast_buffers=False)]
    for pair in pairs:
        with pair[0].join():
            run_both([pair], range(fewest + 2 * rank), rank)
    last = world_size - 1
    assert rank != last or all(map(torch.equal, model.parameters(), other.parameters()))
    for parameter in model.parameters():
        expected = parameter.detach().clone()
        dist.broadcast(expected, last)
        assert torch.equal(parameter, expected)


@on_ranks(2)
def test_parameters_taken_out_of_their_bucket(rank, world_size):
    model, other = Net(), Net()
    pairs = [overlapped(model), separate(other)]
    run_both(pairs, range(4), rank)
    for net in (model, other):
        net.first.weight.data = net.first.weight.data * 2
    run_both(pairs, range(4, 7), rank)
    assert_same_parameters(model, other)


@on_ranks(2)
def test_optimizer_that_counts_steps_in_its_groups(rank, world_size):
    class Counting(FusedLayoutAdam):
        """Counts as apex does: once for each call of `step`."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            super().step()

    for hook in HOOKS:
        model = Net()
        ddp = DDP(model, bucket_cap_mb=SMALL)
        ours = ZeroRedundancyOptimizer(groups(ddp), Counting, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, ours, from_first_iteration=True))
        run_both([(ddp, ours)], range(5), rank)
        mine = [bool(group["params"]) for group in ours.optim.param_groups]
        assert [g.get("calls") for g, has in zip(ours.param_groups, mine, strict=True) if has] == [5] * sum(mine)


@on_ranks(2)
def test_what_it_refuses_and_warns_of(rank, world_size):
    ddp, ours = overlapped(Net())
    with pytest.raises(ValueError, match="needs an optimizer with overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, make("adamw", ddp))
    assert ours.step() is None
    ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    run_both([(ddp, ours)], range(4), rank)
    with pytest.raises(RuntimeError, match="after DDP's buckets"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


@on_ranks(2)
def test_torchs_own_hook_runs_it(rank, world_size):
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
def test_group_ranks_are_told_from_global_ranks(rank, world_size, hook, shard):
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        model, other = Net(), Net()
        pairs = [overlapped(model, hook, shard_buckets=shard, process_group=group),
                 separate(other, process_group=group)]  # fmt: skip
        run_both(pairs, range(5), rank)
        assert_same_parameters(model, other)
