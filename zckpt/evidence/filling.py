"""Names that follow each other and fill what has a known size: a flat tensor, or several in turn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)
Step = TypeVar("Step")


def ways(
    count: int, start: State, end: State, steps: Callable[[int, State], Iterable[tuple[Step, State]]]
) -> tuple[int, list[Step]]:
    """Return in how many ways so many steps lead from a state to another, 2 if in more, and one of them.

    Parameters
    ----------
    count : int
    start, end : State
    steps : callable
        Yields what can be done in the n-th step in a state, and the state after it.
    """
    numbers = {start: 1}
    before: list[dict[State, tuple[Step, State]]] = []
    for number in range(count):
        after: dict[State, int] = {}
        before.append({})
        for state, leading in numbers.items():
            for step, to in steps(number, state):
                after[to] = min(after.get(to, 0) + leading, 2)
                before[-1][to] = step, state
        numbers = after
    found: list[Step] = []
    at = end
    for known in reversed(before) if end in numbers else ():
        step, at = known[at]
        found.append(step)
    return numbers.get(end, 0), found[::-1]
