"""8-bit state of a real DeepSpeed run: cut for other ranks where blocks allow it, else refused, or made floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.truth import bits
from zckpt.errors import UnsupportedError

pytestmark = pytest.mark.interop

NESTED = "__bnb_optimizer_quant_state__"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of four ranks, each with four blocks of a matrix, and a small group in floats; and its next losses."""
    folder = tmp_path_factory.mktemp("codes")
    losses = gloo.run(_train, 4, 64, folder)[0]
    return folder, losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_codes_are_cut_where_partitions_begin_with_blocks(
    world_size: int, run: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, losses = run
    done = zckpt.reshard(folder, tmp_path / "cut", world_size=world_size, verify=True)
    assert done.verified is not None
    before, after = states(folder, 4), states(tmp_path / "cut", world_size)
    for group, kind in ((0, torch.uint8), (1, torch.float32)):
        mine, its = joined(before, group), joined(after, group)
        assert mine["state1"].dtype == kind
        assert mine.keys() == its.keys()
        for key, value in its.items():
            assert torch.equal(bits(value), bits(mine[key][: len(value)])), key
    found = gloo.run(_resume, world_size, 64, tmp_path / "cut")[0]
    assert found == pytest.approx(losses, abs=2e-5)
    assert zckpt.verify(tmp_path / "cut", deep=True).sound


def test_codes_are_back_where_they_were(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    zckpt.reshard(run[0], tmp_path / "one", world_size=1)
    zckpt.reshard(tmp_path / "one", tmp_path / "four", world_size=4)
    for mine, its in zip(states(run[0], 4), states(tmp_path / "four", 4), strict=True):
        for key, value in mine[0][NESTED].items():
            assert torch.equal(bits(value), bits(its[0][NESTED][key])), key


def test_blocks_with_two_scales_are_refused_and_floats_are_not(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    """4,096 elements among three ranks: partitions of 1,366 begin within a block."""
    with pytest.raises(UnsupportedError, match="--dequantize"):
        zckpt.reshard(run[0], tmp_path / "cut", world_size=3)
    zckpt.reshard(run[0], tmp_path / "cut", world_size=3, dequantize=True, verify=True)
    before, after = zckpt.open(run[0]), zckpt.open(tmp_path / "cut")
    assert after.slot_names() == ["weight", "master", "exp_avg", "exp_avg_sq"]
    assert not after.per_rank
    for name in after.parameters:
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after.read(name, slot), before.read(name, slot))
    assert [group.state for group in after.param_groups] == [{"step": 3}] * 2
    with pytest.raises(zckpt.UsageError, match="no quantised state"):
        zckpt.reshard(tmp_path / "cut", tmp_path / "again", world_size=2, dequantize=True)


def states(folder: Path, world_size: int) -> list[dict[int, dict[str, Any]]]:
    """What the optimizer of each rank has, by group."""
    paths = [next(folder.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")) for rank in range(world_size)]
    return [torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
            for path in paths]  # fmt: skip


def joined(ranks: list[dict[int, dict[str, Any]]], group: int) -> dict[str, torch.Tensor]:
    every = [one[group][NESTED] for one in ranks]
    return {key: every[0][key] if key.startswith("qmap") else torch.cat([one[key] for one in every])
            for key in every[0]}  # fmt: skip


def _engine(width: int, seed: int) -> Any:
    import deepspeed

    from tests.deepspeed_engine.optimizers import BlockwiseAdam

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, 1, bias=False))
    model[1].weight = torch.nn.Parameter(model[1].weight[:, :10].clone())
    model.forward = lambda x: model[1](model[0](x)[:, :10])  # type: ignore[method-assign]
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight], "lr": 1e-3}]
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": False},
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=BlockwiseAdam(groups), config=config, dist_init_required=False)[
        0
    ]


def _steps(engine: Any, width: int, first: int, count: int) -> list[float]:
    """Train on batches that every rank has alike, so that the number of ranks changes nothing but rounding."""
    losses = []
    for step in range(first, first + count):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        loss = (engine(batch) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _train(rank: int, world_size: int, width: int, folder: Path) -> list[float]:
    engine = _engine(width, 1)
    _steps(engine, width, 0, 3)
    engine.save_checkpoint(str(folder), tag="global_step3")
    return _steps(engine, width, 3, 3)


def _resume(rank: int, world_size: int, width: int, folder: Path) -> list[float]:
    engine = _engine(width, 2)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    return _steps(engine, width, 3, 3)
