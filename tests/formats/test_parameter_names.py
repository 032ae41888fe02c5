"""An optimizer's parameter gets a name where every reading of the file gives it the same one, and no name otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from zckpt.formats.torch_files.optimizer import Fits, deduce_names

Model = dict[str, int]
"""Names in the model's order, each with what tells its tensor from others: its shape, here a number."""

ANYTHING = 0
"""Kind of a parameter of which the optimizer's state shows nothing: it fits every tensor."""


def fits_of(model: Model, kinds: Sequence[int]) -> Fits:
    return lambda number, name: kinds[number] in (ANYTHING, model[name])


def deduced(model: Model, *groups: Sequence[int]) -> list[str | None]:
    """Deduce names for groups given by the kinds of their parameters; return them in the optimizer's order."""
    kinds = [kind for group in groups for kind in group]
    found = deduce_names(numbered(groups), list(model), fits_of(model, kinds))
    return [found.get(number) for number in range(len(kinds))]


def numbered(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    numbers, at = [], 0
    for group in groups:
        numbers.append(list(range(at, at + len(group))))
        at += len(group)
    return numbers


# --- what is certain --------------------------------------------------------------------------------------------


def test_all_parameters_in_the_models_order():
    model = {"wte": 1, "h.0": 2, "h.1": 2, "ln": 3}
    assert deduced(model, [1, 2, 2, 3]) == ["wte", "h.0", "h.1", "ln"]


def test_groups_with_and_without_weight_decay():
    model = {"wte": 1, "h.weight": 2, "h.bias": 3, "ln.weight": 4, "ln.bias": 5}
    assert deduced(model, [1, 2], [3, 4, 5]) == list(model)


def test_tensors_that_the_optimizer_does_not_own_are_skipped():
    assert deduced({"frozen": 1, "lora_a": 2, "lora_b": 3}, [2, 3]) == ["lora_a", "lora_b"]


def test_parameter_without_state_is_named_by_its_neighbours():
    model = {"a": 1, "b": 2, "c": 3}
    assert deduced(model, [1, ANYTHING, 3]) == ["a", "b", "c"]


def test_parameters_without_state_are_named_where_they_are_the_whole_model():
    assert deduced({"a": 1, "b": 2, "c": 3}, [ANYTHING] * 3) == ["a", "b", "c"]


def test_group_sorted_by_name_is_recognised_by_its_shapes():
    model = {"wte": 1, "h.0": 2, "ln": 3}
    assert deduced(model, [2, 3, 1]) == ["h.0", "ln", "wte"]


def test_name_of_one_group_frees_the_others_of_doubt():
    assert deduced({"a": 1, "b": 1, "c": 2}, [1, 1], [ANYTHING]) == ["a", "b", "c"]


def test_doubt_between_two_groups_remains():
    assert deduced({"a": 1, "b": 1, "c": 2}, [1, 2], [1]) == [None, "c", None]


def test_models_without_an_optimizer_and_optimizers_without_parameters():
    assert deduce_names([], ["a"], lambda number, name: True) == {}
    assert deduce_names([[]], ["a"], lambda number, name: True) == {}
    assert deduce_names([[0]], [], lambda number, name: True) == {}


# --- what is not ------------------------------------------------------------------------------------------------


def test_one_of_two_tensors_of_a_shape_stays_a_number():
    assert deduced({"a": 1, "b": 1}, [1]) == [None]


def test_two_orders_that_both_fit_leave_numbers():
    """The model's order says b, a; sorted by name it is a, b; both have one shape."""
    assert deduced({"b": 1, "a": 1}, [1, 1]) == [None, None]


def test_only_what_both_orders_agree_on_is_named():
    assert deduced({"b": 1, "a": 1, "c": 2}, [1, 1, 2]) == [None, None, "c"]


def test_shape_that_no_tensor_has_stays_a_number():
    assert deduced({"a": 1}, [9]) == [None]


def test_order_that_is_neither_the_models_nor_the_names_gives_no_name():
    assert deduced({"b": 1, "c": 2, "a": 3}, [3, 1, 2]) == ["a", "b", "c"]
    assert deduced({"b": 1, "c": 2, "a": 3}, [3, 2, 1]) == [None, None, None]


def test_two_groups_that_need_the_same_tensor_give_no_name():
    first, second, third = deduced({"a": 1, "b": 2}, [1, 2], [1])
    assert (first, third) == (None, None)
    assert second in ("b", None)


# --- against all assignments there are --------------------------------------------------------------------------


def readings(kinds: Sequence[int], group: Sequence[int], model: Model, free: Sequence[str]) -> Iterator[dict[int, str]]:
    """Enumerate every way to read one group: some of the free tensors, in the model's order or sorted by name."""
    fits = fits_of(model, kinds)
    for order in (list(free), sorted(free)):
        for chosen in combinations(order, len(group)):
            if all(fits(number, name) for number, name in zip(group, chosen, strict=True)):
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


def assert_sound(model: Model, groups: Sequence[Sequence[int]]) -> None:
    kinds = [kind for group in groups for kind in group]
    every = list(assignments(kinds, numbered(groups), model))
    assume(every)
    certain = common(every)
    found = deduce_names(numbered(groups), list(model), fits_of(model, kinds))
    assert found.items() <= certain.items()


@given(models, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_single_group_gets_every_name_that_is_certain(model, kinds):
    group = list(range(len(kinds)))
    every = list(readings(kinds, group, model, list(model)))
    found = deduce_names([group], list(model), fits_of(model, kinds))
    assert found == (common(every) if every else {})
