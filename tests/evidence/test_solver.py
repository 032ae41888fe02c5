"""An optimizer's parameter gets a name where every reading of the file gives it the same one, and no name otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.refusals import refusing
from zckpt.errors import UnsupportedError, UsageError
from zckpt.evidence import Evidence, keep_number, refuse_unnamed, shown_shape
from zckpt.state import Checkpoint, Parameter, ParamGroup

Model = dict[str, int]
"""Names in the model's order, each with what tells its tensor from others: its shape, here a number."""

Orders = Sequence[Callable[[Sequence[str]], list[str]]]

ANYTHING = 0
"""Kind of a parameter of which the optimizer's state shows nothing: it fits every tensor."""


def evidence(model: Model, groups: Sequence[Sequence[int]]) -> Evidence[int]:
    """Evidence of groups that are given by the kinds of their parameters."""
    kinds = [kind for group in groups for kind in group]
    shapes = {number: (kind,) if kind != ANYTHING else None for number, kind in enumerate(kinds)}
    return Evidence(numbered(groups), {name: (kind,) for name, kind in model.items()}, shapes)


def deduced(model: Model, *groups: Sequence[int]) -> list[str | None]:
    """Deduce names for groups; return them in the optimizer's order."""
    found = evidence(model, groups).certain()
    return [found.get(number) for number in range(sum(map(len, groups)))]


def numbered(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    numbers, at = [], 0
    for group in groups:
        numbers.append(list(range(at, at + len(group))))
        at += len(group)
    return numbers


# --- what is certain, and what is not ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "groups", "names"),
    [
        ({"wte": 1, "h.0": 2, "h.1": 2, "ln": 3}, [[1, 2, 2, 3]], ["wte", "h.0", "h.1", "ln"]),
        (
            {"wte": 1, "h": 2, "h.bias": 3, "ln": 4, "ln.bias": 5},
            [[1, 2], [3, 4, 5]],
            ["wte", "h", "h.bias", "ln", "ln.bias"],
        ),
        ({"frozen": 1, "lora_a": 2, "lora_b": 3}, [[2, 3]], ["lora_a", "lora_b"]),
        ({"a": 1, "b": 2, "c": 3}, [[1, ANYTHING, 3]], ["a", "b", "c"]),  # by its neighbours
        ({"a": 1, "b": 2, "c": 3}, [[ANYTHING] * 3], ["a", "b", "c"]),  # the whole model
        ({"wte": 1, "h.0": 2, "ln": 3}, [[2, 3, 1]], ["h.0", "ln", "wte"]),  # sorted by name
        ({"a": 1, "b": 1, "c": 2}, [[1, 1], [ANYTHING]], ["a", "b", "c"]),  # one group frees the other of doubt
        ({"b": 1, "c": 2, "a": 3}, [[3, 1, 2]], ["a", "b", "c"]),
    ],
)
def test_names_that_only_one_reading_gives_are_certain(model, groups, names):
    assert deduced(model, *groups) == names


@pytest.mark.parametrize(
    ("model", "groups", "names"),
    [
        ({"a": 1, "b": 1}, [[1]], [None]),
        ({"a": 1, "b": 1, "c": 2}, [[1, 2], [1]], [None, "c", None]),
        ({"b": 1, "a": 1}, [[1, 1]], [None, None]),  # the model's order says b, a; sorted by name it is a, b
        ({"b": 1, "a": 1, "c": 2}, [[1, 1, 2]], [None, None, "c"]),
        ({"a": 1}, [[9]], [None]),
        ({"b": 1, "c": 2, "a": 3}, [[3, 2, 1]], [None] * 3),  # an order that nobody makes
    ],
)
def test_parameters_that_could_be_several_keep_their_numbers(model, groups, names):
    assert deduced(model, *groups) == names


def test_models_without_an_optimizer_and_optimizers_without_parameters():
    assert evidence({"a": 1}, []).certain() == {}
    assert evidence({"a": 1}, [[]]).certain() == {}
    assert evidence({}, [[ANYTHING]]).certain() == {}


def test_what_fits_one_alone_is_known_in_whatever_order():
    shapes = {0: (3,), 1: (1,), 2: (3,), 3: (9,)}
    said = Evidence([[0, 1], [2, 3]], {"a": (1,), "b": (2,), "c": (3,), "d": (3,)}, shapes)
    assert said.alone() == {1: "a"}
    told = replace(said, rules=(lambda number, name: (number == 0) == (name == "d"),))
    assert told.alone() == {0: "d", 1: "a", 2: "c"}


def test_two_groups_that_need_the_same_tensor_give_no_name():
    first, second, third = deduced({"a": 1, "b": 2}, [1, 2], [1])
    assert (first, third) == (None, None)
    assert second in ("b", None)


# --- against all assignments there are --------------------------------------------------------------------------


def readings(
    kinds: Sequence[int], group: Sequence[int], model: Model, free: Sequence[str], orders: Orders = (list, sorted)
) -> Iterator[dict[int, str]]:
    """Enumerate every way to read one group: some of the free tensors, in the model's order or sorted by name."""
    for order in orders:
        for chosen in combinations(order(free), len(group)):
            if all(kinds[number] in (ANYTHING, model[name]) for number, name in zip(group, chosen, strict=True)):
                yield dict(zip(group, chosen, strict=True))


def assignments(kinds: Sequence[int], groups: Sequence[Sequence[int]], model: Model) -> Iterator[dict[int, str]]:
    """Enumerate every way to read all groups such that no tensor is in two of them."""
    if not groups:
        yield {}
        return
    for rest in assignments(kinds, groups[1:], model):
        free = [name for name in model if name not in rest.values()]
        for reading in readings(kinds, groups[0], model, free):
            yield {**rest, **reading}


def common(found: Sequence[dict[int, str]]) -> dict[int, str]:
    """Return the names that all assignments give."""
    return {number: name for number, name in found[0].items() if all(one[number] == name for one in found)}


models = st.tuples(st.permutations("abcdefg"), st.lists(st.integers(1, 3), max_size=7)).map(
    lambda drawn: dict(zip(*drawn, strict=False))
)
kinds_of_groups = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=3)


@given(models, kinds_of_groups)
def test_name_that_is_given_is_the_one_of_every_reading(model, groups):
    assert_sound(model, groups)


@given(st.data(), models)
def test_names_of_an_optimizer_that_was_made_of_the_model_are_never_wrong(data, model):
    """Groups drawn as a program makes them, so that some reading is always there: the true one."""
    membership = {name: data.draw(st.sampled_from(["decay", "no decay", "frozen"]), label=name) for name in model}
    members = [[name for name in model if membership[name] == group] for group in ("decay", "no decay")]
    members = [sorted(names) if data.draw(st.booleans()) else names for names in members]
    stateless = data.draw(st.booleans())
    groups = [[ANYTHING if stateless else model[name] for name in names] for names in members]
    true = [name for names in members for name in names]
    found = deduced(model, *groups)
    assert all(name in (None, right) for name, right in zip(found, true, strict=True))
    assert_sound(model, groups)


def assert_sound(model: Model, groups: Sequence[Sequence[int]]):
    kinds = [kind for group in groups for kind in group]
    every = list(assignments(kinds, numbered(groups), model))
    assume(every)
    certain = common(every)
    found = evidence(model, groups).certain()
    assert found.items() <= certain.items()


@given(models, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.booleans(), st.sets(st.sampled_from("abcdefg")))
def test_single_group_gets_every_name_that_is_certain(model, kinds, sorted_too, last):
    group = list(range(len(kinds)))
    orders = (
        list,
        *([sorted] if sorted_too else []),
        *([lambda names: sorted(names, key=last.__contains__)] if last else []),
    )
    every = list(readings(kinds, group, model, list(model), orders))
    found = evidence(model, [kinds]).certain(lambda _, names: [order(names) for order in orders])
    assert found == (common(every) if every else {})


@given(models, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_rules_leave_what_all_readings_without_them_leave(model, kinds, data):
    may = {(n, name): data.draw(st.booleans()) for n in range(len(kinds)) for name in model}
    said = replace(evidence(model, [kinds]), rules=(lambda number, name: may[number, name],))
    every = readings(kinds, range(len(kinds)), model, list(model))
    allowed = [one for one in every if all(may[pair] for pair in one.items())]
    assert said.certain() == (common(allowed) if allowed else {})


# --- names that someone gives -----------------------------------------------------------------------------------


@given(models, st.lists(st.integers(0, 3), max_size=4), st.lists(st.sampled_from("abcdefgx"), max_size=5))
def test_given_names_are_taken_as_they_are_or_refused(model, kinds, names):
    said = replace(evidence(model, [kinds]), tied={"x": "a"})
    owners = ["a" if name == "x" else name for name in names]
    right = (
        len(names) == len(kinds) == len(set(owners))
        and set(owners) <= model.keys()
        and all(kind in (ANYTHING, model[name]) for kind, name in zip(kinds, owners, strict=True))
    )
    assert said.recorded(names) == (dict(enumerate(owners)) if right else {})
    if not right:
        with pytest.raises(UsageError):
            said.given(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "unusable parameter names: expected 2 different names, found 1 different ones of 1"),
        (["a", "a"], "found 1 different ones of 2"),
        (["a", "c"], "the model has no parameter c"),
        (["b", "a"], r"parameter 0 of the optimizer is not b: expected shape \(2,\), found \(1,\)"),
        (["a", "alias"], "two of the names belong to one tied parameter"),
    ],
)
def test_given_names_that_cannot_be(names, message):
    said = replace(evidence({"a": 1, "b": 2}, [[1], [ANYTHING]]), tied={"alias": "a"})
    assert said.given(["module.a", "module.b"]) == {0: "a", 1: "b"}
    with refusing(UsageError, message):
        said.given(names)


def test_factored_state_is_of_parameters_with_its_dimensions_only_where_that_is_said():
    said = Evidence([[0]], {"a": (3, 4), "b": (5, 6)}, {0: (5,)})
    assert said.certain() == {}
    assert replace(said, factored=True).certain() == {0: "b"}
    for shape, names in (((5, 1), {0: "b"}), ((5, 2), {})):  # summed along a dimension, or of neither
        assert replace(said, shapes={0: shape}, factored=True).certain() == names


# --- shapes -----------------------------------------------------------------------------------------------------


def test_shape_is_that_of_the_largest_tensor_and_of_adafactors_two_together():
    assert shown_shape({"step": [()], "exp_avg": [(2, 3)], "norm": [(7,)]}) == (2, 3)
    assert shown_shape({"exp_avg_sq_row": [(4, 2)], "exp_avg_sq_col": [(4, 3)], "RMS": [()]}) == (4, 2, 3)
    assert shown_shape({"step": [()], "row_var": [(4, 2, 1)], "col_var": [(4, 1, 3)]}) == (4, 2, 3)
    assert shown_shape({"exp_avg": [(9, 9)], "master": [(2,)]}) == (2,)
    assert shown_shape({"step": [()]}) is None


# --- what is said -----------------------------------------------------------------------------------------------


def test_parameters_without_names_are_refused_where_names_are_needed():
    checkpoint = Checkpoint("run", "torch", param_groups=[ParamGroup({}, ["a", "1"])])
    checkpoint.parameters["a"] = Parameter("a", (1,), "float32")
    with refusing(UnsupportedError, r"the names of some .* are unknown, why: found 1; give --names"):
        refuse_unnamed(checkpoint, "why")
    checkpoint.param_groups = [ParamGroup({}, ["a"])]
    refuse_unnamed(checkpoint, "why")
    assert keep_number(checkpoint, "7", (2,), is_kept=False).shape == (2,)
    refuse_unnamed(checkpoint, "why")
    keep_number(checkpoint, "7", None)
    with refusing(UnsupportedError, "found 7"):
        refuse_unnamed(checkpoint, "why")
