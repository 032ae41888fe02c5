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

from tests.cli.console import FIXTURES, in_time, run
from tests.pairwise import each

OTHER = FIXTURES / "other"


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
    "a torch file": (OTHER / "plain_adamw" / "ckpt.pt", ""),
    "a safetensors file": (OTHER / "plain_adamw" / "truth.safetensors", ""),
    "latest": (FIXTURES / "s2_bf16_dp2", "latest"),
    "DeepSpeed's model": (FIXTURES / "s2_bf16_dp2", "global_step5/mp_rank_00_model_states.pt"),
    "DeepSpeed's optimizer": (
        FIXTURES / "s2_bf16_dp2",
        "global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "DCP's metadata": (OTHER / "dcp_fsdp2_dp2" / "ckpt", ".metadata"),
    "a file of DCP's": (OTHER / "dcp_fsdp2_dp2" / "ckpt", "__1_0.distcp"),
    "an index": (OTHER / "dcphf_consolidated_dp2" / "ckpt", "model.safetensors.index.json"),
    "a shard": (OTHER / "dcphf_consolidated_dp2" / "ckpt", "model-00002-of-00002.safetensors"),
    "a rank of ZeroRedundancyOptimizer": (OTHER / "zro_dp2_adamw" / "ckpt", "zero_rank1.pt"),
}


def said_in_one_line(*arguments: object) -> None:
    done = run(*arguments)
    assert done.returncode in (0, 1, 3), (arguments, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or len(done.stderr.splitlines()) <= 1, done.stderr


@pytest.mark.parametrize(("file", "kind"), each(FILES, KINDS))
def test_no_verb_waits_for_what_is_no_file(file, kind, tmp_path):
    original, name = FILES[file]
    source = tmp_path / original.name
    if original.is_dir():
        shutil.copytree(original, source)
        (source / name).unlink()
    KINDS[kind](source / name if name else source)
    said_in_one_line("inspect", source)
    said_in_one_line("verify", "--deep", source)
    target = tmp_path / "out.pt"
    said_in_one_line("consolidate", source, target)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("native") / "step5"
    done = run("convert", FIXTURES / "s2_bf16_dp2", target, "--to", "zckpt", "--quiet")
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00001-of-00002.safetensors"])
def test_files_of_zckpts_own_format_are_files(name, kind, native, tmp_path):
    source = Path(shutil.copytree(native, tmp_path / "step5"))
    (source / name).unlink(missing_ok=True)
    KINDS[kind](source / name)
    said_in_one_line("inspect", source)
    said_in_one_line("verify", "--deep", source)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_digests_are_read_from_files_only(kind, tmp_path):
    KINDS[kind](tmp_path / "digests.json")
    done = run("verify", OTHER / "plain_adamw" / "ckpt.pt", "--against", tmp_path / "digests.json")
    assert done.returncode == 3
    assert "is not a regular file" in done.stderr


def renamed(index: Path, name: str) -> None:
    document = json.loads(index.read_text())
    document["weight_map"] = dict.fromkeys(document["weight_map"], name)
    index.write_text(json.dumps(document))


def with_latest(directory: Path, name: str) -> Path:
    source = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", directory / "run"))
    (source / "latest").write_text(name)
    return source


def with_universal(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "latest_universal").write_text(name)
    return directory


def with_index(directory: Path, name: str) -> Path:
    source = Path(shutil.copytree(OTHER / "dcphf_consolidated_dp2" / "ckpt", directory / "hf"))
    renamed(source / "model.safetensors.index.json", name)
    return source


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "\x9b31m"])
@pytest.mark.parametrize("make", [with_latest, with_index, with_universal])
def test_name_that_no_file_can_have_is_said_to_name_nothing(make, name, tmp_path):
    source = make(tmp_path, name)
    for verb in (("inspect",), ("verify", "--deep"), ("consolidate",)):
        done = run(*verb, source, *([tmp_path / "out.pt"] if verb == ("consolidate",) else []))
        assert done.returncode == (1 if verb[0] == "verify" else 3), (verb, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 1
        assert len(done.stderr) < 1500 + len(str(source))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"])
def test_argument_that_no_file_can_have_is_said_to_be_none(name, tmp_path):
    if "\0" in name:
        return
    done = run("inspect", tmp_path / name)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    ckpt = OTHER / "plain_adamw" / "ckpt.pt"
    for verb in ("consolidate", "strip"):
        done = run(verb, ckpt, tmp_path / f"{name}.pt", *(["--optimizer"] if verb == "strip" else []))
        assert done.returncode == 4, done.stderr
        assert len(done.stderr.splitlines()) == 1
