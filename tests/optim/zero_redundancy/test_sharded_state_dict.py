"""Sharded state dicts: torch.distributed.checkpoint saves and loads them, at any world size, and tools read them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import zckpt
from tests.gloo import run
from tests.optim.zero_redundancy.training import Net, assert_same_parameters, assert_same_state, groups, make, train
from zckpt.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop


def save_run(rank, world_size, path: Path, named: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save from every rank; return the consolidated state, and what training goes on to."""
    model = Net()
    model.last.bias.requires_grad_(False)  # never has state
    ours = make("adamw", model, named=named)
    train(model, ours, range(3))
    dcp.save({"model": model.state_dict(), "optimizer": ours.sharded_state_dict()}, checkpoint_id=path)
    ours.consolidate_state_dict()
    state = ours.state_dict()
    train(model, ours, range(3, 6))
    return state, model.state_dict()


def load_run(rank, world_size, path: Path, named: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    model = Net()
    model.last.bias.requires_grad_(False)
    ours = make("adamw", model, named=named)
    ours.param_groups[0]["lr"] = 9.0
    metadata = dcp.FileSystemReader(path).read_metadata()
    into = {"model": model.state_dict(), "optimizer": ours.sharded_state_dict(metadata, within=["optimizer"])}
    dcp.load(into, checkpoint_id=path)
    model.load_state_dict(into["model"])
    ours.load_sharded_state_dict(into["optimizer"])
    ours.consolidate_state_dict()
    state = ours.state_dict()
    train(model, ours, range(3, 6))
    return state, model.state_dict()


@pytest.mark.parametrize("named", [True, False])
def test_what_4_ranks_save_continues_at_any_number_of_them(named, tmp_path):
    state, weights = run(save_run, 4, tmp_path / "saved", named)[0]
    for world_size in (1, 2, 3, 5):
        found = run(load_run, world_size, tmp_path / "saved", named)
        assert_same_state(found[0][0]["state"], state["state"])
        assert found[0][0]["param_groups"] == state["param_groups"]
        for _, after in found:
            assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_tools_read_what_ranks_save(tmp_path):
    state, _ = run(save_run, 3, tmp_path / "saved", True)[0]
    checkpoint = zckpt.open(tmp_path / "saved")
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert [name for group in checkpoint.param_groups for name in group.parameters] == names
    for number, values in state["state"].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(checkpoint.read(names[number], slot), values[slot])
    assert checkpoint.param_groups[1].hyperparameters["lr"] == 0.02


def room_is_made_of_what_the_optimizer_has(rank, world_size, path: Path) -> None:
    """Without metadata, state is read into state that is there already."""
    model, other = Net(), Net()
    ours, theirs = make("adamw", model, named=True), make("adamw", other, named=True)
    train(model, ours, range(3))
    dcp.save(ours.sharded_state_dict(), checkpoint_id=path)
    train(other, theirs, range(5, 6))
    other.load_state_dict(model.state_dict())
    into = theirs.sharded_state_dict()
    dcp.load(into, checkpoint_id=path)
    theirs.load_sharded_state_dict(into)
    train(model, ours, range(3, 5))
    train(other, theirs, range(3, 5))
    assert_same_parameters(model, other)


def refuses_what_would_be_lost(rank, world_size, path: Path) -> None:
    model = Net()
    ours = make("adamw", model, named=True)
    train(model, ours, range(2))
    dcp.save(ours.sharded_state_dict(), checkpoint_id=path)
    fresh = make("adamw", model, named=True)
    into = fresh.sharded_state_dict()
    assert not into["state"]
    dcp.load(into, checkpoint_id=path)
    with pytest.raises(
        ValueError,
        match=r"state of .* differs from what was read: exp_avg, exp_avg_sq, step; read into sharded_state_dict",
    ):
        fresh.load_sharded_state_dict(into)
    unnamed = make("adamw", model)
    metadata = dcp.FileSystemReader(path).read_metadata()
    into = unnamed.sharded_state_dict(metadata)
    dcp.load(into, checkpoint_id=path)
    with pytest.raises(ValueError, match=r"parameters that the optimizer lacks: first\.weight"):
        unnamed.load_sharded_state_dict(into)
    with pytest.raises(ValueError, match="no optimizer with param groups at model"):
        fresh.sharded_state_dict(metadata, within=["model"])
    with pytest.raises(ValueError, match="no 'state' and 'param_groups'"):
        fresh.load_sharded_state_dict({})
    assert not fresh.state


def every_rank_has_its_own_and_nothing_is_copied(rank, world_size, path: Path) -> None:
    model = Net()
    ours = ZeroRedundancyOptimizer(groups(model), torch.optim.Adam, lr=0.1)
    train(model, ours, range(2))
    mine = ours.sharded_state_dict()
    held = {id(value) for values in ours.state.values() for value in values.values()}
    assert {id(value) for values in mine["state"].values() for value in values.values()} == held
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, list(mine["state"]))
    everything = [label for labels in told for label in labels]
    assert sorted(everything, key=int) == [str(number) for number in range(len(ours._all_params))]
    before = copy.deepcopy(mine["param_groups"])
    ours.param_groups[0]["lr"] = 3.0
    assert mine["param_groups"] == before


@pytest.mark.parametrize(
    "check",
    [room_is_made_of_what_the_optimizer_has, refuses_what_would_be_lost, every_rank_has_its_own_and_nothing_is_copied],
)
def test_sharded_state_dict(check, tmp_path):
    run(check, 2, tmp_path / "saved")
