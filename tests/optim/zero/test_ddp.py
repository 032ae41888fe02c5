"""Beside DistributedDataParallel: its buckets go to owners, once, and training is that of the plain optimizer."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

from tests.gloo import on_ranks
from tests.live import groups_of, of_all_ranks
from tests.optim.zero.reference import (
    SGD,
    TOLERANCE,
    Flat,
    Net,
    assert_alike,
    assert_near,
    bits,
    has_gradient,
    is_unchanged,
    loss_of,
    make,
    stepped,
)
from tests.optim.zero.traffic import traffic
from tests.pairwise import each
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop


def train(
    model: torch.nn.Module, optimizer: Any, rank: int, *, steps: int = 4, parts: int = 1, no_sync: bool = False,
    by_tensor: bool = False, in_turn: bool = False,
) -> None:  # fmt: skip
    """Take steps of several backwards, the early ones under `no_sync`; ranks may use the spare layer in turn."""
    for step in range(0, steps * parts, parts):
        optimizer.zero_grad()
        for part in range(parts):
            with model.no_sync() if no_sync and part < parts - 1 else contextlib.nullcontext():
                loss = loss_of(model, step + part, spare=not in_turn or (step + rank) % 2 == 0)
                optimizer.backward(loss) if isinstance(optimizer, ZeroOptimizer) and not by_tensor else loss.backward()
        optimizer.step()


BF16 = torch.bfloat16
UNEVEN: dict[str, Any] = {"uneven": True}
ACCUMULATED = {"parts": 3, "no_sync": True, "steps": 3}
MODES: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, Any]]] = {
    "plain": ({}, torch.float32, {}),
    "Tensor.backward": ({"by_tensor": True}, torch.float32, {}),
    "no_sync": (ACCUMULATED, torch.float32, {}),
    "each part reduced": ({"parts": 3, "steps": 3}, torch.float32, {}),  # DDP averages what has been summed up
    "static graph": ({}, torch.float32, {"static_graph": True}),
    "static graph, small buckets": ({}, torch.float32, {"static_graph": True, "bucket_cap_mb": 1e-4}),
    "gradients as bucket views": ({}, torch.float32, {"gradient_as_bucket_view": True}),
    "views, accumulated": (ACCUMULATED, torch.float32, {"gradient_as_bucket_view": True}),
    "unused parameters": ({"in_turn": True}, torch.float32, {"find_unused_parameters": True}),
    "small buckets": ({}, torch.float32, {"bucket_cap_mb": 1e-4}),
    "small buckets, accumulated": (ACCUMULATED, torch.float32, {"bucket_cap_mb": 1e-4}),
    "uneven inputs": (UNEVEN, torch.float32, {}),
    "uneven inputs, small buckets": (UNEVEN, torch.float32, {"bucket_cap_mb": 1e-4}),
    "bfloat16": ({}, BF16, {}),
}


def group_of_ranks() -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=30))


def pair(dtype: torch.dtype, ddp: dict[str, Any], **options: Any) -> tuple[DDP, ZeroOptimizer]:
    process_group = group_of_ranks()
    model = DDP(Net(dtype), process_group=process_group, **ddp)
    ours = make(model.module, process_group=process_group, **options)
    ours.attach(model)
    return model, ours


OPTIONS = [{"stage": 1, "overlap_comm": False, "reduce_scatter": False}, {"stage": 2}]


@on_ranks(2, each=each(MODES, OPTIONS))
def test_trains_as_the_plain_optimizer(rank, world_size, mode, options):
    """In bfloat16 as without DDP, for the plain optimizer has no masters."""
    how, dtype, ddp = MODES[mode]
    model, ours = pair(dtype, ddp, **options)
    other: torch.nn.Module = Net(dtype)
    if dtype == torch.float32:
        theirs: Any = torch.optim.SGD(groups_of(other, named=True), **SGD)
        other = DDP(other, process_group=group_of_ranks(), **ddp)
    else:
        theirs = make(other)
    start = bits(model)
    for one, optimizer in ((model, ours), (other, theirs)):
        if how == UNEVEN:  # the plain optimizer needs no joining
            with Join([one, optimizer] if optimizer is ours else [one]):
                train(one, optimizer, rank, steps=1 + 2 * rank)
        else:
            train(one, optimizer, rank, **how)
    assert_alike(model)
    assert not any(map(torch.equal, bits(model), start))
    if how != UNEVEN or rank == world_size - 1:  # the plain optimizer of those that joined early has stopped
        assert_near(model, other, TOLERANCE if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3})  # of a sum


@on_ranks(2)
def test_two_ranks_equal_the_plain_optimizer_bit_for_bit(world_size):
    """Of two ranks, whose sum has no order, with one bucket, and elements that lie in the same places."""
    model, ours = pair(torch.float32, {}, reduce_scatter=False)
    net = Net()
    theirs = Flat(net, torch.optim.SGD, parts=world_size)
    other = DDP(net)
    for step in range(4):
        stepped(ours, model, step)
        loss_of(other, step).backward()
        theirs.step()
    assert is_unchanged(model, bits(other))


def what_ddp_gets_back(optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    """Return a list that gets a copy of each bucket that DDP goes on with."""
    found: list[torch.Tensor] = []
    real = optimizer._reduce_bucket

    def noted(bucket: Any) -> Any:
        future = real(bucket)
        found.append(future.wait().clone())
        return future

    optimizer._reduce_bucket = noted  # type: ignore[method-assign]
    return found


@on_ranks(2)
def test_reduces_each_gradient_once():
    """To its owner, also if there is accumulation; and DDP's own reducer, which counts beside Python, sends nothing."""
    for reduce_scatter, name in ((True, "reduce"), (False, "all_reduce")):
        model, ours = pair(torch.float32, {"bucket_cap_mb": 1e-4}, reduce_scatter=reduce_scatter)
        returned = what_ddp_gets_back(ours)
        numel = sum(p.numel() for p in model.parameters())
        stepped(ours, model, 0)
        for parts in (1, 3):
            with traffic() as seen:
                for part in range(parts):
                    with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                        ours.backward(loss_of(model, part))
                assert seen.elements == {name: numel}
                assert not any(map(has_gradient, model.parameters()))
                ours.step()
            weights = sum(group.flat.numel() for group in ours.groups)
            assert seen.elements == {name: numel, "broadcast": weights}
            theirs = of_all_ranks(returned)
            # What DDP puts into `grad` is this rank's: had it averaged gradients, too, all would have the same.
            assert returned
            assert not any(torch.equal(a, b) for a, b in zip(theirs[0], theirs[1], strict=True))


@on_ranks(2)
def test_holds_its_own_part_only(world_size):
    model, ours = pair(torch.float32, {})
    ours.backward(loss_of(model, 0))
    for group in ours.groups:
        assert group.gradient is not None
        assert group.gradient.numel() == group.partition == group.flat.numel() // world_size
    whole = {name: ours.full_state(name, "gradient") for name in ours.names()}
    other = DDP(Net())
    loss_of(other, 0).backward()
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, **TOLERANCE)


@on_ranks(2)
def test_scales_the_loss(rank):
    """Overflow on one rank skips the step on all."""
    model, ours = pair(torch.float32, {}, loss_scale=1024.0)
    other, theirs = pair(torch.float32, {})
    for one, optimizer in ((model, ours), (other, theirs)):
        train(one, optimizer, rank)
    assert_near(model, other)
    before = bits(model)
    ours.backward(loss_of(model, 9) * (float("inf") if rank == 1 else 1.0))
    ours.step()
    assert ours.overflow
    assert is_unchanged(model, before)
    train(model, ours, rank)
    assert_alike(model)


@on_ranks(2)
def test_without_attach(rank):
    """What both reduce is right, too: it is only sent twice."""
    model, other = DDP(Net()), DDP(Net())
    ours = make(model.module)
    theirs = torch.optim.SGD(groups_of(other.module, named=True), **SGD)
    for one, optimizer in ((model, ours), (other, theirs)):
        train(one, optimizer, rank)
    assert_near(model, other)


@on_ranks(2)
def test_other_ranks_are_refused(rank):
    halves = [dist.new_group([0]), dist.new_group([1])]
    model = DDP(Net(), process_group=halves[rank])
    ours = make(model.module)
    with pytest.raises(ValueError, match="the model and the optimizer must have the same ranks"):
        ours.attach(model)
    ours.backward(loss_of(model.module, 0))  # its own hooks are still there
    ours.step()
    assert_alike(model)
