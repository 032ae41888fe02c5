"""Every optimizer family and kind of model, saved at 1 to 4 ranks and resumed at 1 to 4: same state, same losses.

Every run resumes each kind at 3 ranks, and what each number of ranks has saved; `make test-all` resumes the product
of all three.

State is bit-equal by name. The next losses are bit-equal at the same number of ranks; at another, averages over ranks
are taken in another order, and float32 losses agree to 2e-6 of themselves, those of a bfloat16 model to 3e-2: there,
one rounding of a gradient is one of 256.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zckpt
from tests.gloo import run
from tests.pairwise import some
from tests.training.trainings import BF16, BY_NAME, KINDS, Kind, Training, differences, save_at

pytestmark = pytest.mark.interop

WORLD_SIZES = (1, 2, 3, 4)
SAVED, MORE = 3, 2

Losses = dict[str, list[float]]


def save_all(rank, world_size, directory: Path, names: list[str]) -> Losses:
    """Train, save, keep the truth beside it, and train on."""
    losses = {}
    for number, kind in enumerate(KINDS):
        if kind.name not in names:
            continue
        training = Training.of(kind)
        training.train(range(SAVED))
        truth = training.state()
        saving = zckpt.save(
            directory / kind.name, **training.given,
            step=SAVED, extra={"ranks": world_size, "table": torch.arange(3)}, async_=bool(number % 2),
        )  # fmt: skip
        losses[kind.name] = training.train(range(SAVED, SAVED + MORE))
        if saving is not None:
            saving.result()
        if rank == 0:
            torch.save(truth, directory / f"{kind.name}.truth")
    return losses


def resume_all(rank, world_size, directories: list[Path], names: list[list[str]]) -> list[Losses]:
    """Resume the kinds that are named for each directory; check the state, and train on."""
    return [
        {name: resume(BY_NAME[name], BY_NAME[name], directory) for name in its}
        for directory, its in zip(directories, names, strict=True)
    ]


def resume(kind: Kind, saved: Kind, directory: Path) -> list[float]:
    training = Training.of(kind, seed=1)  # other weights than were saved
    restored = zckpt.load(directory / saved.name, **training.given)
    assert (restored.step, restored.format) == (SAVED, "zckpt")
    assert restored.extra["ranks"] == restored.world_size
    assert torch.equal(restored.extra["table"], torch.arange(3))
    assert not restored.missing + restored.unexpected + restored.reshaped
    found = training.state()
    expected = torch.load(directory / f"{saved.name}.truth", weights_only=True)
    if kind == saved:
        assert differences(found, expected) == []
    return training.train(range(SAVED, SAVED + MORE))


@pytest.fixture
def saved(shared) -> Callable[..., tuple[Path, Losses]]:
    """Give what a number of ranks saves: all kinds, or those that are resumed at a number of ranks."""

    def get(at: int, to: int | None = None) -> tuple[Path, Losses]:
        save = partial(save_all, names=list(BY_NAME) if to is None else chosen(at, to))
        return shared(f"test_resume-at{at}-{to}", partial(save_at, save, at))

    return get


def assert_close(kind: Kind, found: list[float], expected: list[float], what: str) -> None:
    allowed = 3e-2 if kind.dtype == BF16 else 2e-6
    assert all(math.isclose(a, b, rel_tol=allowed) for a, b in zip(found, expected, strict=True)), (
        f"{what}: {found}, not {expected}"
    )


def chosen(at: int, world_size: int) -> list[str]:
    """The kinds that are resumed at `world_size` ranks from `at`: together, all pairs of the three."""
    number, of = at - world_size, len(WORLD_SIZES)
    return [
        kind.name
        for index, kind in enumerate(KINDS)
        if (index + number) % of == 0 or index % of == at - 1 == world_size - 1
    ]


def test_all_pairs_are_resumed():
    resumed = {(at, to, name) for at in WORLD_SIZES for to in WORLD_SIZES for name in chosen(at, to)}
    assert {(at, to) for at, to, _ in resumed} == set(itertools.product(WORLD_SIZES, WORLD_SIZES))
    assert {(at, name) for at, _, name in resumed} == set(itertools.product(WORLD_SIZES, BY_NAME))
    assert {(to, name) for _, to, name in resumed} == set(itertools.product(WORLD_SIZES, BY_NAME))
    assert {name for at, to, name in resumed if at == to} == set(BY_NAME)


@pytest.mark.parametrize("every", some([False], [True]), ids=["pairs", "product"])
@pytest.mark.parametrize("world_size", some([3], [1, 2, 4]))
def test_resume_goes_on_as_if_nothing_had_happened(world_size, every, saved):
    given = {at: saved(at, None if every or at == 3 else world_size) for at in WORLD_SIZES}
    names = [list(BY_NAME) if every else chosen(at, world_size) for at in given]
    resumed = run(resume_all, world_size, [directory for directory, _ in given.values()], names)[0]
    for (at, (_, expected)), found in zip(given.items(), resumed, strict=True):
        for name, losses in found.items():
            if at == world_size:
                assert losses == expected[name], f"{name} at {at} ranks"
            assert_close(BY_NAME[name], losses, expected[name], f"{name} from {at} to {world_size} ranks")


def resume_others(rank, world_size, directory: Path, every: bool) -> Losses:
    """Resume each optimizer's checkpoint with the next one of the same rule, or with every other."""
    told = {}
    for has_empty in (False, True):
        kinds = [kind for kind in KINDS if kind.optimizer != "sgd" and kind.dtype != BF16]
        kinds = [kind for kind in kinds if kind.has_empty == has_empty]
        pairs = itertools.permutations(kinds, 2) if every else zip(kinds, kinds[1:] + kinds[:1], strict=True)
        told |= {f"{saved.name} {kind.name}": resume(kind, saved, directory) for saved, kind in pairs}
    return told


@pytest.mark.parametrize("every", some([False], [True]))
def test_one_optimizer_resumes_what_another_saved(every, saved):
    directory, expected = saved(3)
    for pair, losses in run(resume_others, 2, directory, every)[0].items():
        name, resumed = pair.split()
        assert_close(BY_NAME[resumed], losses, expected[name], pair)
