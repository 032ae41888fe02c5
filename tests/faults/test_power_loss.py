"""Power is lost at every moment of every verb that writes: what is there then is old or new, and whole.

The calls of a run are recorded, and `tests/faults/disk.py`, which says what a disk promises, makes every state of the
disk that a loss of power after each of them may leave. In each:

- all that is said to be whole is, and it is old or new (`Verb.whole`, `Verb.allowed`);
- the next run succeeds, with the right bytes, and removes what was left;
- when the run has ended with success, what it wrote is there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disk import Crashes, Recorder
from tests.faults.system_calls import CALLS, Supervised, why_not
from tests.faults.test_faults import Run, prepared, spawned
from tests.faults.verbs import VERBS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def lose_power(name: str, base: Path) -> tuple[int, int, list[str]]:
    """Return how many states of the disk there were, how many of them differ, and what was wrong."""
    run = prepared(name, base)
    run.reset()
    recorder = Recorder(run.before)
    status = Supervised(lambda: run.verb.act(base).returncode, base / "out", recorder, CALLS).run()
    assert status == 0
    if not callable(run.verb.arguments):
        assert recorder.states().tree() == run.after, "the model has lost something"
    run.willbe = run.verb.whole(base / "out")
    crashes, differ, wrong = Crashes(recorder), 0, list[str]()
    for found, is_last in crashes.every():
        differ += 1
        run.reset(found)
        wrong += [f"{'after the end' if is_last else 'on the way'}: {one}" for one in judged(run, is_last=is_last)]
    return crashes.count, differ, wrong


def judged(run: Run, *, is_last: bool) -> list[str]:
    lost: list[str] = []
    if is_last:
        try:
            found: Any = run.verb.whole(run.base / "out")
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        lost = [f"{name} is lost" for name, its in run.willbe.items() if name not in found or found[name] != its]
    return lost + run.left()


@pytest.mark.parametrize("name", ["consolidate-over"])
def test_power_is_lost(name, made_inputs, tmp_path):
    count, differ, wrong = spawned(lose_power, name, made_inputs)
    assert wrong == []
    assert differ > 10
