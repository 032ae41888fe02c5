"""torch's ZeroRedundancyOptimizer assigns parameters as zckpt does, and goes on from its files as if never stopped.

All ranks see the same data, so that gradients are equal without a reduction and losses can be compared bit for bit.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
from tests import gloo
from tests.gloo import on_ranks
from tests.live import Words, groups_of, save_both, train
from tests.logical import assert_same_tree
from tests.pairwise import each
from zckpt.state.partition import greedy_partition

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[2] / "fixtures"
STEPS, STEPS_AFTER = 3, 5
KINDS = {"adamw": torch.optim.AdamW, "sgdm": torch.optim.SGD}
OPTIONS = {"adamw": {"lr": 0.01, "betas": (0.9, 0.95)}, "sgdm": {"lr": 0.01, "momentum": 0.9}}


def net(*, doubtful: bool) -> Words:
    """With `doubtful`, a frozen parameter has the shape of trained ones, as the buffer, and one is never used."""
    return Words(8, 12, beside=() if doubtful else (1,), unused=doubtful)


def groups(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    """AdamW: two groups by weight decay; SGD: one."""
    return groups_of(model) if kind == "adamw" else [{"params": [p for p in model.parameters() if p.requires_grad]}]


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in groups for p in group["params"]]


def build(kind: str, *, doubtful: bool, seed: int, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model and the real optimizer on this rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(seed)
    model = net(doubtful=doubtful)
    return model, ZeroRedundancyOptimizer(groups(model, kind), KINDS[kind], **options)


def state_by_name(model: nn.Module, state: Any) -> dict[str, dict[str, Any]]:
    """Copies of what a rank has of each parameter."""
    kept = {name: state[p] for name, p in model.named_parameters() if state.get(p)}
    return {name: {key: value.clone() for key, value in slots.items()} for name, slots in kept.items()}


# --- what runs on ranks ---------------------------------------------------------------------------------------------


def save_and_go_on(rank, world_size, kind: str, doubtful: bool, folder: Path) -> tuple[list[float], Any]:
    """Train, save the consolidated and every rank's state, train on; return losses and this rank's state."""
    model, optimizer = build(kind, doubtful=doubtful, seed=1, options=OPTIONS[kind])
    train(model, optimizer, range(STEPS))
    optimizer.consolidate_state_dict(to=0)
    torch.save({"optim": optimizer.optim.state_dict()}, folder / f"zero_rank{rank}.pt")
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        save_both(model, optimizer, folder / "all.pt")
    saved = state_by_name(model, optimizer.optim.state)
    return train(model, optimizer, range(STEPS, STEPS + STEPS_AFTER)), saved


def load_and_go_on(rank, world_size, kind: str, doubtful: bool, folder: Path) -> tuple[list[float], Any]:
    """Load into a model and an optimizer that differ in everything, train on; return losses and this rank's state."""
    model, optimizer = build(kind, doubtful=doubtful, seed=2, options={**OPTIONS[kind], "lr": 9.0, "weight_decay": 0.7})
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    load(rank, optimizer, folder)
    loaded = state_by_name(model, optimizer.optim.state)
    return train(model, optimizer, range(STEPS, STEPS + STEPS_AFTER)), loaded


def load(rank, optimizer: Any, folder: Path) -> None:
    if (folder / "optimizer.pt").is_file():
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        return
    optimizer.optim.load_state_dict(torch.load(folder / f"optimizer_rank_{rank}.pt", weights_only=True))
    for mine, every in zip(optimizer.optim.param_groups, optimizer.param_groups, strict=True):
        every.update({key: value for key, value in mine.items() if key != "params"})


def load_and_save_again(rank, world_size, kind: str, doubtful: bool, folder: Path, out: Path) -> None:
    """Load what zckpt wrote, and save every rank's state as torch has it then, names and all."""
    model, optimizer = build(kind, doubtful=doubtful, seed=2, options=OPTIONS[kind])
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    load(rank, optimizer, folder)
    torch.save(optimizer.optim.state_dict(), out / f"optim-{rank}.pt")
    if rank == 0:
        torch.save(model.state_dict(), out / "weights.pt")


# --- the tests ------------------------------------------------------------------------------------------------------


def some_layouts(seed: int, count: int) -> list[list[list[tuple[int, ...]]]]:
    """Groups of shapes with many equal sizes, some without elements, 0-d ones, and empty groups."""
    draw = random.Random(seed)
    sizes = [(), (1,), (0,), (0, 3), (2, 2), (4,), (1, 4), (3,), (5, 7), (35,), (6, 6)]
    made = [[draw.choices(sizes, k=draw.randint(0, 12)) for _ in range(draw.randint(1, 4))] for _ in range(count)]
    return [groups for groups in made if any(groups)]


@on_ranks(1, 2, 3, 4)
def test_parameters_are_assigned_as_torch_assigns_them(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for groups in some_layouts(world_size, 150):
        parameters = [[nn.Parameter(torch.zeros(shape)) for shape in group] for group in groups]
        optimizer = ZeroRedundancyOptimizer([{"params": group} for group in parameters], torch.optim.SGD, lr=1.0)
        place = {id(p): at for group in parameters for at, p in enumerate(group)}
        assigned = [[[place[id(p)] for p in group["params"]] for group in its]
                    for its in optimizer._partition_parameters()]  # fmt: skip
        assert greedy_partition([[p.numel() for p in group] for group in parameters], world_size) == assigned


@pytest.fixture(scope="module")
def saved(shared) -> Callable[..., tuple[Path, list[Any]]]:
    """Directories that the real optimizer saved, each made once, with what every rank says of the run."""

    def of(kind: str, world_size: int, *, doubtful: bool = True) -> tuple[Path, list[Any]]:
        def make(directory: Path) -> tuple[Path, list[Any]]:
            return directory, gloo.run(save_and_go_on, world_size, kind, doubtful, directory)

        found: tuple[Path, list[Any]] = shared(f"zero-redundancy-{kind}-{world_size}-{doubtful}", make)
        return found

    return of


def names(kind: str, *, doubtful: bool = True) -> list[str]:
    model = net(doubtful=doubtful)
    return names_of(model, groups(model, kind))


def written(source: Path, directory: Path, world_size: int, names: list[str] | None, *, per_rank: bool) -> Path:
    zckpt.convert(
        source, directory, to="zero-redundancy", names=names, verify=True,
        world_size=world_size if per_rank else None,
    )  # fmt: skip
    return directory


def without_consolidated(folder: Path, target: Path) -> Path:
    """A copy that has the model and every rank's state only."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("all.pt")))


def assert_goes_on(results: list[Any], original: list[Any]) -> None:
    """Every rank's losses and, together, the state of every parameter are those of the run that was not stopped."""
    expected = {name: slots for _, state in original for name, slots in state.items()}
    assert_same_tree({name: slots for _, state in results for name, slots in state.items()}, expected)
    assert sum(len(state) for _, state in results) == len(expected)
    for losses, _ in results:
        assert losses == original[0][0]


@pytest.mark.parametrize("per_rank", [False, True], ids=["consolidated", "per-rank"])
@pytest.mark.parametrize(("kind", "world_size"), [("adamw", 2), ("sgdm", 3)])
def test_training_goes_on_from_either_form(kind, world_size, per_rank, saved, tmp_path):
    folder, original = saved(kind, world_size)
    directory = written(folder / "all.pt", tmp_path / "out", world_size, names(kind), per_rank=per_rank)
    assert_goes_on(gloo.run(load_and_go_on, world_size, kind, True, directory), original)


@pytest.mark.parametrize(("kind", "world_size"), each(["adamw", "sgdm"], [1, 3, 4]))
def test_ranks_files_are_resharded_to_other_ranks(kind, world_size, saved, tmp_path):
    folder, original = saved(kind, 2)
    directory = without_consolidated(folder, tmp_path / "ranks")
    assert zckpt.open(directory, names=names(kind)).world_size == 2
    out = written(directory, tmp_path / "out", world_size, names(kind), per_rank=True)
    assert_goes_on(gloo.run(load_and_go_on, world_size, kind, True, out), original)


@pytest.mark.parametrize("kind", ["adamw", "sgdm"])
def test_models_order_tells_the_names_where_nothing_is_doubtful(kind, saved, tmp_path):
    folder, original = saved(kind, 3, doubtful=False)
    directory = without_consolidated(folder, tmp_path / "ranks")
    known = [name for group in zckpt.open(directory).param_groups for name in group.parameters]
    assert known == names(kind, doubtful=False)
    out = written(directory, tmp_path / "out", 2, None, per_rank=False)
    assert_goes_on(gloo.run(load_and_go_on, 2, kind, False, out), original)


def test_names_that_torch_took_over_are_used(saved, tmp_path):
    """Once a consolidated state with names is loaded, torch saves them with every rank's share, all of them."""
    folder, original = saved("adamw", 2)
    first = written(folder / "all.pt", tmp_path / "first", 2, names("adamw"), per_rank=False)
    again = tmp_path / "again"
    again.mkdir()
    gloo.run(load_and_save_again, 3, "adamw", True, first, again)
    assert zckpt.open(again).warnings == []
    out = written(again, tmp_path / "out", 2, None, per_rank=True)
    assert_goes_on(gloo.run(load_and_go_on, 2, "adamw", True, out), original)
