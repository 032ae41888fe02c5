"""Whatever lies where a file of a checkpoint should: pipes, devices, directories, links to nothing, impossible names.

Every verb says so in one line and at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, copy, in_time, printed, refused, run, succeeded
from tests.folders import names_in
from tests.pairwise import each

OTHER, RUN = FIXTURES / "other", FIXTURES / "s2_bf16_dp2"


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with in_time():
        yield


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


KINDS = {make.__name__: make for make in (pipe, zeros, nowhere, Path.mkdir)}

FILES = {
    "a torch file": (OTHER / "plain_adamw/ckpt.pt", ""),
    "a safetensors file": (OTHER / "plain_adamw/truth.safetensors", ""),
    "latest": (RUN, "latest"),
    "DeepSpeed's model": (RUN, "global_step5/mp_rank_00_model_states.pt"),
    "DeepSpeed's optimizer": (RUN, "global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "DCP's metadata": (OTHER / "dcp_fsdp2_dp2/ckpt", ".metadata"),
    "a file of DCP's": (OTHER / "dcp_fsdp2_dp2/ckpt", "__1_0.distcp"),
    "an index": (OTHER / "dcphf_consolidated_dp2/ckpt", "model.safetensors.index.json"),
    "a shard": (OTHER / "dcphf_consolidated_dp2/ckpt", "model-00002-of-00002.safetensors"),
    "a rank of ZeroRedundancyOptimizer": (OTHER / "zro_dp2_adamw/ckpt", "zero_rank1.pt"),
}


def said_in_one_line(*arguments: object) -> None:
    done = run(*arguments)
    assert done.returncode in (0, 1, 3), (arguments, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or len(done.stderr.splitlines()) <= 1, done.stderr


@pytest.mark.parametrize(("file", "kind"), each(FILES, KINDS))
def test_no_verb_waits_for_what_is_no_file(file, kind):
    original, name = FILES[file]
    source = Path(original.name)
    if original.is_dir():
        shutil.copytree(original, source)
        (source / name).unlink()
    KINDS[kind](source / name)
    for command in (f"inspect {source}", f"verify --deep {source}", f"consolidate {source} out.pt"):
        said_in_one_line(command)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("native") / "step5"
    succeeded("convert fixtures/s2_bf16_dp2", target, "--to zckpt --quiet")
    return target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00001-of-00002.safetensors"])
def test_files_of_zckpts_own_format_are_files(name, kind, native):
    source = Path(shutil.copytree(native, "step5"))
    (source / name).unlink(missing_ok=True)
    KINDS[kind](source / name)
    said_in_one_line("inspect step5")
    said_in_one_line("verify --deep step5")


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_digests_are_read_from_files_only(kind):
    KINDS[kind](Path("digests.json"))
    command = "verify fixtures/other/plain_adamw/ckpt.pt --against digests.json"
    refused(3, command, words="is not a regular file")


def with_latest(name: str) -> Path:
    source = copy("s2_bf16_dp2")
    (source / "latest").write_text(name)
    return source


def with_universal(name: str) -> Path:
    Path("latest_universal").write_text(name)
    return Path()


def with_index(name: str) -> Path:
    source = copy("other/dcphf_consolidated_dp2/ckpt")
    index = source / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = dict.fromkeys(document["weight_map"], name)
    index.write_text(json.dumps(document))
    return source


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "\x9b31m"])
@pytest.mark.parametrize("make", [with_latest, with_index, with_universal])
def test_name_that_no_file_can_have_is_said_to_name_nothing(make, name):
    source = make(name)
    for status, command in (
        (3, f"inspect {source}"),
        (1, f"verify --deep {source}"),
        (3, f"consolidate {source} out.pt"),
    ):
        done = run(command)
        assert done.returncode == status, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 1
        assert len(done.stderr) < 1500


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000])
def test_argument_that_no_file_can_have_is_said_to_be_none(name):
    refused(3, f"inspect {name}")
    refused(4, f"consolidate fixtures/other/plain_adamw/ckpt.pt {name}.pt")
    refused(4, f"strip fixtures/other/plain_adamw/ckpt.pt {name}.pt --optimizer")


@pytest.mark.parametrize("within", ["DeepSpeed's step", "a Hugging Face model"])
def test_checkpoint_in_the_current_directory(within, monkeypatch):
    """`.` has no name, which is the tag, and the name in a store."""
    place = copy("s2_bf16_dp2/global_step5")
    if within != "DeepSpeed's step":
        succeeded(f"consolidate {place} model")
        place = Path("model")
    name = place.name
    there = place.resolve()
    monkeypatch.chdir(there)
    said = printed("inspect .")
    assert Path(said["source"]) == there
    assert said["details"].get("tag", name) == name
    for verb in ("verify .", "fingerprint .", "list .", f"diff . ../{name}", f"average . ../{name} ../mean"):
        succeeded(verb)
    succeeded("pack . ../store")
    assert [one["name"] for one in printed("list ../store")["checkpoints"]] == [name]


def test_target_has_a_name(monkeypatch):
    Path("here").mkdir()
    monkeypatch.chdir("here")
    for verb in ("consolidate", "reshard --world-size 2", "convert --to dcp", "strip --optimizer", "sanitize"):
        for overwrite in ("", " --overwrite"):
            refused(4, f"{verb} fixtures/s2_bf16_dp2 .{overwrite}", words="expected a name")
    assert not names_in()
