"""At which step two runs part, of any formats; and what is said where it cannot be told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.cli.console import FIXTURES, refused, run, succeeded
from tests.refusals import refusing


def model(step: int, since: int = 99) -> dict[str, torch.Tensor]:
    made = {"a.weight": torch.full((3, 5), float(step)), "b.weight": torch.arange(7.0) + step}
    if step >= since:
        made["b.weight"][step % 7] += 1
    return made


def put(name: str, steps: range, since: int = 99) -> str:
    for step in steps:
        at = Path(name, f"step-{step}")
        at.mkdir(parents=True)
        save_file(model(step, since), at / "model.safetensors")
    return name


@pytest.mark.parametrize("since", range(1, 9))
def test_the_step_is_found_wherever_it_is(since):
    a, b = put("a", range(1, 8)), put("b", range(1, 9), since)
    found = zckpt.parting(a, b)
    expected = [{"name": "b.weight", "entry": "weight", "max_abs": 1.0}] if since < 8 else []
    assert (found.equal, found.different) == (since - 1 or None, since if since < 8 else None)
    assert (found.changed, found.steps, found.only_in_a, found.only_in_b) == (expected, [*range(1, 8)], [], [8])


def test_formats_may_differ_and_slots_are_chosen():
    for name, format_ in (("a", None), ("b", "dcp")):
        for step, fixture in ((1, "s2_bf16_dp2"), (2, "s2_bf16_dp4" if name == "a" else "s2_bf16_dp2_lion")):
            at = Path(name, f"step-{step}")
            if format_ is None:
                shutil.copytree(FIXTURES / fixture / "global_step5", at)
            else:
                at.parent.mkdir(exist_ok=True)
                zckpt.convert(FIXTURES / fixture, at, to=format_)
    found = zckpt.parting("a", "b")
    assert (found.equal, found.different) == (1, 2)
    assert {one["entry"] for one in found.changed} >= {"exp_avg_sq", "master"}
    only = zckpt.parting("a", "b", slots=["exp_avg_sq"], parameters=["fc1.weight"])
    assert [(one["name"], one["entry"]) for one in only.changed] == [("fc1.weight", "exp_avg_sq")]


def test_the_command_line_says_where_and_its_status_whether():
    put("a", range(1, 5))
    put("b", range(1, 4), 3)
    done = run("diff --series a b")
    assert (done.returncode, done.stderr) == (1, "")
    assert "equal at step 2, different at step 3: 1 parameter\n  b.weight  weight (by at most 1)\n" in done.stdout
    assert "only in a: 1 step" in done.stdout
    told = run("diff --series a b --json")
    assert json.loads(told.stdout) == zckpt.parting("a", "b").as_dict()
    succeeded("diff --series a a")
    succeeded("diff --series a b --parameters a.*")
    refused(2, "diff --series a b --html page.html", words="no page for two runs")
    assert run("diff --series a/step-1 b/step-1").stdout.startswith("2 checkpoints")


def test_runs_in_stores_part_where_they_do():
    for name, since in (("a", 99), ("b", 3)):
        zckpt.pack(put(name, range(1, 5), since), f"{name}.store")
    done = run("diff --series a.store b.store")
    assert (done.returncode, done.stderr) == (1, "")
    assert "equal at step 2, different at step 3" in done.stdout


def test_runs_that_cannot_be_compared_are_refused():
    a, b = put("a", range(1, 3)), put("b", range(5, 7))
    with refusing(zckpt.UsageError, "no step in common: expected 1, 2, found 5, 6"):
        zckpt.parting(a, b)
    put("several/x", range(1, 3)), put("several/y", range(1, 3))
    with refusing(zckpt.SourceError, "two checkpoints of step 1"):
        zckpt.parting(a, "several")
    with refusing(zckpt.SourceError, "not a directory"):
        zckpt.parting(a, "none")


def test_a_slot_that_some_models_have_is_measured_where_it_is():
    for name, fixture in (("a", "s2_bf16_dp2"), ("b", "s2_bf16_dp2_lion")):
        at = Path(name, "global_step_5")
        (at / "critic").mkdir(parents=True)
        zckpt.consolidate(FIXTURES / fixture, at / "actor", slots=["all"])
        save_file(model(5), at / "critic/model.safetensors")
    found = zckpt.parting("a", "b", slots=["exp_avg"])
    assert found.different == 5
    assert {one["entry"] for one in found.changed} == {"exp_avg"}
    assert {one["name"].partition(": ")[0] for one in found.changed} == {"actor"}
    assert None not in {one["max_abs"] for one in found.changed}


def test_models_of_one_checkpoint_are_compared_each():
    for name in ("a", "b"):
        for step in (1, 2):
            for part in ("actor", "critic"):
                at = Path(name, f"global_step_{step}", part)
                at.mkdir(parents=True)
                save_file(model(step, 2 if (name, part) == ("b", "critic") else 99), at / "model.safetensors")
    found = zckpt.parting("a", "b")
    assert (found.equal, found.different) == (1, 2)
    assert found.changed == [{"name": "critic: b.weight", "entry": "weight", "max_abs": 1.0}]
