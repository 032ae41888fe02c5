"""A Checkpointer that is killed before any of the calls that change a name or make one last."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.pairwise import some
from tests.storage.test_naming import killed
from tests.training.test_run_directory import RECORD, checkpointer, model_of, name_of, resumed, saved, steps_in


def three(here: Path) -> None:
    saved(1, 2, 3, directory=here, keep=2)


def save_fourth(here: Path) -> None:
    saved(4, directory=here, keep=2)


def save_third_again(here: Path) -> None:
    """After a rollback, with other weights."""
    run = checkpointer(here, keep=2)
    run.save(3, model=model_of(30))
    run.close()


@pytest.mark.parametrize(
    ("act", "without_exchange", "every"),
    some(
        [("save_fourth", False, 4)],
        [("save_fourth", False, 1), ("save_third_again", True, 1), ("save_third_again", False, 1)],
    ),
)
def test_whenever_a_save_is_killed_the_run_goes_on_and_nothing_is_left(act, without_exchange, every, tmp_path):
    left = killed("three", act, tmp_path, without_exchange=without_exchange, module=__name__, every=every)
    assert len(left) > 30 // every
    found = []
    for here in left:
        model = model_of(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is passed over
            restored = checkpointer(here).resume(model=model, verify=True)
        found.append((restored.step, int(model.weight[0, 0])))
        saved(5, directory=here, keep=1)
        assert steps_in(here) == [5]
        assert resumed(here) == 5
    before, after = (3, 3), (4, 4) if act == "save_fourth" else (3, 30)
    assert set(found) == {before, after}
    assert found == sorted(found)  # the old one, until it is the new one
    assert {path.name for here in left for path in here.iterdir()} == {RECORD, "latest", name_of(5)}
