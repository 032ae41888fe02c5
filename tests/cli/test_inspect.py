"""`zckpt inspect`: what its document says of real checkpoints, and how it prints it."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zckpt
from tests.cli.console import FIXTURES, command, copy, environment, inspected, printed, refused, run, succeeded
from tests.folders import names_in
from tests.truth import Truth
from zckpt.cli.reading import inspect_command

DEEPSPEED = sorted(p.parent.name for p in FIXTURES.glob("*/truth.json"))
ZERO = [n for n in DEEPSPEED if "s0_" not in n]
DENSE = [n for n in ZERO if n.startswith(("s", "ds0145", "hf"))]
FLAT = [n for n in DENSE if "s1_" in n or "s2_" in n]


@pytest.mark.parametrize("name", DEEPSPEED)
@pytest.mark.every(3)
def test_document_says_what_the_run_was(name):
    document, facts = described(name), Truth(FIXTURES / name).facts
    spec = facts.get("spec", {})
    assert document["format"] == "deepspeed"
    assert document["format_version"] == facts["deepspeed"]
    assert document["step"] == facts["global_steps"]
    assert document["topology"] == {
        "dp": facts["dp_world_size"] if spec.get("stage") or "s0" not in name else document["topology"]["dp"],
        "tp": spec.get("tensor_parallel", spec.get("tp", 1)),
        "pp": spec.get("pipeline_parallel", spec.get("pp", 1)),
        "ep": spec.get("expert_parallel", spec.get("ep", 1)),
    }
    assert document["zero_stage"] == int(re.search(r"(?:^|_)s(\d)_", name)[1])
    assert document["world_size"] == math.prod(document["topology"][k] for k in ("dp", "tp", "pp"))


@pytest.mark.parametrize("name", [n for n in DEEPSPEED if n != "pp2_s0_fp32_dp2"])  # no file has its names
@pytest.mark.every(3)
def test_every_parameter_has_its_shape_dtype_slots_and_standing(name):
    document, truth = described(name), Truth(FIXTURES / name)
    found = {one["name"]: one for one in document["parameters"]}
    left_out = set(truth.frozen) if "nofrozen" in name else set()
    shapes = {n: tuple(t.shape) for n, t in truth.weights.items() if n not in truth.buffers and n not in left_out}
    aliases = {alias: owner for alias, owner in truth.tied.items() if owner in shapes}
    assert {n: tuple(one["shape"]) for n, one in found.items() if one["tied_to"] is None} == {
        n: s for n, s in shapes.items() if n not in aliases
    }
    assert {n: one["tied_to"] for n, one in found.items() if one["tied_to"]} == aliases
    empty = {n for n, shape in shapes.items() if 0 in shape}  # those no file tells from frozen ones
    frozen = {n for n, one in found.items() if one["frozen"]}
    expected = set(truth.frozen) - left_out - set(truth.masters) - empty  # some have an optimizer all the same
    if name == "s0_fp32_dp2":  # the optimizer has numbers only, and some could be those of frozen parameters
        assert frozen < expected
    else:
        assert frozen - empty == expected
    for parameter, one in found.items():
        if one["tied_to"] is None:
            assert one["dtype"] == str(truth.weights[parameter].dtype).removeprefix("torch.")
    if "s0_" not in name:
        for slot in truth.slots:
            owners = {n for n, one in found.items() if slot in one["slots"]}
            assert owners == set(truth.kind(slot))


@functools.cache
def described(name: str) -> dict[str, Any]:
    """What is said of a fixture, without the cost of a process."""
    document: dict[str, Any] = json.loads(json.dumps(zckpt.inspect(FIXTURES / name).as_dict()))
    return document


@pytest.mark.parametrize("name", DEEPSPEED)
def test_counts_and_bytes_add_up(name):
    document = described(name)
    own = [one for one in document["parameters"] if one["tied_to"] is None]
    assert document["num_parameters"] == len(own)
    assert document["num_elements"] == sum(math.prod(one["shape"]) for one in own)
    assert document["num_trainable_elements"] == sum(math.prod(one["shape"]) for one in own if not one["frozen"])
    newest = max(Path(file["path"]).stat().st_mtime for file in document["files"])
    assert abs(datetime.fromisoformat(document["saved"]).timestamp() - newest) <= 1
    listed = {Path(file["path"]) for file in document["files"]}
    on_disk = set((FIXTURES / name / document["details"]["tag"]).iterdir())
    assert listed == on_disk
    assert document["nbytes"] == sum(path.stat().st_size for path in on_disk)
    for slot, facts in document["slots"].items():
        assert facts["num_parameters"] == sum(slot in one["slots"] for one in own + document["unnamed"])


@pytest.mark.parametrize("name", [n for n in DENSE if "elastic" not in n and "subgroup" not in n])
@pytest.mark.every(2)
def test_param_groups_have_the_users_hyperparameters_and_their_parameters(name):
    document, facts = described(name), Truth(FIXTURES / name).facts
    assert len(document["param_groups"]) == len(facts["param_groups"])
    for found, expected, order in zip(document["param_groups"], facts["param_groups"], facts["order"], strict=True):
        for key in ("lr", "weight_decay", "betas", "eps", "momentum"):
            assert found.get(key) == expected.get(key)
        assert sorted(found["parameters"]) == sorted(order)
        assert all(key != "params" for key in found)


def test_sub_groups_are_not_param_groups():
    assert described("s3_bf16_dp2_subgroup")["param_groups"] == described("s3_bf16_dp2")["param_groups"]


def test_round_robin_groups_are_in_the_users_order():
    plain, reordered = (described(name)["param_groups"] for name in ("s2_bf16_dp2", "s2_bf16_dp2_rr"))
    assert [g["parameters"] for g in reordered] == [g["parameters"] for g in plain]


@pytest.mark.parametrize("name", ["s1_bf16_dp2", "s3_bf16_dp2", "s2_bf16_dp2_cpuadam", "s1_bf16_dp3_fused"])
def test_param_groups_have_the_step(name):
    assert [group["state"]["step"] for group in described(name)["param_groups"]] == [5, 5, 5]


@pytest.mark.parametrize("name", [n for n in FLAT if "palign" not in n])
def test_padding_of_flat_groups_is_told_by_rank(name):
    document, facts = described(name), Truth(FIXTURES / name).facts
    world = facts["dp_world_size"]
    expected = [[0] * len(facts["order"]) for _ in range(world)]
    for group, names in enumerate(facts["order"]):
        total = sum(math.prod(facts["shapes"][n]) for n in names)
        partition = 2 * math.ceil(total / (2 * world))
        for rank in range(world):
            expected[rank][group] = min(max((rank + 1) * partition - total, 0), partition)
    assert [rank["groups"] for rank in document["padding"]["ranks"]] == expected
    assert document["padding"]["num_elements"] == sum(map(sum, expected))


@pytest.mark.parametrize("name", ["s3_bf16_dp2", "s3_bf16_dp3", "s3_bf16_dp4", "s3_fp32_dp2", "s3_bf16_dp2_subgroup"])
def test_padding_of_stage_3_is_that_of_each_parameter(name):
    document, truth = described(name), Truth(FIXTURES / name)
    world = truth.facts["dp_world_size"]
    assert document["padding"]["num_elements"] == sum(-t.numel() % world for t in truth.masters.values())


def test_elastic_checkpoint_warns_that_hyperparameters_are_absent():
    (warning,) = described("s2_bf16_dp2_elastic")["warnings"]
    assert "elastic" in warning


@pytest.mark.parametrize("name", ["plain_adamw", "plain_bf16", "plain_legacy", "plain_proto4", "plain_mixed"])
def test_plain_torch_file_is_described(name):
    document, truth = inspected(FIXTURES / "other" / name / "ckpt.pt"), Truth(FIXTURES / "other" / name)
    assert document["format"] == "torch"
    assert document["zero_stage"] is None
    assert set(truth.weights) <= {one["name"] for one in document["parameters"] + document["buffers"]}


@pytest.mark.parametrize("name", ["s2_bf16_dp2_client", "s3_bf16_dp2", "moe_ep2_s2_bf16_dp2", "tp2_s1_bf16_dp2"])
def test_command_prints_the_document_of_the_function(name):
    assert inspected(FIXTURES / name) == described(name)


# --- which checkpoint is meant

WRAPPED = [
    ("trainer_ds2_gpt2", "checkpoint-4", "checkpoint-4/global_step4"),
    ("accel_ds2_bf16", "state", "state/pytorch_model"),
    ("litsim_ds2", "epoch=0-step=5.ckpt", "epoch=0-step=5.ckpt/checkpoint"),
]


@pytest.mark.parametrize(("name", "wrapper", "inside"), WRAPPED)
def test_wrapper_of_another_program_is_the_checkpoint_inside(name, wrapper, inside):
    directory = FIXTURES / "other" / name
    by_wrapper, by_tag = inspected(directory / wrapper), inspected(directory / inside)
    assert by_wrapper["source"] == str(directory / inside)
    assert by_wrapper["parameters"] == by_tag["parameters"]


def test_trainers_output_directory_says_where_the_checkpoint_is():
    for number in (8, 12):
        shutil.copytree(FIXTURES / "other/trainer_ds2_gpt2/checkpoint-4", f"checkpoint-{number}")
    refused(3, "inspect .", words="checkpoint-12?")


def test_run_directory_is_the_tag_that_latest_names_unless_another_is_given():
    run = copy("s2_bf16_dp2_multitag")
    assert inspected(run)["step"] == 5
    assert inspected(run, "--tag global_step3")["step"] == 3
    assert inspected(run / "global_step3", "--tag global_step3")["step"] == 3
    (run / "latest").write_text("global_step3\n")
    assert inspected(run)["step"] == 3
    assert inspected(run, "--tag global_step5")["step"] == 5
    (run / "latest").unlink()
    refused(3, "inspect", run, words=("--tag", "global_step3", "global_step5"))
    shutil.rmtree(run / "global_step5")
    assert inspected(run)["step"] == 3  # the only one needs no latest


def test_unknown_tag_is_refused_with_the_tags_that_are_there():
    run = "inspect fixtures/s2_bf16_dp2_multitag"
    refused(3, f"{run} --tag global_step4", words=("global_step4", "global_step3, global_step5"))
    refused(3, f"{run}/global_step5 --tag global_step4", words=("global_step4", "one checkpoint"))


def test_unknown_tag_is_refused_with_the_tags_of_any_format():
    steps = [f"step-{number}" for number in range(8, 12)]
    for step in steps[:2]:
        zckpt.convert(FIXTURES / "s2_bf16_dp2", step, to="zckpt")
    shutil.copytree(FIXTURES / "other/dcp_fsdp2_dp3/ckpt", steps[2])
    shutil.copytree(FIXTURES / "s2_bf16_dp2/global_step5", steps[3])
    Path("logs").mkdir()
    for tag in ("nope", "logs"):
        refused(3, f"inspect . --tag {tag}", words=("no such tag", tag, f"found {', '.join(steps)}\n"))
    for longer_than_any_name_or_path in ("x" * 300, "/".join(["deep"] * 2000)):
        refused(3, f"inspect . --tag {longer_than_any_name_or_path}", words=("no such tag", steps[0]))


def test_latest_that_names_no_tag_is_refused():
    run = copy("s2_bf16_dp2")
    shutil.copytree(run, "other")
    for text in ("", "global_step9", "../other", "..", ".", "/", "a\0b", "x" * 300, "x" * 100_000, bytes(range(256))):
        (run / "latest").write_bytes(text if isinstance(text, bytes) else text.encode())
        refused(3, "inspect", run, words=(str(run / "latest"), "--tag"))


def test_files_of_another_node_are_added_by_root():
    run, node = copy("s2_bf16_dp2"), Path("node1/global_step5")
    node.mkdir(parents=True)
    shard = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (run / "global_step5" / shard).rename(node / shard)
    refused(3, "inspect", run, words=("missing for rank", " 1:", "--root"))
    for source, root in ((run, "node1"), (run, node), (run / "global_step5", node), (run / "global_step5", "node1")):
        assert inspected(source, f"--root {root}")["topology"]["dp"] == 2
    (node / node.name).mkdir()
    (node / node.name / shard).write_bytes(b"")  # left over, and not looked at
    assert inspected(run, f"--root {node}")["topology"]["dp"] == 2


# --- how it is printed


def test_without_json_a_person_reads_it():
    done = succeeded("inspect fixtures/s2_bf16_dp2")
    assert "ZeRO stage 2" in done.stdout
    assert "exp_avg_sq" in done.stdout
    assert "conv.weight" not in done.stdout
    assert done.stderr == ""


def test_parameters_lists_every_parameter_and_buffer():
    done = succeeded("inspect fixtures/s2_bf16_dp2 --parameters")
    lines = done.stdout.splitlines()
    for name in (*Truth(FIXTURES / "s2_bf16_dp2").weights, "head.weight", "counter"):
        assert any(line.split()[:1] == [name] for line in lines), name
    assert any("tied to emb.weight" in line for line in lines)


def test_files_lists_every_file_with_its_rank():
    done = succeeded("inspect fixtures/s2_bf16_dp4 --files")
    for rank in range(4):
        assert f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in done.stdout


def test_globals_are_in_the_document_only_when_asked_for():
    source = "fixtures/s2_bf16_dp2_client"
    document = inspected(source)
    assert {"args", "np_rng", "consumed", "nested"} <= set(document["metadata"])
    assert all("globals" not in file for file in document["files"])
    for file in inspected(source, "--globals")["files"]:
        assert "torch._utils._rebuild_tensor_v2" in file["globals"]["data.pkl"]
    text = succeeded(f"inspect {source} --globals").stdout
    for name in ("_utils._rebuild_tensor_v2", "argparse.Namespace", "deepspeed.runtime.zero.config.ZeroStageEnum"):
        assert name in text


def test_names_that_are_not_ascii_are_printed_where_the_terminal_is():
    copy("s2_bf16_dp2").rename("läuft")
    assert inspected("läuft")["source"] == "läuft/global_step5"
    of_ascii = {**environment(), "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command("inspect läuft"), capture_output=True, env=of_ascii, check=False)
    assert b"Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_one_line():
    with Path("/dev/full").open("wb") as full:
        words, streams = command("inspect fixtures/s2_bf16_dp2"), {"stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run(words, **streams, text=True, env=environment(), check=False)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr


# --- errors


PLAIN = "fixtures/other/plain_adamw/ckpt.pt"


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (3, "inspect absent", "absent"),
        (3, f"inspect {'x' * 1000}", ""),
        (3, "inspect .", "not recognised as a checkpoint"),
        (3, "inspect fixtures/s2_bf16_dp2 --root absent", "absent"),
        (3, "inspect fixtures/s2_bf16_dp2 --root .", ".: holds no files of the checkpoint"),
        (2, f"inspect {PLAIN} --root .", "--root"),
        (2, f"inspect {PLAIN} --tag x", "--tag"),
        (2, f"inspect {PLAIN} --names absent", "absent"),
        (2, "inspect", ""),
        (2, "inspect x --tag", ""),
        (2, "inspect --frobnicate x", ""),
        (2, "frobnicate", ""),
        (2, "stats x y", ""),
    ],
)
def test_what_cannot_be_inspected_is_said_in_one_line(status, arguments, words):
    refused(status, arguments, words=words)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"\x80\x02}.", bytes(100)])
def test_file_that_is_no_checkpoint_is_refused(content):
    Path("x.pt").write_bytes(content)
    refused(3, "inspect x.pt", words="x.pt")


@pytest.mark.parametrize(
    "arguments", ["--debug inspect . --json", "inspect --debug . --json", "inspect . --json --debug"]
)
def test_debug_shows_a_traceback_wherever_it_is_given(arguments):
    done = run(arguments)
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert "UnknownFormatError" in done.stderr


def test_several_checkpoints_are_a_table():
    sources = ("fixtures/s3_bf16_dp3", "fixtures/s2_bf16_dp2")
    lines = succeeded("inspect", *sources).stdout.splitlines()
    assert [line.split()[1:6] for line in lines[1:3]] == [
        ["deepspeed", "3", "3", "5", "21"],
        ["deepspeed", "2", "2", "5", "21"],
    ]
    both = printed("inspect", *sources)["checkpoints"]
    assert both == [inspected(one) for one in sources]
    whole = [succeeded(f"inspect {one} --parameters").stdout for one in sources]
    assert succeeded("inspect", *sources, "--parameters").stdout == "\n".join(whole)
    said = refused(2, "inspect", *sources, "--html page.html")
    assert said == "zckpt: a page shows one checkpoint: found 2 given\n"
    assert names_in() == []


def test_help_and_version_are_on_standard_output():
    assert "consolidate" in succeeded("--help").stdout
    assert "SOURCE" in succeeded("inspect -h").stdout
    assert succeeded("--version").stdout.startswith("zckpt")


def test_a_command_without_the_group_has_the_same_help():
    assert CliRunner().invoke(inspect_command, ["-h"]).exit_code == 0
