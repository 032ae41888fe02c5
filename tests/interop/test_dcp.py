"""FSDP2 trainings, on any number of gloo ranks, load what zckpt writes for torch.distributed.checkpoint and go on.

All ranks see the same data: gradients are then the same without and with any power of two of ranks, as a sum of equal
numbers that is divided by their count is exact, and only the order of elementwise arithmetic within a shard
(vectorised, or the scalar rest of it) may move a last bit. On one rank nothing may.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import zckpt
from tests import gloo
from tests.fsdp_training.training import load_by_dcp, states
from tests.live import Words, groups_of, save_both, train, whole
from tests.logical import assert_same_tree
from tests.pairwise import some
from zckpt.formats.dcp import writer

pytestmark = pytest.mark.interop

STEPS, STEPS_AFTER = 5, 5
LAST_BITS = 1e-6
"""Relative; float32 has 6e-8, and five steps of AdamW let a difference in the last bit grow a little."""


def net(seed: int) -> Words:
    """No size that 4 ranks could share evenly, and fewer rows than ranks."""
    torch.manual_seed(seed)
    return Words(6, 301, gain=(1,), beside=(3,))


def shard(model: nn.Module, *parts: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (*parts, model):
        fully_shard(part, mesh=mesh)


# --- what runs on ranks ---------------------------------------------------------------------------------------------


def load_and_go_on(rank, world_size, directory: Path, fsdp: bool) -> tuple[list[float], dict[str, Any]]:
    """Load into a model and an optimizer that differ in everything, train on; return losses and what was loaded."""
    model = net(2)
    if fsdp:
        shard(model, model.up, model.down)
    optimizer = torch.optim.AdamW(groups_of(model), lr=9.0, betas=(0.1, 0.2), eps=1e-3)
    load_by_dcp(model, optimizer, checkpoint_id=directory)
    state = whole(states(model, optimizer))
    return train(model, optimizer, range(STEPS, STEPS + STEPS_AFTER)), state


def save_sharded(rank, world_size, directory: Path) -> None:
    """Save as FSDP2 does, a model that is cut as zckpt cuts it."""
    import torch.distributed.checkpoint as dcp

    model = net(1)
    shard(model)
    dcp.save(states(model, torch.optim.AdamW(groups_of(model), lr=0.01)), checkpoint_id=directory)


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[str, Any]:
    """A training in one process: its file after 5 steps, its names and state, and its losses thereafter."""
    path = tmp_path_factory.mktemp("run") / "plain.pt"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks do
    model = net(1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, betas=(0.9, 0.95))
    train(model, optimizer, range(STEPS))
    state = whole(states(model, optimizer))
    save_both(model, optimizer, path)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    losses = train(model, optimizer, range(STEPS, STEPS + STEPS_AFTER))
    torch.set_num_threads(threads)
    return {"path": path, "names": names, "state": state, "losses": losses}


@pytest.mark.parametrize(
    ("ranks", "fsdp", "files"),
    some(
        [(1, False, 1), (2, True, 3)],
        [(1, True, 3), (2, True, 1), (1, False, 3), (1, True, 1), (4, True, 3), (4, True, 1)],
    ),
)
def test_fsdp2_goes_on_as_if_never_stopped(ranks, fsdp, files, run, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "CUT_NBYTES", 64)
    zckpt.convert(run["path"], tmp_path / "dcp", to="dcp", world_size=files, names=run["names"])
    for losses, state in gloo.run(load_and_go_on, ranks, tmp_path / "dcp", fsdp):
        assert_same_tree(state, run["state"])
        assert losses == (run["losses"] if ranks == 1 else pytest.approx(run["losses"], rel=LAST_BITS))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.every(2)
def test_tensors_are_cut_as_fsdp2_saves_them(ranks, run, tmp_path, monkeypatch):
    """Each rank then reads its own file only. FSDP2 also writes empty pieces, where there are fewer rows than ranks."""
    monkeypatch.setattr(writer, "CUT_NBYTES", 0)
    gloo.run(save_sharded, ranks, tmp_path / "torch")
    zckpt.convert(run["path"], tmp_path / "dcp", to="dcp", world_size=ranks, names=run["names"])
    found, expected = (pickle.loads((tmp_path / one / ".metadata").read_bytes()) for one in ("dcp", "torch"))
    assert found.planner_data == {**expected.planner_data, "step": ("step",)}
    assert found.state_dict_metadata.keys() == found.planner_data.keys()
    for key, about in expected.state_dict_metadata.items():
        chunks = [chunk for chunk in getattr(about, "chunks", []) if 0 not in chunk.sizes]
        if len(chunks) < len(getattr(about, "chunks", [])) or len(chunks) > 1:
            assert found.state_dict_metadata[key].chunks == chunks, key
        for chunk in chunks if len(chunks) > 1 else []:
            index = MetadataIndex(key, chunk.offsets)
            assert found.storage_data[index].relative_path == expected.storage_data[index].relative_path
