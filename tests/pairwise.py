"""Products of parameters, of which every run has enough for all pairs or values, and `make test-all` has all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

Pair = frozenset[tuple[int, object]]


def pairwise(*factors: Iterable[object]) -> list[object]:
    """Give all tuples of one value of each factor for `parametrize`; those that bring no new pair are `nightly`.

    A pair is of two values of different factors. Where a value is a name such as `s2_bf16_dp4_lion`, it is of its
    stage, type and ranks, and the name itself is in one tuple at least. Tuples are chosen one after the other, each the
    first of those with the most new pairs.
    """
    tuples = list(itertools.product(*(enumerate(factor) for factor in factors)))
    pairs = [_pairs(values) for values in tuples]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        best = max(range(len(tuples)), key=lambda number: len(pairs[number] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [
        pytest.param(*(value for _, value in values), marks=[] if number in chosen else pytest.mark.nightly)
        for number, values in enumerate(tuples)
    ]


def each(*factors: Iterable[object]) -> list[object]:
    """Give all tuples of factors that do not depend on each other; those that bring no new value are `nightly`.

    Every run has each value, beside another one of the other factors each time.
    """
    values = [list(factor) for factor in factors]
    chosen = [tuple(n % len(one) for one in values) for n in range(max(map(len, values)))]
    every = dict(zip(itertools.product(*(range(len(one)) for one in values)), itertools.product(*values), strict=True))
    return [pytest.param(*one, marks=[] if at in chosen else pytest.mark.nightly) for at, one in every.items()]


def some(kept: Iterable[object], rest: Iterable[object]) -> list[object]:
    """Give parameters that every run has, and those that are `nightly`; a tuple is one of several arguments."""
    marked = [*((one, ()) for one in kept), *((one, pytest.mark.nightly) for one in rest)]
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=mark) for one, mark in marked]


def of_each_kind(names: Iterable[str]) -> list[object]:
    """Give names of fixtures; all but the first of a stage and type, as in `s2_bf16_dp4_lion`, are `nightly`."""
    kinds: dict[str, str] = {}
    names = sorted(names)
    for name in names:
        kinds.setdefault("_".join(name.split("_")[:2]), name)
    return some(kinds.values(), [name for name in names if name not in kinds.values()])


def _pairs(values: Sequence[tuple[int, object]]) -> set[Pair]:
    """The pairs of features of a tuple, and each value alone."""
    features = [
        {(factor, feature) for feature in _features(index, value)} for factor, (index, value) in enumerate(values)
    ]
    of_two = {
        frozenset(pair) for one, other in itertools.combinations(features, 2) for pair in itertools.product(one, other)
    }
    return of_two | {frozenset([(factor, index)]) for factor, (index, _) in enumerate(values)}


def _features(index: int, value: object) -> set[object]:
    """What a value is one of: stage, type and ranks for a name, otherwise only itself."""
    if isinstance(value, str) and value.count("_") >= 2:
        return set(enumerate(value.split("_")[:3]))
    return {index}
