"""What Accelerate saves of FSDP without DCP, a torch file for each rank, is read: by names, and as flat parameters."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.fsdp_training.training import trained, truth
from tests.interop.test_fsdp_rank_files import assert_is
from tests.pairwise import some
from zckpt.errors import UnsupportedError
from zckpt.formats.account import take_inventory

pytestmark = pytest.mark.interop


def save(rank, world_size, wrap: str, kind: str, folder: Path) -> Any:
    """Train, and save by Accelerate's own functions; rank 0 returns the truth."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import (
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    fsdp_utils.logger = logging.getLogger(__name__)  # its own wants an Accelerator
    torch.set_num_threads(1)
    model, optimizer, _ = trained(wrap, world_size)
    local = kind == "LOCAL_STATE_DICT"
    plugin = SimpleNamespace(
        fsdp_version=2 if "fsdp2" in wrap else 1,
        state_dict_type=StateDictType[kind],
        state_dict_config=LocalStateDictConfig() if local else ShardedStateDictConfig(),
        optim_state_dict_config=LocalOptimStateDictConfig() if local else ShardedOptimStateDictConfig(),
    )
    accelerator: Any = SimpleNamespace(process_index=rank, num_processes=world_size)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(folder), use_dcp=False)
    if not local:
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder), use_dcp=False)
    held = truth(model, optimizer)
    return held if not rank else None


@pytest.mark.parametrize(("wrap", "world_size"), some([("fsdp2", 2), ("fsdp1", 2)], [("fsdp1 mesh", 3)]))
def test_shares_are_read_by_their_names(wrap, world_size, tmp_path):
    held = gloo.run(save, world_size, wrap, "SHARDED_STATE_DICT", tmp_path / "state")[0]
    checkpoint = zckpt.open(tmp_path / "state")
    assert_is(checkpoint, held)
    assert not checkpoint.unnamed
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(tmp_path / "state", deep=True).sound


def test_flat_parameters_are_read_as_they_are(tmp_path):
    held = gloo.run(save, 2, "fsdp1", "LOCAL_STATE_DICT", tmp_path / "state")[0]
    checkpoint = zckpt.open(tmp_path / "state")
    assert any("flat parameters" in one for one in checkpoint.warnings)
    layer = checkpoint.read("layers.0._flat_param", "weight")
    names = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    assert torch.equal(layer, torch.cat([held[f"weight/layers.0.{name}"].flatten() for name in names]))


def test_local_pieces_of_original_parameters_are_refused(tmp_path):
    gloo.run(save, 2, "fsdp1 orig", "LOCAL_STATE_DICT", tmp_path / "state")
    with pytest.raises(UnsupportedError, match=r"one-dimensional.*LOCAL_STATE_DICT.*save it as SHARDED_STATE_DICT"):
        zckpt.open(tmp_path / "state")
