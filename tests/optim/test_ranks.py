"""What ranks tell each other."""

from __future__ import annotations

import threading

from tests.gloo import run
from zckpt.optim.ranks import Ranks


def ask(rank, world_size) -> list[str]:
    said = []
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for what in (threading.Lock(), deep, 1):
        try:
            said.append(str(Ranks().of_first(lambda what=what: what)))  # type: ignore[misc]
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    while deep:  # taken apart, for its destructor would go as deep
        [deep] = deep  # type: ignore[assignment]
    return said


def test_all_learn_of_what_the_first_cannot_send():
    first, other = run(ask, 2)
    assert "cannot pickle" in first[0]
    assert "cannot pickle" in other[0]
    assert "rank 0 failed: RecursionError" in other[1]
    assert (first[2], other[2]) == ("1", "1")
