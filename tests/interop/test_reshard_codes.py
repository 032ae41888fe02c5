"""8-bit state of a real DeepSpeed run: cut for other ranks where blocks allow it, else refused, or made floats."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.deepspeed_engine.spec import plain_config
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.refusals import refusing
from tests.truth import bits
from zckpt.errors import UnsupportedError

pytestmark = pytest.mark.interop

TWO_IN_ONE = "AdEMAMix8bit"

NESTED = "__bnb_optimizer_quant_state__"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[float]]:
    """A run of four ranks, each with four blocks of a matrix, and a small group in floats; and its next losses."""
    folder = tmp_path_factory.mktemp("codes")
    losses = gloo.run(_train, 4, 64, folder)[0]
    return folder, losses


@pytest.mark.parametrize("world_size", some([1], [2]))
def test_codes_are_cut_where_partitions_begin_with_blocks_and_come_back(world_size, run, tmp_path):
    folder, losses = run
    done = zckpt.reshard(folder, tmp_path / "cut", world_size=world_size, verify=True)
    assert done.verified is not None
    before, after = states(folder, 4), states(tmp_path / "cut", world_size)
    for group, kind in ((0, torch.uint8), (1, torch.float32)):
        mine, its = joined(before, group), joined(after, group)
        assert mine["state1"].dtype == kind
        assert_same_tree({key: value[: len(its[key])] for key, value in mine.items()}, its)
    found = gloo.run(_resume, world_size, 64, tmp_path / "cut")[0]
    assert found == pytest.approx(losses, abs=2e-5)
    assert zckpt.verify(tmp_path / "cut", deep=True).sound
    done = zckpt.reshard(folder, tmp_path / "anew", world_size=world_size, requantize=True)  # which is not needed
    assert not any("again" in note for note in done.notes)
    assert_same_tree(of_matrix(tmp_path / "anew", world_size), of_matrix(tmp_path / "cut", world_size))
    zckpt.reshard(tmp_path / "cut", tmp_path / "four", world_size=4)
    assert_same_tree(of_matrix(tmp_path / "four", 4), of_matrix(folder, 4))


def test_blocks_with_two_scales_are_refused_and_floats_are_not(run, tmp_path):
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
    with pytest.raises(zckpt.UsageError, match="no quantised weights and no quantised optimizer state"):
        zckpt.reshard(tmp_path / "cut", tmp_path / "again", world_size=2, dequantize=True)
    with pytest.raises(zckpt.UsageError, match="exclude each other"):
        zckpt.reshard(run[0], tmp_path / "again", world_size=3, requantize=True, dequantize=True)


@pytest.mark.parametrize("stage", some([2], [3]))
def test_codes_are_made_anew_where_blocks_have_other_elements(stage, run, tmp_path):
    """As bitsandbytes' function for any device makes them of the floats that `--dequantize` writes."""
    folder, losses = run
    done = zckpt.reshard(folder, tmp_path / "cut", world_size=3, stage=stage, requantize=True, verify=True)
    assert any("quantised again" in note for note in done.notes)
    zckpt.reshard(folder, tmp_path / "floats", world_size=3, stage=stage, dequantize=True)
    for its, floats in zip(states(tmp_path / "cut", 3), states(tmp_path / "floats", 3), strict=True):
        assert its[0][NESTED].keys() == of_matrix(folder, 4)[0].keys()
        for number, slot in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            codes, scales = of_any_device(floats[0][slot], its[0][NESTED][f"qmap{number}"])
            assert torch.equal(its[0][NESTED][f"state{number}"], codes)
            assert torch.equal(bits(its[0][NESTED][f"absmax{number}"]), bits(scales))
            assert torch.equal(its[1][NESTED][f"state{number}"], floats[1][slot])
    assert zckpt.verify(tmp_path / "cut", deep=True).sound
    found = gloo.run(_resume, 3, 64, tmp_path / "cut", stage)[0]
    assert found[0] == pytest.approx(losses[0], abs=2e-5)  # the weights', before moments are used
    assert found == pytest.approx(losses, abs=2e-2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_codes_of_torchao_are_cut_where_partitions_begin_with_blocks(kind, tmp_path):
    """Four partitions of 4,096 elements, which is what torchao quantises at least."""
    pytest.importorskip("torchao")
    (run := tmp_path / "run").mkdir()
    losses = gloo.run(_train, 4, 128, run, kind)[0]
    for world_size in (1, 2):
        zckpt.reshard(run, tmp_path / f"cut{world_size}", world_size=world_size, verify=True)
        found = gloo.run(_resume, world_size, 128, tmp_path / f"cut{world_size}", 2, kind)[0]
        assert found == pytest.approx(losses, abs=2e-5)
    zckpt.reshard(run, tmp_path / "anew", world_size=2, stage=3, requantize=True, verify=True)
    assert type(states(tmp_path / "anew", 2)[0][0]["exp_avg"]).__name__.startswith("OptimState")
    found = gloo.run(_resume, 2, 128, tmp_path / "anew", 3, kind)[0]
    assert found[0] == pytest.approx(losses[0], abs=2e-5)
    assert found == pytest.approx(losses, abs=2e-2)


def test_two_moments_in_one_tensor_are_read_and_not_cut(tmp_path):
    """Two partitions of 8,192 elements, which bitsandbytes quantises, with blocks of its own for each moment."""
    undone = pytest.importorskip("bitsandbytes").functional.dequantize_blockwise
    (run := tmp_path / "run").mkdir()
    gloo.run(_train, 2, 128, run, TWO_IN_ONE)
    for requantize in (False, True):
        with refusing(UnsupportedError, "has two moments in one tensor, .* is not cut; .*dequantize"):
            zckpt.reshard(run, tmp_path / "cut", world_size=1, requantize=requantize)
    zckpt.reshard(run, tmp_path / "cut", world_size=1, dequantize=True, verify=True)
    found = zckpt.open(tmp_path / "cut")
    for at, slot in enumerate(("exp_avg", "exp_avg_slow")):
        of_ranks = [undone(its["state1"][at], absmax=its["absmax1"][at], code=its["qmap1"], blocksize=256)
                    for its in of_matrix(run, 2)]  # fmt: skip
        assert torch.equal(found.read("0.weight", slot).flatten(), torch.cat(of_ranks))


def of_any_device(values: torch.Tensor, qmap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import bitsandbytes  # noqa: F401  # registers it

    operator = torch.ops.bitsandbytes.quantize_blockwise.default
    key = torch._C.DispatchKey.CompositeExplicitAutograd  # its kernels for single devices take shortcuts
    codes, scales = operator._op_dk(key, values, qmap, 256)
    return codes, scales


def states(folder: Path, world_size: int) -> list[dict[int, dict[str, Any]]]:
    """What the optimizer of each rank has, by group."""
    paths = [next(folder.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")) for rank in range(world_size)]
    contents = [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in paths]
    return [(one.get("base_optimizer_state") or one["optimizer_state_dict"])["state"] for one in contents]


def of_matrix(folder: Path, world_size: int) -> list[dict[str, torch.Tensor]]:
    """What it has of the matrix."""
    return [one[0][NESTED] for one in states(folder, world_size)]


def joined(ranks: list[dict[int, dict[str, Any]]], group: int) -> dict[str, torch.Tensor]:
    every = [one[group][NESTED] for one in ranks]
    return {key: every[0][key] if key.startswith("qmap") else torch.cat([one[key] for one in every])
            for key in every[0]}  # fmt: skip


def _engine(width: int, seed: int, stage: int = 2, kind: str | None = None) -> Any:
    import deepspeed

    from tests.deepspeed_engine.optimizers import BlockwiseAdam

    make = BlockwiseAdam
    if kind is not None:
        module = import_module("bitsandbytes.optim" if kind == TWO_IN_ONE else "torchao.optim")
        make = partial(getattr(module, kind), lr=1e-2)

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, 1, bias=False))
    model[1].weight = torch.nn.Parameter(model[1].weight[:, :8].clone())
    model.forward = lambda x: model[1](model[0](x).view(-1, 8, 8).mean(1))  # type: ignore[method-assign]
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight], "lr": 1e-3}]
    config = plain_config(stage)
    return deepspeed.initialize(model=model, optimizer=make(groups), config=config, dist_init_required=False)[0]


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


def _train(rank, world_size, width: int, folder: Path, kind: str | None = None) -> list[float]:
    engine = _engine(width, 1, kind=kind)
    _steps(engine, width, 0, 3)
    engine.save_checkpoint(str(folder), tag="global_step3")
    return _steps(engine, width, 3, 3)


def _resume(rank, world_size, width: int, folder: Path, stage: int = 2, kind: str | None = None) -> list[float]:
    engine = _engine(width, 2, stage, kind)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    return _steps(engine, width, 3, 3)
