"""`zckpt reshard`: every option's effect, every error's status, and that a target appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import FIXTURES, copy, inspected, refused, run, succeeded
from tests.folders import snapshot
from tests.formats.deepspeed import sliced
from tests.pairwise import some

SOURCE = FIXTURES / "s2_bf16_dp2"


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def flat_files(world_size: int, folder: str = "") -> list[str]:
    ranks = [f"{folder}bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world_size)]
    return sorted([f"{folder}mp_rank_00_model_states.pt", *ranks])


# --- what is written


def test_run_directory_comes_out_as_a_run_directory(tmp_path):
    succeeded("reshard", SOURCE, tmp_path / "cut", "--world-size", 6)
    done = succeeded("reshard", SOURCE, tmp_path / "cut", "--world-size", 3, "--overwrite")
    assert done.stdout == ""
    assert "wrote" in done.stderr
    assert files(tmp_path) == sorted(["cut/latest", *flat_files(3, "cut/global_step5/")])
    assert (tmp_path / "cut" / "latest").read_text() == "global_step5"
    assert zckpt.open(tmp_path / "cut").topology.dp == 3


def test_tag_directory_comes_out_as_a_tag_directory(tmp_path):
    succeeded("reshard", SOURCE / "global_step5", tmp_path / "cut", "--world-size", 3)
    assert files(tmp_path / "cut") == flat_files(3)
    assert zckpt.open(tmp_path / "cut").topology.dp == 3


@pytest.mark.parametrize(("option", "key"), [("round-robin", "round_robin_gradients"),
                                             ("parameter-alignment", "parameter_alignment")])  # fmt: skip
def test_order_and_alignment_are_switched_on_and_off(option, key, tmp_path):
    succeeded("reshard", SOURCE, tmp_path / "on", "--world-size", 3, f"--{option}")
    succeeded("reshard", tmp_path / "on", tmp_path / "kept", "--world-size", 2)
    succeeded("reshard", tmp_path / "kept", tmp_path / "off", "--world-size", 3, f"--no-{option}")
    found = [bool(zckpt.open(tmp_path / one).details.get(key)) for one in ("on", "kept", "off")]
    assert found == [True, True, False]


def test_a_run_of_a_version_without_alignment_gets_it(tmp_path):
    source = FIXTURES / "ds0145_s1_fp32_dp2"
    succeeded("reshard", source, tmp_path / "aligned", "--world-size", 3, "--parameter-alignment")
    assert inspected(tmp_path / "aligned")["details"]["parameter_alignment"]
    succeeded("diff", source, tmp_path / "aligned")


def test_stage_form_and_order_together(tmp_path):
    succeeded("reshard", SOURCE, tmp_path / "cut", "--world-size", 3, "--stage", 1, "--elastic", "--round-robin")
    found = inspected(tmp_path / "cut")
    assert found["zero_stage"] == 1
    assert found["details"]["optimizer_form"] == "elastic"
    assert found["details"]["round_robin_gradients"] is True


def test_rules_come_from_a_file(tmp_path):
    run_directory = sliced.make(tmp_path / "source", 2, 2, rules=None)
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(sliced.RULES))
    for options in ((), ("--tensor-parallel-size", 1)):
        words = ("embedding.weight", "no rules", "--tp-rules")
        refused(5, "reshard", run_directory, tmp_path / "cut", "--world-size", 3, *options, words=words)
    assert not (tmp_path / "cut").exists()
    options = ("--tensor-parallel-size", 1, "--tp-rules", rules)
    succeeded("reshard", run_directory, tmp_path / "cut", "--world-size", 3, *options)
    assert inspected(tmp_path / "cut")["topology"] == {"dp": 3, "tp": 1, "pp": 1, "ep": 1}
    rules.write_text("{}}")
    refused(2, "reshard", run_directory, tmp_path / "no", "--world-size", 3, *options, words=("rules.json", "JSON"))


def test_tag_chooses_another_checkpoint(tmp_path):
    source = FIXTURES / "s2_bf16_dp2_multitag"
    succeeded("reshard", source, tmp_path / "cut", "--world-size", 3, "--tag", "global_step3")
    assert (tmp_path / "cut" / "latest").read_text() == "global_step3"
    assert zckpt.open(tmp_path / "cut").step == 3


# --- what is printed


@pytest.mark.parametrize(
    ("name", "options", "degrees"),
    some(
        [
            ("moe_ep2_s2_fp32_dp4", ("--world-size", 6, "--expert-parallel-size", 1), (6, 1, 1, 1)),
            (
                "tp2_s1_bf16_dp2",
                ("--world-size", 2, "--tensor-parallel-size", 4, "--padded-vocab-size", 48),
                (2, 4, 1, 1),
            ),
        ],
        [
            ("s2_bf16_dp4", ("--world-size", 6), (6, 1, 1, 1)),
            ("s3_bf16_dp3", ("--world-size", 2, "--stage", 1), (2, 1, 1, 1)),
            ("tp2_s2_fp32_dp2", ("--world-size", 1, "--tensor-parallel-size", 1), (1, 1, 1, 1)),
            ("tp2_s1_bf16_dp2", ("--world-size", 3), (3, 2, 1, 1)),
        ],
    ),
)
def test_degrees_are_those_asked_for_and_verify_compares_all_that_was_written(name, options, degrees, tmp_path):
    done = succeeded("reshard", FIXTURES / name, tmp_path / "out", *options, "--verify")
    assert "compared with the source, byte for byte" in done.stderr
    assert inspected(tmp_path / "out")["topology"] == dict(zip(("dp", "tp", "pp", "ep"), degrees, strict=True))


def test_no_weight_check_compares_nothing(tmp_path):
    options = ("--world-size", 3, "--json", "--no-weight-check")
    assert json.loads(succeeded("reshard", SOURCE, tmp_path / "cut", *options).stdout)["checked_elements"] == 0


def test_notes_name_random_states_that_are_carried_over(tmp_path):
    done = succeeded("reshard", FIXTURES / "s2_bf16_dp2_client", tmp_path / "cut", "--world-size", 3, "--json")
    notes = "\n".join(json.loads(done.stdout)["notes"])
    assert "np_rng" in notes
    assert "py_rng" in notes


# --- what is refused


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("moe_ep2_s2_fp32_dp4", ("--world-size", 3), ("divides the world size", "--expert-parallel-size")),
        ("moe_ep2_s2_fp32_dp4", ("--world-size", 6, "--expert-parallel-size", 3), ("4 experts", "3 ranks")),
        ("s2_bf16_dp2", ("--world-size", 6, "--expert-parallel-size", 3), ("no experts",)),
        ("tp2_s1_bf16_dp2", ("--world-size", 6, "--tensor-parallel-size", 0), ("unusable --tensor-parallel-size", "0")),
        (
            "tp2_s1_bf16_dp2",
            ("--world-size", 6, "--tensor-parallel-size", 10**12),
            ("unusable --tensor-parallel-size", "at most"),
        ),
        ("tp2_s1_bf16_dp2", ("--world-size", 6, "--padded-vocab-size", 39), ("unusable padded size", "39")),
    ],
)
def test_degrees_that_cannot_be(name, options, words, tmp_path):
    refused(2, "reshard", FIXTURES / name, tmp_path / "cut", *options, words=words)
    assert list(tmp_path.iterdir()) == []


def test_slices_that_do_not_divide_are_named(tmp_path):
    options = ("--world-size", 2, "--tensor-parallel-size", 3)
    refused(3, "reshard", FIXTURES / "tp2_s1_bf16_dp2", tmp_path / "cut", *options, words=("query_key_value", "3"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--world-size", "0"), "world size"),
        (("--world-size", "-1"), "world size"),
        (("--world-size", "abc"), "--world-size"),
        (("--world-size", "1.5"), "--world-size"),
        (("--world-size", "3", "--stage", "4"), "--stage"),
        (("--world-size", "3", "--stage", "0"), "--stage"),
        (("--stage", "2"), "--world-size"),
    ],
)
def test_options_that_cannot_be_read(options, words, tmp_path):
    refused(2, "reshard", SOURCE, tmp_path / "cut", *options, words=(words,))
    assert list(tmp_path.iterdir()) == []


def test_plain_torch_file_is_not_resharded(tmp_path):
    (path,) = sorted((FIXTURES / "other" / "plain_adamw").glob("*.pt"))[:1]
    refused(5, "reshard", path, tmp_path / "cut", "--world-size", 3, words=(path.name,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["--rigid", "--stage=3"])
def test_elastic_source_lacks_what_other_forms_need(form, tmp_path):
    source = FIXTURES / "s2_bf16_dp2_elastic"
    refused(5, "reshard", source, tmp_path / "cut", "--world-size", 3, form, words=("elastic", "hyperparameters"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [("--stage", "2"), ("--elastic",), ("--round-robin",), ("--parameter-alignment",)])
def test_bf16_optimizer_stays_one(options, tmp_path):
    source = FIXTURES / "s1_bf16_dp2_bf16opt"
    refused(5, "reshard", source, tmp_path / "cut", "--world-size", 3, *options, words=("BF16_Optimizer",))
    assert list(tmp_path.iterdir()) == []


def test_tag_directory_beside_the_source(tmp_path):
    run_directory = copy("s2_bf16_dp2", tmp_path)
    succeeded("reshard", run_directory / "global_step5", run_directory / "cut", "--world-size", 3)
    assert zckpt.open(run_directory).topology.dp == 2
    assert zckpt.open(run_directory, tag="cut").topology.dp == 3


def test_source_behind_a_link_is_the_source(tmp_path):
    run_directory = copy("s2_bf16_dp2", tmp_path)
    (tmp_path / "link").symlink_to(run_directory)
    before = snapshot(run_directory)
    done = run("reshard", tmp_path / "link", run_directory, "--world-size", 3, "--overwrite")
    assert done.returncode == 2, done.stderr
    done = run("reshard", run_directory, tmp_path / "link", "--world-size", 3, "--overwrite")
    assert done.returncode == 2, done.stderr
    assert snapshot(run_directory) == before
