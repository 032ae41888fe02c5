"""Which orders a model may have, against all permutations of its siblings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.evidence.modules import MOST_DEPTH, TooManyOrdersError, possible, tree_of

NAMES = ["a", "b.c", "b.d", "b.e.f", "g.0.h", "g.0.i", "g.1.h", "g.1.i", "g.10.h"]


def orders(names: list[str], prefix="") -> Iterator[list[str]]:
    """Yield all orders that `named_parameters` may have, by going through them."""
    own = [name for name in names if "." not in name[len(prefix) :]]
    children = list(dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in names if name not in own))
    for first in permutations(own):
        for order in permutations(children):
            numbers = [int(child) for child in order if child.isdecimal()]
            if numbers == sorted(numbers):
                yield from _joined(names, list(first), prefix, list(order))


def _joined(names: list[str], first: list[str], prefix, children: list[str]) -> Iterator[list[str]]:
    if not children:
        yield first
        return
    inside = f"{prefix}{children[0]}."
    for one in orders([name for name in names if name.startswith(inside)], inside):
        yield from _joined(names, [*first, *one], prefix, children[1:])


@given(st.data())
def test_possible_names_are_those_of_all_orders_that_fit(data):
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=7, unique=True))
    shape = {name: data.draw(st.integers(0, 2), label=name) for name in names}
    group_of = {name: data.draw(st.integers(0, 1), label=f"group of {name}") for name in names}
    every = list(orders(names))
    real = data.draw(st.sampled_from(every))
    shapes = [[shape[name] for name in real if group_of[name] == group] for group in (0, 1)]
    expected = {}
    for order in every:
        members = [[name for name in order if group_of[name] == group] for group in (0, 1)]
        if [[shape[name] for name in one] for one in members] == shapes:
            for group, one in enumerate(members):
                for number, name in enumerate(one):
                    expected.setdefault((group, number), set()).add(name)
    found = possible(group_of, lambda name, group, number: shapes[group][number] == shape[name], {}, lambda *_: ())
    assert found == expected


def test_places_and_siblings_leave_fewer_orders():
    names = {"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 0}

    def search(places, known):
        return possible(names, lambda *_: True, places, lambda *_: known)

    assert len(search({}, ())[0, 0]) == 4
    assert search({"a.x": 1, "b.y": 0}, ("y", "x")) == {
        (0, 0): {"b.y"}, (0, 1): {"b.x"}, (0, 2): {"a.y"}, (0, 3): {"a.x"},
    }  # fmt: skip
    assert search({"a.x": 0, "a.y": 2, "b.x": 1}, ()) == {}


def test_what_would_take_too_long_is_not_searched():
    wide = {f"m{number}.w": 0 for number in range(40)}
    with pytest.raises(TooManyOrdersError):
        possible(wide, lambda *_: True, {}, lambda *_: ())
    with pytest.raises(TooManyOrdersError):
        tree_of({"a." * (MOST_DEPTH + 1) + "w": 0}, {})
