"""A run that goes on: what is said of each checkpoint as it appears, and when it is taken for finished."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES, command, environment, refused, run, succeeded
from tests.operations.test_history import TAG, put
from tests.refusals import refusing
from zckpt.operations import watch as module


class Training:
    """A model in training, with a frozen layer, and a run's directory of what it saved."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.run = Path("run")
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
        self.model[0].requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(self.model[1].parameters(), lr=0.01)
        self.steps = 0

    def step(self) -> Training:
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 6)).square().mean().backward()
            self.optimizer.step()
        self.steps += 3
        return self

    def save(self, name: str | None = None, **other: Any) -> Path:
        at = self.run / (name or f"step-{self.steps}")
        at.parent.mkdir(exist_ok=True)
        zckpt.save(at, **{"model": self.model, "optimizer": self.optimizer, "step": self.steps, **other})
        return at


def seen(at: Path, **given: Any) -> list[zckpt.Appeared]:
    return list(zckpt.watch(at, **{"idle": 0.0, "settle": 0.0, **given}))


def codes(one: zckpt.Appeared) -> list[str]:
    return [finding.code for finding in one.findings]


def watched(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], object], idle: float) -> list[zckpt.Appeared]:
    """What is said of the run while one thing happens after the other."""
    left = iter(acts)
    monkeypatch.setattr(module, "time", Clock(lambda _: next(left, lambda: None)()))
    return list(zckpt.watch("run", settle=0.0, idle=idle))


@pytest.fixture
def training() -> Training:
    made = Training()
    made.step().save()
    made.step().save()
    return made


def test_the_last_and_what_appears_then_are_compared_with_the_one_before(training, monkeypatch):
    found = watched(monkeypatch, lambda: training.step().save(), lambda: training.step().save(), idle=1.5)
    assert [one.checkpoint.name for one in found] == ["step-6", "step-9", "step-12"]
    assert [Path(str(one.before)).name for one in found] == ["step-3", "step-6", "step-9"]
    assert [one.findings for one in found] == [[], [], []]
    for one in found:
        assert one.checkpoint.fingerprint == zckpt.fingerprint(one.checkpoint.path).text


@torch.no_grad()
def wrong(training: Training, what: str) -> None:
    layer, state = training.model[1], training.optimizer.state
    if what == "NaN":
        layer.weight[1, 2] = torch.nan
    elif what == "infinite moment":
        state[layer.weight]["exp_avg"][0, 0] = torch.inf
    elif what == "frozen":
        training.model[0].weight[0, 0] += 1e-3
    elif what == "moments of zero":
        for one in state.values():
            one["exp_avg"].zero_()
            one["exp_avg_sq"].zero_()


@pytest.mark.parametrize(
    ("what", "code", "names", "said"),
    [
        ("NaN", "ZC-202", ("1.weight",), "weight of 1.weight holds NaN or Inf"),
        ("infinite moment", "ZC-202", ("1.weight",), "exp_avg of 1.weight holds NaN or Inf"),
        ("frozen", "ZC-403", ("0.weight",), "weight of 0.weight has moved, and is frozen"),
        ("moments of zero", "ZC-404", (), "the norm of exp_avg of all parameters is 0, and was"),
    ],
)
def test_what_is_odd_of_what_elements_say(what, code, names, said, training):
    training.step()
    wrong(training, what)
    training.save()
    [one] = seen(training.run)
    assert one.findings[0].message.startswith(said)
    assert (set(codes(one)), one.findings[0].parameters) == ({code}, names)
    assert one.checkpoint.sound


def test_norms_that_changed_by_a_factor(training):
    with torch.no_grad():
        training.model[1].weight *= 30
        training.model[1].bias *= 1.1
    training.steps += 1
    training.save()
    [one] = seen(training.run, factor=20.0)
    assert one.findings[0].message == "the norm of weight of 1.weight has grown to more than 20 times"
    assert codes(seen(training.run, factor=40.0)[0]) == []
    assert codes(seen(training.run, factor=5.0)[0]) == ["ZC-404"]
    assert "all parameters" in seen(training.run, factor=5.0)[0].findings[0].message


def test_a_run_that_does_not_go_on(training):
    training.save("step-9")
    [one] = seen(training.run)
    assert codes(one) == ["ZC-401", "ZC-402"]
    assert (one.findings[0].expected, one.findings[0].found) == ("beyond 6", "6")


def test_an_optimizer_that_began_anew(training):
    training.optimizer = torch.optim.SGD(training.model[1].parameters(), lr=0.01)
    training.step().save()
    [one] = seen(training.run)
    assert codes(one) == ["ZC-405", "ZC-405"]
    assert {finding.message.split()[0] for finding in one.findings} == {"exp_avg", "exp_avg_sq"}


def test_deep_finds_what_the_one_before_had_as_well_and_what_is_damaged():
    made = Training().step()
    wrong(made, "NaN")
    made.save()
    assert codes(seen(made.run)[0]) == []
    assert codes(seen(made.run, deep=True)[0]) == ["ZC-202"]


def test_one_that_is_not_sound_is_a_finding_and_not_what_the_next_is_compared_with(training, monkeypatch):
    def broken() -> None:
        at = training.step().save()
        next(at.glob("rank-*")).unlink()

    found = watched(monkeypatch, broken, lambda: training.step().save(), idle=0.5)
    assert [codes(one) for one in found] == [[], ["ZC-101"], []]
    assert [one.checkpoint.sound for one in found] == [True, False, True]
    assert found[2].before == str(training.run / "step-6")


def test_one_before_that_was_pruned_is_not_compared_with(training, monkeypatch):
    def appear(_: float) -> None:
        training.step().save()
        shutil.rmtree(training.run / "step-6")

    monkeypatch.setattr(module, "time", Clock(appear))
    found = zckpt.watch(training.run, settle=0.0)
    assert next(found).checkpoint.name == "step-6"
    assert Path(str(next(found).before)).name == "step-3"


# --- when one is finished


class Clock:
    """Time that passes while `watch` waits, in which something happens; files are written later than its now."""

    def __init__(self, happen: Callable[[float], object]) -> None:
        self.now, self._happen = 1e6, happen

    def time(self) -> float:
        return self.now + 1e9

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1.0)
        self._happen(self.now)


def appearances(
    at: Path, happen: dict[int, Callable[[], object]], monkeypatch: Any, **given: Any
) -> Iterator[tuple[int, str]]:
    """At which second which checkpoint was taken for finished, where something happens at some."""

    def passes(now: float) -> None:
        if act := happen.pop(round(now - 1e6), None):
            act()

    clock = Clock(passes)
    monkeypatch.setattr(module, "time", clock)
    for one in zckpt.watch(at, idle=100.0, **given):
        yield round(clock.now - 1e6), one.checkpoint.name


def test_it_is_finished_when_it_does_not_change_or_latest_names_it(monkeypatch):
    at, tag = Path("run"), FIXTURES / TAG

    def written(name: str, part: slice) -> Callable[[], object]:
        def write() -> None:
            (at / name).mkdir(parents=True, exist_ok=True)
            for file in sorted(tag.iterdir())[part]:
                (at / name / file.name).write_bytes(file.read_bytes())

        return write

    happen = {
        5: written("global_step1", slice(0, 1)),
        25: written("global_step1", slice(1, None)),
        50: written("global_step2", slice(None)),
        55: lambda: (at / "latest").write_text("global_step2"),
    }
    found = list(appearances(at, happen, monkeypatch, settle=30.0))
    assert found == [(55, "global_step1"), (55, "global_step2")]


def test_one_that_is_written_again_is_looked_at_again_but_not_for_its_digests(monkeypatch):
    at = put(global_step5=TAG)

    def again() -> None:
        shutil.rmtree(at / "global_step5")
        put(at, global_step5="s2_bf16_dp2_multitag/global_step3")
        (at / "global_step5/mp_rank_00_model_states.pt").touch()

    happen = {5: lambda: (at / "global_step5/fingerprint.json").write_text("{}"), 20: again}
    assert list(appearances(at, happen, monkeypatch, settle=10.0)) == [(10, "global_step5"), (30, "global_step5")]


# --- the command


def test_the_command_prints_lines_and_ends_at_a_finding_or_runs_a_command(training):
    training.step().save()
    training.save("step-12")
    command = "verify run --watch --idle 0 --settle 0"
    done = run(command)
    assert done.returncode == 1
    [line] = map(json.loads, done.stdout.splitlines())
    assert [one["code"] for one in line["findings"]] == ["ZC-401", "ZC-402"]
    assert line == seen(training.run)[0].as_dict()
    done = run(command, "--quiet --on-finding cat>found.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert json.loads(Path("found.json").read_text()) == line
    shutil.rmtree(training.run / "step-12")
    succeeded(command)


def test_a_process_that_watches_sees_what_another_saves(training):
    for path in training.run.rglob("*"):  # both are finished, however soon somebody looks
        os.utime(path, (1, 1))
    words = command("verify run --watch --settle 0.2")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as watching, ExitStack() as ends:
        ends.callback(watching.kill)  # it would watch for ever
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["name"] == "step-6"
        training.step().save()
        assert json.loads(watching.stdout.readline())["name"] == "step-9"
        with torch.no_grad():
            training.model[1].bias[0] = torch.nan
        training.steps += 1
        training.save()
        assert json.loads(watching.stdout.readline())["findings"][0]["code"] == "ZC-202"
        assert watching.wait(20) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (". --settle 3", "--settle needs --watch"),
        (". --watch --tag x", "--tag does not go with --watch"),
        (". --watch --html x.html", "--html does not go with --watch"),
        ("s3://bucket/run --watch", "cannot be in a store such as S3"),
        (". --watch --factor 1", "--factor must be above 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments, words):
    refused(2, f"verify {arguments}", words=words)


def test_no_sample_is_watched():
    with refusing(zckpt.UsageError, "does not apply to a sample"):
        zckpt.watch(".", direct=True)
