"""`zckpt convert` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.console import copy, inspected, printed, refused, succeeded
from tests.folders import contents, names_in
from tests.pairwise import each

FORMATS = ("deepspeed", "universal", "consolidated", "zckpt", "dcp", "zero-redundancy")
S2 = "fixtures/s2_bf16_dp2"


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_written_compared_read_again_and_replaced_only_if_it_is_one(to):
    command = f"convert {S2} {to} --to {to}"
    written = printed(command, "--verify")
    document, source = inspected(to), inspected(S2)
    assert document["num_elements"] == source["num_elements"]
    assert set(document["slots"]) >= {"weight", "exp_avg", "exp_avg_sq"}
    assert written["verified_nbytes"] >= sum(source["slots"][key]["nbytes"] for key in ("exp_avg", "exp_avg_sq"))
    refused(4, command, words=("already exists", "--overwrite"))
    done = succeeded(command, "--overwrite")
    assert done.stdout == ""
    assert f"wrote {to}" in done.stderr
    Path(to, "mine.txt").write_text("mine")
    refused(4, command, "--overwrite", words="mine.txt")
    assert Path(to, "mine.txt").read_text() == "mine"


def test_deepspeed_run_directory_has_the_ranks_of_its_source_unless_told():
    succeeded(f"convert {S2} same --to deepspeed")
    assert inspected("same")["topology"]["dp"] == 2
    succeeded(f"convert {S2} other --to deepspeed --world-size 3 --stage 3")
    document = inspected("other")
    assert (document["topology"]["dp"], document["zero_stage"]) == (3, 3)


def test_universal_has_its_pointer_beside_it():
    assert "latest_universal" in printed(f"convert {S2} step5 --to universal")["files"]
    assert Path("latest_universal").read_text() == "step5"
    assert inspected(".")["format"] == inspected("step5")["format"]


@pytest.mark.parametrize(("name", "to"), [("out", "dcp"), ("out.pt", "consolidated")])
def test_a_fingerprint_is_listed_too(name, to):
    assert sorted(printed(f"convert {S2} {name} --to {to} --fingerprint")["files"]) == sorted(contents())


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth"])
def test_consolidated_file(suffix):
    succeeded(f"convert {S2} all{suffix} --to consolidated")
    assert names_in() == [f"all{suffix}"]
    assert inspected(f"all{suffix}")["num_elements"] == inspected(S2)["num_elements"]


@pytest.mark.parametrize("to", ["consolidated", "dcp", "zero-redundancy"])
def test_dtype_of_the_model(to):
    succeeded(f"convert {S2} out --to {to} --dtype float32")
    assert {p["dtype"] for p in inspected("out")["parameters"] if p["group"] is not None} == {"float32"}


def test_ranks_of_zero_redundancy():
    succeeded(f"convert {S2} whole --to zero-redundancy")
    succeeded(f"convert {S2} cut --to zero-redundancy --world-size 3")
    assert len({*names_in("cut")} - {*names_in("whole")}) == 3


def test_a_pointer_that_cannot_be_written_is_told_before_anything_is():
    Path("latest_universal").symlink_to("elsewhere")
    refused(4, f"convert {S2} out --to universal", words=("latest_universal", "symbolic link"))
    assert names_in() == ["latest_universal"]


def test_a_fingerprint_beside_a_file_is_part_of_the_target():
    beside, other = Path("x.pt.fingerprint.json"), "convert fixtures/s3_bf16_dp2 x.pt --to consolidated --overwrite"
    command = f"convert {S2} x.pt --to consolidated --fingerprint"
    beside.write_text("mine")
    refused(4, command, words=("x.pt.fingerprint.json", "already exists"))
    assert contents() == {beside.name: b"mine"}
    beside.unlink()
    succeeded(command)
    first = beside.read_text()
    succeeded("verify x.pt")
    refused(4, other, words="would be taken for the new file's")
    succeeded(other, "--fingerprint")
    assert beside.read_text() != first
    succeeded("verify x.pt")
    assert names_in() == ["x.pt", beside.name]


def test_a_directory_of_lightning_keeps_the_end_of_its_name():
    succeeded(f"convert {S2} last.ckpt --to deepspeed")
    assert Path("last.ckpt").is_dir()


# --- refusals: one line, and no target


OF_FILES = each(["out.pt", "out.safetensors", "out.gguf"], [to for to in FORMATS if to != "consolidated"])


@pytest.mark.parametrize(("name", "to"), OF_FILES)
def test_a_directory_does_not_get_the_name_of_a_file(name, to):
    refused(2, f"convert {S2} {name} --to {to}", words="the target is a directory")
    assert names_in() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--to zckpt --stage 2", ("stage", "zckpt")),
        ("--to universal --world-size 2", ("world-size", "universal")),
        ("--to zckpt --dtype float32", ("dtype", "zckpt")),
        ("--to consolidated --elastic", ("elastic", "consolidated")),
        ("--to deepspeed --world-size 0", "0"),
        ("--to zckpt --world-size -1", "-1"),
        ("--to deepspeed --stage 4", "4"),
        ("--to hdf5", ("hdf5", "universal")),
        ("", "--to"),
    ],
)
def test_options_that_do_not_apply(options, words):
    refused(2, f"convert {S2} out {options}", words=words)
    assert names_in() == []


def test_ranks_and_stage_are_needed_where_the_source_has_none():
    succeeded("convert fixtures/s1_fp32_dp2 all.pt --to consolidated")
    refused(2, "convert all.pt out --to deepspeed", words="--world-size")
    needs = ("expected --world-size N and --stage 1, 2 or 3", "ZeRO stage 0")
    refused(2, "convert fixtures/s0_bf16_dp2 out --to deepspeed", words=needs)
    succeeded("convert all.pt out --to deepspeed --world-size 2")
    assert inspected("out")["zero_stage"] == 1


def test_what_has_no_optimizer_or_no_names_is_no_zero_checkpoint():
    options = "--to deepspeed --world-size 2 --stage 1"
    succeeded(f"consolidate {S2} model.safetensors")
    refused(5, "convert model.safetensors out", options, words="no optimizer")
    refused(5, "convert fixtures/other/plain_adamw/ckpt.pt out", options, words="--names")
    assert names_in() == ["model.safetensors"]


def test_universal_checkpoint_within_its_run_directory():
    source = copy("s2_bf16_dp2")
    succeeded("convert s2_bf16_dp2 s2_bf16_dp2/global_step5_universal --to universal")
    assert (source / "latest_universal").read_text() == "global_step5_universal"
    assert inspected(source)["format"] == "deepspeed"
