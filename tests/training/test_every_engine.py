"""What any engine has saved, any engine goes on from, at any number of ranks: same state, same losses.

Of (from, to, ranks then, ranks now), 1296, every (from, to) comes once, and with ranks that make all pairs of the four.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

import zckpt
from tests.gloo import run
from tests.training.engines import ENGINES, Engine
from tests.training.trainings import differences

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

RANKS = (1, 2, 3, 4)
SAVED, MORE = 3, 3

Cell = tuple[str, str, int, int]

CELLS: list[Cell] = [
    (source, target, RANKS[(i + j) % 4], RANKS[(i + 2 * j + j // 2 + i // 4) % 4])
    for (i, source), (j, target) in itertools.product(enumerate(ENGINES), enumerate(ENGINES))
]


def test_cells_make_all_pairs():
    every = [set(ENGINES), set(ENGINES), set(RANKS), set(RANKS)]
    for one, other in itertools.combinations(range(4), 2):
        assert {(cell[one], cell[other]) for cell in CELLS} == set(itertools.product(every[one], every[other]))


def save_all(rank, world_size, directory: Path) -> dict[str, list[float]]:
    """Train in every engine that is gone on from at this number of ranks; save; keep the truth beside it."""
    losses = {}
    for name in dict.fromkeys(source for source, _, ranks, _ in CELLS if ranks == world_size):
        engine = Engine(name, seed=0, lr=1e-2)
        engine.train(range(SAVED))
        engine.save(directory / name)
        truth = engine.state()
        if rank == 0:
            torch.save(truth, directory / f"{name}.truth")
        losses[name] = engine.train(range(SAVED, SAVED + MORE))
    return losses


def save_at(world_size: int, directory: Path) -> tuple[Path, dict[str, list[float]]]:
    return directory, run(save_all, world_size, directory)[0]


def load_all(rank, world_size, cells: list[tuple[str, str, Path]]) -> list[tuple[list[str], list[float]] | str]:
    """Load into each engine; return what differs, and the next losses, or the error."""
    found: list[tuple[list[str], list[float]] | str] = []
    for source, target, directory in cells:
        engine = Engine(target, seed=1, lr=0.5)
        engine.load(directory / source)
        truth = torch.load(directory / f"{source}.truth", weights_only=True)
        found.append((differences(engine.state(), truth), engine.train(range(SAVED, SAVED + MORE))))
    return found


@pytest.mark.parametrize("world_size", RANKS)
def test_every_engine_goes_on_from_every_other(world_size, shared):
    saved = {ranks: shared(f"test_every_engine-at{ranks}", partial(save_at, ranks)) for ranks in RANKS}
    cells = [cell for cell in CELLS if cell[3] == world_size]
    told = run(load_all, world_size, [(source, target, saved[ranks][0]) for source, target, ranks, _ in cells])[0]
    wrong = []
    for (source, target, ranks, _), (different, losses) in zip(cells, told, strict=True):
        expected = saved[ranks][1][source]
        if different or losses != pytest.approx(expected, rel=2e-6):
            wrong.append(f"{source} at {ranks} -> {target} at {world_size}: {different[:3]} {losses} {expected}")
    assert not wrong, "\n".join(wrong)


def save_clipped(rank, world_size, directory: Path) -> dict[str, list[float]]:
    losses = {}
    for name in ("ds0", "ds3"):
        engine = Engine(name, seed=0, lr=1e-2, clips=True)
        engine.train(range(SAVED))
        engine.save(directory / name)
        losses[name] = engine.train(range(SAVED, SAVED + MORE))
    return losses


def load_clipped(rank, world_size, directory: Path) -> list[tuple[str, list[float]]]:
    found = []
    for source in ("ds0", "ds3"):
        zckpt.convert(directory / source, directory / f"{source}-1", to="deepspeed", world_size=1, stage=1)
        for target, its in (("ds1", source), ("ds2", source), ("ds1", f"{source}-1")):
            engine = Engine(target, seed=1, lr=0.5, clips=True)
            engine.load(directory / its)
            found.append((source, engine.train(range(SAVED, SAVED + MORE))))
    return found


def test_gradients_are_clipped_as_usual_where_no_file_says_how(tmp_path):
    expected = run(save_clipped, 2, tmp_path)[0]
    for source, losses in run(load_clipped, 1, tmp_path)[0]:
        assert losses == pytest.approx(expected[source], rel=2e-6)
