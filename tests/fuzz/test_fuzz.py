"""Every target runs without a find, what was found stays mended, and the fuzzer finds what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zckpt
from tests.fuzz import run
from tests.fuzz.oracles import check_error
from tests.fuzz.targets import FIXTURES, ROOT, TARGETS, Checkpoints, opened
from tests.fuzz.trees import EDIT, files_of, of_folder
from tests.pairwise import some
from zckpt.errors import ZckptError

CORPUS = sorted(path for path in Path(__file__).with_name("corpus").rglob("*") if path.is_file())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_once(path):
    try:
        TARGETS[path.parent.name].run(path.read_bytes())
    except ZckptError as error:
        check_error(error)


@pytest.mark.parametrize("limit", some(["--runs=10"], ["--time=60"]))
def test_every_target_runs(limit, tmp_path):
    pytest.importorskip("atheris", reason="there is no wheel of atheris for this Python")
    command = [sys.executable, "-m", "tests.fuzz.run", limit, "--jobs", "3", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    finds = [path.read_text() for path in (tmp_path / "finds").glob("*.txt")]
    assert done.returncode == 0, "\n".join([done.stdout, *finds]) or done.stderr[-4000:]
    [totals] = tmp_path.glob("totals-*.json")
    executions = {name: one["executions"] for name, one in json.loads(totals.read_text()).items()}
    assert executions.keys() == TARGETS.keys()
    assert min(executions.values()) > 0


def wrong_result(_data):
    raise AssertionError


def endless(_data):
    while True:
        pass


@pytest.mark.parametrize("wrong", [lambda data: data[9], endless, lambda data: bytes(1 << 62), wrong_result])
def test_what_is_wrong_is_found(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "HANG_SECONDS", 0.2)
    before = signal.signal(signal.SIGVTALRM, run.interrupt)
    counts = run.Counter()
    watched = run.Watched("pickle", wrong, counts, tmp_path)
    try:
        watched(b"ab")
        watched(b"abc")
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert counts.get()["finds"] == counts.get()["executions"] == counts.get()["last_find"] == 2
    [kept] = tmp_path.glob("*.bin")  # one of each place
    assert kept.read_bytes() == b"ab"
    assert "Error" in kept.with_suffix(".txt").read_text()


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "other/mcore_legacy_tp2_pp2/ckpt", "other/plain_legacy/ckpt.pt"])
def test_a_tree_without_edits_is_the_same_checkpoint(name, tmp_path):
    """What is mutated is what the program wrote, so that it is read to its end."""
    source = FIXTURES / name
    files = files_of(of_folder(source if source.is_dir() else source.parent))
    for one, data in files.items():
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / one).write_bytes(data)
    assert zckpt.diff(source, tmp_path if source.is_dir() else tmp_path / source.name).equal


def test_an_edit_reaches_the_reader(tmp_path):
    """Each edit of one number of a pickle is another archive, whose checksums are right."""
    target = TARGETS["deepspeed"]
    assert isinstance(target, Checkpoints)
    base, said = target.bases[0], set()
    for place in range(0, len(base.tree.paths), 7):
        try:
            opened(base.put(EDIT.pack(place, 8, 77)))
        except ZckptError as error:
            said.add(error.message)
    assert len(said) > 40
    assert not any("CRC" in one or "directory" in one for one in said)
