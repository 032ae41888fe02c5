"""What any engine has saved, any engine goes on from, at any number of ranks: same state, same losses.

What is restored is held against the checkpoint, too: whether an engine has it, and what differs. Of (from, to, ranks
then, ranks now), 1296, every (from, to) comes once, and with ranks that make all pairs of the four.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import zckpt
from tests.gloo import run
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.engines import ENGINES, Engine
from tests.training.trainings import differences
from zckpt.errors import NotRestoredError, UsageError

pytestmark = pytest.mark.interop

RANKS = (1, 2, 3, 4)
SAVED, MORE = 3, 3

Cell = tuple[str, str, int, int]

CELLS: list[Cell] = [
    (source, target, RANKS[(i + j) % 4], RANKS[(i + 2 * j + j // 2 + i // 4) % 4])
    for (i, source), (j, target) in itertools.product(enumerate(ENGINES), enumerate(ENGINES))
]
OFTEN: list[Cell] = [("ds2", "ds1", 2, 3), ("fsdp2", "ds2", 2, 3), ("ds1", "ds3", 2, 3), ("ds3", "ds0", 2, 3)]
"""In every run: DeepSpeed of each stage."""


@pytest.mark.nightly
def test_cells_make_all_pairs():
    every = [set(ENGINES), set(ENGINES), set(RANKS), set(RANKS)]
    for one, other in itertools.combinations(range(4), 2):
        assert {(cell[one], cell[other]) for cell in CELLS} == set(itertools.product(every[one], every[other]))


def save_all(
    rank, world_size, directory: Path, names: Sequence[str], clips: bool = False
) -> tuple[Path, dict[str, list[float]]]:
    """Train in some engines; save; keep the truth beside it; return where, and the losses thereafter."""
    losses = {}
    for name in names:
        engine = Engine(name, seed=0, lr=1e-2, clips=clips)
        engine.train(range(SAVED))
        engine.save(directory / name)
        truth = engine.state()
        if rank == 0:
            torch.save(truth, directory / f"{name}.truth")
        losses[name] = engine.train(range(SAVED, SAVED + MORE))
    return directory, losses


def save_at(world_size: int, names: Sequence[str], directory: Path) -> tuple[Path, dict[str, list[float]]]:
    return run(save_all, world_size, directory, names)[0]


def not_restored(engine: Engine, path: Path) -> tuple[str, ...]:
    """What differs between an engine and a checkpoint."""
    with pytest.raises(NotRestoredError) as error:
        zckpt.assert_restored(path, model=engine.model, optimizer=engine.optimizer)
    return error.value.differences


@contextmanager
def scaled_moments(engine: Engine, factor: float) -> Iterator[None]:
    """Let the optimizer's state on this rank be another; by a power of two, after which it is what it was."""
    base = getattr(engine.optimizer, "optimizer", None) or getattr(engine.optimizer, "optim", engine.optimizer)
    moments = [getattr(values["exp_avg"], "_local_tensor", values["exp_avg"]) for values in base.state.values()]
    for one in moments:
        torch.Tensor.mul_(one, factor)
    yield
    for one in moments:
        torch.Tensor.div_(one, factor)


def load_all(rank, world_size, cells: list[tuple[str, str, Path]]) -> list[tuple[list[str], list[float]]]:
    """Load into each engine, and hold it against the checkpoint; return what differs, and the next losses."""
    found = []
    for source, target, directory in cells:
        engine, path = Engine(target, seed=1, lr=0.5), directory / source
        said = not_restored(engine, path)
        assert any("weight of body.0.weight differs" in one for one in said), (source, target, said)
        assert any("param group 0: lr is 0.01 in the checkpoint, 0.5 here" in one for one in said), (source, target)
        engine.load(path)
        zckpt.assert_restored(path, model=engine.model, optimizer=engine.optimizer)
        if engine.engine is not None and target != "ds0":
            with refusing(UsageError, "by its engine"):
                zckpt.save(directory / "never", model=engine.inner, optimizer=engine.optimizer)
        with scaled_moments(engine, 2.0 if rank == world_size - 1 else 1.0):
            said = not_restored(engine, path)
        assert all(one.startswith("exp_avg of ") for one in said), said
        truth = torch.load(directory / f"{source}.truth", weights_only=True)
        found.append((differences(engine.state(), truth), engine.train(range(SAVED, SAVED + MORE))))
    return found


@pytest.mark.parametrize(("cells", "world_size"), some([(OFTEN, 3)], [(CELLS, ranks) for ranks in RANKS]))
def test_every_engine_goes_on_from_every_other(cells, world_size, shared):
    saved = {}
    for then in {then for _, _, then, now in cells if now == world_size}:
        names = list(dict.fromkeys(source for source, _, ranks, _ in cells if ranks == then))
        saved[then] = shared(f"{'-'.join(names)}-at{then}", partial(save_at, then, names))
    cells = [cell for cell in cells if cell[3] == world_size]
    told = run(load_all, world_size, [(source, target, saved[ranks][0]) for source, target, ranks, _ in cells])[0]
    wrong = []
    for (source, target, ranks, _), (different, losses) in zip(cells, told, strict=True):
        expected = saved[ranks][1][source]
        if different or losses != pytest.approx(expected, rel=2e-6):
            wrong.append(f"{source} at {ranks} -> {target} at {world_size}: {different[:3]} {losses} {expected}")
    assert not wrong, "\n".join(wrong)


def load_clipped(rank, world_size, directory: Path) -> list[tuple[str, list[float]]]:
    found = []
    for source in ("ds0", "ds3"):
        zckpt.convert(directory / source, directory / f"{source}-1", to="deepspeed", world_size=1, stage=1)
        for target, its in (("ds1", source), ("ds2", source), ("ds1", f"{source}-1")):
            engine = Engine(target, seed=1, lr=0.5, clips=True)
            engine.load(directory / its)
            found.append((source, engine.train(range(SAVED, SAVED + MORE))))
    return found


@pytest.mark.nightly
def test_gradients_are_clipped_as_usual_where_no_file_says_how(tmp_path):
    _, expected = run(save_all, 2, tmp_path, ["ds0", "ds3"], True)[0]
    for source, losses in run(load_clipped, 1, tmp_path)[0]:
        assert losses == pytest.approx(expected[source], rel=2e-6)
