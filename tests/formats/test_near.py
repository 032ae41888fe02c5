"""What is said of something that no format recognises: what it is, and where a checkpoint is near it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.cli.console import FIXTURES, copy, refused, run
from tests.refusals import refusing

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 123456\n"


def foreign(path, *words):
    """Refused as intact, but not supported."""
    with pytest.raises(zckpt.UnsupportedError) as caught:
        zckpt.open(path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.exit_status == 5
    assert run("inspect", path).returncode == 5


@pytest.mark.parametrize("name", ["model.safetensors", "x.pt", "pytorch_model.bin"])
def test_pointer_of_git_lfs(name, tmp_path):
    (tmp_path / name).write_text(POINTER)
    refused(3, "inspect", tmp_path / name, words=("git-lfs pointer", "run `git lfs pull`"))
    refused(3, "inspect", tmp_path, words=("git-lfs", "run `git lfs pull`"))


def test_pointer_of_git_lfs_among_the_files_of_a_checkpoint():
    run_directory = copy("s2_bf16_dp2")
    shard = run_directory / "global_step5" / "mp_rank_00_model_states.pt"
    shard.write_text(POINTER)
    refused(3, "inspect", run_directory, words=(shard.name, "git-lfs pointer", "run `git lfs pull`"))
    done = run("verify", run_directory)
    assert done.returncode == 1
    assert shard.name in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.gguf", b"GGUF\3\0\0\0" + bytes(40), "GGUF"),
        ("model.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
        ("flax_model.msgpack", b"\x81\xa6params\x80", "Flax"),
        ("model.ckpt.index", b"\0\0\5" + bytes(40), "TensorFlow"),
        ("model.ckpt-100.data-00000-of-00001", b"\1\2\3" + bytes(40), "TensorFlow"),
        ("saved_model.pb", b"\x08\1\x12" + bytes(40), "TensorFlow"),
        ("model.onnx", b"\x08\7\x12" + bytes(40), "inference"),
    ],
)
def test_files_of_other_programs(name, content, said):
    Path(name).write_bytes(content)
    foreign(Path(name), said, "zckpt does not read", "safetensors")


def test_arrays_of_numpy(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    np.save(tmp_path / "x.npy", np.zeros(3))
    foreign(tmp_path / "x.npz", "NumPy")
    foreign(tmp_path / "x.npy", "NumPy")
    foreign(tmp_path, "NumPy")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["_CHECKPOINT_METADATA", "params/_METADATA"], "Orbax"),
        (["manifest.ocdbt", "d/0123"], "Orbax"),
        (["saved_model.pb", "variables/variables.index"], "TensorFlow"),
        (["checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"], "TensorFlow"),
        (["mp_rank_00/model_rng.pt"], "Megatron-LM"),
        (["mp_rank_00_000/model_rng.pt", "mp_rank_01_000/distrib_optim.pt"], "Megatron-LM"),
        (["model/pp_00/tp_00/sdp_00.pt", "optimizer/pp_00/tp_00/sdp_00.pt", "trainer/rank_00.pt"], "fairseq2"),
        (["rank_0.safetensors", "rank_1.safetensors", "metadata.yaml", "ok"], "Fast-LLM"),
        (["config.json", "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"], "vLLM"),
        (["class_and_ctor_args.pkl", "rllib_checkpoint.json", "algorithm_state.pkl"], "RLlib"),
        (["config.cfg", "meta.json", "textcat/model", "vocab/strings.json"], "spaCy"),
        (["model.gguf", "README.md"], "GGUF"),
    ],
)
def test_directories_of_other_programs(files, said, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    foreign(tmp_path, said)


def test_of_a_models_file_and_its_optimizers_the_models_is_meant(tmp_path):
    """As Stable-Baselines3's archive has them."""
    for name in ("policy.optimizer.pth", "policy.pth"):
        torch.save({"weight": torch.ones(2)}, tmp_path / name)
    refused(3, "inspect", tmp_path, words=(f"give one of its files, such as {tmp_path / 'policy.pth'}",))


def test_one_ranks_file_says_give_its_directory():
    tag = FIXTURES / "s2_bf16_dp2" / "global_step5"
    shard = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    refused(5, "inspect", shard, words=("holds no state dict", "one DeepSpeed rank", f"give its directory, {tag}"))


def test_one_item_of_dcp_says_give_its_directory():
    directory = FIXTURES / "other" / "dcp_fsdp2_dp2_flatopt" / "ckpt"
    for name in ("__0_0.distcp", ".metadata"):
        done = run("inspect", directory / name)
        assert done.returncode in (3, 5)
        assert f"give its directory, {directory}" in done.stderr


def test_items_of_dcp_without_metadata(tmp_path):
    directory = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "other" / "dcp_fsdp2_dp2_flatopt" / "ckpt", directory)
    (directory / ".metadata").unlink()
    refused(3, "inspect", directory, words=("the metadata file is missing", "expected .metadata", "begins with a dot"))
    for path in (directory, tmp_path):
        done = run("verify", path)
        assert done.returncode == 1
        assert "ZC-101" in done.stdout


@pytest.mark.parametrize("to", ["zckpt", "consolidated"])
def test_parent_names_the_last_checkpoint_in_it(to, tmp_path):
    for step in (2, 9, 10):
        zckpt.convert(FIXTURES / "s2_bf16_dp2", tmp_path / f"step-{step}", to=to)
    refused(3, "inspect", tmp_path, words=("not recognised as a checkpoint", f"did you mean {tmp_path / 'step-10'}?"))


def test_parent_of_megatron_names_the_iteration_that_its_file_says(tmp_path):
    for number in (100, 200):
        (tmp_path / f"iter_{number:07d}" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    refused(3, "inspect", tmp_path, words=(f"did you mean {tmp_path / 'iter_0000100'}?",))


@pytest.mark.parametrize("given", ["", "checkpoint_000001"])
def test_a_checkpoint_that_is_in_a_folder_of_a_step_is_meant(given, tmp_path):
    """As Ray Train keeps what a Trainer has saved."""
    inner = tmp_path / "checkpoint_000001" / "checkpoint"
    inner.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, inner / "model.safetensors")
    (inner.parent / ".metadata.json").write_text("{}")
    refused(3, "inspect", tmp_path / given, words=(f"did you mean {inner}?",))
    assert zckpt.open(inner).parameters


def test_file_of_torch_without_a_state_dict_is_intact_and_not_supported(torch_file):
    foreign(torch_file([1, 2]), "holds no state dict")


def test_what_another_verb_does_is_named(tmp_path):
    refused(5, "reshard", FIXTURES / "pp2_s1_fp32_dp2", tmp_path / "out", "--world-size", 3, "--stage", 2,
            words=("zckpt convert",))  # fmt: skip
    refused(5, "reshard", FIXTURES / "s0_fp32_dp2", tmp_path / "out", "--world-size", 3, "--stage", 2,
            words=("zckpt convert",))  # fmt: skip
    refused(5, "strip", FIXTURES / "other" / "mcore_bf16_plain_tp2" / "ckpt", tmp_path / "out", "--optimizer",
            words=("zckpt consolidate",))  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.tar", b"\0" * 257 + b"ustar  \0" + b"\0" * 400),
        ("run.tar.gz", b"\x1f\x8b\x08\0"),
        ("run.zst", b"(\xb5/\xfd\0"),
        ("run.zip", b"PK\3\4"),
    ],
)
def test_an_archive_is_told_as_one(name, content):
    Path(name).write_bytes(content)
    with refusing(zckpt.SourceError, "is an archive; unpack it"):
        zckpt.open(name)


def test_what_names_the_latest_checkpoint_is_not_it():
    with refusing(zckpt.SourceError, "latest: only names the latest checkpoint; give its directory, "):
        zckpt.open(FIXTURES / "s2_bf16_dp2/latest")


def test_what_is_not_there_is_answered_with_what_may_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "gone").symlink_to("checkpoint-400")
    for path, words in {
        "gone": "gone is a link to checkpoint-400, which is not there",
        "gone/global_step4": "gone is a link to checkpoint-400, which is not there",
        "checkpoint-50": "did you mean checkpoint-500?",
        "runs/a/step": ". exists, but not runs in it",
        str(tmp_path / "checkpoint-500" / "a" / "b"): f"{tmp_path}/checkpoint-500 exists, but not a in it",
        "gpt2": "hf download gpt2",
        "meta-llama/Llama-3-8B": "hf download meta-llama/Llama-3-8B",
    }.items():
        with refusing(zckpt.SourceError, re.escape(words)):
            zckpt.open(path)


def test_a_model_whose_links_lead_nowhere_is_told_as_that(tmp_path):
    """A snapshot of a hub's cache that was copied without the files that it links to."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("../blobs/0a1b")
    with refusing(
        zckpt.SourceError, "model.safetensors is a link to ../blobs/0a1b, which is not there; copy the files"
    ):
        zckpt.open(tmp_path)
