"""What resume-check says of each kind of checkpoint is what each program does with it: it is run, and looked into."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

import zckpt
from tests import gloo
from tests.cli.console import FIXTURES, ROOT, run
from tests.pairwise import some
from tests.resuming import ALONE, KINDS, PLACES, PROGRAMS, STEPS, Outcome, resume, save, trained_vit, weights_by
from zckpt.cli.verbs import VALUES
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
        [("deepspeed", 2, SOME[:3]), ("fsdp2", 1, SOME[1:3]), ("zckpt", 1, SOME[2:])],
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
            for _ in found.commands:
                after = follow(found, tmp_path / f"{kind.replace(', ', '-')}-{ranks}")
                assert not {"weights", "optimizer state"} & lost(after)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("universal/s2_bf16_dp2_empty", {}, "IndexError"),  # a rank would hold nothing of a group
        ("s2_bf16_dp2", {"model": FIXTURES / "hf_llama_s2_bf16_dp2"}, "tensors that the checkpoint lacks"),
        ("s2_bf16_dp2", {"model": FIXTURES / "s2_bf16_dp2"}, ""),
    ],
)
def test_what_cannot_be_resumed_is_told_by_its_reason(source, options, words):
    found = zckpt.resume_check(FIXTURES / source, program="deepspeed", **options)
    assert found.verdict == ("no" if words else "whole")
    assert not words or any(words in one for one in found.why)


@pytest.mark.parametrize(
    ("source", "ranks", "words"),
    [
        ("mcore_bf16_buckets_tp2_dp2", 4, ""),  # `dp_reshardable`: Megatron-Core 0.16.1 loaded such with 1, 3 and 4
        ("mcore_bf16_buckets_tp2_dp2", 64, "it was saved by 2 ranks"),
        ("mcore08_buckets_pp2", 4, "it was saved by 1 ranks"),
        ("mcore_bf16_moe_freq", 64, ""),
    ],
)
def test_megatron_takes_its_buckets_at_other_data_parallel_ranks_or_not(source, ranks, words):
    found = zckpt.resume_check(FIXTURES / "other" / source / "ckpt", program="megatron", world_size=ranks)
    assert (found.verdict == "no") == bool(words)
    assert not words or words in found.why[0]


def test_what_a_universal_checkpoint_does_not_bring_back_is_named():
    found = zckpt.resume_check(FIXTURES / "universal" / "s3_bf16_dp2", program="deepspeed", world_size=3)
    assert lost(found) == {"frozen weights", "buffers", "param groups"}


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
    assert any("tensors that the checkpoint lacks" in one for one in found.why)
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


def lost(found: zckpt.ResumeCheck) -> set[str]:
    return {str(one["part"]) for one in found.not_back}


def follow(found: zckpt.ResumeCheck, target: Path) -> zckpt.ResumeCheck:
    """Do what is advised; what is said of the result is what was foretold."""
    [command] = found.commands
    words = {"TARGET": str(target), "SAMPLES": "1"}
    done = run(*(words.get(one, one) for one in command.split()[1:]))
    assert done.returncode == 0, (command, done.stderr)
    after = zckpt.resume_check(target, program=found.program, world_size=found.world_size)
    assert after.verdict in ("whole", "partly"), (command, after)
    assert lost(after) == {str(one["part"]) for one in found.not_back_after}
    return after


@pytest.mark.parametrize("name", some(["s2_bf16_dp2"], ["s3_bf16_dp2_nofrozen"]))
def test_masters_come_back_in_fsdp2_where_it_says_so(name, tmp_path):
    source = zckpt.open(FIXTURES / name)
    masters = {one.name: source.read(one.name, "master") for one in source.owners if "master" in one.slots}
    made = zckpt.convert(source, tmp_path / "default", to="dcp")
    assert [one for one in made.notes if "--dtype float32" in one]
    exact = zckpt.convert(source, tmp_path / "exact", to="dcp", dtype="float32")
    assert not [one for one in exact.notes if "masters" in one]
    found = zckpt.resume_check(tmp_path / "default", program="fsdp2")
    assert (found.verdict, lost(found)) == ("partly", {"master weights"})
    assert "bfloat16" in str(found.not_back[0]["why"])
    assert "zckpt.dcp.Reader" in str(found.advice)
    assert run("resume-check", tmp_path / "default", "--for", "fsdp2").returncode == 1
    assert follow(found, tmp_path / "again").verdict == "whole"
    assert follow(zckpt.resume_check(source, program="fsdp2"), tmp_path / "direct").verdict == "whole"
    for one in ("exact", "default"):
        program = "fsdp2" if one == "exact" else "zckpt"
        assert zckpt.resume_check(tmp_path / one, program=program).verdict == "whole"
    loads = [("stock", tmp_path / one) for one in ("default", "exact", "again", "direct")]
    loads += [("reader", tmp_path / "default"), ("load", tmp_path / "default")]
    shapes = {name: tuple(one.shape) for name, one in masters.items()}
    groups = [[*group.parameters] for group in source.param_groups]
    rounded, *whole = gloo.run(weights_by, 1, loads, shapes, groups)[0]
    for name, master in masters.items():
        assert torch.equal(rounded[name], master.bfloat16().float())
        assert all(torch.equal(one[name], master) for one in whole)
    assert any(not torch.equal(rounded[name], master) for name, master in masters.items())


def test_weights_that_hold_the_masters_need_no_note(tmp_path):
    for number, name in enumerate(("s2_fp32_dp2", "s2_bf16_dp2_bf16master")):
        made = zckpt.convert(FIXTURES / name, tmp_path / str(number), to="dcp")
        assert not [one for one in made.notes if "masters" in one]
        assert "master weights" not in lost(zckpt.resume_check(tmp_path / str(number), program="fsdp2"))


def test_lightning_reads_no_copy_of_another_format(tmp_path):
    """It tells its directories by meta.pt, and looks for its keys at the top of a file."""
    source = FIXTURES / "other" / "litsim_ds2" / "epoch=0-step=5.ckpt"
    assert zckpt.resume_check(source, program="lightning").verdict == "whole"
    for target, to in (("dcp", "dcp"), ("whole.pt", "consolidated")):
        zckpt.convert(source, tmp_path / target, to=to)
        assert zckpt.resume_check(tmp_path / target, program="lightning").verdict == "no"


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A checkpoint of the Trainer, whose model has other names in memory than in files."""
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("files have names as in memory")
    folder = tmp_path_factory.mktemp("vit")
    [truth] = gloo.run(trained_vit, 1, folder, [])[0]
    return folder / "out0" / f"checkpoint-{STEPS}", truth


def test_names_of_transformers_are_told_from_those_in_files(vit, tmp_path):
    source, truth = vit
    found = zckpt.resume_check(source, program="trainer")
    assert lost(found) == {"weights"}
    assert found.commands[0].endswith("TARGET --to transformers-trainer --map transformers")
    assert follow(found, tmp_path / "mapped").verdict == "whole"
    _, before, after = gloo.run(trained_vit, 1, tmp_path, [source, tmp_path / "mapped"])[0]
    assert all(torch.equal(after[name], one) for name, one in truth.items())
    assert not all(torch.equal(before[name], one) for name, one in truth.items())


@pytest.mark.parametrize("model", [False, True])
def test_a_command_has_the_map_of_transformers(model, vit, tmp_path):
    source, _ = vit
    config = tmp_path / "config.json"
    config.write_text((source / "config.json").read_text())
    found = zckpt.resume_check(source, program="deepspeed", world_size=4, model=config if model else None)
    assert found.commands[0].endswith("--map transformers")
    assert lost(follow(found, tmp_path / "four")) == {"scheduler", "random states", "data position"}
    if model:  # of what has no configuration with it, that of the model says the map
        zckpt.convert(tmp_path / "four", tmp_path / "files", to="dcp", map="transformers", map_config=config)
        found = zckpt.resume_check(tmp_path / "files", program="deepspeed", model=config)
        assert found.commands[0].endswith(f"--map transformers --map-config {config}")
        follow(found, tmp_path / "named")
        assert zckpt.resume_check(tmp_path / "named", program="deepspeed", model=config).verdict == "partly"
    with pytest.raises(zckpt.UnsupportedError, match=r"add .*map=.?transformers"):
        zckpt.convert(source, tmp_path / "unnamed", to="deepspeed", world_size=4, stage=2)


def test_what_a_program_does_not_read_is_told_by_its_file():
    source = FIXTURES / "other" / "trainer_ds2_gpt2" / "checkpoint-4"
    done = run("resume-check", source, "--for", "deepspeed")
    assert "DeepSpeed does not read trainer_state.json" in done.stdout
    assert "(DeepSpeed) in DeepSpeed" in done.stdout
    done = run("resume-check", source, "--for", "fsdp2")
    assert "after that, does not come back: scheduler, random states, data position" in done.stdout


def test_words_of_programs_are_taken_for_formats():
    for word, about in KNOWN.items():
        made = {make.to for make in about.makes if make.to}
        for to in made:
            assert VALUES.get(word, word) == to
    done = run("convert", FIXTURES / "s2_bf16_dp2", "out", "--to", "fsdp")
    assert (done.returncode, "use dcp" in done.stderr) == (2, True)
