"""Sharded state dicts: torch.distributed.checkpoint saves and loads them, at any world size, and tools read them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from tests.gloo import on_ranks, run
from tests.live import of_all_ranks
from tests.logical import assert_same_tree
from tests.optim.zero_redundancy.training import Net, groups, make, train, train_twins
from tests.pairwise import each
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


def load_run(rank, world_size, path: Path, named: bool, state: dict[str, Any], after: dict[str, Any]) -> None:
    """Go on from what each rank reads of the files, and from the consolidated state."""
    model = Net()
    model.last.bias.requires_grad_(False)
    ours = make("adamw", model, named=named)
    ours.param_groups[0]["lr"] = 9.0
    metadata = dcp.FileSystemReader(path).read_metadata()
    into = {"model": model.state_dict(), "optimizer": ours.sharded_state_dict(metadata, within=["optimizer"])}
    dcp.load(into, checkpoint_id=path)
    model.load_state_dict(into["model"])
    ours.load_sharded_state_dict(into["optimizer"])
    other = copy.deepcopy(model)
    whole = make("adamw", other, named=named)
    whole.load_state_dict(state)
    ours.consolidate_state_dict()
    if rank == 0:
        assert_same_tree(ours.state_dict(), state)
    for net, optimizer in ((model, ours), (other, whole)):
        train(net, optimizer, range(3, 6))
        assert_same_tree(net.state_dict(), after)


@pytest.mark.parametrize(("named", "world_sizes"), each([True, False], [(1, 3), (2, 5)]))
def test_what_4_ranks_save_continues_at_any_number_of_them(named, world_sizes):
    given = run(save_run, 4, "saved", named)[0]
    for world_size in world_sizes:
        run(load_run, world_size, "saved", named, *given)


def test_tools_read_what_ranks_save():
    state, _ = run(save_run, 3, "saved", True)[0]
    checkpoint = zckpt.open("saved")
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert [name for group in checkpoint.param_groups for name in group.parameters] == names
    for number, values in state["state"].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(checkpoint.read(names[number], slot), values[slot])
    assert checkpoint.param_groups[1].hyperparameters["lr"] == 0.02


@on_ranks(2)
def test_room_is_made_of_what_the_optimizer_has(tmp_path):
    """Without metadata, state is read into state that is there already."""
    model, other = Net(), Net()
    ours, theirs = make("adamw", model, named=True), make("adamw", other, named=True)
    train(model, ours, range(3))
    dcp.save(ours.sharded_state_dict(), checkpoint_id=tmp_path)
    train(other, theirs, [5])
    other.load_state_dict(model.state_dict())
    into = theirs.sharded_state_dict()
    dcp.load(into, checkpoint_id=tmp_path)
    theirs.load_sharded_state_dict(into)
    train_twins((model, ours, other, theirs), (3, 4))


@on_ranks(2)
def test_refuses_what_would_be_lost(tmp_path):
    model = Net()
    ours = make("adamw", model, named=True)
    train(model, ours, range(2))
    dcp.save(ours.sharded_state_dict(), checkpoint_id=tmp_path)
    fresh = make("adamw", model, named=True)
    into = fresh.sharded_state_dict()
    assert not into["state"]
    dcp.load(into, checkpoint_id=tmp_path)
    differs = r"state of .* differs from what was read: exp_avg, exp_avg_sq, step; read into sharded_state_dict"
    with pytest.raises(ValueError, match=differs):
        fresh.load_sharded_state_dict(into)
    unnamed = make("adamw", model)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    into = unnamed.sharded_state_dict(metadata)
    dcp.load(into, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"parameters that the optimizer lacks: first\.weight"):
        unnamed.load_sharded_state_dict(into)
    with pytest.raises(ValueError, match="no optimizer with param groups at model"):
        fresh.sharded_state_dict(metadata, within=["model"])
    with pytest.raises(ValueError, match="no 'state' and 'param_groups'"):
        fresh.load_sharded_state_dict({})
    assert not fresh.state


@on_ranks(2)
def test_every_rank_has_its_own_and_nothing_is_copied():
    model = Net()
    ours = ZeroRedundancyOptimizer(groups(model), torch.optim.Adam, lr=0.1)
    train(model, ours, range(2))
    mine = ours.sharded_state_dict()
    held = {id(value) for values in ours.state.values() for value in values.values()}
    assert {id(value) for values in mine["state"].values() for value in values.values()} == held
    told = of_all_ranks(list(mine["state"]))
    assert sorted(int(label) for labels in told for label in labels) == [*range(len(ours._all_params))]
    before = copy.deepcopy(mine["param_groups"])
    ours.param_groups[0]["lr"] = 3.0
    assert mine["param_groups"] == before
