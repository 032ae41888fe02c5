"""Power is lost at every moment of every verb that writes: what is there then is old or new, and whole.

The calls of a run are recorded, and `tests/faults/disk.py`, which says what a disk promises, makes every state of the
disk that a loss of power after each of them may leave. In each:

- all that is said to be whole is, and it is old or new (`Verb.whole`, `Verb.allowed`);
- the next run succeeds, with the right bytes, and removes what was left;
- when the run has ended with success, what it wrote is there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disk import Crashes, Recorder
from tests.faults.system_calls import CALLS, Supervised, can_ask
from tests.faults.test_faults import Run, prepared, spawned
from tests.faults.verbs import VERBS, Tree, seen, tree
from tests.pairwise import some

pytestmark = can_ask


def lose_power(name: str, base: Path, exchanges: bool = True, every: int = 1) -> tuple[int, int, list[str]]:
    """Look at each n-th state of the disk that differs, and all after the end.

    Returns how many there were, how many of them differ, and what was wrong.
    """
    run = prepared(name, base)
    run.reset()
    recorder = Recorder(run.before, exchanges=exchanges)
    if not exchanges:
        run.verb = replace(run.verb, whole=with_old)
    status = Supervised(lambda: run.verb.act(base).returncode, base / "out", recorder, CALLS).run()
    assert status == 0
    if not callable(run.verb.arguments):
        assert recorder.now.tree() == run.after, "the model has lost something"
    run.willbe = run.verb.whole(base / "out")
    crashes, differ, wrong = Crashes(recorder), 0, list[str]()
    for found, is_last in crashes.every():
        differ += 1
        if differ % every and not is_last:
            continue
        run.reset(found)
        wrong += [f"{'after the end' if is_last else 'on the way'}: {one}" for one in judged(run, is_last=is_last)]
    return crashes.count, differ, wrong


def with_old(out: Path) -> Tree:
    """What is seen, where a directory that waits for its successor has its name."""
    found = tree(out)
    for name in [name for name in found if name.startswith(".") and name.endswith(".zckpt-old")]:
        target = name.removeprefix(".").removesuffix(".zckpt-old")
        if target not in found:
            found |= {f"{target}{one.removeprefix(name)}": data for one, data in found.items() if one.startswith(name)}
    return seen(found)


def judged(run: Run, *, is_last: bool) -> list[str]:
    lost: list[str] = []
    if is_last:
        try:
            found: Any = run.verb.whole(run.base / "out")
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        lost = [f"{name} is lost" for name, its in run.willbe.items() if name not in found or found[name] != its]
    return lost + run.left()


KEPT = [("consolidate-deep", 1), ("Checkpointer", 3)]


@pytest.mark.parametrize(("name", "every"), some(KEPT, [(name, 1) for name in VERBS if (name, 1) not in KEPT]))
def test_power_is_lost(name, every, made_inputs):
    count, differ, wrong = spawned(lose_power, name, made_inputs, True, every)
    print(name, count, "states,", differ, "of them differ")
    assert wrong == []
    assert differ > 3


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["reshard-over", "consolidate-folder"])
def test_power_is_lost_where_names_are_not_exchanged(name, made_inputs):
    """As on NFS: the old directory is there under its name, or as the one that waits."""
    _, differ, wrong = spawned(lose_power, name, made_inputs, False)
    assert wrong == []
    assert differ > 3
