"""Between backward and step: whoever clips, scales, drops or looks at gradients does it to the average, or is told."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

from tests.gloo import on_ranks
from tests.optim.zero.reference import (
    ModelParallel,
    Net,
    Unsharded,
    assert_alike,
    beside_unsharded,
    bits,
    both_step,
    is_unchanged,
    loss_of,
    losses,
    make,
)
from tests.pairwise import each, pairwise
from zckpt.optim import DynamicLossScaler, ZeroOptimizer

pytestmark = pytest.mark.interop


def prepared(attached: bool, **options: Any) -> tuple[torch.nn.Module, Net, Unsharded, ZeroOptimizer]:
    net, twin, ours = beside_unsharded(**options)
    model: torch.nn.Module = net
    if attached:
        model = DDP(net, bucket_cap_mb=1e-4)
        ours.attach(model)
    return model, net, twin, ours


OPTIONS = ({"stage": 1}, {"stage": 2}, {"stage": 2, "loss_scale": 64.0})
WAYS = each((False, True), OPTIONS)


@on_ranks(3, each=pairwise((False, True), OPTIONS, (2.0, math.inf)))
def test_clipping_of_torch_by_norm(attached, options, norm_type):
    """torch's own clipping gives the norm of the average, whatever the loss scale, and clips it."""
    model, net, twin, ours = prepared(attached, **options)
    for step in range(2):
        ours.backward(loss_of(model, step))
        trained = [one for one in net.parameters() if one.requires_grad]
        torch.autograd.grad(loss_of(net, 9), trained, allow_unused=True)  # puts nothing into `grad`
        mine = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type)
        twin.gradients(losses(step))
        its = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.05, norm_type=norm_type)
        assert float(its) > 0.1
        torch.testing.assert_close(mine, its.detach(), rtol=1e-5, atol=0)
        ours.step()
        assert ours.last_grad_norm < 0.06 or norm_type != 2.0
        twin.optimizer.step()
        twin.assert_is(net)
    assert_alike(net)


@on_ranks(2, each=WAYS)
def test_clipping_of_torch_by_value(attached, options):
    model, net, twin, ours = prepared(attached, **options)
    for step in range(3):
        ours.backward(loss_of(model, step))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        twin.gradients(losses(step))
        torch.nn.utils.clip_grad_value_(twin.model.parameters(), 0.01)
        ours.step()
        twin.optimizer.step()
        twin.assert_is(net)


@on_ranks(2, each=WAYS)
def test_scaled_and_dropped(attached, options):
    """What is taken out of `grad` is forgotten, for one parameter or all, as torch's own optimizers forget it."""
    model, net, twin, ours = prepared(attached, **options)
    for step in range(3):
        ours.backward(loss_of(model, step))
        twin.gradients(losses(step))
        for one in (net, twin.model):
            one.last.weight.grad.mul_(0.5)
            one.last.bias.grad /= 4
        net.spare.weight.grad = None
        twin.model.spare.weight.grad.zero_()
        ours.step()
        twin.optimizer.step()
        twin.assert_is(net)
    for to_none in (True, False):
        ours.backward(loss_of(model, 7))
        model.zero_grad(set_to_none=to_none)
        both_step(ours, model, twin, [8])


@on_ranks(2, each=WAYS)
def test_what_is_refused(attached, options):
    model, net, _, ours = prepared(attached, **options)
    ours.backward(loss_of(model, 0))
    gradient = net.last.weight.grad
    assert gradient.shape == net.last.weight.shape
    assert "the gradient lies with the ranks that step it" in repr(gradient)
    for look in (
        lambda: gradient + 1, gradient.mean, lambda: gradient.float() + 1, lambda: gradient[0],
        lambda: gradient.clone() + 1, lambda: torch.cat([gradient]), lambda: gradient.add_(1),
        lambda: torch.ones(3, 9).copy_(gradient), lambda: gradient.mul_(torch.ones(3, 9)),
        lambda: copy.deepcopy([gradient]), lambda: pickle.dumps(gradient), lambda: torch.save(gradient, io.BytesIO()),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"lie in partitions.*clip them with ZeroOptimizer\(clip_grad=\.\.\.\)"):
            look()
    for read in (gradient.tolist, gradient.numpy):
        with pytest.raises(RuntimeError, match=r"subclass|lie in partitions|numpy"):
            read()
    ours.step()
    assert net.last.weight.grad is None


@on_ranks(2, each=WAYS)
def test_scaler_of_torch(attached, options):
    """It is told what to use instead, and nothing is stepped."""
    model, _, _, ours = prepared(attached, **options)
    before = bits(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler.*loss_scale=DynamicLossScaler\(\).*backward\(loss\)"):
        scaler.step(ours)
    assert is_unchanged(model, before)


@on_ranks(2)
def test_parts_of_models(rank, world_size):
    """A norm over this rank's parts is not that of the model."""
    alone = [dist.new_group([r]) for r in range(world_size)]

    net = Net()
    ours = make(net, process_group=alone[rank], model_parallel=ModelParallel(dist.group.WORLD))
    ours.backward(loss_of(net, 0))
    with pytest.raises(RuntimeError, match=r"that other ranks share.*clip_grad"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@on_ranks(2)
def test_another_optimizer_after_this_one():
    """One that is gone between backward and step leaves nothing that the next one trips over."""
    net, twin, ours = beside_unsharded()
    ours.backward(loss_of(net, 0))
    gone = weakref.ref(ours)
    del ours
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="lie in partitions"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    ours = make(net, loss_scale=DynamicLossScaler(cur_scale=4.0))
    both_step(ours, net, twin, [1])
