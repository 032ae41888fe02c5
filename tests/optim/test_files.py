"""Sharded optimizers in files: written by those who have the state, read by everything."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

import zckpt
from tests.gloo import run
from tests.live import groups_of
from tests.optim.test_distributed import Model, inputs, on_workers, set_weight
from tests.pairwise import each
from tests.truth import Truth, assert_same
from zckpt.errors import UsageError
from zckpt.optim import DistributedOptimizer, ZeroRedundancyOptimizer, files

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Net(torch.nn.Module):
    """Odd sizes, a tied and a frozen parameter, a buffer, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(11, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.middle = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.rand(5), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.rand(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.norm(self.embedding(tokens)))) + self.frozen.sum()


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.arange(8).mul(step + 3).remainder(11)
        optimizer.zero_grad()
        model(tokens).pow(2).mean().backward()
        optimizer.step()


def make(kind: str, model: Net, *, named: bool) -> ZeroRedundancyOptimizer:
    if kind == "adamw":
        return ZeroRedundancyOptimizer(groups_of(model, named=named), torch.optim.AdamW, lr=0.01)
    return ZeroRedundancyOptimizer(groups_of(model, named=named), torch.optim.SGD, lr=0.01, momentum=0.9)


def save_run(rank, world_size, path: Path, kind: str, named: bool) -> list[torch.Tensor]:
    """Train three steps, save, train three more; return the parameters."""
    model = Net()
    optimizer = make(kind, model, named=named)
    train(model, optimizer, range(3))
    files.save(optimizer, path, model=model)
    train(model, optimizer, range(3, 6))
    return [p.detach().clone() for p in model.parameters()]


def load_run(rank, world_size, path: Path, kind: str, named: bool) -> list[torch.Tensor]:
    """Take model and optimizer from a checkpoint, train the next three steps; return the parameters."""
    model = Net()
    checkpoint = zckpt.open(path)
    tensors = {name: checkpoint.read(name, "weight") for name in [*checkpoint.parameters, *checkpoint.buffers]}
    model.load_state_dict(tensors)
    optimizer = make(kind, model, named=named)
    files.load(optimizer, path, model=model)
    train(model, optimizer, range(3, 6))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("kind", "named"), each(["adamw", "sgdm"], [True, False]))
def test_what_ranks_write_continues_at_any_number_of_them(kind, named, tmp_path):
    (wanted, *others) = run(save_run, 3, tmp_path / "saved", kind, named)
    assert all(torch.equal(a, b) for other in others for a, b in zip(wanted, other, strict=True))
    paths = [tmp_path / "saved"]
    for to, options in (("zero-redundancy", {"world_size": 2}), ("zckpt", {"world_size": 4}), ("consolidated", {})):
        paths.append(tmp_path / to)
        zckpt.convert(tmp_path / "saved", paths[-1], to=to, **options)
    for world_size, path in zip((1, 2, 4, 5), paths, strict=True):
        for found in run(load_run, world_size, path, kind, named):
            for mine, its in zip(found, wanted, strict=True):
                assert torch.equal(mine, its), (world_size, path.name)


def test_tools_treat_it_like_any_other(tmp_path):
    run(save_run, 2, tmp_path / "saved", "adamw", True)
    checkpoint = zckpt.open(tmp_path / "saved")
    assert checkpoint.format == "zero-redundancy"
    assert checkpoint.world_size == 2
    assert {n: p.tied_to for n, p in checkpoint.parameters.items() if p.tied_to} == {"head.weight": "embedding.weight"}
    assert [n for n, p in checkpoint.parameters.items() if p.frozen] == ["frozen"]
    assert set(checkpoint.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert checkpoint.param_groups[0].hyperparameters["weight_decay"] == 0.1
    zckpt.consolidate(tmp_path / "saved", tmp_path / "model.safetensors", slots="all")
    zckpt.convert(tmp_path / "saved", tmp_path / "deepspeed", to="deepspeed", world_size=3, stage=2)
    found = zckpt.open(tmp_path / "deepspeed")
    for name in ("embedding.weight", "middle.bias"):
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.read(name, slot), checkpoint.read(name, slot))


def load_by_torch(rank, world_size, path: Path) -> bool:
    """PyTorch's own optimizer takes the rank's file, and goes on as ours does."""
    model = Net()
    checkpoint = zckpt.open(path)
    model.load_state_dict({n: checkpoint.read(n, "weight") for n in [*checkpoint.parameters, *checkpoint.buffers]})
    other = copy.deepcopy(model)
    theirs = TorchOptimizer(groups_of(model, named=False), torch.optim.AdamW, lr=0.01)
    theirs.optim.load_state_dict(torch.load(path / f"optimizer_rank_{rank}.pt", weights_only=True))
    for mine, its in zip(theirs.param_groups, theirs.optim.param_groups, strict=True):
        mine.update({key: value for key, value in its.items() if key != "params"})
    ours = make("adamw", other, named=True)
    files.load(ours, path)
    train(model, theirs, range(3, 6))
    train(other, ours, range(3, 6))
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_torchs_own_optimizer_loads_what_ranks_write(tmp_path):
    run(save_run, 3, tmp_path / "saved", "adamw", True)
    assert all(run(load_by_torch, 3, tmp_path / "saved"))


def load_deepspeed(rank, world_size, path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Give an optimizer of parameters of the checkpoint's names and shapes its state; return this rank's."""
    checkpoint = zckpt.open(path)
    parameters = {
        n: torch.nn.Parameter(torch.zeros(p.shape)) for n, p in checkpoint.parameters.items() if p.group is not None
    }
    made = [{"params": [(n, parameters[n]) for n in group.parameters]} for group in checkpoint.param_groups]
    optimizer = ZeroRedundancyOptimizer(made, torch.optim.AdamW, lr=1.0)
    files.load(optimizer, path)
    names = {p: n for n, p in parameters.items()}
    return {names[p]: dict(values) for p, values in optimizer.state.items()}


@pytest.mark.parametrize("name", ["s2_fp32_dp4", "s3_bf16_dp3", "s1_fp32_dp3"])
def test_a_deepspeed_checkpoint_is_loaded_as_it_is(name, tmp_path):
    truth = Truth(FIXTURES / name)
    found = {}
    for part in run(load_deepspeed, 3, FIXTURES / name):
        assert not set(part) & set(found)
        found |= part
    for slot in truth.slots:
        for parameter, value in truth.kind(slot).items():
            assert_same(found[parameter][slot], value, f"{slot}/{parameter}")


def refuse_other_parameters(rank, world_size, path: Path) -> str:
    model = Net()
    optimizer = ZeroRedundancyOptimizer([("embedding.weight", model.embedding.weight)], torch.optim.AdamW, lr=1.0)
    with pytest.raises(zckpt.UsageError, match="param groups"):
        files.load(optimizer, path)
    unnamed = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0)
    with pytest.raises(zckpt.UsageError, match="has no name"):
        files.save(unnamed, path.with_name("other"))
    with pytest.raises(zckpt.TargetExistsError):
        files.save(optimizer, path)
    dist.barrier()
    return "refused"


def test_refusals_reach_all_ranks(tmp_path):
    run(save_run, 2, tmp_path / "saved", "adamw", True)
    before = {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}
    assert run(refuse_other_parameters, 2, tmp_path / "saved") == ["refused"] * 2
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


# --- RPC workers

PLACES = (("worker1", 1, True), ("worker2", 2, True), ("worker1", 3, True))


def workers_save_and_others_load(path: Path) -> None:
    model = Model(*PLACES)
    optimizer = DistributedOptimizer(torch.optim.AdamW, named(model), lr=0.05)
    for x in inputs(3):
        model.step(optimizer, x)
    files.save(optimizer, path)
    moved = Model(("worker2", 1, True), ("worker0", 2, True), ("worker2", 3, True))
    checkpoint = zckpt.open(path)
    for number, parameter in enumerate(moved.parameters):
        weight = checkpoint.read(f"layer{number}", "weight")
        rpc.rpc_sync(parameter.owner(), set_weight, args=(parameter, weight))
    other = DistributedOptimizer(torch.optim.AdamW, named(moved), lr=1.0)
    files.load(other, path)
    assert other.param_groups[0]["lr"] == 0.05
    for x in inputs(3):
        model.step(optimizer, x)
        moved.step(other, x)
    for one, two in zip(model.weights(), moved.weights(), strict=True):
        assert torch.equal(one, two)
    another = DistributedOptimizer(torch.optim.RMSprop, named(moved), lr=1.0)
    with pytest.raises(UsageError, match="RMSprop cannot continue from the state of layer0"):
        files.load(another, path)
    assert another.param_groups[0]["lr"] == 1.0


def named(model: Model) -> list[tuple[str, Any]]:
    return [(f"layer{number}", parameter) for number, parameter in enumerate(model.parameters)]


def test_workers_write_and_read_their_own_parts(tmp_path):
    path = tmp_path / "saved"
    on_workers(partial(workers_save_and_others_load, path), tmp_path)
    assert sorted(p.name for p in path.iterdir()) == [
        "metadata.pt", "model_rank_0.pt", "model_rank_1.pt", "optimizer_rank_0.pt", "optimizer_rank_1.pt",
    ]  # fmt: skip
    zckpt.consolidate(path, tmp_path / "model.safetensors", slots="all")
    zckpt.convert(path, tmp_path / "other", to="zero-redundancy", world_size=3)
    one, other = zckpt.open(path), zckpt.open(tmp_path / "other")
    for name in one.parameters:
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(one.read(name, slot), other.read(name, slot))
