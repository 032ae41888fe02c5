"""A run's directory: what is saved when, what is kept, and where a run resumes."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.folders import names_in
from tests.gloo import on_ranks, run
from tests.live import equal
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.trainings import BY_NAME, Training, differences
from zckpt.errors import DamagedFileError, SourceError, UsageError
from zckpt.formats.native.rank_file import recorded

pytestmark = pytest.mark.interop

RECORD = "checkpointer.json"


def train(
    rank, world_size, directory: str, steps: int, options: dict[str, Any], terminated: int | None
) -> dict[str, Any]:
    """Resume, train up to a step, and let the last rank be told to end before one."""
    training = Training.of(BY_NAME["zero2-plain-float32"])
    before = signal.getsignal(signal.SIGTERM)
    checkpointer = zckpt.Checkpointer(directory, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        restored = checkpointer.resume(**training.given)
    first = restored.step if restored and restored.step else 0
    losses = []
    for step in range(first, steps):
        losses += training.train([step])
        if step == terminated and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step(step + 1, **training.given, extra={"seen": step + 1})
        if checkpointer.is_ending:
            break
    checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == before
    dist.barrier()
    return {
        "first": first, "losses": losses, "names": names_in(directory), "extra": restored.extra if restored else None,
        "notes": restored.notes if restored else [], "warned": [str(one.message) for one in warned],
    }  # fmt: skip


@pytest.mark.parametrize("async_", some([True], [False]))
def test_a_run_that_is_ended_resumes_where_it_was(async_):
    options = {"keep": 2, "every": 2, "async_": async_}
    whole = run(train, 2, "whole", 7, options, None)[0]
    assert whole["names"] == [RECORD, "latest", "step-00000004", "step-00000006"]
    began = run(train, 2, "run", 7, options, 2)
    [latest] = {told["names"][-1] for told in began}
    assert latest in ("step-00000003", "step-00000004")  # after the step in which one rank was told, or the next
    assert Path("run/latest").read_text() == latest
    last = zckpt.open("run").step
    assert latest == f"step-{last:08d}"
    ended = run(train, 2, "run", 7, options, None)[0]
    assert ended["extra"] == {"seen": last}
    assert began[0]["losses"] + ended["losses"] == whole["losses"]
    assert ended["names"] == whole["names"]


def damage(checkpoint: str, how: str) -> None:
    ranks = sorted(Path(checkpoint).glob("rank-*"))
    if how == "missing":
        ranks[1].unlink()
    elif how == "short":
        os.truncate(ranks[0], ranks[0].stat().st_size - 1)
    elif how == "document":
        Path(checkpoint, "checkpoint.json").unlink()
    else:
        data = bytearray(ranks[1].read_bytes())
        data[-1] ^= 1
        ranks[1].write_bytes(data)


@pytest.mark.parametrize("how", some(["short"], ["missing", "document"]))
def test_what_is_not_sound_is_passed_over_and_named(how):
    run(train, 2, ".", 4, {"every": 1, "keep": None}, None)
    damage("step-00000004", how)
    damage("step-00000003", how)
    told = run(train, 2, ".", 3, {}, None)
    for one in told:
        assert one["first"] == 2
        assert [note.split(":")[0] for note in one["notes"]] == [f"skipped step-0000000{n}" for n in (4, 3)]
    assert len(told[0]["warned"]) == 2
    assert "step-00000004" in told[0]["warned"][0]
    assert told[1]["warned"] == []
    for name in ("step-00000001", "step-00000002"):
        damage(name, how)
    with (
        refusing(SourceError, "none of the checkpoints is sound"),
        pytest.warns(UserWarning, match="skipped step"),
    ):
        zckpt.Checkpointer(".", on_sigterm=False).resume()


def flipped(rank, world_size) -> list[int]:
    training = Training.of(BY_NAME["zero2-plain-float32"])
    checkpointer = zckpt.Checkpointer(".", on_sigterm=False)
    both = {"model": training.model, "optimizer": training.optimizer}
    found = [checkpointer.resume(**both, verify=verify).step for verify in (False, None, True)]
    with refusing(DamagedFileError, "must not be used"):  # of the weights, which another may not have
        checkpointer.resume(model=training.model, strict=False)
    return found


def test_a_flipped_bit_is_found_unless_nothing_is_to_be_verified():
    run(train, 2, ".", 2, {"every": 1}, None)
    path = Path("step-00000002")
    damage(path, "bit")
    damage_weights(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(flipped, 2) == [[2, 1, 1], [2, 1, 1]]


def damage_weights(path: Path) -> None:
    """Flip a bit of every weight."""
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        for one in recorded(str(file)):
            if one.name.startswith("weight/") and one.nbytes:
                data[one.offset] ^= 1
        file.write_bytes(data)


def test_the_last_sound_one_is_never_removed():
    checkpointer = zckpt.Checkpointer(".", keep=1, on_sigterm=False)
    for step in (1, 2, 3):
        checkpointer.save(step, model=torch.nn.Linear(2, 2))
        checkpointer.close()
        assert names_in() == [RECORD, "latest", f"step-0000000{step}"]
        Path(".step-00000001.zckpt-removed").mkdir()  # left by a run that was killed


def test_a_run_stays_where_it_began_wherever_the_program_goes(monkeypatch):
    top, model = Path.cwd(), torch.nn.Linear(900, 900)
    with zckpt.Checkpointer("run", every=1, async_=True, on_sigterm=False, history="all.store") as checkpointer:
        for step in (1, 2):
            checkpointer.step(step, model=model)
            Path(f"{step}").mkdir()
            monkeypatch.chdir(f"{step}")
    saving = zckpt.save("one", model=model, async_=True)
    monkeypatch.chdir(top)
    saving.result()
    assert names_in("1/2") == ["one"]
    assert names_in() == ["1", "all.store", "run"]
    assert names_in("run") == [RECORD, "latest", "step-00000001", "step-00000002"]


def test_a_new_run_begins_afresh_and_replaces_a_step_of_its_own():
    model = torch.nn.Linear(2, 2)
    checkpointer = zckpt.Checkpointer("new", on_sigterm=False)
    assert checkpointer.resume(model=model) is None
    assert not checkpointer.step(7, model=model)
    checkpointer.save(7, model=model)
    with torch.no_grad():
        model.weight += 1
    checkpointer.save(7, model=model)
    other = torch.nn.Linear(2, 2)
    assert checkpointer.resume(model=other) is not None
    assert equal(other, model)


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}, {"keep": -1}])
def test_unusable_numbers_are_refused(options):
    with refusing(UsageError, "must be at least 1"):
        zckpt.Checkpointer(".", **options)


@on_ranks(2)
def test_a_save_that_fails_in_the_background_does_not_become_the_latest(rank):
    training = Training.of(BY_NAME["zero2-plain-float32"])
    training.train([0])
    before = training.state()
    checkpointer = zckpt.Checkpointer(".", every=1, async_=True, on_sigterm=False)
    both = {"model": training.model, "optimizer": training.optimizer}
    checkpointer.step(1, **both)
    checkpointer.close()
    dist.barrier()
    if rank == 0:
        Path(".step-00000002.zckpt-partial").write_text("in the way")
    dist.barrier()
    checkpointer.step(2, **both)
    with pytest.raises(OSError, match="cannot be"):
        checkpointer.close()
    assert differences(training.state(), before) == []
    dist.barrier()
    assert names_in() == [".step-00000002.zckpt-partial", RECORD, "latest", "step-00000001"]
    assert Path("latest").read_text() == "step-00000001"
