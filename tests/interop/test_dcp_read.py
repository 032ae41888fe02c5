"""What several gloo ranks of the installed torch save with torch.distributed.checkpoint is read bit by bit.

Each rank gathers whole tensors from its live model and optimizer, which is what zckpt has to find in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import gloo
from tests.logical import opened
from tests.pairwise import some
from tests.truth import assert_same
from zckpt.formats.dcp.reader import read as read_dcp
from zckpt.formats.safetensors import shards as safetensors_shards

pytestmark = pytest.mark.interop

WRAPS = some(
    [("fsdp1", 2), ("hsdp", 2), ("fsdp2_tp", 4)], [("fsdp2", 2), ("fsdp2", 3), ("fsdp1", 3), ("hsdp", 4), ("tp", 3)]
)
STEPS = 2


class Net(nn.Module):
    """Sizes that ranks cannot share evenly but in a tensor-parallel layer, fewer rows than ranks, unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.embed = nn.Embedding(13, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.unused = nn.Linear(2, 5)
        self.frozen = nn.Parameter(torch.rand(7, 6), requires_grad=False)
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) * self.scale * self.gain
        return x + self.down(self.up(x).relu()) + self.frozen.mean(0)


def wrapped(model: Net, wrap: str, world_size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if wrap == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if wrap == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("rep", "shard")))
    degrees = (2, 2) if wrap == "fsdp2_tp" else (1, world_size) if wrap == "tp" else (world_size, 1)
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("dp", "tp"))
    if "tp" in wrap:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "fsdp2" in wrap:
        fully_shard(model, mesh=mesh["dp"])
    return model


def whole(value: Any) -> Any:
    """A state dict with whole tensors."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    gather = getattr(value, "full_tensor", None)
    return gather() if gather is not None else value.detach().clone() if isinstance(value, torch.Tensor) else value


def save(rank, world_size, wrap: str, folder: Path) -> Any:
    """Train and save in several ways; rank 0 returns what it has live."""
    import torch.distributed.checkpoint as real
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    torch.manual_seed(0)
    model = wrapped(Net(), wrap, world_size)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = [p for n, p in trained if n.endswith(("bias", "gain"))]
    decayed = [p for n, p in trained if not n.endswith(("bias", "gain"))]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.01,
        foreach=False,
    )
    for step in range(STEPS):
        tokens = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        names, state = get_state_dict(model, optimizer, options=options)
        real.save({"app": {"model": names, "optim": state}, "step": STEPS}, checkpoint_id=folder / f"flat{flat}")
    names, state = get_state_dict(model, optimizer)
    if wrap != "fsdp1":  # its ShardedTensors are not what that writer takes
        writer = real.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True)
        real.save(names, storage_writer=writer)
    live = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    found = whole({"model": live[0], "optimizer": live[1]})
    return found if rank == 0 else None


@pytest.mark.parametrize(("wrap", "world_size"), WRAPS, ids=str)
def test_what_ranks_save_is_read_as_they_have_it(wrap, world_size, tmp_path):
    live = next(one for one in gloo.run(save, world_size, wrap, tmp_path) if one is not None)
    for flat in (False, True):
        checkpoint = opened(read_dcp(tmp_path / f"flat{flat}"))
        assert {p.name for p in checkpoint.tensors()} == set(live["model"])
        for name, tensor in live["model"].items():
            assert_same(checkpoint.read(name, "weight"), tensor, name)
        for name, slots in live["optimizer"]["state"].items():
            assert checkpoint.parameters[name].slots.keys() - {"weight"} == slots.keys()
            for key, tensor in slots.items():
                assert_same(checkpoint.read(name, key), tensor, f"{key}/{name}")
        assert (checkpoint.step, checkpoint.unnamed, checkpoint.warnings) == (STEPS, {}, [])
        for mine, its in zip(checkpoint.param_groups, live["optimizer"]["param_groups"], strict=True):
            assert mine.parameters == its["params"]
            assert mine.hyperparameters == {key: value for key, value in its.items() if key != "params"}
        ranks = {file.dp_rank for file in checkpoint.files if file.dp_rank is not None}
        assert checkpoint.world_size == len(ranks) > 1
    if (tmp_path / "hf").is_dir():
        shards = opened(safetensors_shards.read(tmp_path / "hf"))
        assert {p.name for p in shards.tensors()} == set(live["model"])
        for name, tensor in live["model"].items():
            assert_same(shards.read(name), tensor, name)
