"""Where PyTorch's class of this name goes wrong and this one does not: each test shows both, of the torch installed."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

from tests.gloo import on_ranks, run
from tests.optim.zero_redundancy.training import Net, backward, groups, train
from zckpt.optim import ZeroRedundancyOptimizer, hook_with_zero_step

pytestmark = pytest.mark.interop

Either = ZeroRedundancyOptimizer | TorchOptimizer
MEGABYTE = 1 << 20


def trained(optimizer_class: type[Any], model: Net | None = None, **options: Any) -> tuple[Net, Any]:
    model = model or Net()
    optimizer = optimizer_class(model.parameters(), torch.optim.AdamW, lr=0.1, **options)
    train(model, optimizer, range(2))
    return model, optimizer


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
def test_consolidation_costs_those_nothing_that_do_not_want_it(rank, world_size):
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
def test_state_is_there_without_consolidation(rank, world_size):
    _, torchs = trained(TorchOptimizer)
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        torchs.state_dict()
    torchs.consolidate_state_dict(to=99)  # and nobody has it
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        torchs.state_dict()
    _, ours = trained(ZeroRedundancyOptimizer)
    assert ours.state_dict()["state"]
    with pytest.raises(ValueError, match="no rank 99"):
        ours.consolidate_state_dict(to=99)


@on_ranks(3)
def test_consolidated_copy_is_a_copy(rank, world_size):
    for optimizer_class, is_copy in ((TorchOptimizer, False), (ZeroRedundancyOptimizer, True)):
        model, optimizer = trained(optimizer_class)
        optimizer.consolidate_state_dict()
        if rank == 0:
            taken = optimizer.state_dict()["state"]
            before = copy.deepcopy(taken)
        train(model, optimizer, range(2, 4))
        if rank == 0:
            kept = all(torch.equal(taken[n][key], before[n][key]) for n in taken for key in ("exp_avg", "exp_avg_sq"))
            assert kept == is_copy


@on_ranks(3)
def test_loading_leaves_the_dict_alone(rank, world_size):
    model = Net()
    reference = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, reference, range(2))
    for optimizer_class, is_clean in ((TorchOptimizer, False), (ZeroRedundancyOptimizer, True)):
        given = copy.deepcopy(reference.state_dict())
        optimizer = optimizer_class(model.parameters(), torch.optim.AdamW, lr=0.1)
        optimizer.load_state_dict(given)
        assert (None not in given["state"].values()) == is_clean
        assert (None not in optimizer.state.values()) == is_clean
        given = copy.deepcopy(reference.state_dict())
        given["state"].clear()
        optimizer.load_state_dict(given)
        assert (len(optimizer.optim.state) == 0) == is_clean


@on_ranks(3)
def test_loading_casts_to_the_parameters_type(rank, world_size):
    full = torch.optim.AdamW(Net().parameters(), lr=0.1)
    full = trained_by(full)
    for optimizer_class, is_cast in ((TorchOptimizer, False), (ZeroRedundancyOptimizer, True)):
        optimizer = optimizer_class(Net(torch.bfloat16).parameters(), torch.optim.AdamW, lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(full.state_dict()))
        found = {values["exp_avg"].dtype for values in optimizer.optim.state.values()}
        assert (found == {torch.bfloat16}) == is_cast


def trained_by(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Step once on gradients of ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@on_ranks(3)
def test_overlap_works_on_gloo(rank, world_size):
    for optimizer_class, hook in (
        (TorchOptimizer, ddp_zero_hook.hook_with_zero_step),
        (ZeroRedundancyOptimizer, hook_with_zero_step),
    ):
        ddp = DDP(Net(strange=False))
        optimizer = optimizer_class(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        if optimizer_class is TorchOptimizer:
            with pytest.raises(RuntimeError, match="may meet hangs"):
                hook(allreduce_hook, ddp, optimizer)
            with pytest.raises(RuntimeError, match="until this"):
                optimizer.load_state_dict({})
        else:
            ddp.register_comm_hook(None, hook(allreduce_hook, ddp, optimizer))
            optimizer.load_state_dict(optimizer.state_dict())


@on_ranks(3)
def test_overlap_takes_changes_of_the_learning_rate(rank, world_size):
    for optimizer_class, takes in ((TorchOptimizer, False), (ZeroRedundancyOptimizer, True)):
        model = Net(strange=False)
        ddp = DDP(model)
        optimizer = optimizer_class(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        with mock.patch.object(dist, "get_backend", return_value="other"):  # torch's hook would refuse gloo
            ddp.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, optimizer))
        for step in range(4):
            backward(ddp, step, rank)
        optimizer.param_groups[0]["lr"] = 0.0
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        backward(ddp, 5, rank)
        assert torch.equal(model.first.weight, before["first.weight"]) == takes


@on_ranks(3)
def test_copies_work_or_are_refused(rank, world_size):
    model, torchs = trained(TorchOptimizer)
    copied = copy.deepcopy(torchs)
    backward(model, 0)
    with pytest.raises(AttributeError):
        copied.step()
    _, ours = trained(ZeroRedundancyOptimizer)
    with pytest.raises(TypeError, match="bound to its process group"):
        copy.deepcopy(ours)


@on_ranks(3)
def test_defaults_are_the_inner_classes(rank, world_size):
    _, torchs = trained(TorchOptimizer)
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        torch.optim.lr_scheduler.OneCycleLR(torchs, 0.1, total_steps=9)
    _, ours = trained(ZeroRedundancyOptimizer)
    torch.optim.lr_scheduler.OneCycleLR(ours, 0.1, total_steps=9)


@on_ranks(3)
def test_element_types_may_differ(rank, world_size):
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64)]
    with pytest.raises(ValueError, match="the same dense type"):
        TorchOptimizer(parameters, torch.optim.SGD, lr=1.0)
    for view in (False, True):
        ours = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, parameters_as_bucket_view=view, lr=1.0)
        trained_by(ours)
        assert [p.dtype for p in parameters] == [torch.float32, torch.float64]


@on_ranks(3)
def test_few_messages_are_sent(rank, world_size):
    sent = {}
    for optimizer_class in (TorchOptimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer_class([torch.nn.Parameter(torch.ones(n)) for n in range(1, 41)], torch.optim.SGD, lr=1.0)
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            trained_by(optimizer)
        sent[optimizer_class] = broadcast.call_count
    assert sent == {TorchOptimizer: 40, ZeroRedundancyOptimizer: world_size}
    assert sum(optimizer.shares) == sum(range(1, 41))


@on_ranks(3)
def test_gradients_lie_in_buckets_as_parameters_do(rank, world_size):
    """DDP lays gradients of a transposed or channels-last parameter in a bucket as that lies; torch's hook does not."""
    for optimizer_class, hook in (
        (TorchOptimizer, ddp_zero_hook.hook_with_zero_step),
        (ZeroRedundancyOptimizer, hook_with_zero_step),
    ):
        ddp, reference = (DDP(Net(), broadcast_buffers=False) for _ in range(2))
        optimizer = optimizer_class(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
        with mock.patch.object(dist, "get_backend", return_value="other"):
            ddp.register_comm_hook(None, hook(allreduce_hook, ddp, optimizer))
        for _ in range(3):
            optimizer.zero_grad()
            backward(ddp, 0, rank)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
        backward(reference, 0, rank)
        theirs.step()
        is_right = optimizer_class is ZeroRedundancyOptimizer
        assert torch.allclose(ddp.module.first.weight, reference.module.first.weight, atol=1e-6)
        assert torch.allclose(ddp.module.second.weight, reference.module.second.weight, atol=1e-6) == is_right


@on_ranks(3)
def test_ranks_out_of_inputs_step_with_the_others_gradients(rank, world_size):
    """Under DDP, a rank without inputs has old gradients: a share stepped with those is wrong."""
    for optimizer_class, is_right in ((TorchOptimizer, False), (ZeroRedundancyOptimizer, True)):
        pair = [DDP(Net(), broadcast_buffers=False) for _ in range(2)]
        optimizers = [
            optimizer_class(pair[0].parameters(), torch.optim.SGD, lr=0.5),
            torch.optim.SGD(pair[1].parameters(), lr=0.5),
        ]
        for ddp, optimizer in zip(pair, optimizers, strict=True):
            with Join([ddp, optimizer] if ddp is pair[0] else [ddp]):
                for step in range(2 + 2 * rank):
                    optimizer.zero_grad()
                    backward(ddp, step, rank)
                    optimizer.step()
        if rank == world_size - 1:
            assert all(map(torch.equal, pair[0].parameters(), pair[1].parameters())) == is_right


def dcp_saves_it(rank, world_size, path: Path) -> None:
    _, torchs = trained(TorchOptimizer)
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        dcp.save({"optimizer": torchs.state_dict()}, checkpoint_id=path)
    model = Net()
    ours = ZeroRedundancyOptimizer(groups(model, named=True), torch.optim.AdamW, lr=0.1)
    train(model, ours, range(2))
    dcp.save({"optimizer": ours.sharded_state_dict()}, checkpoint_id=path)


def test_a_checkpoint_needs_no_consolidation(tmp_path):
    run(dcp_saves_it, 2, tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
