"""`zckpt reshard`: every option's effect, every error's status, and that a target appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import copy, inspected, printed, refused, succeeded
from tests.folders import contents, names_in, snapshot
from tests.formats.deepspeed import sliced
from tests.pairwise import some


def flat_files(world_size: int, folder: str = "") -> set[str]:
    ranks = {f"{folder}bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world_size)}
    return {f"{folder}mp_rank_00_model_states.pt", *ranks}


# --- what is written


def test_run_directory_comes_out_as_a_run_directory():
    succeeded("reshard fixtures/s2_bf16_dp2 cut --world-size 6")
    done = succeeded("reshard fixtures/s2_bf16_dp2 cut --world-size 3 --overwrite")
    assert done.stdout == ""
    assert "wrote" in done.stderr
    assert contents().keys() == {"cut/latest", *flat_files(3, "cut/global_step5/")}
    assert Path("cut/latest").read_text() == "global_step5"
    assert zckpt.open("cut").topology.dp == 3


def test_tag_directory_comes_out_as_a_tag_directory():
    succeeded("reshard fixtures/s2_bf16_dp2/global_step5 cut --world-size 3")
    assert contents("cut").keys() == flat_files(3)
    assert zckpt.open("cut").topology.dp == 3


@pytest.mark.parametrize(("option", "key"), [("round-robin", "round_robin_gradients"),
                                             ("parameter-alignment", "parameter_alignment")])  # fmt: skip
def test_order_and_alignment_are_switched_on_and_off(option, key):
    succeeded(f"reshard fixtures/s2_bf16_dp2 on --world-size 3 --{option}")
    succeeded("reshard on kept --world-size 2")
    succeeded(f"reshard kept off --world-size 3 --no-{option}")
    assert [bool(zckpt.open(one).details.get(key)) for one in ("on", "kept", "off")] == [True, True, False]


def test_a_run_of_a_version_without_alignment_gets_it():
    succeeded("reshard fixtures/ds0145_s1_fp32_dp2 aligned --world-size 3 --parameter-alignment")
    assert inspected("aligned")["details"]["parameter_alignment"]
    succeeded("diff fixtures/ds0145_s1_fp32_dp2 aligned")


def test_stage_form_and_order_together():
    succeeded("reshard fixtures/s2_bf16_dp2 cut --world-size 3 --stage 1 --elastic --round-robin")
    found = inspected("cut")
    assert found["zero_stage"] == 1
    assert found["details"]["optimizer_form"] == "elastic"
    assert found["details"]["round_robin_gradients"] is True


def test_rules_come_from_a_file(tmp_path):
    sliced.make(tmp_path / "source", 2, 2, rules=None)
    Path("rules.json").write_text(json.dumps(sliced.RULES))
    for options in ("", "--tensor-parallel-size 1"):
        words = ("embedding.weight", "no rules", "--tp-rules")
        refused(5, "reshard source cut --world-size 3", options, words=words)
    assert not Path("cut").exists()
    command = "reshard source cut --world-size 3 --tensor-parallel-size 1 --tp-rules rules.json"
    succeeded(command)
    assert inspected("cut")["topology"] == {"dp": 3, "tp": 1, "pp": 1, "ep": 1}
    Path("rules.json").write_text("{}}")
    refused(2, command, words=("rules.json", "JSON"))


def test_tag_chooses_another_checkpoint():
    succeeded("reshard fixtures/s2_bf16_dp2_multitag cut --world-size 3 --tag global_step3")
    assert Path("cut/latest").read_text() == "global_step3"
    assert zckpt.open("cut").step == 3


# --- what is printed


@pytest.mark.parametrize(
    ("name", "options", "degrees"),
    some(
        [
            ("moe_ep2_s2_fp32_dp4", "--world-size 6 --expert-parallel-size 1", (6, 1, 1, 1)),
            ("tp2_s1_bf16_dp2", "--world-size 2 --tensor-parallel-size 4 --padded-vocab-size 48", (2, 4, 1, 1)),
        ],
        [
            ("s2_bf16_dp4", "--world-size 6", (6, 1, 1, 1)),
            ("s3_bf16_dp3", "--world-size 2 --stage 1", (2, 1, 1, 1)),
            ("tp2_s2_fp32_dp2", "--world-size 1 --tensor-parallel-size 1", (1, 1, 1, 1)),
            ("tp2_s1_bf16_dp2", "--world-size 3", (3, 2, 1, 1)),
        ],
    ),
)
def test_degrees_are_those_asked_for_and_verify_compares_all_that_was_written(name, options, degrees):
    done = succeeded(f"reshard fixtures/{name} out {options} --verify")
    assert "compared with the source, byte for byte" in done.stderr
    assert inspected("out")["topology"] == dict(zip(("dp", "tp", "pp", "ep"), degrees, strict=True))


def test_no_weight_check_compares_nothing():
    assert printed("reshard fixtures/s2_bf16_dp2 cut --world-size 3 --no-weight-check")["checked_elements"] == 0


def test_notes_name_random_states_that_are_carried_over():
    notes = "\n".join(printed("reshard fixtures/s2_bf16_dp2_client cut --world-size 3")["notes"])
    assert "np_rng" in notes
    assert "py_rng" in notes


# --- what is refused


@pytest.mark.parametrize(
    ("status", "name", "options", "words"),
    [
        (2, "moe_ep2_s2_fp32_dp4", "--world-size 3", ("divides the world size", "--expert-parallel-size")),
        (2, "moe_ep2_s2_fp32_dp4", "--world-size 6 --expert-parallel-size 3", ("4 experts", "3 ranks")),
        (2, "s2_bf16_dp2", "--world-size 6 --expert-parallel-size 3", "no experts"),
        (2, "tp2_s1_bf16_dp2", "--world-size 6 --tensor-parallel-size 0", ("unusable --tensor-parallel-size", "0")),
        (2, "tp2_s1_bf16_dp2", f"--world-size 6 --tensor-parallel-size {10**12}",
         ("unusable --tensor-parallel-size", "at most")),
        (2, "tp2_s1_bf16_dp2", "--world-size 6 --padded-vocab-size 39", ("unusable padded size", "39")),
        (3, "tp2_s1_bf16_dp2", "--world-size 2 --tensor-parallel-size 3", ("query_key_value", "3")),
        (2, "s2_bf16_dp2", "--world-size 0", "world size"),
        (2, "s2_bf16_dp2", "--world-size -1", "world size"),
        (2, "s2_bf16_dp2", "--world-size abc", "--world-size"),
        (2, "s2_bf16_dp2", "--world-size 1.5", "--world-size"),
        (2, "s2_bf16_dp2", "--world-size 3 --stage 4", "--stage"),
        (2, "s2_bf16_dp2", "--world-size 3 --stage 0", "--stage"),
        (2, "s2_bf16_dp2", "--stage 2", "--world-size"),
        (5, "other/plain_adamw/ckpt.pt", "--world-size 3", "ckpt.pt"),
        (5, "s2_bf16_dp2_elastic", "--world-size 3 --rigid", ("elastic", "hyperparameters")),
        (5, "s2_bf16_dp2_elastic", "--world-size 3 --stage 3", ("elastic", "hyperparameters")),
        (5, "s1_bf16_dp2_bf16opt", "--world-size 3 --stage 2", "BF16_Optimizer"),
        (5, "s1_bf16_dp2_bf16opt", "--world-size 3 --elastic", "BF16_Optimizer"),
        (5, "s1_bf16_dp2_bf16opt", "--world-size 3 --round-robin", "BF16_Optimizer"),
        (5, "s1_bf16_dp2_bf16opt", "--world-size 3 --parameter-alignment", "BF16_Optimizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_is_written(status, name, options, words):
    refused(status, f"reshard fixtures/{name} cut {options}", words=words)
    assert names_in() == []


def test_tag_directory_beside_the_source():
    source = copy("s2_bf16_dp2")
    succeeded("reshard s2_bf16_dp2/global_step5 s2_bf16_dp2/cut --world-size 3")
    assert zckpt.open(source).topology.dp == 2
    assert zckpt.open(source, tag="cut").topology.dp == 3


def test_source_behind_a_link_is_the_source():
    source = copy("s2_bf16_dp2")
    Path("link").symlink_to(source)
    before = snapshot(source)
    refused(2, "reshard link s2_bf16_dp2 --world-size 3 --overwrite")
    refused(2, "reshard s2_bf16_dp2 link --world-size 3 --overwrite")
    assert snapshot(source) == before
