"""What resume-check says of each kind of checkpoint is what each program does with it: it is run, and looked into."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import zckpt
from tests import gloo
from tests.cli.console import FIXTURES, ROOT, run
from tests.pairwise import some
from tests.resuming import ALONE, KINDS, PLACES, PROGRAMS, Outcome, resume, save
from zckpt.operations.resume_check.programs import PROGRAMS as KNOWN

pytestmark = pytest.mark.interop

SOME = ("ZeRO-2", "universal", "DCP", "zckpt", "weights")
PAGE = ROOT / "docs" / "resume-check.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a kind, with what its own program has saved."""
    base = tmp_path_factory.mktemp("kinds")

    @cache
    def of(kind: str) -> Path:
        folder = base / kind.replace(", ", "-")
        gloo.run(save, 1 if kind in ALONE else 2, kind, folder)
        return folder

    return of


def assert_is_as_said(found: zckpt.ResumeCheck, outcome: Outcome) -> None:
    """Hold a verdict against what came back."""
    if isinstance(outcome, str):
        assert found.verdict == "no", outcome
        return
    assert found.verdict in ("whole", "partly"), (found.why, outcome)
    back, gone = ({str(one["part"]) for one in some} for some in (found.comes_back, found.not_back))
    assert {part for part, restored in outcome.items() if restored and part in gone} == set()
    assert {part for part, restored in outcome.items() if not restored and part in back - gone} == set()
    assert {"weights", "optimizer state"} <= outcome.keys()


def test_every_program_that_is_known_is_run():
    assert PROGRAMS.keys() == KNOWN.keys()


@pytest.mark.parametrize(
    ("program", "world_size", "kinds"),
    some(
        [("deepspeed", 2, SOME), ("deepspeed", 1, SOME), ("fsdp2", 1, SOME), ("zckpt", 1, SOME)],
        [(program, ranks, KINDS) for program in PROGRAMS for ranks in (1, 2)],
    ),
)
def test_the_verdict_is_what_the_program_does(program, world_size, kinds, folders):
    places = {kind: folders(kind) for kind in kinds}
    outcomes = gloo.run(resume, world_size, program, places)[0]
    for kind, folder in places.items():
        found = zckpt.resume_check(folder / PLACES[kind], program=program, world_size=world_size)
        try:
            assert_is_as_said(found, outcomes[kind])
        except AssertionError as error:
            raise AssertionError(f"{kind} in {program} at {world_size} ranks: {found}, {outcomes[kind]}") from error


def cell(place: Path, program: str, saved: int) -> str:
    """What the page's table says of a kind in a program: at as many ranks as saved it, and at another number."""
    said = []
    for ranks in (saved, 3 - saved):
        found = zckpt.resume_check(place, program=program, world_size=ranks)
        gone = ", ".join(str(one["part"]) for one in found.not_back)
        command = found.commands[0].split()[1] if found.commands else ""
        said.append({"whole": "whole", "partly": f"without {gone}", "no": command or "no"}.get(found.verdict, "?"))
    return said[0] if said[0] == said[1] else " / ".join(said)


def table(folders) -> list[str]:
    rows = [f"| | {' | '.join(PROGRAMS)} |", f"|---|{'---|' * len(PROGRAMS)}"]
    for kind in KINDS:
        saved = 1 if kind in ALONE else 2
        cells = [cell(folders(kind) / PLACES[kind], program, saved) for program in PROGRAMS]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    return rows


@pytest.mark.nightly
def test_the_pages_table_is_what_is_said(folders):
    wanted = "\n".join(table(folders))
    assert wanted in PAGE.read_text(), wanted


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_command_that_is_given_makes_what_resumes(program, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        for ranks in (1, 2):
            found = zckpt.resume_check(folders(kind) / PLACES[kind], program=program, world_size=ranks)
            for command in found.commands:
                target = tmp_path / f"{kind.replace(', ', '-')}-{ranks}"
                words = [str(target) if one == "TARGET" else one for one in command.split()[1:]]
                words = ["1" if one == "SAMPLES" else one for one in words]
                done = run(*words)
                assert done.returncode == 0, (kind, command, done.stderr)
                after = zckpt.resume_check(target, program=program, world_size=ranks)
                assert after.verdict in ("whole", "partly"), (kind, command, after)
                lost = {str(one["part"]) for one in after.not_back}
                assert not {"weights", "optimizer state"} & lost
                assert {str(one["part"]) for one in found.not_back_after} == lost, (kind, command, after)


def test_a_rank_that_would_hold_nothing_of_a_group_is_named():
    found = zckpt.resume_check(FIXTURES / "universal" / "s2_bf16_dp2_empty", program="deepspeed")
    assert found.verdict == "no"
    assert "IndexError" in found.why[0]


def test_what_a_universal_checkpoint_does_not_bring_back_is_named():
    found = zckpt.resume_check(FIXTURES / "universal" / "s3_bf16_dp2", program="deepspeed", world_size=3)
    assert {one["part"] for one in found.not_back} == {"frozen weights", "param groups"}


def test_another_model_is_refused_by_the_names_of_its_tensors():
    source = FIXTURES / "s2_bf16_dp2"
    assert zckpt.resume_check(source, program="deepspeed", model=source).verdict == "whole"
    found = zckpt.resume_check(source, program="deepspeed", model=FIXTURES / "hf_llama_s2_bf16_dp2")
    assert found.verdict == "no"
    assert any("tensors that the checkpoint has not" in one for one in found.why)


def test_a_status_says_whether_all_comes_back():
    source = FIXTURES / "s2_bf16_dp2"
    assert run("resume-check", source, "--for", "deepspeed").returncode == 0
    other = run("resume-check", source, "--for", "deepspeed", "--world-size", 3)
    assert (other.returncode, "zckpt reshard" in other.stdout) == (1, True)
    assert run("resume-check", source, "--for", "nobody").returncode == 2
    assert run("resume-check", source, "--for", "deepspeed", "--world-size", 0).returncode == 2


def test_a_model_is_told_by_its_configuration(tmp_path):
    source = FIXTURES / "other" / "trainer_ds2_gpt2" / "checkpoint-4"
    config = json.loads((source / "config.json").read_text())
    assert zckpt.resume_check(source, program="deepspeed", model=source / "config.json").verdict != "no"
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": config["n_layer"] + 1}))
    found = zckpt.resume_check(source, program="deepspeed", model=tmp_path)
    assert found.verdict == "no"
    assert any("tensors that the checkpoint has not" in one for one in found.why)
    for wrong, words in (
        ({"architectures": ["Nothing"]}, "not a transformers model"),
        ({"n_head": 7}, "cannot create a model from it"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(zckpt.UsageError, match=words):
            zckpt.resume_check(source, program="deepspeed", model=tmp_path)


def test_what_a_program_makes_of_a_url_is_not_known():
    import fsspec

    fsspec.filesystem("memory").put(str(FIXTURES / "s2_bf16_dp2"), "/checked", recursive=True)
    found = zckpt.resume_check("memory://checked", program="deepspeed")
    assert (found.verdict, found.as_dict()["verdict"]) == ("unknown", "unknown")
    assert "copy it first" in found.why[0]
    assert zckpt.resume_check("memory://checked", program="zckpt").verdict in ("whole", "partly")
