"""What PyTorch's class of this name costs and this one does not: each test measures both, of the torch installed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

from tests.gloo import on_ranks
from zckpt.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop

MEGABYTE = 1 << 20


def peak_of(act: Any) -> int:
    """Return by how many bytes this process grew at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


@pytest.mark.nightly
@on_ranks(3)
def test_consolidation_costs_those_nothing_that_do_not_want_it(rank):
    grown = {}
    for optimizer_class in (TorchOptimizer, ZeroRedundancyOptimizer):
        parameters = [torch.nn.Parameter(torch.zeros(MEGABYTE // 4)) for _ in range(24)]
        optimizer = optimizer_class(parameters, torch.optim.Adam, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        dist.barrier()
        grown[optimizer_class] = peak_of(lambda optimizer=optimizer: optimizer.consolidate_state_dict(to=0))
    if rank != 0:
        assert grown[ZeroRedundancyOptimizer] < 3 * MEGABYTE
        assert grown[TorchOptimizer] > 16 * MEGABYTE  # at the least the 8 parameters of another rank, twice


@on_ranks(3)
def test_few_messages_are_sent(world_size):
    sent = {}
    for optimizer_class in (TorchOptimizer, ZeroRedundancyOptimizer):
        parameters = [torch.nn.Parameter(torch.ones(n)) for n in range(1, 41)]
        optimizer = optimizer_class(parameters, torch.optim.SGD, lr=1.0)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            optimizer.step()
        sent[optimizer_class] = broadcast.call_count
    assert sent == {TorchOptimizer: 40, ZeroRedundancyOptimizer: world_size}
    assert sum(optimizer.shares) == sum(range(1, 41))
