"""Regular expressions of a file's author, matched in a time that is bounded: whether, not how, a name fits one.

Where `re` tries one way after the other, of which there may be 2**n, here all places that a name can be read to are
followed at once, as a set. What needs more than sets (references to groups, atomic groups) is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

if sys.version_info >= (3, 11):
    from re import _compiler, _parser  # type: ignore[attr-defined]
else:  # pragma: no cover
    import sre_compile as _compiler
    import sre_parse as _parser

Places = set[int]
Step = Callable[[str, Places], Places]
"""Returns where a name can be read to, from any of some places on."""

PLAIN = re.compile(r"[^*+?{|(\n]*")
"""Of these `re` tries one way only."""

MOST_NAME, MOST_PATTERN = 1 << 12, 1 << 16
"""Characters."""

MOST_STEPS = 20_000_000
"""What all matches of a configuration may take together: some seconds. A usual one takes thousands."""

PLACE_STEPS, BUILDING_STEPS = 10, 200
"""What a place that is followed takes, and an item of a pattern before it is matched first; a plain match takes one."""


class Patterns:
    """The patterns of one configuration, and what is left of their time."""

    def __init__(self) -> None:
        self._left = MOST_STEPS
        self._built: dict[str, Step] = {}
        self._state: Any = None

    def match(self, pattern: str, name: str, *, below: bool = False) -> bool:
        """Tell whether a pattern matches a whole name, or `below`, all of it or what is behind some dot.

        Raises
        ------
        ValueError
            It is none, needs more than sets, or all together take too long.
        """
        if len(name) > MOST_NAME or len(pattern) > MOST_PATTERN:
            raise ValueError("it or a name is too long")
        text = rf"(?:.*\.)?(?:{pattern})$" if below else pattern
        if text not in self._built:
            self._built[text] = self._build(text, is_plain=PLAIN.fullmatch(pattern) is not None)
        ends = self._built[text](name, {0})
        return bool(ends) if below else len(name) in ends

    def _build(self, text: str, *, is_plain: bool) -> Step:
        try:
            parsed = _parser.parse(text)
            self._state = parsed.state
            if not is_plain:
                return self._sequence(parsed)
            one = re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        self._spend(BUILDING_STEPS)

        def step(name: str, _: Places) -> Places:
            self._spend(1 + len(name) * min(len(name), len(text)) // 4096)
            found = one.match(name)
            return {found.end()} if found else set()

        return step

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise ValueError("it takes too long")

    def _sequence(self, items: Iterable[tuple[object, Any]]) -> Step:
        steps = [self._step(item) for item in items]

        def step(name: str, places: Places) -> Places:
            self._spend(PLACE_STEPS * (1 + len(places)))
            return reduce(lambda found, step: self._spent(step(name, found)), steps, places)

        return step

    def _spent(self, places: Places) -> Places:
        self._spend(PLACE_STEPS * (1 + len(places)))
        return places

    def _step(self, item: tuple[object, Any]) -> Step:
        """Return what follows one item of a pattern that `re` has parsed."""
        self._spend(BUILDING_STEPS)
        kind, of = str(item[0]), item[1]
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            one = _compiler.compile(_parser.SubPattern(self._state, [item]), self._state.flags)
            return lambda name, places: {found.end() for at in places if (found := one.match(name, at))}
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return partial(self._repeated, of[0], of[1], self._sequence(of[2]))
        if kind == "BRANCH":
            return partial(_any_of, [self._sequence(one) for one in of[1]])
        if kind == "SUBPATTERN" and not (of[1] or of[2]):
            return self._sequence(of[3])
        if kind in ("ASSERT", "ASSERT_NOT"):
            back = of[1].getwidth()[0] if of[0] < 0 else 0
            inner, wanted = self._sequence(of[1]), kind == "ASSERT"
            return lambda name, places: {
                at for at in places if (at >= back and bool(inner(name, {at - back}))) is wanted
            }
        raise ValueError(f"it has {kind.lower()}, which is not followed")

    def _repeated(self, low: int, high: int, inner: Step, name: str, places: Places) -> Places:
        found, count = set(places) if low == 0 else set(), 0
        while places and count < high:
            before, places, count = places, inner(name, places), count + 1
            if places == before:
                count = max(count, low)  # as it is now it stays
            if count >= low:
                places = places - found
                found |= places
        return found


def _any_of(steps: Iterable[Step], name: str, places: Places) -> Places:
    found: Places = set()
    return found.union(*(step(name, places) for step in steps))
