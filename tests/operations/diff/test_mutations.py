"""One thing is changed in a copy of a real checkpoint: it is found and named, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from tests.operations.diff.checkpoints import copied, flip, resave, rewrite, slot_of

SEED = 7


@dataclass
class Expected:
    """What is to be reported: (name, slot) of what differs, what only one has, and keys of settings."""

    changed: set[tuple[str, str]] = field(default_factory=set)
    only_in_a: set[tuple[str, str | None]] = field(default_factory=set)
    only_in_b: set[tuple[str, str | None]] = field(default_factory=set)
    settings: set[str] = field(default_factory=set)
    count: int | None = None
    first: int | None = None


Mutation = Callable[[Path, random.Random], Expected]


def trained(copy: Path) -> dict[str, tuple[int, ...]]:
    parameters = zckpt.open(copy).parameters.values()
    return {p.name: p.shape for p in parameters if "master" in p.slots and p.numel > 1}


def drawn(copy: Path, chance: random.Random, key: str) -> tuple[str, int]:
    """A parameter and one of its elements."""
    name = chance.choice(sorted(trained(copy)))
    return name, chance.randrange(slot_of(copy, name, key).numel)


def one_element(key: str, change: Callable[[Any], Any]) -> Mutation:
    def mutate(copy, chance):
        name, element = drawn(copy, chance, key)
        rewrite(copy, name, key, element, change)
        return Expected({(name, key)}, count=1, first=element)

    return mutate


def one_bit(key: str, bits: int) -> Mutation:
    def mutate(copy, chance):
        name, element = drawn(copy, chance, key)
        flip(copy, name, key, element, chance.randrange(bits))
        return Expected({(name, key)}, count=1, first=element)

    return mutate


def swapped_parameters(copy, _):
    shapes = trained(copy)
    one, other = next((a, b) for a in shapes for b in shapes if a < b and shapes[a] == shapes[b])
    opened = zckpt.open(copy)
    values = {name: opened.read(name, "exp_avg").reshape(-1) for name in (one, other)}
    for element in range(len(values[one])):
        rewrite(copy, one, "exp_avg", element, lambda _, e=element: float(values[other][e]))
        rewrite(copy, other, "exp_avg", element, lambda _, e=element: float(values[one][e]))
    return Expected({(one, "exp_avg"), (other, "exp_avg")})


def in_files(pattern: str, change: Callable[[dict[str, Any]], Any], expected: Expected) -> Mutation:
    """Change what files hold, each in the same way."""

    def mutate(copy, _):
        for path in copy.rglob(pattern):
            resave(path, change)
        return expected

    return mutate


def in_optimizer(change: Callable[[dict[str, Any]], Any], *settings: str) -> Mutation:
    """Change the base optimizer's state dict on all ranks."""

    def of_rank(content):
        change(content["optimizer_state_dict"]["base_optimizer_state"])

    return in_files("*_optim_states.pt", of_rank, Expected(settings=set(settings)))


def in_model(change: Callable[[dict[str, Any]], Any], **expected: Any) -> Mutation:
    return in_files("mp_rank_00_model_states.pt", change, Expected(**expected))


def learning_rate(state):
    state["param_groups"][1]["lr"] *= 2


def stale_step(state):
    for one in state["state"].values():
        one["step"] = one["step"] - 1


def betas(state):
    state["param_groups"][0]["betas"] = (0.9, 0.5)


def dropped_slot(copy, chance):
    names = {(name, "exp_avg_sq") for name, p in zckpt.open(copy).parameters.items() if "exp_avg_sq" in p.slots}
    in_optimizer(lambda state: [one.pop("exp_avg_sq") for one in state["state"].values()])(copy, chance)
    return Expected(only_in_a=names)


def buffer_changed(content):
    content["module"][sorted(content["buffer_names"])[0]].view(-1)[0] += 1


def frozen_widened(content):
    content["module"]["frozen_odd"] = content["module"]["frozen_odd"].float()


def frozen_reshaped(content):
    weight = content["module"]["frozen_odd"]
    content["module"]["frozen_odd"] = weight.reshape(1, *weight.shape)
    if content.get("frozen_param_shapes"):
        content["frozen_param_shapes"]["frozen_odd"] = content["module"]["frozen_odd"].shape


def buffer_lost(content):
    name = sorted(content["buffer_names"])[0]
    content["buffer_names"].remove(name)
    del content["module"][name]


def counter(content):
    content["global_samples"] += 1


FIRST_BUFFER = next(iter(sorted(zckpt.open(FIXTURES / "s2_bf16_dp2").buffers)))

MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "one element of a master": ("s2_bf16_dp4", one_element("master", lambda x: x + 1)),
    "one element of a weight": ("s2_bf16_dp4", one_element("weight", lambda x: -x - 1)),
    "sign of a first moment": ("s1_bf16_dp4", one_element("exp_avg", lambda x: -x if x else 1)),
    "NaN in a second moment": ("s2_bf16_dp2_rr", one_element("exp_avg_sq", lambda x: float("nan"))),
    "Inf in a weight": ("s2_bf16_dp2", one_element("weight", lambda x: float("inf"))),
    "one bit of a master": ("s1_fp32_dp3", one_bit("master", 32)),
    "one bit of a weight": ("s2_bf16_dp3", one_bit("weight", 16)),
    "one bit of a shard of ZeRO-3": ("s3_bf16_dp3", one_bit("exp_avg", 32)),
    "one bit of a momentum": ("s2_bf16_dp2_sgdm", one_bit("momentum_buffer", 32)),
    "parameters of one shape swapped": ("s2_bf16_dp2", swapped_parameters),
    "learning rate": ("s2_bf16_dp2", in_optimizer(learning_rate, "param_groups[1].lr")),
    "betas": ("s2_bf16_dp2", in_optimizer(betas, "param_groups[0].betas[1]")),
    "step": ("s2_bf16_dp2", in_optimizer(stale_step, *(f"param_groups[{i}].state.step" for i in range(3)))),
    "slot dropped": ("s2_bf16_dp2", dropped_slot),
    "buffer": ("s2_bf16_dp2", in_model(buffer_changed, changed={(FIRST_BUFFER, "weight")}, count=1, first=0)),
    "buffer lost": ("s2_bf16_dp2", in_model(buffer_lost, only_in_a={(FIRST_BUFFER, None)})),
    "dtype": ("s2_bf16_dp2", in_model(frozen_widened, changed={("frozen_odd", "weight")}, count=0)),
    "shape": ("s2_bf16_dp2", in_model(frozen_reshaped, changed={("frozen_odd", "weight")})),
    "client state": (
        "s2_bf16_dp2",
        in_model(lambda content: content.update(client_note="new"), settings={"metadata.client_note"}),
    ),
    "counter": ("s2_bf16_dp2", in_model(counter, settings={"metadata.global_samples"})),
    "scheduler": (
        "s2_bf16_dp2",
        in_model(
            lambda content: content.update(lr_scheduler={"last_batch_iteration": 4}),
            settings={"metadata.lr_scheduler.last_batch_iteration"},
        ),
    ),
}


@pytest.mark.parametrize("name", sorted({name for name, _ in MUTATIONS.values()}))
def test_a_copy_is_equal(name):
    assert zckpt.diff(FIXTURES / name, copied(name)).equal


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutation_is_named_and_nothing_else(what):
    name, mutate = MUTATIONS[what]
    copy = copied(name)
    before = zckpt.fingerprint(copy)
    expected = mutate(copy, random.Random(f"{SEED} {what}"))
    found = zckpt.diff(FIXTURES / name, copy)
    assert {(one.match.name, one.match.slot) for one in found.changed} == expected.changed
    assert (set(found.only_in_a), set(found.only_in_b)) == (expected.only_in_a, expected.only_in_b)
    assert {one.key for one in found.settings} == expected.settings
    assert not found.equal
    if expected.count is not None:
        (difference,) = (one.difference for one in found.changed)
        assert difference is not None
        assert (difference.figures.num_different, difference.figures.first) == (expected.count, expected.first)
    if expected.changed or expected.only_in_a or "step" in what:
        assert zckpt.fingerprint(copy) != before


def test_nan_and_inf_are_counted_on_their_side():
    copy = copied("s2_bf16_dp2")
    rewrite(copy, "fc1.weight", "master", 3, lambda _: float("nan"))
    rewrite(copy, "fc1.weight", "master", 5, lambda _: float("-inf"))
    (changed,) = zckpt.diff(FIXTURES / "s2_bf16_dp2", copy).changed
    assert changed.difference is not None
    figures = changed.difference.figures
    assert (figures.nan_a, figures.nan_b, figures.inf_a, figures.inf_b, figures.num_different) == (0, 1, 0, 1, 2)
    assert figures.max_abs is None


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ({1: 5}, {"1": 6}, "x.1"),
        ({"a.b": 5}, {"a": {"b": 6}}, "x.a.b"),
        ({"a[0]": 5}, {"a": [6]}, "x.a[0]"),
        ({1: {"a": 5}}, {"1.a": 6}, "x.1.a"),
    ],
)
def test_keys_that_read_alike_hide_no_value(first, second, place):
    def saved(name: str, content: object) -> str:
        torch.save({"model": {"w": torch.ones(2)}, "x": content}, name)
        return name

    def other(tree: object, value: int) -> object:
        if isinstance(tree, dict):
            return {key: other(one, value) for key, one in tree.items()}
        return [other(one, value) for one in tree] if isinstance(tree, list) else value

    whole = saved("a.pt", first | second)
    assert zckpt.diff(whole, saved("b.pt", first | second)).equal
    for number, content in (("", other(first, 7) | second), (" (2)", first | other(second, 7))):
        [found] = zckpt.diff(whole, saved("b.pt", content)).settings
        assert (found.key, found.b) == (f"metadata.{place}{number}", 7)
    assert [one.key for one in zckpt.diff(whole, saved("b.pt", first)).settings] == [f"metadata.{place} (2)"]
    assert not zckpt.diff(whole, saved("b.pt", other(second, 5) | other(first, 7))).equal


def test_names_that_read_alike_hide_no_value():
    for name, value in (("a", 5), ("b", 7)):
        torch.save({"model": {"w": torch.ones(2)}, "x": {"y": 6}, "x.y": value}, f"{name}.pt")
    [found] = zckpt.diff("a.pt", "b.pt").settings
    assert (found.key, found.a, found.b) == ("metadata.x.y (2)", 5, 7)


def test_keys_that_are_tensors_are_the_same_wherever_they_lie():
    model = torch.nn.Linear(2, 2)
    cache = {one: {"exp_avg": torch.ones(2)} for one in model.parameters()}  # as GrokAdamW keeps its state
    torch.save({"model": model.state_dict(), "cache": cache, "more": torch.ones(100)}, "a.pt")
    torch.save({"more": torch.ones(100), "cache": cache, "model": model.state_dict()}, "b.pt")
    assert zckpt.diff("a.pt", "b.pt").equal
    cache[model.bias]["exp_avg"] += 1
    torch.save({"model": model.state_dict(), "cache": cache, "more": torch.ones(100)}, "b.pt")
    [found] = zckpt.diff("a.pt", "b.pt").settings
    assert found.key.endswith("[2]}.exp_avg")


def test_random_state_in_client_state_is_compared_byte_by_byte():
    keys = []

    def add(content):
        content["some_rng"] = torch.arange(200, dtype=torch.uint8)

    def change(content):
        for key, value in content.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
                value[100] ^= 1
                keys.append(key)

    first, second = (copied("s2_bf16_dp2_client", name) for name in ("first", "second"))
    for path in Path().rglob("mp_rank_00_model_states.pt"):
        resave(path, add)
    resave(next(second.rglob("mp_rank_00_model_states.pt")), change)
    assert "some_rng" in keys
    found = zckpt.diff(first, second)
    assert {one.key for one in found.settings} == {f"metadata.{key}" for key in keys}
    assert [one.b for one in found.settings if one.key == "metadata.some_rng"] == ["differs in 1 of 200"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_in_client_state_is_compared_code_by_code():
    for side, second in (("first", 0.3), ("second", 0.8)):
        (path,) = copied("s2_bf16_dp2", side).rglob("mp_rank_00_model_states.pt")
        codes = torch.quantize_per_tensor(torch.tensor([0.1, second, 0.5]), 0.1, 0, torch.qint8)
        resave(path, lambda content, codes=codes: content.update(codes=codes))
    first, second = (f"{side}/copy" for side in ("first", "second"))
    assert zckpt.diff(first, first).equal
    assert [(one.key, one.b) for one in zckpt.diff(first, second).settings] == [
        ("metadata.codes.tensor", "differs in 1 of 3")
    ]
