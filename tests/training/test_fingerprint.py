"""The fingerprint that a save records is that of what was saved, and stays it at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from tests.gloo import run
from tests.training.trainings import BY_NAME, Training
from zckpt.compare.digests import read_digests
from zckpt.errors import UsageError

pytestmark = pytest.mark.interop

NAMES = ["zero2-plain-bfloat16", "zero1-plain-float32", "adamw-fsdp-float32", "redundancy-ddp-float32"]


def save_all(rank, world_size, directory: Path) -> None:
    for name in NAMES:
        training = Training.of(BY_NAME[name])
        training.train(range(3))
        given = {"model": training.model, "optimizer": training.optimizer, "step": 3, "fingerprint": True}
        zckpt.save(directory / name / "first", **given)
        saving = zckpt.save(directory / name / "second", **given, async_=True)
        assert saving is not None
        saving.result()
    with pytest.raises(UsageError, match="zckpt's format: found format deepspeed; use zckpt fingerprint"):
        zckpt.save(directory / "none", optimizer=training.optimizer, format="deepspeed", fingerprint=True)


def load_and_save_all(rank, world_size, directory: Path) -> None:
    for name in NAMES:
        training = Training.of(BY_NAME[name], seed=5)
        zckpt.load(directory / name / "first", model=training.model, optimizer=training.optimizer)
        checkpointer = zckpt.Checkpointer(directory / name / "run", fingerprint=True, on_sigterm=False)
        checkpointer.save(3, model=training.model, optimizer=training.optimizer)


def test_it_is_recorded_and_stays(tmp_path):
    run(save_all, 2, tmp_path)
    run(load_and_save_all, 3, tmp_path)
    for name in NAMES:
        first, second, again = (tmp_path / name / one for one in ("first", "second", "run/step-00000003"))
        expected = zckpt.fingerprint(first)
        assert len(expected.entries) > 5
        for directory in (first, second, again):
            assert read_digests(directory / "fingerprint.json") == expected, (name, directory)
        assert zckpt.verify(again, deep=True, against=first / "fingerprint.json").findings == []
        assert zckpt.diff(first, again).changed == []
