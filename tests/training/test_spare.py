"""What memory keeps between saves: no step is lost with the workers, nor with a node; at other numbers of ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.folders import names_in
from tests.gloo import on_ranks, run
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.trainings import BY_NAME, Kind, Training, differences
from zckpt.compare.digests import read_digests
from zckpt.errors import DamagedFileError, TargetError, UsageError, ZckptError
from zckpt.training import spare
from zckpt.training.spare import neighbours

pytestmark = pytest.mark.interop

ZERO, FSDP = BY_NAME["zero2-plain-float32"], BY_NAME["adamw-fsdp-float32"]


def train(rank, world_size, kind: Kind, nodes: list[str], steps: list[int]) -> list[dict[str, Any]]:
    """Resume and train up to each of some steps, each time as if killed before; each rank on its node."""
    spare.PIECE_NBYTES = 3000  # several for each file
    told = []
    for last in steps:
        training = Training.of(kind, seed=last)
        within = Path(nodes[rank])
        within.mkdir(exist_ok=True)
        checkpointer = zckpt.Checkpointer("run", every=2, fingerprint=True, replicate=True, replicate_in=within)
        restored = checkpointer.resume(**training.given)
        first = restored.step if restored and restored.step else 0
        state = training.state()
        losses = []
        for step in range(first, last):
            losses += training.train([step])
            checkpointer.step(step + 1, **training.given, extra={"seen": step + 1})
        checkpointer._spare.finish()
        held = sorted(path.name for path in within.rglob("*") if path.suffix in (".safetensors", ".json"))
        told.append({"first": first, "found": state, "losses": losses, "state": training.state(), "held": held,
                     "extra": restored.extra if restored else None})  # fmt: skip
    return told


def unbroken(rank, world_size, steps: int, kind: Kind) -> list[float]:
    return Training.of(kind, seed=3).train(range(steps))


def test_each_rank_sends_to_the_next_node():
    assert neighbours(["a", "a"]) == [None, None]
    assert neighbours(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert neighbours(["a", "a", "b", "c"]) == [2, 2, 3, 0]
    assert neighbours(["a", "b", "b", "b"]) == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", some([ZERO], [FSDP]), ids=lambda kind: kind.name)
def test_no_step_is_lost_with_a_node(kind):
    [before, again] = run(train, 3, kind, ["a", "b", "b"], [3, 5])[1]
    assert (before["first"], again["first"]) == (0, 3)
    assert differences(again["found"], before["state"]) == []
    files = [f"rank-0000{n}-of-00003.safetensors" for n in range(3)]
    assert before["held"] == ["checkpoint.json", *files, "spare.json"]
    shutil.rmtree("a")  # the first rank, and the document
    [last] = run(train, 2, kind, ["c", "b"], [7])[0]
    assert (last["first"], last["extra"]) == (5, {"seen": 5})
    assert differences(last["found"], again["state"]) == []
    expected = run(unbroken, 1, 7, kind)[0]
    assert before["losses"] + again["losses"] + last["losses"] == pytest.approx(expected, rel=2e-6)
    copied = Path("run/step-00000005")  # from memory, as nothing was saved then
    assert read_digests(copied / "fingerprint.json") == zckpt.fingerprint(copied)
    assert names_in("run") == [
        "checkpointer.json", "latest", "spare.json", "step-00000004", "step-00000005", "step-00000006",
    ]  # fmt: skip


def with_error(checkpointer: zckpt.Checkpointer, training: Training) -> None:
    with checkpointer:
        checkpointer.step(7, **training.given)
        _ = 1 // 0


@on_ranks(1)
def test_a_spare_is_gone_on_with_only_after_the_save_that_it_follows():
    """One rank, on which whatever happens to a spare happens."""
    training = Training.of(ZERO)
    run_directory, within = Path("run"), Path("memory")
    within.mkdir()
    options = {"replicate": True, "replicate_in": within}

    def resumed(**more: Any) -> tuple[zckpt.Checkpointer, int]:
        made = zckpt.Checkpointer(run_directory, **options, **more)
        restored = made.resume(**training.given)
        return made, (restored.step or 0) if restored else 0

    def spares() -> list[Path]:
        return list(within.rglob("checkpoint.json"))

    checkpointer, _ = resumed(async_=True)
    for step in (1, 2, 3):
        checkpointer.step(step, **training.given)
        assert len(spares()) == 1  # the last one only
    assert zckpt.open(spares()[0].parent).step == 3
    checkpointer.save(2, **training.given)  # back to an earlier step, which is then the latest
    checkpointer._finish()
    assert resumed()[1] == 2
    assert not spares()

    checkpointer, _ = resumed()
    checkpointer.step(5, **training.given)
    (run_directory / "latest").write_text("step-00000009")  # somebody goes on from elsewhere
    assert resumed()[1] == 2

    checkpointer, _ = resumed(replicate_every=2)
    checkpointer.step(5, **training.given)
    assert not spares()
    checkpointer.step(6, **training.given)
    (spares()[0].parent / "spare.json").unlink()  # killed before all was said
    assert resumed()[1] == 2
    checkpointer, _ = resumed()
    checkpointer.step(5, **training.given)
    for path in spares()[0].parent.iterdir():  # killed while it was removed
        if path.name != "spare.json":
            path.unlink()
    assert resumed()[1] == 2

    with pytest.raises(ZeroDivisionError):
        with_error(resumed()[0], training)
    assert spares()  # what failed may be started again
    with resumed()[0] as checkpointer:
        checkpointer.step(8, **training.given)
        assert zckpt.open(spares()[0].parent).step == 8
    assert not spares()  # and what ended well is not

    checkpointer, _ = resumed()
    checkpointer.step(9, **training.given)
    shutil.rmtree(run_directory)  # another run
    assert resumed()[1] == 0

    (run_directory / "spare.json").write_text("[]")
    with refusing(DamagedFileError, "does not name a run"):
        resumed()
    shutil.rmtree(run_directory)
    with refusing(UsageError, "no such directory"):
        zckpt.Checkpointer(run_directory, replicate=True, replicate_in="none")
    with refusing(UsageError, "replicate_every"):
        zckpt.Checkpointer(run_directory, replicate=True, replicate_every=0)
    mine = within / f"zckpt-{os.getuid()}"
    mine.chmod(0o755)
    with refusing(TargetError, "a directory that only this user can access"):
        resumed()


@on_ranks(2)
def test_a_step_that_cannot_be_kept_is_told_on_all_ranks(rank):
    """All raise, and the step before is still there."""
    training = Training.of(ZERO)
    within = Path(f"node{rank}")
    within.mkdir()
    checkpointer = zckpt.Checkpointer("run", replicate=True, replicate_in=within)
    checkpointer.step(1, **training.given)
    if rank == 1:
        [own] = within.rglob("node")
        own.parent.chmod(0o500)
    with pytest.raises(ZckptError):
        checkpointer.step(2, **training.given, extra={"odd": object()} if rank == 0 and os.getuid() == 0 else None)
    for path in within.rglob("node"):
        path.parent.chmod(0o700)
    again = Training.of(ZERO, seed=1)
    restored = zckpt.Checkpointer("run", replicate=True, replicate_in=within).resume(**again.given)
    assert restored.step == 1


@on_ranks(2)
def test_an_error_waits_for_what_is_sent(rank):
    """Two runs in one process, each rank a node; what fails has been sent when both are closed."""
    spare.PIECE_NBYTES = 500  # many
    training = Training.of(ZERO)
    within = Path(f"node{rank}")
    within.mkdir()
    options = {"replicate": True, "replicate_in": within, "on_sigterm": False}
    runs = [zckpt.Checkpointer(name, **options) for name in "ab"]
    for number in (1, 2):
        for checkpointer in runs:
            checkpointer.step(number, **training.given)
    for checkpointer in runs:
        with pytest.raises(ZeroDivisionError):
            with_error(checkpointer, training)
    found = [zckpt.open(path.parent) for path in within.rglob("checkpoint.json")]
    assert [one.step for one in found] == [7, 7]
    assert all(zckpt.verify(one.source, deep=True).sound for one in found)


@on_ranks(1)
def test_a_spare_becomes_a_checkpoint_in_a_store(tmp_path):
    url = "memory://run"
    training = Training.of(ZERO)
    for first in (0, 1, 2):
        checkpointer = zckpt.Checkpointer(url, replicate=True, replicate_in=tmp_path)
        restored = checkpointer.resume(**training.given)
        assert (restored.step if restored else 0) == first
        checkpointer.step(first + 1, **training.given)
