"""Which backward ends a window, beside DDP and without it; what no pass has reduced when a step is due; inner hooks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

from tests.gloo import on_ranks
from tests.live import groups_of
from tests.optim.zero.reference import (
    SGD,
    BrokenError,
    Net,
    Unsharded,
    assert_alike,
    assert_near,
    beside_unsharded,
    bits,
    both_step,
    fails,
    has_gradient,
    is_unchanged,
    loss_of,
    losses,
    make,
    stepped,
)
from tests.pairwise import each, pairwise
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop

PARTS = 3


def run_backward(ours: ZeroOptimizer, loss: torch.Tensor, how: str) -> None:
    """By the optimizer, or by somebody who divides the loss himself."""
    if how == "optimizer.backward":
        ours.backward(loss)
    else:
        (loss / ours.gradient_accumulation_steps).backward()


HOWS = ("optimizer.backward", "Tensor.backward")


@on_ranks(2, each=each(("each", "last", "none"), HOWS, (1, 2)))
def test_attached_steps_once_in_a_window(world_size, syncs, how, stage):
    """A step comes with the last backward of a window, whether DDP synchronises each of them, the last or none."""
    net = Net()
    model = DDP(net, gradient_as_bucket_view=stage == 1, bucket_cap_mb=1e-4)
    twin = Unsharded(net)
    ours = make(net, gradient_accumulation_steps=PARTS, stage=stage)
    ours.attach(model)
    for step in range(3):
        for part in range(PARTS):
            before = bits(model)
            ours.zero_grad()
            is_synced = {"each": True, "last": part == PARTS - 1, "none": False}[syncs]
            with nullcontext() if is_synced else model.no_sync():
                run_backward(ours, loss_of(model, PARTS * step + part), how)
            ours.step()
            assert is_unchanged(model, before) == (part < PARTS - 1)
        twin.train(losses(range(PARTS * step, PARTS * step + PARTS)), PARTS * world_size)
        twin.assert_is(net)
    assert_alike(net)


class Split(torch.nn.Module):
    """A model of which DDP has a part: one layer lies outside, one is ignored, one is frozen when DDP is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.outside = torch.nn.Linear(5, 5)
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.outside(x))


def wrapped(model: Split) -> DDP:
    DDP._set_params_and_buffers_to_ignore_for_model(model.net, ["twice.weight"])
    model.net.spare.requires_grad_(False)
    made = DDP(model.net, bucket_cap_mb=1e-4)
    model.net.spare.requires_grad_(True)
    return made


@on_ranks(2, each=pairwise(HOWS, (1, 2), (1, 2)))
def test_parameters_that_ddp_does_not_reduce_are_trained(world_size, how, steps, stage):
    model = Split()
    twin = Unsharded(model)
    ours = make(model, gradient_accumulation_steps=steps, stage=stage)
    net = model.net
    start = bits(model)
    model.net = wrapped(model)
    ours.attach(model.net)
    for step in range(2):
        for part in range(steps):
            with nullcontext() if part == steps - 1 else model.net.no_sync():
                run_backward(ours, loss_of(model, steps * step + part), how)
            ours.step()
        twin.train(losses(range(steps * step, steps * step + steps)), steps * world_size)
    model.net = net
    twin.assert_is(model)
    assert_alike(model)
    assert not any(torch.equal(p.detach(), was) for p, was in zip(model.parameters(), start, strict=True))


@on_ranks(2)
def test_of_two_optimizers():
    """What is in DDP's buckets and another optimizer's, is averaged for that one."""
    model, other = DDP(Net(), bucket_cap_mb=1e-4), DDP(Net(), bucket_cap_mb=1e-4)
    every_one = list(model.module.named_parameters())
    ours = ZeroOptimizer([(n, p) for n, p in every_one if p.dim() > 1], torch.optim.SGD, **SGD)
    ours.attach(model)
    beside = torch.optim.SGD([p for _, p in every_one if p.dim() <= 1], **SGD)
    theirs = torch.optim.SGD(other.parameters(), **SGD)
    for step in range(4):
        for one, optimizers in ((model, (ours, beside)), (other, (theirs,))):
            loss_of(one, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(model)
    assert_near(model, other)


@on_ranks(2, each=each(("all-reduce", "fp16", "power"), (1, 2)))
def test_inner_hooks(kind, steps):
    """As DDP with this hook and the plain optimizer; what is not in its buckets, is trained all the same."""

    def hook_of(model: DDP) -> tuple[Any, Any]:
        if kind == "power":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            return powerSGD_hook.powerSGD_hook, state
        return {"all-reduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}[kind], None

    nets = [Net(), Net()]
    for net in nets:
        net.scale = torch.nn.Parameter(torch.tensor([1.5]))  # PowerSGD takes none without dimensions
    # PowerSGD sends from callbacks, in no order where there are several buckets.
    model, other = (DDP(net, bucket_cap_mb=25 if kind == "power" else 1e-4) for net in nets)
    ours = make(model.module, gradient_accumulation_steps=steps, stage=steps)
    hook, state = hook_of(model)
    ours.attach(model, hook, state=state)
    other.register_comm_hook(*reversed(hook_of(other)))
    theirs = torch.optim.SGD(groups_of(other.module, named=True), **SGD)
    for step in range(4):
        for part in range(steps):
            last = part == steps - 1
            with nullcontext() if last else model.no_sync():
                ours.backward(loss_of(model, steps * step + part))
            ours.step()
            with nullcontext() if last else other.no_sync():
                (loss_of(other, steps * step + part) / steps).backward()
        theirs.step()
        theirs.zero_grad()
        assert_near(model, other)
    assert_alike(model)


@on_ranks(2)
def test_hooks_that_are_refused():
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ours = make(model.module)
    with pytest.raises(
        ValueError, match=r"already has its only communication hook.*attach\(model, hook, state=state\)"
    ):
        ours.attach(model)
    model = DDP(Net())
    ours = make(model.module)
    ours.backward(loss_of(model.module, 0))
    with pytest.raises(RuntimeError, match="between backward and step"):
        ours.attach(model)
    ours.step()


STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 1, "overlap_comm": False}]


@on_ranks(2, each=each(STAGES, (False, True)))
def test_partial_window(world_size, options, attached):
    """Five batches in windows of three: the last window is two, and is stepped. Not all parameters are in each."""
    net = Net()
    twin = Unsharded(net)
    model = DDP(net, find_unused_parameters=True) if attached else net
    ours = make(net, gradient_accumulation_steps=PARTS, **options)
    if attached:
        ours.attach(model)
    for epoch in range(2):
        for number in range(5):
            ends = number in (2, 4)
            if number == 4:
                ours.set_gradient_accumulation_boundary(True)
            ours.zero_grad()
            before = bits(net)
            assert ours.is_gradient_accumulation_boundary() == ends
            ours.backward(loss_of(model, 5 * epoch + number, spare=number != 1))
            assert ours.is_gradient_accumulation_boundary() == ends
            if not ends:
                ours.zero_grad()
            ours.step()
            assert is_unchanged(net, before) != ends
        ours.set_gradient_accumulation_boundary(None)
        for window in (range(3), range(3, 5)):
            every = [
                partial(loss_of, step=5 * epoch + number, rank=its, spare=number != 1)
                for number in window
                for its in range(world_size)
            ]
            twin.train(every, PARTS * world_size)
        twin.assert_is(net)
    assert_alike(net)


@on_ranks(2, each=[(options,) for options in STAGES])
def test_boundary_by_hand(options):
    """Windows of any length, and one that is ended when its last backward has been."""
    net, twin, ours = beside_unsharded(**options)
    step = 0
    for length, told_before in ((1, True), (3, True), (2, False), (4, True)):
        for part in range(length):
            ours.set_gradient_accumulation_boundary(told_before and part == length - 1)
            before = bits(net)
            ours.zero_grad()
            stepped(ours, net, step + part)
            assert is_unchanged(net, before) == (not told_before or part < length - 1)
        if not told_before:
            ours.set_gradient_accumulation_boundary(True)
            ours.step()
        twin.train(losses(range(step, step + length)))
        twin.assert_is(net)
        step += length


@on_ranks(2, each=each((0, 2), (1, 2)))
def test_failure_in_a_window_whose_end_is_told(rank, at, stage):
    """A rank that fails in a window whose end is told goes through it with the others, and all go on."""
    net = Net()
    ours = make(net, stage=stage)
    for part in range(3):
        ours.set_gradient_accumulation_boundary(part == 2)
        before = bits(net)
        loss = loss_of(net, part)
        if part == at and rank == 0:
            loss.register_hook(fails)
            with pytest.raises(BrokenError):
                ours.backward(loss)
        else:
            ours.backward(loss)
        failed = part == 2 or (rank == 0 and part >= at)
        with pytest.raises(RuntimeError, match="no rank has stepped") if failed else nullcontext():
            ours.step()
        assert is_unchanged(net, before)
    twin = Unsharded(net)
    both_step(ours, net, twin, [7])
    assert_alike(net)


@on_ranks(2, each=[(1,), (2,)])
def test_left_by_no_sync(rank, world_size, stage):
    """A backward under no_sync after one that was reduced: the step has both."""
    net, twin, ours = beside_unsharded(stage=stage)
    for step in range(0, 6, 2):
        ours.backward(loss_of(net, step))
        with ours.no_sync():
            ours.backward(loss_of(net, step + 1, spare=rank == 0))
        ours.step()
        last = [partial(loss_of, step=step + 1, rank=r, spare=r == 0) for r in range(world_size)]
        twin.train([*losses(step), *last])
        twin.assert_is(net)
    assert_alike(net)


@on_ranks(2, each=[(1,), (2,)])
def test_no_sync_of_the_optimizer_beside_ddp(stage):
    """The optimizer's own no_sync holds back what DDP would have reduced; before a backward outside it, and after."""
    net = Net()
    model = DDP(net, bucket_cap_mb=1e-4)
    twin = Unsharded(net)
    ours = make(net, stage=stage)
    ours.attach(model)
    for step in range(0, 6, 2):
        for part in range(2):
            with ours.no_sync() if part == (step // 2) % 2 else nullcontext():
                ours.backward(loss_of(model, step + part))
        ours.step()
        twin.train(losses(range(step, step + 2)))
        twin.assert_is(net)
    assert_alike(net)


@on_ranks(2, each=[(1,), (2,)])
def test_put_by_hand_after_backward(rank, world_size, stage):
    net, twin, ours = beside_unsharded(stage=stage)
    ours.backward(loss_of(net, 0))
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    ours.step()
    twin.gradients(losses(range(1)))
    for parameter in twin.model.parameters():
        parameter.grad += (1 + world_size) / 2
    twin.optimizer.step()
    twin.assert_is(net)


@on_ranks(2, each=[(1,), (2,)])
def test_joined_in_a_window(rank, world_size, stage):
    """Attached, rank 0 has two windows and rank 1 has four."""
    net = Net()
    model = DDP(net, bucket_cap_mb=1e-4)
    ours = make(net, gradient_accumulation_steps=2, stage=stage)
    ours.attach(model)
    twin = Unsharded(net)
    with Join([model, ours]):
        for step in range(4 + 4 * rank):
            stepped(ours, model, step)
    for window in range(4):
        ranks = range(world_size) if window < 2 else [1]
        steps = range(2 * window, 2 * window + 2)
        twin.train([partial(loss_of, step=step, rank=its) for step in steps for its in ranks], 2 * world_size)
    assert_alike(net)
    assert not any(map(has_gradient, net.parameters()))
    if rank == 1:
        twin.assert_is(net)


@on_ranks(2)
def test_joining_and_boundary():
    ours = make(Net())
    with Join([ours]), pytest.raises(RuntimeError, match="cannot know where a window ends"):
        ours.set_gradient_accumulation_boundary(True)
