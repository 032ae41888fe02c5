"""`zckpt verify`: exit status, text, JSON and page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, command, environment, on_terminal, refused, run, succeeded
from tests.damage import copy, flip, optimizer_file, place, set_element
from tests.pairwise import some
from zckpt.operations.verify import verify
from zckpt.report.reports import render_verification

RUN = "s2_bf16_dp2"
SOUND = FIXTURES / RUN


@pytest.fixture
def damaged() -> Path:
    """A run with one element of a master changed and one bit of another rank's flipped."""
    target = copy(RUN)
    set_element(target, "fc1.weight", "master", 50, 9.0)
    span, offset = place(target, "big.2.weight", "exp_avg", 140)
    flip(span.path, offset)
    return target


def test_sound_checkpoint_exits_0():
    done = succeeded("verify", SOUND, "--deep")
    assert done.stdout.startswith(f"sound  {SOUND} (deepspeed)\n")
    assert f"of {SOUND / 'global_step5'} only; zckpt list {SOUND} looks at each" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_unsound_checkpoint_exits_1_and_names_what_is_wrong(damaged):
    done = run(f"verify {damaged} --deep")
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout.startswith("unsound  ")
    for word in ("ZC-107", "ZC-201", "fc1.weight", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout


def test_warnings_alone_exit_0():
    target = copy(RUN)
    name = "global_step5/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(FIXTURES / "s2_bf16_dp3" / name, target / name)
    assert "ZC-114" in succeeded(f"verify {target}").stdout


def test_json_is_one_document(damaged):
    done = run(f"verify {damaged} --deep --json")
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert document["sound"] is False
    assert document["deep"] is True
    assert document["format"] == "deepspeed"
    assert document["fingerprint"] is None
    assert document["checked"]["files"] == 3
    keys = {"code", "severity", "title", "message", "file", "ranks", "parameters", "expected", "found", "advice"}
    assert [set(finding) for finding in document["findings"]] == [keys, keys]
    assert [finding["ranks"] for finding in document["findings"]] == [[1], [0]]


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (3, "nowhere", "cannot be opened"),
        (3, ".", "not recognised as a checkpoint"),
        (3, f"fixtures/{RUN} --against nowhere.json", "nowhere.json"),
        (2, "", "SOURCE"),
        (2, f"fixtures/{RUN} --memory none", "size"),
        (2, "fixtures/other/plain_adamw/ckpt.pt --tag x", "--tag"),
    ],
)
def test_what_cannot_be_verified_is_refused(status, arguments, words):
    refused(status, f"verify {arguments}", words=words)


def test_quiet_prints_nothing(damaged):
    done = run(f"verify {damaged} --deep --quiet")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_page_is_written_whole_or_not_at_all(damaged):
    assert run(f"verify {damaged} --deep --html page.html").returncode == 1
    text = Path("page.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "ZC-201" in text
    refused(4, f"verify {damaged} --html page.html", words="exists")
    succeeded(f"verify {damaged} --html page.html --overwrite --quiet")
    assert "ZC-201" not in Path("page.html").read_text()


def test_page_of_a_checkpoint_that_cannot_be_opened():
    target = copy(RUN)
    optimizer_file(target, 1).unlink()
    assert run(f"verify {target} --html page.html").returncode == 1
    assert "ZC-101" in Path("page.html").read_text()


@pytest.mark.parametrize("width", some([60], [100]))
def test_text_fits_the_terminal_but_for_paths_and_names(damaged, width):
    text = on_terminal(f"verify {damaged} --deep", columns=width, NO_COLOR="1").replace("\r\n", "\n")
    long = [line for line in text.splitlines()[1:] if len(line) > width]
    assert all(any(len(word) > width - 13 for word in line.split()) for line in long)
    labels = [line for line in text.splitlines() if line.startswith("  what") or line.startswith("  found")]
    assert {len(line) - len(line[2:].split(maxsplit=1)[1]) for line in labels} == {13}


def test_many_findings_and_names_are_counted():
    document = verify(SOUND).as_dict()
    names = [f"p{i}" for i in range(1000)]
    finding = {"code": "ZC-202", "severity": "error", "title": "NaN or Inf", "message": "m", "ranks": [0, 1]}
    finding |= {"file": None, "parameters": names, "expected": None, "found": None, "advice": None}
    text = render_verification(
        {**document, "sound": False, "findings": [finding] * 300}, width=80, paint=lambda text, _: text
    )
    assert "300 errors" in text
    assert "and 100 more findings" in text
    assert "and 992 more" in text
    assert "p9," not in text


def test_shallow_run_needs_no_numpy_until_there_are_weights_to_compare():
    program = (
        "import sys; from zckpt.operations.verify import verify; "
        f"v = verify({str(FIXTURES / 's3_bf16_dp2')!r}); assert v.sound; "
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [*command()[:1], "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout == "[]\n"
