"""The example: a run that is killed and resumed on fewer ranks agrees with one that was left alone, and it says so."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import train_and_resume
from killed_ranks import Part
from train_and_resume import disagreements

import zckpt
from tests import gloo
from tests.cli.console import ROOT, environment
from tests.pairwise import some

pytestmark = pytest.mark.interop

Called = Callable[..., tuple[int, str, str]]
STEPS = 8
WHOLE = Part(4, losses={step: 1 / step for step in range(1, STEPS + 1)})
PARTS = [
    Part(4, losses={step: 1 / step for step in range(1, 6)}, killed=3),
    Part(2, resumed=4, saved_by=4, losses={step: 1 / step for step in range(5, STEPS + 1)}),
]


@pytest.fixture
def called(monkeypatch, capsys) -> Called:
    """Call the example in this process: its status, and what it printed; ranks are forked as those of other tests."""
    gloo.start_server()

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train_and_resume", *map(str, arguments)])
        return train_and_resume.main(), *capsys.readouterr()

    return call


@pytest.mark.parametrize("worlds", some([((2, 2, 1),)], [(train_and_resume.WORLDS,)]))
def test_killed_run_goes_on_with_fewer_ranks(worlds, called, monkeypatch):
    monkeypatch.setattr(train_and_resume, "WORLDS", worlds)
    png = Path("pictures/curves.png")
    status, out, error = called("--quick", "--steps", 16, "--seed", 7, "--directory", "run", "--png", png)
    assert status == 0, out + error
    lines = out.splitlines()
    parts = [line.strip() for line in lines if " ranks: " in line]
    assert [part[:8] for part in parts] == [f"{ranks} ranks:" for ranks in worlds]
    assert [part.endswith("was killed") for part in parts] == [True] * (len(worlds) - 1) + [False]
    assert [part.split("saved by ")[1][:7] for part in parts[1:]] == [f"{ranks} ranks" for ranks in worlds[:-1]]
    assert any(line.startswith("losses agree") for line in lines)
    if importlib.util.find_spec("matplotlib"):
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    opened = zckpt.open("run/run")
    assert (opened.step, opened.world_size) == (16, worlds[-1])


@pytest.mark.parametrize("arguments", [("--steps", 3), ("--quick",)])
def test_example_cannot_be_run_with_too_few_steps_or_over_another_run(arguments, called, tmp_path):
    Path("checkpoint").touch()
    status, out, error = called(*arguments, "--directory", tmp_path)
    assert (status, out) == (2, "")
    assert len(error.splitlines()) == 1, error
    assert "too few steps" in error or "is not empty" in error
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("argument", "status", "last"),
    some([("--steps=3", 2, "too few steps")], [("--quick", 0, "matplotlib is not here to draw a picture")]),
)
def test_the_example_is_a_program_that_needs_no_matplotlib(argument, status, last, tmp_path):
    Path("matplotlib.py").write_text("raise ImportError")
    its = environment()
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train_and_resume.py", argument, "--directory", "run"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        env=its | {"PYTHONPATH": os.pathsep.join([str(tmp_path), its["PYTHONPATH"]])},
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    assert last in done.stdout.splitlines()[-1]


def test_what_is_told_without_agreement_or_matplotlib(called, tmp_path, monkeypatch):
    """Of runs as they come back from their ranks, one of which took a wrong turn."""
    losses = {step: 1 / step for step in range(1, train_and_resume.QUICK_STEPS + 1)}
    found = iter([
        Part(4, losses=losses),
        Part(4, losses={step: losses[step] for step in range(1, 6)}, killed=3),
        Part(4, resumed=5, saved_by=4, losses={step: losses[step] for step in range(6, 12)}, killed=0),
        Part(3, resumed=11, saved_by=4, losses={step: 1.02 * losses[step] for step in range(12, 18)}, killed=1),
        Part(2, resumed=17, saved_by=3, losses={step: losses[step] for step in range(18, 25)}),
    ])  # fmt: skip
    monkeypatch.setattr(train_and_resume, "run", lambda *_, **__: next(found))
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    status, out, _ = called("--quick", "--directory", "run")
    assert status == 1
    wrong = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert [line.split(" of ")[1][:7] for line in wrong] == ["3 ranks"]
    assert out.splitlines()[-1] == "matplotlib is not here to draw a picture"
    assert "  step     alone   resumed  ranks" in out
    assert not list(tmp_path.rglob("*.png"))


def test_a_picture_that_is_there_is_not_replaced(called):
    Path("thesis.png").write_bytes(b"precious")
    status, out, error = called("--quick", "--directory", "run", "--png", "thesis.png")
    assert (status, out) == (4, "")
    assert "already exists" in error
    assert Path("thesis.png").read_bytes() == b"precious"
    assert not Path("run").exists()


def test_run_that_agrees_has_no_disagreements():
    assert list(disagreements(WHOLE, PARTS, STEPS)) == []


@pytest.mark.parametrize(
    ("index", "step", "factor", "wrong"),
    [(0, 2, 1 + 1e-9, True), (1, 7, 1 + 1e-9, False), (1, 7, 1.02, True), (1, 7, float("nan"), True)],
)
def test_loss_of_as_many_ranks_must_be_equal_and_of_fewer_near(index, step, factor, wrong):
    part = PARTS[index]
    changed = replace(part, losses={**part.losses, step: part.losses[step] * factor})
    parts = [changed if one is part else one for one in PARTS]
    assert any(f"step {step}" in one for one in disagreements(WHOLE, parts, STEPS)) == wrong


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([replace(PARTS[0], killed=None), PARTS[1]], "nothing was killed"),
        ([PARTS[0], replace(PARTS[1], resumed=0)], "did not resume"),
        ([PARTS[0], replace(PARTS[1], saved_by=2)], "did not resume"),
        (PARTS[:1], "no loss of step 6"),
    ],
)
def test_what_did_not_happen_is_said(parts, words):
    assert any(words in one for one in disagreements(WHOLE, parts, STEPS))
