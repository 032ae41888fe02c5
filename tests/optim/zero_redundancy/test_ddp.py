"""Beside DistributedDataParallel in each of its modes: the parameters of an unsharded optimizer under the same DDP."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

from tests.gloo import on_ranks, run
from tests.live import equal
from tests.optim.zero.reference import assert_alike
from tests.optim.zero_redundancy.training import Net, assert_same_parameters, backward, make, unsharded
from tests.pairwise import each

pytestmark = pytest.mark.interop

KINDS = ("adamw", "sgd_nesterov")


class Branched(Net):
    """Some ranks leave a layer out at some steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.last(torch.relu(self.second(hidden))) if x[0, 0] > 0 else hidden[:, :3] * self.scale


class Usual(Net):
    """All matrices row-major, and no scalar: PowerSGD takes none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, strange=False)


def plain(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()


def accumulating(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(0, 9, 3):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                backward(model, step + part, rank)
        optimizer.step()


def clipping(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step, rank)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def joining(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Rank r has 3 + r batches; the unsharded optimizer needs no joining."""
    joinables = [model, optimizer] if hasattr(optimizer, "join_hook") else [model]
    with Join(joinables):
        for step in range(3 + rank):
            optimizer.zero_grad()
            backward(model, step, rank)
            optimizer.step()


def compressing(model: DDP) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def factoring(model: DDP) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


Mode = tuple[type[Net], torch.dtype, dict[str, Any], Callable[[DDP], None] | None, Callable[..., None]]
FLOAT = torch.float32
MODES: dict[str, Mode] = {
    "plain": (Net, FLOAT, {}, None, plain),
    "no_sync": (Net, FLOAT, {}, None, accumulating),
    "gradients as bucket views": (Net, FLOAT, {"gradient_as_bucket_view": True}, None, plain),
    "views, accumulated": (Net, FLOAT, {"gradient_as_bucket_view": True}, None, accumulating),
    "static graph": (Net, FLOAT, {"static_graph": True}, None, plain),
    "static graph and views": (Net, FLOAT, {"static_graph": True, "gradient_as_bucket_view": True}, None, plain),
    "unused parameters": (Branched, FLOAT, {"find_unused_parameters": True}, None, plain),
    "small buckets": (Net, FLOAT, {"bucket_cap_mb": 1e-4}, None, plain),
    "no buffers broadcast": (Net, FLOAT, {"broadcast_buffers": False}, None, plain),
    "bfloat16": (Net, torch.bfloat16, {}, None, plain),
    "clipped gradients": (Net, FLOAT, {}, None, clipping),
    "compressing hook": (Net, FLOAT, {}, compressing, plain),
    "factoring hook": (Usual, FLOAT, {}, factoring, plain),
    "uneven inputs": (Net, FLOAT, {"broadcast_buffers": False}, None, joining),
}


def trains_as_the_unsharded_optimizer(rank, world_size, modes: list[str]) -> None:
    for mode in modes:
        build, dtype, options, prepare, loop = MODES[mode]
        at = [*MODES].index(mode) // 2
        for number, kind in enumerate(KINDS) if world_size == 2 else [(0, KINDS[at % 2])]:
            view = (number + at) % 2 == 0  # each mode and kind with one of both, in turn
            torch.manual_seed(0)
            model = build(dtype)
            other = copy.deepcopy(model)
            pair = [DDP(model, **options), DDP(other, **options)]
            optimizers = [make(kind, pair[0], parameters_as_bucket_view=view), unsharded(kind, pair[1])]
            for ddp, optimizer in zip(pair, optimizers, strict=True):
                if prepare is not None:
                    prepare(ddp)
                loop(ddp, optimizer, rank)
            if loop is joining:  # the unsharded ones of ranks that joined early have stopped
                assert rank != world_size - 1 or equal(model, other)
                assert_alike(model)
            else:
                assert_same_parameters(model, other, f"{mode}, {kind}, {view}")


@pytest.mark.parametrize(("world_size", "modes"), each([2, 3], [list(MODES)[::2], list(MODES)[1::2]]))
def test_trains_as_the_unsharded_optimizer(world_size, modes):
    run(trains_as_the_unsharded_optimizer, world_size, modes)


@on_ranks(2)
def test_mixed_precision_with_a_scaler_that_skips_a_step(rank, world_size):
    model = Net()
    other = copy.deepcopy(model)
    for net, sharded in ((model, True), (other, False)):
        ddp = DDP(net)
        optimizer = make("adamw", ddp) if sharded else unsharded("adamw", ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ddp(torch.full((5, 7), 0.1 * step + 0.1 * rank)).float().pow(2).mean()
            scaler.scale(loss).backward()
            if step == 1:
                next(net.parameters()).grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
    assert_same_parameters(model, other)
