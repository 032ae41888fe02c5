"""Which rule of an adapter speaks for a place in a file's tree. Pure: no I/O.

The rules of a file become a tree of their own, step by step as the file's tree is gone through: a place there has the
rules that fit all steps to it, in their order. Steps that no rule names lead to the same place, however many there are;
numbers may have one of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zckpt.state.inventory import ANY, EXACTLY, NUMBER, REST, Rule

Steps = Sequence[object]
"""Keys, indices and names of fields from the root of a tree."""

SHOWN_STEP = 200
"""Characters of a key that a place shows: a name in a file may have any length."""

KEPT = 8
"""Sets of rules whose places are kept: the files of all ranks have the same few."""

FEW = 64
"""Rules of a set that is kept: a file may have one for each of its items."""


class Fit:
    """A place that some rules fit.

    Parameters
    ----------
    rules : sequence of Rule
        Those whose steps fit, in the order in which they are asked.
    depth : int
        Number of steps to the place.

    Attributes
    ----------
    rule : Rule or None
        The first that speaks for what is here.
    """

    __slots__ = ("_any", "_depth", "_is_same_below", "_named", "_next", "_numbers", "_rules", "rule")

    def __init__(self, rules: Sequence[Rule], depth: int) -> None:
        self._rules, self._depth = rules, depth
        self._named: dict[str, list[int]] = {}  # which rules go on with a step, by the step
        self._any: list[int] = []
        self._numbers: list[int] = []
        for number, one in enumerate(rules):
            step = one.pattern[depth] if len(one.pattern) > depth else None
            if step in (ANY, REST) or (step is None and one.pattern[-1:] == (REST,)):
                self._any.append(number)
            elif step == NUMBER:
                self._numbers.append(number)
            elif step is not None:
                self._named.setdefault(step.removeprefix(EXACTLY), []).append(number)
        self._next: dict[str | bool, Fit] = {}
        """By a step that rules name; of others by whether it is a number that has rules of its own."""
        ends = ((one, len(one.pattern)) for one in rules)
        self.rule = next(
            (one for one, n in ends if depth == n or (depth >= n - 1 and one.pattern[-1:] == (REST,))), None
        )
        self._is_same_below = all(one.pattern[-1:] == (REST,) and len(one.pattern) <= depth for one in rules)

    def after(self, step: object) -> Fit:
        """Return the place that one more step leads to."""
        if self._is_same_below:
            return self
        text = step if type(step) is str else text_of(step)
        is_number = bool(self._numbers) and text.isdecimal()
        key = text if text in self._named else is_number
        if key not in self._next:
            those = [*self._named.get(text, ()), *(self._numbers if is_number else ()), *self._any]
            self._next[key] = Fit([self._rules[number] for number in sorted(those)], self._depth + 1)
        return self._next[key]


def fit_of(rules: tuple[Rule, ...]) -> Fit:
    """Return the root of a tree, which all rules fit."""
    return _kept(rules) if len(rules) <= FEW else Fit(rules, 0)


@lru_cache(maxsize=KEPT)
def _kept(rules: tuple[Rule, ...]) -> Fit:
    return Fit(rules, 0)


def text_of(step: object) -> str:
    """Return a step as a place shows it, and as rules name it."""
    text = step if isinstance(step, str) else ":".join(map(str, step)) if isinstance(step, tuple) else str(step)
    return text if len(text) <= SHOWN_STEP else text[: SHOWN_STEP - 3] + "..."


def place_of(steps: Steps) -> str:
    """Return the steps to a place as text."""
    return "/".join(map(text_of, steps))
