"""`zckpt convert` as a user meets it."""

from __future__ import annotations

import json

import pytest

from tests.cli.console import FIXTURES, copy, inspected, refused, run, succeeded

FORMATS = ("deepspeed", "universal", "consolidated", "zckpt", "dcp", "zero-redundancy")
S2 = FIXTURES / "s2_bf16_dp2"
S3 = FIXTURES / "s3_bf16_dp2"


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_written_compared_read_again_and_replaced_only_if_it_is_one(to, tmp_path):
    written = json.loads(succeeded("convert", S2, tmp_path / to, "--to", to, "--verify", "--json").stdout)
    document, source = inspected(tmp_path / to), inspected(S2)
    assert document["num_elements"] == source["num_elements"]
    assert set(document["slots"]) >= {"weight", "exp_avg", "exp_avg_sq"}
    assert written["verified_nbytes"] >= sum(source["slots"][key]["nbytes"] for key in ("exp_avg", "exp_avg_sq"))
    refused(4, "convert", S2, tmp_path / to, "--to", to, words=("already exists", "--overwrite"))
    done = succeeded("convert", S2, tmp_path / to, "--to", to, "--overwrite")
    assert done.stdout == ""
    assert f"wrote {tmp_path}" in done.stderr
    (tmp_path / to / "mine.txt").write_text("mine")
    refused(4, "convert", S2, tmp_path / to, "--to", to, "--overwrite", words=("mine.txt",))
    assert (tmp_path / to / "mine.txt").read_text() == "mine"


def test_deepspeed_run_directory_has_the_ranks_of_its_source_unless_told(tmp_path):
    succeeded("convert", S2, tmp_path / "same", "--to", "deepspeed")
    assert inspected(tmp_path / "same")["topology"]["dp"] == 2
    succeeded("convert", S2, tmp_path / "other", "--to", "deepspeed", "--world-size", 3, "--stage", 3)
    document = inspected(tmp_path / "other")
    assert (document["topology"]["dp"], document["zero_stage"]) == (3, 3)


def test_universal_has_its_pointer_beside_it(tmp_path):
    done = succeeded("convert", S2, tmp_path / "step5", "--to", "universal", "--json")
    assert (tmp_path / "latest_universal").read_text() == "step5"
    assert str(tmp_path / "latest_universal") in json.loads(done.stdout)["files"]
    assert inspected(tmp_path)["format"] == inspected(tmp_path / "step5")["format"]


@pytest.mark.parametrize(("name", "to"), [("out", "dcp"), ("out.pt", "consolidated")])
def test_a_fingerprint_is_listed_too(name, to, tmp_path):
    done = succeeded("convert", S2, tmp_path / name, "--json", "--to", to, "--fingerprint")
    there = sorted(str(one) for one in tmp_path.rglob("*") if one.is_file())
    assert sorted(json.loads(done.stdout)["files"]) == there


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth"])
def test_consolidated_file(suffix, tmp_path):
    target = tmp_path / f"all{suffix}"
    succeeded("convert", S2, target, "--to", "consolidated")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert inspected(target)["num_elements"] == inspected(S2)["num_elements"]


@pytest.mark.parametrize("to", ["consolidated", "dcp", "zero-redundancy"])
def test_dtype_of_the_model(to, tmp_path):
    succeeded("convert", S2, tmp_path / "out", "--to", to, "--dtype", "float32")
    dtypes = {p["name"]: p["dtype"] for p in inspected(tmp_path / "out")["parameters"] if p["group"] is not None}
    assert dtypes
    assert set(dtypes.values()) == {"float32"}


def test_ranks_of_zero_redundancy(tmp_path):
    succeeded("convert", S2, tmp_path / "whole", "--to", "zero-redundancy")
    succeeded("convert", S2, tmp_path / "cut", "--to", "zero-redundancy", "--world-size", 3)
    more = {p.name for p in (tmp_path / "cut").iterdir()} - {p.name for p in (tmp_path / "whole").iterdir()}
    assert len(more) == 3


def test_a_pointer_that_cannot_be_written_is_told_before_anything_is(tmp_path):
    (tmp_path / "latest_universal").symlink_to("elsewhere")
    refused(4, "convert", S2, tmp_path / "out", "--to", "universal", words=("latest_universal", "symbolic link"))
    assert [path.name for path in tmp_path.iterdir()] == ["latest_universal"]


def test_a_fingerprint_beside_a_file_is_part_of_the_target(tmp_path):
    target, beside = tmp_path / "x.pt", tmp_path / "x.pt.fingerprint.json"
    beside.write_text("mine")
    options = ("--to", "consolidated", "--fingerprint")
    refused(4, "convert", S2, target, *options, words=("x.pt.fingerprint.json", "already exists"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(beside.name, "mine")]
    beside.unlink()
    succeeded("convert", S2, target, *options)
    first = beside.read_text()
    assert run("verify", target).returncode == 0
    without = (*options[:2], "--overwrite")
    refused(4, "convert", S3, target, *without, words=("would be taken for the new file's",))
    succeeded("convert", S3, target, *options, "--overwrite")
    assert beside.read_text() != first
    assert run("verify", target).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [target.name, beside.name]


@pytest.mark.parametrize("to", [to for to in FORMATS if to != "consolidated"])
@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "out.gguf"])
def test_a_directory_does_not_get_the_name_of_a_file(name, to, tmp_path):
    refused(2, "convert", S2, tmp_path / name, "--to", to, words=("the target is a directory",))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_lightning_keeps_the_end_of_its_name(tmp_path):
    succeeded("convert", S2, tmp_path / "last.ckpt", "--to", "deepspeed")
    assert (tmp_path / "last.ckpt").is_dir()


# --- refusals: one line, and no target


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "zckpt", "--stage", 2), ("stage", "zckpt")),
        (("--to", "universal", "--world-size", 2), ("world-size", "universal")),
        (("--to", "zckpt", "--dtype", "float32"), ("dtype", "zckpt")),
        (("--to", "consolidated", "--elastic"), ("elastic", "consolidated")),
        (("--to", "deepspeed", "--world-size", 0), ("0",)),
        (("--to", "zckpt", "--world-size", -1), ("-1",)),
        (("--to", "deepspeed", "--stage", 4), ("4",)),
        (("--to", "hdf5"), ("hdf5", "universal")),
        ((), ("--to",)),
    ],
)
def test_options_that_do_not_apply(options, words, tmp_path):
    refused(2, "convert", S2, tmp_path / "out", *options, words=words)
    assert list(tmp_path.iterdir()) == []


def test_ranks_and_stage_are_needed_where_the_source_has_none(tmp_path):
    source = tmp_path / "all.pt"
    succeeded("convert", FIXTURES / "s1_fp32_dp2", source, "--to", "consolidated")
    refused(2, "convert", source, tmp_path / "out", "--to", "deepspeed", words=("--world-size",))
    succeeded("convert", source, tmp_path / "out", "--to", "deepspeed", "--world-size", 2)
    assert inspected(tmp_path / "out")["zero_stage"] == 1


def test_source_without_an_optimizer_is_no_zero_checkpoint(tmp_path):
    succeeded("consolidate", S2, tmp_path / "model.safetensors")
    refused(5, "convert", tmp_path / "model.safetensors", tmp_path / "out", "--to", "deepspeed", "--world-size", 2,
            "--stage", 1, words=("no optimizer",))  # fmt: skip


def test_parameters_without_names_are_no_zero_checkpoint(tmp_path):
    source = FIXTURES / "other" / "plain_adamw" / "ckpt.pt"
    options = ("--to", "deepspeed", "--world-size", 2, "--stage", 1)
    refused(5, "convert", source, tmp_path / "out", *options, words=("--names",))
    assert list(tmp_path.iterdir()) == []


def test_universal_checkpoint_within_its_run_directory(tmp_path):
    source = copy("s2_bf16_dp2", tmp_path)
    succeeded("convert", source, source / "global_step5_universal", "--to", "universal")
    assert (source / "latest_universal").read_text() == "global_step5_universal"
    assert inspected(source)["format"] == "deepspeed"
