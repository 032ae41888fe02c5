"""Whose a run's directory is: what a Checkpointer did not write stays, and the order is that of saving."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import zckpt
from tests.folders import snapshot
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, TargetError, TargetExistsError

RECORD = "checkpointer.json"


def model_of(step: int) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(step)
    return model


def checkpointer(directory: Path | str, **options: int | None) -> zckpt.Checkpointer:
    return zckpt.Checkpointer(directory, on_sigterm=False, **options)


def saved(*steps: int, directory: Path | str = ".", **options: int | None) -> zckpt.Checkpointer:
    made = checkpointer(directory, **options)
    for step in steps:
        made.save(step, model=model_of(step))
    made.close()  # what is no longer kept is gone
    return made


def saved_and_pruned(run: zckpt.Checkpointer, step: int) -> None:
    run.save(step, model=model_of(step))
    run.close()


def resumed(directory: Path | str = ".") -> int | None:
    """Resume with a Checkpointer that has just been made; return the step, which the weights tell, too."""
    model = model_of(0)
    restored = checkpointer(directory).resume(model=model)
    if restored is None:
        return None
    assert model.weight[0, 0] == restored.step
    return restored.step


def steps_in(directory: Path | str = ".") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path(directory).glob("step-*"))


def name_of(step: int) -> str:
    return f"step-{step:08d}"


# --- what is not ours


def notes(path: str) -> None:
    Path(path).mkdir()
    Path(path, "notes.txt").write_text("precious")


def deepspeeds(path: str) -> None:
    Path(path).mkdir()
    Path(path, "mp_rank_00_model_states.pt").write_text("precious")


def another_runs(path: str) -> None:
    zckpt.save(path, model=model_of(7), step=7)


def empty(path: str) -> None:
    Path(path).mkdir()


def link(path: str) -> None:
    another_runs("elsewhere")
    Path(path).symlink_to("elsewhere")


FOREIGN = [notes, deepspeeds, another_runs, empty, link]


@pytest.mark.parametrize("make", FOREIGN)
def test_what_no_checkpointer_wrote_is_never_removed(make):
    """Whatever its name and its step: older than what is kept, or newer."""
    for step in (1, 350, 99999999):
        make(name_of(step)) if make is not link or step == 1 else None
    before, steps = snapshot(), steps_in()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(300, 400, 500, keep=1)
    assert snapshot().items() >= before.items()
    assert steps_in() == sorted([*steps, 500])


@pytest.mark.parametrize("make", FOREIGN)
def test_what_no_checkpointer_wrote_is_not_replaced(make):
    make(name_of(2))
    before = snapshot()
    run = saved(1)
    with refusing(TargetExistsError, f"{name_of(2)}: exists, but no Checkpointer wrote it"):
        run.save(2, model=model_of(2))
    assert snapshot().items() >= before.items()
    assert Path("latest").read_text() == name_of(1)


def test_a_copy_of_ours_under_another_name_stays():
    """Whether it is sound or not."""
    run = saved(1, keep=1)
    for step in (8, 9):
        shutil.copytree(name_of(1), name_of(step))
    os.truncate(Path(name_of(9), "checkpoint.json"), 9)
    run.save(2, model=model_of(2))
    saved_and_pruned(run, 3)
    assert steps_in() == [3, 8, 9]


def test_what_takes_the_place_of_ours_stays():
    """Under our name, from another run: its id is another."""
    run = saved(1, keep=1)
    shutil.rmtree(name_of(1))
    another_runs(name_of(1))
    saved_and_pruned(run, 2)
    assert steps_in() == [1, 2]


def test_ours_with_something_of_the_users_in_it_stays_and_is_told():
    run = saved(1, keep=1)
    Path(name_of(1), "notes.txt").write_text("precious")
    with pytest.warns(UserWarning, match=r"step-00000001 is not removed: .*notes\.txt"):
        saved_and_pruned(run, 2)
    assert Path(name_of(1), "notes.txt").read_text() == "precious"
    Path(name_of(1), "notes.txt").unlink()
    saved_and_pruned(run, 3)
    assert steps_in() == [3]


def test_a_run_of_an_earlier_zckpt_is_resumed_and_left_alone():
    saved(1, 2)
    Path(RECORD).unlink()
    assert resumed() == 2
    saved(3, 4, keep=1)
    assert steps_in() == [1, 2, 4]


@pytest.mark.parametrize("how", ["text", "list", "version", "names", "directory", "link"])
def test_a_record_that_is_none_is_told_at_once_and_not_replaced(how):
    saved(1)
    path = Path(RECORD)
    texts = {
        "text": "mine", "list": "[]", "version": '{"format": "zckpt checkpointer", "version": 2}',
        "names": json.dumps({
            "format": "zckpt checkpointer", "version": 1, "saved": [["../../home", "00"]], "saving": None,
        }),
    }  # fmt: skip
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "link":
        path.symlink_to("elsewhere")
    else:
        path.write_text(texts[how])
    with refusing((DamagedFileError, TargetExistsError), r"checkpointer\.json"):
        checkpointer(".")
    assert how not in texts or path.read_text() == texts[how]
    assert steps_in() == [1]


def test_a_directory_whose_latest_is_another_programs_is_refused():
    deepspeeds("global_step5")
    Path("latest").write_text("global_step5")
    with refusing(TargetExistsError, "global_step5"):
        checkpointer(".")
    assert Path("latest").read_text() == "global_step5"


# --- the order is that of saving


@pytest.mark.parametrize("keep", [1, 2, 3, None])
def test_after_a_rollback_what_is_saved_is_kept_and_resumed_from(keep):
    saved(100, 200, 300, 400, 500, keep=None)
    run = checkpointer(".", keep=keep)
    model = model_of(0)
    assert zckpt.load(name_of(300), model=model).step == 300
    order = [100, 200, 300, 400, 500]
    for step in (350, 400, 450):
        saved_and_pruned(run, step)
        order = [*(one for one in order if one != step), step]
        assert Path("latest").read_text() == name_of(step)
        assert steps_in() == sorted(order if keep is None else order[-keep:])
        assert resumed() == step
        assert zckpt.open(".").step == step


def test_latest_leads_also_if_it_was_written_by_hand():
    saved(100, 200, 300, keep=None)
    Path("latest").write_text(f"{name_of(200)}\n")
    assert resumed() == 200


def test_where_latest_is_not_sound_what_was_saved_before_it_is_next():
    saved(500, 300, 400, keep=None)
    another_runs(name_of(900))
    for step, following in ((400, 300), (300, 500)):
        Path(name_of(step), "checkpoint.json").unlink()
        with pytest.warns(UserWarning, match=f"skipped {name_of(step)}"):
            assert resumed() == following
    shutil.rmtree(name_of(500))
    model = model_of(0)
    with pytest.warns(UserWarning, match="skipped"):
        checkpointer(".").resume(model=model)
    assert model.weight[0, 0] == 7  # what no Checkpointer wrote comes last


def test_a_kept_checkpoint_that_is_not_sound_is_told_of_and_an_older_one_stays():
    saved(1, 2, keep=2)
    [data] = Path(name_of(2)).glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{name_of(2)} is not sound, and does not count"):
        saved(3, keep=2)
    assert steps_in() == [1, 2, 3]


@pytest.mark.parametrize("said", ["", ".", "..", "../elsewhere", "step-00000009", "x" * 300, "x" * 5000, "a\0b"])
def test_a_latest_that_names_nothing_is_passed_over(said):
    saved(1, 2, directory="run")
    another_runs("elsewhere")
    Path("run/latest").write_text(said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert resumed("run") == 2


def test_a_save_that_was_killed_before_it_could_say_so_is_resumed_from_and_pruned(monkeypatch):
    run = saved(1, 2, keep=2)

    def killed(checkpointer: zckpt.Checkpointer, written: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zckpt.Checkpointer, "_name_and_prune", killed)
        with pytest.raises(KeyboardInterrupt):
            run.save(3, model=model_of(3))
    assert Path("latest").read_text() == name_of(2)
    assert resumed() == 3
    saved(4, keep=2)
    assert steps_in() == [3, 4]


def test_a_directory_that_waited_while_its_successor_was_named_is_resumed_from():
    saved(1, 2)
    Path(name_of(2)).rename(f".{name_of(2)}.zckpt-old")
    assert resumed() == 2


def test_what_a_killed_save_has_left_is_gone_when_a_run_resumes_unless_it_may_be_alive():
    saved(1, 2)
    left, others = (Path(f".{name_of(step)}.zckpt-partial") for step in (3, 4))
    for one, name in ((left, "rank-00000-of-00001.safetensors"), (others, "notes.txt")):
        one.mkdir()
        (one / name).write_text("")
    assert resumed() == 2
    assert left.is_dir()  # somebody wrote into it just now
    for path in Path().rglob("*"):
        os.utime(path, (0, 0))
    assert resumed() == 2
    assert not left.exists()
    assert others.is_dir()


# --- names of ours


def test_a_plain_directory_that_is_called_as_a_checkpoint_is_none():
    notes("step-00000001")
    assert resumed() is None


def test_what_only_has_a_temporary_name_of_ours_stays_and_is_named():
    saved(1, 3)
    every = [".step-00000002.zckpt-partial", ".step-00000003.zckpt-old", ".step-00000001.zckpt-removed"]
    for name in every:
        notes(name)
    with refusing(TargetError, r"-partial: holds files that zckpt did not write.* found notes\.txt"):
        saved(2)
    with refusing(TargetError, r"-old: holds files that zckpt did not write.* found notes\.txt"):
        zckpt.save("step-00000003", model=model_of(1), overwrite=True)
    assert resumed() == 3
    saved(4)
    assert all(Path(name, "notes.txt").read_text() == "precious" for name in every)
