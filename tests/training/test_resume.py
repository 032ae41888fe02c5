"""Every optimizer family and kind of model, saved at 1 to 4 ranks and resumed at 1 to 4: same state, same losses.

Every run resumes each kind at 3 ranks, and what each number of ranks has saved; `make test-all` resumes the product
of all three. What is restored is held against what was saved, and fingerprints are those of what was saved.

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
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import zckpt
from tests.gloo import on_ranks, run
from tests.live import of_all_ranks
from tests.pairwise import some
from tests.training.trainings import BF16, BY_NAME, KINDS, Kind, Training, differences, save_at
from zckpt.compare.digests import read_digests
from zckpt.errors import NotRestoredError
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop

WORLD_SIZES = (1, 2, 3, 4)
SAVED, MORE = 2, 2

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
            directory / kind.name, **training.given, step=SAVED,
            extra={"ranks": world_size, "table": torch.arange(3)}, async_=bool(number % 2), fingerprint=True,
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
        {name: resume(BY_NAME[name], BY_NAME[name], directory, broadcast=number % 2 == 0) for name in its}
        for number, (directory, its) in enumerate(zip(directories, names, strict=True))
    ]


def resume(kind: Kind, saved: Kind, directory: Path, *, broadcast: bool = False) -> list[float]:
    training = Training.of(kind, seed=1)  # other weights than were saved
    restored = zckpt.load(directory / saved.name, **training.given, broadcast=broadcast)
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


@pytest.fixture
def saved_at_3(saved) -> Path:
    return saved(3)[0]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank has, to be changed."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)


def stepped(training: Training) -> Any:
    """Return the optimizer that has this rank's state."""
    return getattr(training.optimizer, "optim", training.optimizer)


def change_weight(training: Training, rank: int) -> str:
    its = training.inner.body[0].weight
    if rank == 0:
        local(its)[3] += 1
    return "weight of body.0.weight differs in 1 of "


def change_state(training: Training, rank: int) -> str:
    key = "momentum_buffer" if training.kind.optimizer == "sgd" else "exp_avg"
    for values in stepped(training).state.values():
        if rank == 0 and local(values[key]).numel():
            local(values[key])[0] += 1
            break
    return f"{key} of "


def change_lr(training: Training, rank: int) -> str:
    training.optimizer.param_groups[1]["lr"] = 0.5
    return "param group 1: lr is "


def change_step(training: Training, rank: int) -> str:
    for values in stepped(training).state.values():
        values["step"] = values["step"] - 1
    return f" is {SAVED}.0 in the checkpoint, {SAVED - 1}.0 here"


def change_scheduler(training: Training, rank: int) -> str:
    training.scheduler.last_epoch = 0
    return f"scheduler: last_epoch is {SAVED} in the checkpoint, 0 here"


def forget_state(training: Training, rank: int) -> str:
    if rank == 0:
        stepped(training).state.clear()
    return " is in the checkpoint, and the optimizer has none"


CHANGES = (change_weight, change_state, change_lr, change_step, change_scheduler, forget_state)


@on_ranks(*some([2], [1, 3]), each=[(kind.name,) for kind in KINDS])
def test_what_is_not_restored_is_named(rank, world_size, name, saved_at_3):
    kind, path = BY_NAME[name], saved_at_3 / name
    training = Training.of(kind, seed=1)
    with pytest.raises(NotRestoredError):
        zckpt.assert_restored(path, **training.given)
    zckpt.load(path, **training.given)
    restored = zckpt.assert_restored(path, **training.given)
    assert (restored.step, restored.notes) == (SAVED, [])
    first = KINDS.index(kind) % 3
    for change in CHANGES[first::3] if world_size == 2 else CHANGES:  # at 2 ranks each of some kinds, in every run
        if kind.optimizer == "sgd" and change is change_step:
            continue
        said = change(training, rank)
        if isinstance(training.optimizer, ZeroOptimizer) and change is change_weight:
            said = "of body.0.weight differs in "  # masters follow weights that the program has changed
        with pytest.raises(NotRestoredError) as error:
            zckpt.assert_restored(path, **training.given)
        assert any(said in one for one in error.value.differences), (change, error.value.differences)
        assert len(set(of_all_ranks(error.value.differences))) == 1
        zckpt.load(path, **training.given)


AGAIN = ["zero2-plain-bfloat16", "zero1-plain-float32", "adamw-fsdp-float32", "redundancy-ddp-float32"]
"""What is saved once more, at another number of ranks."""


def load_and_save(rank, world_size, source: Path, directory: Path) -> None:
    for name in AGAIN:
        training = Training.of(BY_NAME[name], seed=5)
        zckpt.load(source / name, **training.given)
        checkpointer = zckpt.Checkpointer(directory / name, fingerprint=True, on_sigterm=False)
        checkpointer.save(SAVED, **training.given)


def test_a_fingerprint_is_recorded_and_stays_at_any_number_of_ranks(saved_at_3, tmp_path):
    run(load_and_save, 2, saved_at_3, tmp_path)
    for name in BY_NAME:
        first, again = saved_at_3 / name, tmp_path / name / f"step-{SAVED:08}"
        expected = zckpt.fingerprint(first)
        assert len(expected.entries) > 5
        assert read_digests(first / "fingerprint.json") == expected, name
        if name in AGAIN:
            assert read_digests(again / "fingerprint.json") == expected, name
            assert zckpt.verify(again, deep=True, against=first / "fingerprint.json").findings == []
            assert zckpt.diff(first, again).changed == []
