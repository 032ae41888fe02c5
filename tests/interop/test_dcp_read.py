"""What several gloo ranks of the installed torch save with torch.distributed.checkpoint is read bit by bit.

Each rank gathers whole tensors from its live model and optimizer, which is what zckpt has to find in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.fsdp_training.training import STEPS, Net, placed, step
from tests.live import whole
from tests.logical import opened
from tests.pairwise import some
from tests.truth import assert_same
from zckpt.formats.dcp.directory import find
from zckpt.formats.dcp.reader import read as read_dcp
from zckpt.formats.safetensors import file as safetensors_shards
from zckpt.optim.values import value_of

pytestmark = pytest.mark.interop

WRAPS = some(
    [("fsdp1 orig", 2), ("fsdp2 hsdp", 2), ("fsdp2 tp", 4)],
    [("fsdp2", 2), ("fsdp2", 3), ("fsdp1 orig", 3), ("fsdp2 hsdp", 4), ("fsdp2 tp", 6), ("fsdp2 columns", 3)],
)

TARGETS: dict[str, dict[str, int]] = {"zckpt": {}, "dcp": {}, "deepspeed": {"world_size": 3, "stage": 2}}


def save(rank, world_size, wrap: str, folder: Path) -> Any:
    """Train and save in several ways; rank 0 returns what it has live."""
    import torch.distributed.checkpoint as real
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    torch.manual_seed(0)
    model = placed(Net(), wrap, world_size)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = [p for n, p in trained if n.endswith(("bias", "gain"))]
    decayed = [p for n, p in trained if not n.endswith(("bias", "gain"))]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.01,
        foreach=False,
    )
    for number in range(STEPS):
        step(model, optimizer, None, number)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        names, state = get_state_dict(model, optimizer, options=options)
        content = {"app": {"model": names, "optim": state}, "step": STEPS, "ema": {"of": names, "decay": 0.5}}
        real.save(content, checkpoint_id=folder / f"flat{flat}")
    names, _ = get_state_dict(model, optimizer)
    del names["head.weight"]  # which is tied, as safetensors has nothing
    if "fsdp1" not in wrap:  # its ShardedTensors are not what that writer takes
        writer = real.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True)
        real.save(names, storage_writer=writer)
    live = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    found = whole({"model": live[0], "optimizer": live[1]})
    return found if rank == 0 else None


@pytest.mark.parametrize(("wrap", "world_size"), WRAPS, ids=str)
def test_what_ranks_save_is_read_as_they_have_it(wrap, world_size, tmp_path):
    live = next(one for one in gloo.run(save, world_size, wrap, tmp_path) if one is not None)
    for flat in (False, True):
        checkpoint = opened(read_dcp(find(tmp_path / f"flat{flat}")))
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
    for to, options in TARGETS.items():  # the pieces of an average are one tensor, wherever it goes
        zckpt.convert(tmp_path / "flatFalse", tmp_path / to, to=to, **options)
        average = value_of(zckpt.open(tmp_path / to).metadata["ema"])
        assert (average["decay"], set(average["of"])) == (0.5, set(live["model"]))
        for name, tensor in live["model"].items():
            assert_same(average["of"][name], tensor, f"{to} {name}")
    if (tmp_path / "hf").is_dir():
        shards = opened(safetensors_shards.read_shards(tmp_path / "hf"))
        assert {p.name for p in shards.tensors()} == set(live["model"]) - {"head.weight"}
        for one in shards.tensors():
            assert_same(shards.read(one.name), live["model"][one.name], one.name)
