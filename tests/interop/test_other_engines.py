"""Engines that are not quite those that saved: another optimizer, or frozen parameters that were left out, tied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zckpt
from tests.deepspeed_engine.spec import plain_config
from tests.gloo import run
from tests.logical import assert_same_tree
from tests.pairwise import some
from zckpt.errors import UnsupportedError, ZckptError
from zckpt.torchfile import read_torchfile

pytestmark = pytest.mark.interop

STEPS = 3


class Tied(nn.Module):
    """A frozen embedding that is the head, a frozen layer if asked for, and one that is trained."""

    def __init__(self, *, layer: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.base = nn.Linear(6, 6) if layer else None
        self.adapter = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        for part in (self.emb, self.base):
            if part is not None:
                part.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return something of each of its tensors."""
        seen = self.emb((rows * 7).long().abs() % 11).mean(1)
        return self.head(self.adapter(seen if self.base is None else self.base(seen)))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda p: __import__("deepspeed").ops.adam.FusedAdam(p, lr=1e-2),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    **{name: partial(lambda cls, p: cls(p, lr=1e-2), getattr(torch.optim, name))
       for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")},
}  # fmt: skip


def engine_of(model: Callable[[], nn.Module], optimizer: str, stage: int, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    module = model()
    config = plain_config(stage, train_micro_batch_size_per_gpu=2)
    trained = [one for one in module.parameters() if one.requires_grad]
    return deepspeed.initialize(model=module, optimizer=OPTIMIZERS[optimizer](trained), config=config)[0]


def step(engine: Any, number: int) -> None:
    rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(rows).square().mean())
    engine.step()


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([*named.values()], enabled=engine.zero_optimization_stage() == 3):
        return {name: one.detach().clone() for name, one in named.items()}


# --- another optimizer

ADAMS = {"Adam", "AdamW", "RAdam", "FusedAdam"}
GOES_ON = {(one, one) for one in OPTIMIZERS} | {(one, other) for one in ADAMS for other in ADAMS} | {
    ("SGD", "momentum"), ("momentum", "SGD"), *(("NAdam", one) for one in ADAMS), ("Adadelta", "RMSprop"),
    ("centered", "RMSprop"), ("RMSprop", "centered"),
}  # fmt: skip
"""What an optimizer wants, the other has. All else is refused."""


def save_each(rank, world_size, folder: Path, stage: int, names: list[str]) -> None:
    for name in names:
        engine = engine_of(plain, name, stage, 1)
        for number in range(STEPS):
            step(engine, number)
        engine.save_checkpoint(str(folder / name))


def load_each(rank, world_size, folder: Path, stage: int, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Load each checkpoint into the other's engine, and go on; return what was said where it was refused."""
    said = {}
    for one, other in pairs:
        engine = engine_of(plain, other, stage, 2)
        before, held = weights_of(engine), len(engine.basic_optimizer.state)
        try:
            with zckpt.deepspeed.any_world_size(engine):
                engine.load_checkpoint(str(folder / one))
        except ZckptError as error:
            assert_same_tree(weights_of(engine), before)
            assert len(engine.basic_optimizer.state) == held
            said[one, other] = f"{type(error).__name__}: {error}"
            continue
        assert not all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
        for number in range(2):
            step(engine, number)
    return said


FEW = [("SGD", "AdamW"), ("momentum", "AdamW"), ("AdamW", "NAdam"), ("AdamW", "Adamax"), ("AdamW", "momentum"),
       ("AdamW", "FusedAdam"), ("FusedAdam", "AdamW"), ("NAdam", "RAdam"), ("momentum", "momentum")]  # fmt: skip
EVERY = [(one, other) for one in OPTIMIZERS for other in OPTIMIZERS]
CASES = some(
    [(2, 2, 1, FEW), (0, 0, 2, FEW)],
    [(*one, EVERY)
     for one in ((2, 2, 2), (2, 2, 1), (0, 0, 2), (0, 2, 1), (3, 3, 2), (3, 1, 3), (2, 0, 1), (1, 3, 1))],
)  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "stage", "ranks", "pairs"), CASES, ids=lambda one: str(len(one)) if isinstance(one, list) else None
)
def test_another_optimizer_goes_on_or_is_refused_before_anything_changes(saved, stage, ranks, pairs, tmp_path):
    run(save_each, 2, tmp_path, saved, sorted({one for one, _ in pairs}))
    said = run(load_each, ranks, tmp_path, stage, pairs)[0]
    goes_on = GOES_ON - {("Adagrad", "Adagrad")} if stage == 3 else GOES_ON  # which DeepSpeed cannot load itself
    if (saved, stage) == (0, 2):  # of other forms, single values of each parameter have no place in a group's
        goes_on = goes_on & (set(pairs) - said.keys())
    assert said.keys() == set(pairs) - goes_on
    for (_, other), text in said.items():
        named = {"momentum": "SGD", "centered": "RMSprop"}.get(other, other)
        assert f"{named} cannot continue from " in text or saved == 0 or (other == "Adagrad" and stage == 3)


# --- frozen while they are trained


def save_frozen_later(rank, world_size, folder: Path, stage: int, optimizer: str) -> dict[str, torch.Tensor]:
    engine = engine_of(plain, optimizer, stage, 1)
    step(engine, 0)
    engine.module[0].requires_grad_(False)
    step(engine, 1)
    engine.save_checkpoint(str(folder))
    return weights_of(engine)


def load_frozen_later(
    rank, world_size, folder: Path, stage: int, optimizer: str, in_place: bool
) -> dict[str, torch.Tensor]:
    engine = engine_of(plain, optimizer, stage, 2)
    engine.module[0].requires_grad_(False)
    with zckpt.deepspeed.any_world_size(engine) if in_place else nullcontext():
        assert engine.load_checkpoint(str(folder))[0] is not None
    return weights_of(engine)


@pytest.mark.parametrize(("stage", "optimizer"), some([(3, "SGD")], [(2, "AdamW"), (3, "AdamW")]))
def test_what_was_frozen_while_it_was_trained_has_its_weights_and_state(stage, optimizer, tmp_path):
    """DeepSpeed lists it as trained, by its groups, and as frozen, where it looks for its weights."""
    expected = run(save_frozen_later, 2, tmp_path / "run", stage, optimizer)[0]
    assert zckpt.verify(tmp_path / "run", deep=True).sound
    zckpt.reshard(tmp_path / "run", tmp_path / "cut", world_size=3, verify=True)
    zckpt.consolidate(tmp_path / "run", tmp_path / "m.safetensors", dtype="float16", exclude_frozen=True)
    parameters = zckpt.open(tmp_path / "m.safetensors").parameters
    assert parameters.keys() == expected.keys()
    assert {one.dtype for one in parameters.values()} == {"float16"}
    zckpt.convert(tmp_path / "run", tmp_path / "zckpt", to="zckpt")
    zckpt.convert(tmp_path / "zckpt", tmp_path / "again", to="deepspeed", world_size=1, dtype="float32", verify=True)
    for source, ranks, in_place in (("cut", 3, False), ("again", 1, False), ("run", 1, True), ("zckpt", 2, True)):
        found = run(load_frozen_later, ranks, tmp_path / source, stage, optimizer, in_place)[0]
        assert_same_tree(found, expected)


# --- frozen parameters that were left out


def save_without_frozen(
    rank, world_size, folder: Path, stage: int, model: Callable[[], nn.Module]
) -> dict[str, torch.Tensor]:
    engine = engine_of(model, "AdamW", stage, 1)
    for number in range(STEPS):
        step(engine, number)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    return weights_of(engine)


def load_without_frozen(
    rank, world_size, folder: Path, stage: int, model: Callable[[], nn.Module], in_place: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Return the weights before and after, and the notes."""
    engine = engine_of(model, "AdamW", stage, 2)
    before = weights_of(engine)
    with zckpt.deepspeed.any_world_size(engine) if in_place else nullcontext() as loading:
        engine.load_checkpoint(str(folder), load_module_strict=False)
    after = weights_of(engine)
    step(engine, STEPS)
    return before, after, loading.notes if in_place else []


@pytest.mark.parametrize(
    ("layer", "saved", "stage", "ranks"),
    some(
        [(True, 2, 2, 1), (False, 1, 3, 1)],
        [(False, 2, 2, 1), (True, 2, 3, 3), (True, 1, 2, 3), (True, 1, 1, 1), (True, 3, 2, 1), (True, 2, 0, 1),
         (False, 1, 2, 1), (False, 3, 3, 1)],
    ),
)  # fmt: skip
def test_tied_parameters_of_which_the_first_name_was_left_out(layer, saved, stage, ranks, tmp_path):
    was = run(save_without_frozen, 2, tmp_path, saved, partial(Tied, layer=layer))[0]
    before, after, notes = run(load_without_frozen, ranks, tmp_path, stage, partial(Tied, layer=layer))[0]
    arrives = saved < 3 and (stage < 3 or not layer)  # ZeRO-3 has a list of all that are frozen, or none
    for name, value in after.items():
        if name.startswith("adapter") or (name == "emb.weight" and arrives):
            assert torch.equal(value, was[name]), name
        else:
            assert torch.equal(value, before[name]), name
    assert any("emb.weight: unchanged in the engine" in note for note in notes) == (saved < 3 and not arrives)


def test_what_is_cut_anew_has_no_list_of_some_frozen_parameters(tmp_path):
    model = partial(Tied, layer=True)
    run(save_without_frozen, 2, tmp_path / "saved", 2, model)
    zckpt.reshard(tmp_path / "saved", tmp_path / "three", world_size=3)
    [path] = (tmp_path / "three").glob("*/mp_rank_00_model_states.pt")
    root = read_torchfile(path).root
    assert "head.weight" in root["module"]
    assert root["frozen_param_fragments"] is None
    before, after, _ = run(load_without_frozen, 3, tmp_path / "three", 2, model)[0]
    assert torch.equal(after["base.weight"], before["base.weight"])
    assert zckpt.verify(tmp_path / "three").sound
    with pytest.raises(UnsupportedError, match="all frozen parameters or none"):
        zckpt.reshard(tmp_path / "saved", tmp_path / "there", world_size=3, stage=3)
    assert not (tmp_path / "there").exists()


def test_what_was_left_out_is_missing_after_another_format_too_until_it_is_filled_in(tmp_path):
    """A list of some frozen parameters, the tied one, would end in DeepSpeed's KeyError."""
    model = partial(Tied, layer=True)
    was = run(save_without_frozen, 2, tmp_path / "saved", 2, model)[0]
    zckpt.convert(tmp_path / "saved", tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "dcp", tmp_path / "two", to="deepspeed", stage=2, world_size=2)
    before, after, _ = run(load_without_frozen, 2, tmp_path / "two", 2, model, False)[0]
    assert torch.equal(after["base.weight"], before["base.weight"])
    with pytest.raises(UnsupportedError, match="all frozen parameters or none"):
        zckpt.convert(tmp_path / "dcp", tmp_path / "three", to="deepspeed", stage=3, world_size=2)
    base = tmp_path / "base.safetensors"
    save_file({name: weight.clone() for name, weight in was.items()}, base)
    zckpt.convert(tmp_path / "dcp", tmp_path / "three", to="deepspeed", stage=3, world_size=2, fill_from=base)
    assert_same_tree(run(load_without_frozen, 2, tmp_path / "three", 3, model, False)[0][1], was)


class Adapter(nn.Module):
    """A frozen layer and a trained one, which share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.adapter = nn.Linear(5, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(rows))


@pytest.mark.parametrize("stage", some([3], [2]))
def test_zero1_without_frozen_parameters_is_loaded_at_another_stage(stage, tmp_path):
    """ZeRO-1 does not list them, so there may be some that were left out, of which a list would lack them."""
    was = run(save_without_frozen, 2, tmp_path / "saved", 1, Adapter)[0]
    zckpt.convert(tmp_path / "saved", tmp_path / "other", to="deepspeed", stage=stage)
    _, found, _ = run(load_without_frozen, 2, tmp_path / "other", stage, Adapter, False)[0]
    assert all(torch.equal(found[name], was[name]) for name in ("adapter.weight", "adapter.bias"))


# --- what modules and clients keep of their own on each rank


class Scaled(nn.Linear):
    """A layer that keeps a number of its own beside its tensors, as Transformer Engine's do."""

    scale = torch.zeros(2)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.scale = state["scale"]


def save_own(rank, world_size, folder: Path) -> None:
    engine = engine_of(partial(Scaled, 5, 3), "AdamW", 3, 1)
    engine.module.scale = torch.full((2,), rank + 1.0)
    step(engine, 0)
    engine.save_checkpoint(str(folder), client_state={"counter": rank + 5})


def load_own(rank, world_size, folder: Path) -> tuple[list[float], object]:
    engine = engine_of(partial(Scaled, 5, 3), "AdamW", 3, 2)
    _, client = engine.load_checkpoint(str(folder))
    assert "_extra_state" not in client
    return engine.module.scale.tolist(), client["counter"]


def test_what_each_rank_keeps_under_zero3_is_its_own_again_after_another_format(tmp_path):
    run(save_own, 3, tmp_path / "saved")
    zckpt.convert(tmp_path / "saved", tmp_path / "between", to="zckpt")
    for ranks in (2, 3):
        zckpt.convert(tmp_path / "between", tmp_path / str(ranks), to="deepspeed", world_size=ranks, stage=3)
        assert run(load_own, ranks, tmp_path / str(ranks)) == [([rank + 1] * 2, rank + 5) for rank in range(ranks)]
