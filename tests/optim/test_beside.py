"""Optimizers that keep more than one tensor or number for each key of a parameter: all that `state_dict()` declares."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

import zckpt
from tests import live
from tests.folders import names_in
from tests.gloo import on_ranks
from tests.live import equal, same, whole
from tests.logical import assert_same_tree
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import LayoutError, UnsupportedError, UsageError, ZckptError
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer


class Ahead(Optimizer):
    """Slow weights over another optimizer, which has the param groups, as Lookahead of several packages has them."""

    def __init__(self, held: Optimizer) -> None:
        self.held = held
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.state = defaultdict(dict)
        self.defaults = {}
        for group in self.param_groups:
            group.setdefault("counter", 0)
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.held.param_groups

    def state_dict(self) -> dict[str, Any]:
        slow = {
            (number, index): dict(self.state[parameter])
            for number, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        return {"slow_state": slow, "base": self.held.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        slow = state_dict.pop("slow_state")
        self.held.load_state_dict(state_dict.pop("base"))
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                self.state[parameter] = {"slow": slow[number, index]["slow"].clone()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.held.step()
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % 3
            for parameter in group["params"] if group["counter"] == 0 else ():
                slow = self.state[parameter]["slow"]
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Turning(SGD):
    """A counter of its own, which its state dict has."""

    turn = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.turn += 1
        self.param_groups[0]["lr"] = 0.1 / self.turn
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turn": self.turn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        hook = self.register_load_state_dict_pre_hook(lambda *_: None)
        super().load_state_dict(state_dict)
        hook.remove()
        self.turn = state_dict["turn"]


class Many(Optimizer):
    """Lists of tensors and a type by parameter, state under a text, and a hyperparameter of several elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": torch.tensor([0.5, 0.25])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        steps = self.state["steps"]
        steps["all"] = steps.get("all", 0) + 1
        for group in self.param_groups:
            group["d"] = group["d"] * 0.75
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    sides = [torch.zeros(n, n).T for n in parameter.shape]  # by columns, as eigenvectors are
                    state |= {"sides": sides, "type": parameter.dtype, "odd": 3}
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 0.5)
                for axis, side in enumerate(state["sides"]):
                    flat = state["mean"].movedim(axis, 0).reshape(len(side), -1)
                    side.add_(flat @ flat.T)
                scale = sum(side.norm() for side in state["sides"]) + steps["all"]
                parameter.sub_(state["mean"].to(state["type"]) * group["d"].sum() / scale)


class Kind(Enum):
    ROWS = 1
    COLUMNS = 2


class Queued(Optimizer):
    """Gradients in a deque, as AdaShift has them, and a hyperparameter that is an Enum, as Scion has them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "kind": Kind.ROWS})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["kind"] = Kind.COLUMNS if group["kind"] is Kind.ROWS else Kind.ROWS
            for parameter in group["params"]:
                queue = self.state[parameter].setdefault("queue", deque([torch.zeros_like(parameter)] * 2))
                queue.append(parameter.grad.clone())
                queue.popleft()
                parameter.sub_(sum(queue) * (0.01 if group["kind"] is Kind.ROWS else 0.02))


class Sharp(Optimizer):
    """Holds an optimizer whose state is its own, too; its state dict has both, as those of SAM have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.1, "lr": 0.1, "momentum": 0.9})
        self.held = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.held.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.5 + parameter.grad
                parameter.grad.add_(state["mean"], alpha=group["rho"])
        self.held.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "held": self.held.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.held.load_state_dict(state_dict["held"])
        self.param_groups = self.held.param_groups


class Inside(Ahead):
    """Has a state dict that is not torch's anywhere."""

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[one]["slow"] for group in self.param_groups for one in group["params"]]
        held = self.held.state_dict()
        return {"fast": held["state"], "param_groups": held["param_groups"], "state": slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert set(state_dict) == {"fast", "param_groups", "state"}
        slow = iter(state_dict["state"])
        self.held.load_state_dict({"state": state_dict["fast"], "param_groups": state_dict["param_groups"]})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"slow": next(slow).clone()}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))


def train(model: nn.Module, optimizers: Iterable[Any], steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(3, 5)).square().sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()


def trained(optimizer: Any, model: nn.Module, *steps: int) -> Any:
    train(model, [optimizer], range(*steps))
    return optimizer


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "ahead": lambda model: Ahead(AdamW(model.named_parameters(), lr=0.1)),
    "inside": lambda model: Inside(AdamW(model.named_parameters(), lr=0.1)),
    "twice": lambda model: Ahead(Ahead(SGD(model.parameters(), lr=0.1, momentum=0.9))),
    "turning": lambda model: Turning(model.parameters(), lr=0.1, momentum=0.9),
    "many": lambda model: Many(model.parameters()),
    "queued": lambda model: Queued(model.parameters()),
    "sharp": lambda model: Sharp(model.parameters()),
    "lbfgs": lambda model: Once(model.parameters(), lr=0.1),
    "plain": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.1),
}


class Once(torch.optim.LBFGS):
    """torch's, with gradients that are there."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(lambda: torch.zeros(()))


SLOTS: dict[str, set[str]] = {
    "ahead": {"exp_avg", "exp_avg_sq"}, "inside": set(), "twice": {"momentum_buffer"}, "turning": {"momentum_buffer"},
    "many": {"mean"}, "queued": set(), "sharp": {"momentum_buffer"}, "lbfgs": {"d", "prev_flat_grad"},
}  # fmt: skip


def saved(kind: str, path: Path, steps: int = 2) -> tuple[nn.Module, Any]:
    """Save a model and its optimizer after some steps, and return them."""
    model = net()
    optimizer = trained(MAKE[kind](model), model, steps)
    zckpt.save(path, model=model, optimizer=optimizer, step=steps)
    return model, optimizer


def goes_on(kind: str, path: Path, model: nn.Module) -> tuple[nn.Module, Any]:
    """Load what was saved after four steps, and hold it after eight against a model that has them."""
    other = net(seed=1)
    its = MAKE[kind](other)
    assert zckpt.load(path, model=other, optimizer=its).notes == []
    trained(its, other, 4, 8)
    assert equal(other, model)
    return other, its


@pytest.mark.parametrize(("kind", "async_"), each(SLOTS, [False, True]))
def test_training_goes_on_as_if_nothing_had_happened(kind, async_):
    model = net()
    optimizer = trained(MAKE[kind](model), model, 4)
    saving = zckpt.save("c", model=model, optimizer=optimizer, step=4, async_=async_)
    trained(optimizer, model, 4, 8)
    if saving is not None:
        saving.result()
    other, its = goes_on(kind, "c", model)
    if kind == "many":
        assert its.state[other[0].weight]["sides"][0].stride() == optimizer.state[model[0].weight]["sides"][0].stride()
    found = zckpt.open("c")
    assert {*found.parameters["0.weight"].slots} - {"weight"} == SLOTS[kind]
    assert zckpt.verify("c", deep=True).sound


def test_an_ordered_dict_among_hyperparameters_stays_one():
    model = net()
    optimizer = trained(MAKE["plain"](model), model, 2)
    optimizer.param_groups[0]["order"] = order = OrderedDict(b=1, a=OrderedDict(c=torch.ones(2)))
    zckpt.save("c", model=model, optimizer=optimizer)
    its = MAKE["plain"](model)
    zckpt.load("c", model=model, optimizer=its)
    assert repr(its.param_groups[0]["order"]) == repr(order)


HOLDING = ["ahead", "twice", "sharp"]
"""Whose state dict has that of another optimizer."""


@pytest.mark.parametrize(
    ("kind", "to"),
    each(["turning", "many", "queued", "plain", "lbfgs", *HOLDING], [None, "zckpt", "dcp", "consolidated"]),
)
def test_a_state_dict_that_torch_saved_goes_on_too_with_all_that_it_has(kind, to):
    source, target = Path("model.pt"), Path("target")
    model = file_of(kind, source)
    if to is not None:
        assert not zckpt.inspect(source, include_inventory=True).left_out
        zckpt.convert(source, target, to=to)
    goes_on(kind, target if to else source, model)
    if kind in HOLDING:
        zckpt.strip(source, "stripped.pt", optimizer=True)
        assert zckpt.open("stripped.pt").slot_names() == ["weight"]
    elif to is None:
        zckpt.convert(source, "again.pt", to="consolidated")
        again, other = torch.load("again.pt", weights_only=False), net(seed=1)
        other.load_state_dict(again["model"])
        its = MAKE[kind](other)
        its.load_state_dict(again["optimizer"])
        trained(its, other, 4, 8)
        assert equal(other, model)


@pytest.mark.parametrize("front", ["module.", "_orig_mod."])
def test_what_the_optimizer_of_a_wrapped_model_keeps_comes_back(front):
    goes_on("turning", "model.pt", file_of("turning", "model.pt", front))


def file_of(kind: str, path: Path, front: str = "") -> nn.Module:
    """Save a model and an optimizer after four steps, `front` before names; return the model after eight."""
    model = net()
    optimizer = trained(MAKE[kind](model), model, 4)
    weights = {f"{front}{name}": one for name, one in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)
    trained(optimizer, model, 4, 8)
    return model


def test_numbers_that_convert_carried_are_named_in_the_optimizers_order_alone():
    """LBFGS has the state of all parameters in the first one's."""
    file_of("lbfgs", "model.pt")
    zckpt.convert("model.pt", "own", to="zckpt")
    model = net(seed=1)
    two = Once([*model.parameters()][:2], lr=0.1)
    with refusing(UsageError, "param group 0 has other parameters"):
        zckpt.load("own", model=model, optimizer=two)


@pytest.mark.parametrize("to", [None, "zckpt", "dcp", "consolidated", "accelerate"])
def test_each_of_several_files_of_optimizers_has_its_own(to):
    source, target = Path("state"), Path("target")
    source.mkdir()
    for at, turns in (("", 3), ("_1", 5)):
        model = net(seed=turns)
        optimizer = trained(MAKE["turning"](model), model, turns)
        save_file(model.state_dict(), source / f"model{at}.safetensors")
        torch.save(optimizer.state_dict(), source / f"optimizer{at}.bin")
    if to is not None:
        zckpt.convert(source, target, to=to)
    others = nn.ModuleDict({"model": net(), "model_1": net()})
    its = {f"optimizer{at}": MAKE["turning"](others[f"model{at}"]) for at in ("", "_1")}
    assert zckpt.load(target if to else source, model=others, optimizer=its).notes == []
    assert [one.turn for one in its.values()] == [3, 5]
    if to == "accelerate":
        assert [torch.load(target / f"optimizer{at}.bin")["turn"] for at in ("", "_1")] == [3, 5]


class Drawing(Turning):
    """Has a tensor among its further keys."""

    drawn = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drawn": self.drawn + self.turn}


@pytest.mark.parametrize(
    ("to", "options", "file"),
    [
        ("consolidated", {}, "optimizer.pt"),
        ("accelerate", {}, "optimizer.bin"),
        ("accelerate", {"fsdp": "full"}, None),
        ("transformers-trainer", {"train_batch_size": 1}, "optimizer.pt"),
        ("zero-redundancy", {}, None),
        ("dcp", {}, None),
    ],
)
def test_it_is_said_where_the_optimizers_own_program_does_not_see_further_keys(to, options, file, tmp_path):
    model = net()
    optimizer = trained(Drawing(model.parameters(), lr=0.1), model, 2)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(saved, "m.pt")
    done = zckpt.convert("m.pt", "out", to=to, **options)
    assert any("only zckpt.load restores" in note for note in done.notes) == (file is None)
    if file is not None:
        its = torch.load(tmp_path / "out" / file)
        assert its["turn"] == 2
        assert its["drawn"].equal(torch.full((3,), 2.0))


@pytest.mark.parametrize("to", ["consolidated", "dcp"])
@pytest.mark.parametrize("made", [Turning, Drawing])
def test_further_keys_are_at_the_top_again_whichever_way_they_have_gone(made, to):
    model = net()
    optimizer = trained(made(model.parameters(), lr=0.1), model, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, "m.pt")
    zckpt.convert("m.pt", "one", to=to)
    zckpt.convert("one", "two", to="consolidated")
    its = torch.load("two/optimizer.pt")
    assert its["turn"] == 2
    optimizer.load_state_dict(its)


def test_further_keys_for_which_a_class_has_no_place_are_named():
    model = file_of("turning", "m.pt")
    restored = zckpt.load("m.pt", model=model, optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert restored.notes == ["left out: turn, for which SGD has no place"]


def test_keys_that_dcp_would_make_texts_of_are_refused_there():
    model = net()
    optimizer = trained(MAKE["plain"](model), model, 2)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momenta": {0.5: torch.ones_like(parameter)}}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "m.pt")
    zckpt.convert("m.pt", "own", to="zckpt")
    with refusing(UnsupportedError, "momenta, which the optimizer keeps of a parameter, has keys that are"):
        zckpt.convert("m.pt", "dcp", to="dcp")


class Kinds(SGD):
    """A hyperparameter that is an object."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["kind"] = timedelta(1)


@pytest.mark.parametrize("kept", ["extra", "scheduler", "state dict"])
def test_an_enum_elsewhere_would_come_back_as_nothing_and_is_refused(kept):
    model = net()
    optimizer = Turning(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scheduler.kind = Kind.ROWS
    given = {"extra": {"extra": {"kind": Kind.ROWS}}, "scheduler": {"scheduler": scheduler}, "state dict": {}}
    optimizer.turn = Kind.ROWS if kept == "state dict" else 0
    with refusing(UnsupportedError, r"is a tests\.optim\.test_beside\.Kind, which only a pickle can hold"):
        zckpt.save("c", model=model, optimizer=optimizer, **given[kept])


def test_what_is_no_data_is_not_given_to_an_optimizer_beside_its_state():
    class Placed(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "place": PurePath("a")}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)

    model = net()
    optimizer = trained(Placed(model.parameters()), model, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    with refusing(UsageError, "an object that only a pickle can make"):
        zckpt.load("c.pt", model=model, optimizer=optimizer)
    restored = zckpt.load("c.pt", model=model, optimizer=optimizer, strict=False)
    assert any("an object that only a pickle can make" in note for note in restored.notes)


def test_what_a_deque_holds_is_held_against_the_checkpoint():
    model, optimizer = saved("queued", "c")
    zckpt.assert_restored("c", model=model, optimizer=optimizer)
    optimizer.state[model[0].weight]["queue"][0].add_(1)
    with refusing(ZckptError, "queue"):
        zckpt.assert_restored("c", model=model, optimizer=optimizer)


def test_an_object_among_hyperparameters_stays_as_the_optimizer_has_it():
    model = net()
    torch.save({"model": model.state_dict(), "optimizer": Kinds(model.parameters()).state_dict()}, "m.pt")
    optimizer = Kinds(model.parameters())
    restored = zckpt.load("m.pt", model=model, optimizer=optimizer)
    assert [note.partition(":")[0] for note in restored.notes] == ["kind of the param groups is left as it is here"]
    assert optimizer.param_groups[0]["kind"] == timedelta(1)
    without = SGD(model.parameters(), lr=0.1)
    with refusing(UnsupportedError, "kind of a param group is an object"):
        zckpt.load("m.pt", model=model, optimizer=without)


@pytest.mark.parametrize(("kind", "to"), each(["ahead", "many"], ["zckpt", "dcp", "consolidated"]))
def test_it_goes_along_to_other_formats_and_is_no_part_of_a_file_without_place(kind, to):
    model, optimizer = saved(kind, "c", 4)
    trained(optimizer, model, 4, 8)
    done = zckpt.convert("c", "out", to=to)
    assert any("only zckpt.load restores" in note for note in done.notes) == (to != "zckpt")
    goes_on(kind, "out", model)
    for refused in (
        lambda: zckpt.consolidate("c", "x.pt", slots="all"),
        lambda: zckpt.average(["c", "c"], "x.pt", slots="all"),
        lambda: zckpt.convert("c", "ds", to="deepspeed", stage=1, world_size=1),
    ):
        with refusing(UnsupportedError, r"kept more|cannot hold (steps, sides, type|slow_state)"):
            refused()
    assert names_in() == ["c", "out"]
    zckpt.consolidate("c", "x.pt", slots=sorted(SLOTS[kind]))


def test_several_optimizers_each_have_theirs():
    def make(model: Any) -> list[Any]:
        return [Ahead(AdamW(model[0].parameters(), lr=0.1)), Many(model[2].parameters())]

    model, other = net(), net(seed=1)
    ours, theirs = make(model), make(other)
    train(model, ours, range(4))
    zckpt.save("c", model=model, optimizer=ours)
    with refusing(UnsupportedError, "kept more"):
        zckpt.consolidate("c", "x.pt", slots="all")
    train(model, ours, range(4, 8))
    zckpt.load("c", model=other, optimizer=theirs)
    train(other, theirs, range(4, 8))
    assert equal(other, model)


class Raising(Turning):
    """Takes no state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.zero_()
        super().load_state_dict(state_dict)
        raise RuntimeError("not today")


NOT_LOADED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "load_state_dict raises": (
        "turning", lambda model: Raising(model.parameters(), lr=0.1, momentum=0.9), "RuntimeError: not today",
    ),
    "without what a wrapper keeps": (
        "adamw", MAKE["ahead"], "Ahead cannot continue from the state of .*KeyError: 'slow_state'",
    ),
    "without a counter": ("momentum", MAKE["turning"], "'turn'"),
    "another class": ("ahead", MAKE["adamw"], "AdamW has no place for slow_state, .*Ahead"),
    "another order": (
        "ahead", lambda model: Ahead(AdamW([*model.parameters()][::-1], lr=0.1)), "another order.*expected 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_LOADED)
def test_what_an_optimizer_cannot_take_is_refused_before_anything_is_changed(case):
    kind, make, match = NOT_LOADED[case]
    saved(kind, "c")
    is_refused(make, match, "c")


@on_ranks(1)
def test_what_sharded_optimizers_cannot_take_is_refused_before_anything_is_changed():
    saved("many", "c")
    for sharded in (ZeroRedundancyOptimizer, ZeroOptimizer):
        is_refused(lambda model, its=sharded: its(model.named_parameters(), AdamW, lr=0.1), "no place", "c")


def is_refused(make: Callable[[Any], Any], match: str, path: Path) -> None:
    model = net(seed=1)
    optimizer = make(model)
    before, settings = whole([*model.parameters()]), repr(optimizer.state_dict())
    with refusing(UsageError, match):
        zckpt.load(path, model=model, optimizer=optimizer)
    assert same(before, whole([*model.parameters()]))
    assert repr(optimizer.state_dict()) == settings


def test_less_than_everything_is_loaded_with_a_note():
    model, optimizer = saved("ahead", "c")
    other = net(seed=1)
    its = AdamW(other.parameters(), lr=0.1)
    restored = zckpt.load("c", model=other, optimizer=its, strict=False)
    assert any("no place for slow_state" in note for note in restored.notes)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.held.state[one]["exp_avg"], its.state[two]["exp_avg"])


class Keyed(torch.optim.Optimizer):
    """Keeps a tensor, a number and a setting under keys that no file could have for names."""

    def __init__(self, parameters: Any, key: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.param_groups[0][key if key not in ("weight", "master") else "limit"] = float("nan")
        self.key = key

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {self.key: torch.full_like(parameter, 5), (self.key, 2): 7}


@pytest.mark.parametrize("key", [0, None, ("a", 1), True, 1.5, "weight", "master"])
def test_state_and_settings_may_have_any_keys(key):
    (model, optimizer), (other, its) = ((one := net(seed), Keyed(one.parameters(), key)) for seed in (0, 1))
    optimizer.step()
    zckpt.save("c", model=model, optimizer=optimizer)
    zckpt.load("c", model=other, optimizer=its)
    assert torch.equal(other[0].weight, model[0].weight)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_tree(its.state[two], optimizer.state[one])
    assert repr({**its.param_groups[0], "params": 0}) == repr({**optimizer.param_groups[0], "params": 0})


@pytest.mark.parametrize(
    "change",
    [
        {"rest": 1}, {"groups": [{}, {}]}, {"parameters": {"0.weight": 7}}, {"at": 7}, {"at": [[1]]},
        {"names": [1]}, {"names": [[1, 2]]}, {"names": [[["0.weight"]]]}, {"keys": [["exp_avg"]]},
    ],
)  # fmt: skip
def test_what_is_none_of_ours_is_damage(change):
    model, optimizer = saved("turning", "c")
    document = json.loads(Path("c/checkpoint.json").read_text())
    document["optimizer_metadata"]["beside_state"]["node"].update(change)
    del document["crc32"]
    Path("c/checkpoint.json").write_text(json.dumps(document))
    with refusing(zckpt.SourceError, "beside_state"):
        zckpt.load("c", model=model, optimizer=optimizer)


@pytest.mark.parametrize("form", ["zckpt", "dcp"])
@pytest.mark.parametrize("kind", ["ahead", "many"])
def test_it_goes_with_the_state_when_that_is_stripped(kind, form):
    saved(kind, "c")
    other = net(seed=1)
    zckpt.convert("c", "d", to=form)
    zckpt.strip("d", "s", optimizer=True)
    restored = zckpt.load("s", model=other)
    assert restored.notes == []
    if form == "zckpt":
        assert zckpt.open("s").optimizer_metadata == {}
    its = SGD(other.parameters(), lr=0.1) if kind == "ahead" else Many(other.parameters())
    restored = zckpt.load("s", model=other, optimizer=its, strict=kind == "many")
    assert any("left out" in note for note in restored.notes) == (form != "zckpt")
    assert not its.state
    trained(its, other, 2, 4)


class Silent(Optimizer):
    """Holds an optimizer of which its state dict says nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.held = SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.held.step()


class Queue(Many):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["queue"] = Fraction(1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: Silent(model.parameters()), "Silent holds SGD in `held`"),
        (lambda model: Queue(model.parameters()), r"'0\.weight'\]\['queue'\] is a fractions.Fraction"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(make, match):
    model = net()
    optimizer = trained(make(model), model, 2)
    with refusing(UnsupportedError, match):
        zckpt.save("c", model=model, optimizer=optimizer)
    assert not Path("c").exists()


@on_ranks(2)
def test_what_ranks_have_shares_of_is_refused_by_name():
    for name, make, match in (
        ("redundancy", lambda model: ZeroRedundancyOptimizer(model.named_parameters(), Many), "keeps sides, type"),
        ("turning", lambda model: ZeroRedundancyOptimizer(model.named_parameters(), Turning, lr=0.1), "keeps turn"),
        ("zero", lambda model: ZeroOptimizer(model.named_parameters(), Turning, lr=0.1), "keeps turn"),
        ("lbfgs", lambda model: ZeroRedundancyOptimizer(model.named_parameters(), Once, max_iter=1), "keeps old_dirs"),
        ("fsdp", MAKE["ahead"], "each rank would have its own"),
    ):
        model = net()
        if name == "fsdp":
            fully_shard(model)
        optimizer = make(model)
        live.step(model, optimizer, (2, 5))
        with refusing(ZckptError, match):
            zckpt.save(name, model=model, optimizer=optimizer)
        if name == "turning":
            with refusing(ZckptError, "keeps turn"):
                zckpt.save(name, model=model, optimizer=optimizer, format="zero-redundancy")
        dist.barrier()
        assert not Path(name).exists()
    model = fully_shard(net())  # a number is the same on all ranks
    optimizer = Turning(model.named_parameters(), lr=0.1, momentum=0.9)
    train(model, [optimizer], range(2))
    zckpt.save("c", model=model, optimizer=optimizer)
    for other in (net(seed=1), fully_shard(net(seed=1))):
        its = Turning(other.named_parameters(), lr=0.1, momentum=0.9)
        zckpt.load("c", model=other, optimizer=its)
        assert its.turn == optimizer.turn == 2
        before = whole([*other.parameters()])
        raising = Raising(other.named_parameters(), lr=0.1, momentum=0.9)
        with refusing(UsageError, "not today"):
            zckpt.load("c", model=other, optimizer=raising)
        assert same(before, whole([*other.parameters()]))


def test_other_names_follow_and_another_arrangement_is_refused():
    model, optimizer = saved("ahead", "c")
    zckpt.convert("c", "renamed", to="zckpt", add_prefix="model.")
    wrapped = nn.ModuleDict({"model": net(seed=1)})
    its = Ahead(AdamW(wrapped.parameters(), lr=0.1))
    zckpt.load("renamed", model=wrapped, optimizer=its)
    for one, two in zip(model.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["slow"], its.state[two]["slow"])
    turned = {"tensors": [{"from": "2.weight", "to": "2.other", "transpose": [1, 0]}]}
    with pytest.raises((UnsupportedError, LayoutError, UsageError)):
        zckpt.convert("c", "turned", to="zckpt", map=turned)


THEIRS = {
    name: lambda its, model, name=name: getattr(its, name)(model.parameters(), lr=0.01)
    for name in ("SOAP", "Prodigy", "ScheduleFreeAdamW", "StableSPAM", "MADGRAD", "Shampoo", "SCION", "AdaShift")
} | {
    "Lookahead": lambda its, model: its.Lookahead(AdamW(model.parameters(), lr=0.01)),
    "SAM": lambda its, model: its.WSAM(model, model.parameters(), AdamW, lr=0.01),
}


@pytest.mark.parametrize("name", THEIRS)
def test_optimizers_of_another_package_go_on(name):
    package = pytest.importorskip("pytorch_optimizer")

    def stepped(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
        for step in steps:

            def closure(step: int = step) -> torch.Tensor:
                torch.manual_seed(step)
                optimizer.zero_grad()
                loss = model(torch.randn(3, 5)).square().sum()
                loss.backward()
                return loss

            closure()
            optimizer.step(closure) if name == "SAM" else optimizer.step()

    model, other = net(), net(seed=1)
    optimizer = THEIRS[name](package, model)
    stepped(model, optimizer, range(6))
    zckpt.save("c", model=model, optimizer=optimizer, step=6)
    stepped(model, optimizer, range(6, 12))
    its = THEIRS[name](package, other)
    zckpt.load("c", model=other, optimizer=its)
    stepped(other, its, range(6, 12))
    assert equal(other, model)


class ScheduleFreeWrapper:
    """schedulefree's (1.4), which is no torch.optim.Optimizer: it gives another one's state and groups as its own."""

    __module__, __qualname__ = "schedulefree.wrap_schedulefree", "ScheduleFreeWrapper"

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.state, self.param_groups = base, base.state, base.param_groups

    def step(self) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)
        self.state, self.param_groups = self.base.state, self.base.param_groups


def test_a_schedule_free_wrapper_is_an_optimizer():
    model, other = net(), net(seed=1)
    optimizer, its = (ScheduleFreeWrapper(torch.optim.SGD(one.parameters(), lr=0.1)) for one in (model, other))
    for p in model.parameters():
        optimizer.state[p]["z"] = torch.randn_like(p)
    optimizer.param_groups[0] |= {"k": 3, "weight_sum": 0.5}
    zckpt.save("c", model=model, optimizer=optimizer)
    zckpt.load("c", model=other, optimizer=its)
    assert_same_tree(its.state_dict(), optimizer.state_dict())
    assert equal(other, model)
