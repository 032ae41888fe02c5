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


def train(model: DDP, optimizer: Any, rank: int, *, steps: int = 4, parts: int = 1, clip: bool = False) -> None:
    """Take steps of several backwards, of which the last one reduces."""
    for step in range(0, steps * parts, parts):
        optimizer.zero_grad()
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                backward(model, step + part, rank)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def compressing(model: DDP) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def factoring(model: DDP) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


Mode = tuple[type[Net], torch.dtype, dict[str, Any], Callable[[DDP], None] | None, dict[str, Any]]
FLOAT = torch.float32
UNEVEN: dict[str, Any] = {"uneven": True}
ACCUMULATED = {"parts": 3, "steps": 3}
MODES: dict[str, Mode] = {
    "plain": (Net, FLOAT, {}, None, {}),
    "no_sync": (Net, FLOAT, {}, None, ACCUMULATED),
    "gradients as bucket views": (Net, FLOAT, {"gradient_as_bucket_view": True}, None, {}),
    "views, accumulated": (Net, FLOAT, {"gradient_as_bucket_view": True}, None, ACCUMULATED),
    "static graph": (Net, FLOAT, {"static_graph": True}, None, {}),
    "static graph and views": (Net, FLOAT, {"static_graph": True, "gradient_as_bucket_view": True}, None, {}),
    "unused parameters": (Branched, FLOAT, {"find_unused_parameters": True}, None, {}),
    "small buckets": (Net, FLOAT, {"bucket_cap_mb": 1e-4}, None, {}),
    "no buffers broadcast": (Net, FLOAT, {"broadcast_buffers": False}, None, {}),
    "bfloat16": (Net, torch.bfloat16, {}, None, {}),
    "clipped gradients": (Net, FLOAT, {}, None, {"clip": True}),
    "compressing hook": (Net, FLOAT, {}, compressing, {}),
    "factoring hook": (Usual, FLOAT, {}, factoring, {}),
    "uneven inputs": (Net, FLOAT, {"broadcast_buffers": False}, None, UNEVEN),
}


def trains_as_the_unsharded_optimizer(rank, world_size, modes: list[str]) -> None:
    for mode in modes:
        build, dtype, options, prepare, how = MODES[mode]
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
                if how == UNEVEN:  # the unsharded optimizer needs no joining
                    with Join([ddp, optimizer] if optimizer is optimizers[0] else [ddp]):
                        train(ddp, optimizer, rank, steps=3 + rank)
                else:
                    train(ddp, optimizer, rank, **how)
            if how == UNEVEN:  # the unsharded ones of ranks that joined early have stopped
                assert rank != world_size - 1 or equal(model, other)
                assert_alike(model)
            else:
                assert_same_parameters(model, other, f"{mode}, {kind}, {view}")


@pytest.mark.parametrize(("world_size", "modes"), each([2, 3], [list(MODES)[::2], list(MODES)[1::2]]))
def test_trains_as_the_unsharded_optimizer(world_size, modes):
    run(trains_as_the_unsharded_optimizer, world_size, modes)


@on_ranks(2)
def test_mixed_precision_with_a_scaler_that_skips_a_step(rank):
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
