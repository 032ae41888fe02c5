"""Regular expressions of a file's author, matched in a time that is bounded: whether, not how, all of a name fits one.

Where `re` tries one way after the other, of which there may be 2**n, here all places that a name can be read to are
followed at once, as a set. What needs more than sets (references to groups, atomic groups) is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

if sys.version_info >= (3, 11):
    from re import _compiler, _parser  # type: ignore[attr-defined]
else:  # pragma: no cover
    import sre_compile as _compiler
    import sre_parse as _parser

Places = set[int]
Step = Callable[[str, Places], Places]
"""Returns where a name can be read to, from any of some places on."""

MOST_CHARACTERS = 1 << 14
MOST_PLACES = 10_000_000
"""That all matches of a configuration may follow together, in some seconds; those of a usual one are thousands."""

BUILDING_PLACES = 20
"""What an item of a pattern takes before it is matched first."""


class Patterns:
    """The patterns of one configuration, and what is left of their time."""

    def __init__(self) -> None:
        self._left = MOST_PLACES
        self._built: dict[str, Step] = {}

    def match(self, pattern: str, name: str) -> bool:
        """Tell whether a pattern matches all of a name.

        Raises ValueError: it is none, needs more than sets, or all together take too long.
        """
        if max(len(name), len(pattern)) > MOST_CHARACTERS:
            raise ValueError("it or a name is too long")
        try:
            if pattern not in self._built:
                parsed = _parser.parse(pattern)
                self._built[pattern] = self._sequence(parsed, parsed.state)
            return len(name) in self._built[pattern](name, {0})
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error

    def _spent(self, places: Places, more: int = 1) -> Places:
        self._left -= len(places) + more
        if self._left < 0:
            raise ValueError("it takes too long")
        return places

    def _sequence(self, items: Any, state: Any) -> Step:  # noqa: ANN401  # the parser's own
        """Return what follows items that `re` has parsed: those of a fixed width together."""
        steps: list[Step] = []
        for simple, some in groupby(items, lambda item: str(item[0]) in _SIMPLE):
            these: list[Any] = list(some)
            self._spent(set(), BUILDING_PLACES * len(these))
            if simple:
                steps.append(partial(_read, _compiler.compile(_parser.SubPattern(state, these), state.flags)))
            else:
                steps += [self._step(str(kind), of, state) for kind, of in these]

        def sequence(name: str, places: Places) -> Places:
            for step in steps:
                places = self._spent(step(name, places))
            return places

        return sequence

    def _step(self, kind: str, of: Any, state: Any) -> Step:  # noqa: ANN401
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return partial(_repeated, of[0], of[1], self._sequence(of[2], state))
        if kind == "BRANCH":
            branches = [self._sequence(one, state) for one in of[1]]
            return lambda name, places: {end for branch in branches for end in branch(name, places)}
        if kind == "SUBPATTERN" and not (of[1] or of[2]):
            return self._sequence(of[3], state)
        if kind in ("ASSERT", "ASSERT_NOT"):
            back = of[1].getwidth()[0] if of[0] < 0 else 0
            inner, wanted = self._sequence(of[1], state), kind == "ASSERT"
            return lambda name, places: {
                at for at in places if (at >= back and bool(inner(name, {at - back}))) is wanted
            }
        raise ValueError(f"it has {kind.lower()}, which is not supported")


_SIMPLE = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"})


def _read(pattern: re.Pattern[str], name: str, places: Places) -> Places:
    return {found.end() for at in places if (found := pattern.match(name, at))}


def _repeated(low: int, high: int, inner: Step, name: str, places: Places) -> Places:
    found, count = set(places) if low == 0 else set(), 0
    while places and count < high:
        before, places, count = places, inner(name, places), count + 1
        if places == before:
            count = max(count, low)  # as it is now it stays
        if count >= low:
            places = places - found
            found |= places
    return found
