"""What DeepSpeed, FSDP and others have restored is held against any engine's checkpoint, at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zckpt
from tests.gloo import run
from tests.pairwise import some
from tests.training.engines import ENGINES, Engine
from zckpt.errors import NotRestoredError, UsageError

pytestmark = pytest.mark.interop


def save_all(rank, world_size, directory: Path) -> None:
    for name in ENGINES:
        engine = Engine(name, seed=0, lr=1e-2)
        engine.train(range(3))
        engine.save(directory / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run(save_all, 2, directory)
    return directory


def held(engine: Engine, path: Path) -> None:
    zckpt.assert_restored(path, model=engine.model, optimizer=engine.optimizer)


def hold(rank, world_size, directory: Path, cells: list[tuple[str, str]]) -> None:
    for source, target in cells:
        engine, path = Engine(target, seed=1, lr=0.5), directory / source
        with pytest.raises(NotRestoredError) as error:
            held(engine, path)
        said = error.value.differences
        assert any("weight of body.0.weight differs" in one for one in said), (source, target, said)
        assert any("param group 0: lr is 0.01 in the checkpoint, 0.5 here" in one for one in said), (source, target)
        engine.load(path)
        held(engine, path)
        if engine.engine is not None and target != "ds0":
            with pytest.raises(UsageError, match="by its engine"):
                zckpt.save(directory / "never", model=engine.inner, optimizer=engine.optimizer)
        base = getattr(engine.optimizer, "optimizer", None) or getattr(engine.optimizer, "optim", engine.optimizer)
        its = [values["exp_avg"] for values in base.state.values()]
        if rank == world_size - 1:
            for one in its:
                torch.Tensor.mul_(getattr(one, "_local_tensor", one), 2)
        with pytest.raises(NotRestoredError) as error:
            held(engine, path)
        assert all(one.startswith("exp_avg of ") for one in error.value.differences), error.value.differences


@pytest.mark.parametrize("world_size", some([3], [1]))
def test_deepspeed_of_each_stage(world_size, saved):
    cells = [("ds2", "ds1"), ("fsdp2", "ds2"), ("ds1", "ds3"), ("ds3", "ds0")]
    run(hold, world_size, saved, cells)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_engine_against_every_checkpoint(world_size, saved):
    run(hold, world_size, saved, [(source, target) for source in ENGINES for target in ENGINES])
