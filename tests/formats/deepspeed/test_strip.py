"""What `strip` leaves of DeepSpeed's files: every value bit for bit, and the bytes saved to the last one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES, copy
from tests.folders import names_in, nbytes_in
from tests.formats.deepspeed.shards import edit_all
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, assert_same
from zckpt.errors import ShardError, SourceError
from zckpt.formats import alike_files, stripping
from zckpt.operations.strip import strip
from zckpt.torchfile import read_torchfile

FLAT = ["s1_bf16_dp2_bf16opt", "s1_bf16_dp2_elastic", "s1_bf16_dp2_empty", "s1_bf16_dp3_fused", "s1_bf16_dp4",
        "s1_fp32_dp3_palign", "s1_fp32_dp4_sgdm", "s2_bf16_dp2_adagrad1g", "s2_bf16_dp2_bf16master",
        "s2_bf16_dp2_client", "s2_bf16_dp2_cpuadam", "s2_bf16_dp2_elastic_fused", "s2_bf16_dp2_lion", "s2_bf16_dp2_rr",
        "s2_bf16_dp2_zerodim", "s2_fp16_dp2", "s2_fp32_dp4", "ds0145_s1_fp32_dp2", "ds0145_s2_bf16_dp4",
        "ds0145_s2_bf16_dp2_elastic_fused", "moe_ep2_s2_fp32_dp4", "tp2_s1_bf16_dp2", "pp2_s1_fp32_dp2"]  # fmt: skip
OTHERS = ["s0_bf16_dp2", "s0_fp32_dp2", "s3_bf16_dp3", "s3_bf16_dp2_subgroup", "s3_fp16_dp2", "tp2_s3_bf16_dp2"]
LEAN = {"s1_bf16_dp3_fused", "s1_fp32_dp4_sgdm", "s2_bf16_dp2_cpuadam", "s2_bf16_dp2_lion", "s1_bf16_dp2_elastic",
        "s2_bf16_dp2_elastic_fused", "ds0145_s2_bf16_dp2_elastic_fused"}  # fmt: skip


def tensors(tree) -> list[torch.Tensor]:
    """All tensors of a loaded file."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [found for one in below for found in tensors(one)]


def optimizer_files(directory) -> list[Any]:
    paths = sorted(directory.rglob("*optim_states.pt"))
    return [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in paths]


# --- nothing that counts goes


def test_of_files_with_one_tree_one_is_looked_through(monkeypatch):
    for constant in ("FEWEST_RECORDS", "ENOUGH_RECORDS"):
        monkeypatch.setattr(alike_files, constant, 0)
    read = []

    def reading(path):
        read.append(path.name)
        return read_torchfile(path)

    monkeypatch.setattr(stripping, "read_torchfile", reading)
    source = FIXTURES / "s3_bf16_dp3"
    strip(source, Path("bare"), optimizer=True)
    assert sum("model_states" in name for name in read) == 2  # rank 0's pickle differs
    for path in source.rglob("*model_states.pt"):
        assert Path("bare", path.relative_to(source)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", FLAT + OTHERS)
@pytest.mark.every(5, 1)
def test_every_slot_is_there_without_padding_and_unused_bytes(name, tmp_path):
    source = FIXTURES / name
    done = strip(source, tmp_path / "thin", padding=True, unreferenced=True)
    assert nbytes_in(source) - nbytes_in(tmp_path / "thin") == sum(done.saved.values())
    assert all(file.unreferenced_nbytes == 0 for file in zckpt.open(tmp_path / "thin").files)
    assert_consolidated(tmp_path / "thin", Truth(source), tmp_path)
    again = strip(tmp_path / "thin", tmp_path / "again", padding=True, unreferenced=True)
    assert again.saved == {}
    if name in FLAT:
        assert_masters_without_padding(name, tmp_path / "thin", done.saved)
    for path in sorted((tmp_path / "thin").rglob("*.pt")):
        assert (tmp_path / "again" / path.relative_to(tmp_path / "thin")).read_bytes() == path.read_bytes()


def assert_masters_without_padding(name, thin, saved: dict[str, int]):
    wanted = sum(p.numel for p in zckpt.open(thin).padding)
    files = optimizer_files(thin)
    masters = [t for z in files for t in z["single_partition_of_fp32_groups"]]
    for master in masters:
        assert master.untyped_storage().nbytes() == master.nbytes
    assert all(isinstance(z["base_optimizer_state"], list) is (name in LEAN) for z in files)
    before = [t for z in optimizer_files(FIXTURES / name) for t in z["single_partition_of_fp32_groups"]]
    assert saved.get("padding", 0) >= sum(t.untyped_storage().nbytes() for t in before) - sum(t.nbytes for t in masters)
    if wanted:
        assert saved["padding"] > 0
    if name in LEAN:
        assert_lean(name, files)


def assert_lean(name, files: list[dict[str, Any]]):
    """Hold slots to be as long as their masters, which with their padding make a partition."""
    for before, z in zip(optimizer_files(FIXTURES / name), files, strict=True):
        lengths = [master.numel() for master in z["single_partition_of_fp32_groups"]]
        partitions = [length + padding for length, padding in zip(lengths, z["group_paddings"], strict=True)]
        for state, length in zip(z["base_optimizer_state"], lengths, strict=True):
            shaped = [value for value in state.values() if torch.is_tensor(value) and value.dim()]
            assert shaped
            assert {(t.numel(), t.untyped_storage().nbytes()) for t in shaped} == {(length, 4 * length)}
        rigid = before["base_optimizer_state"]
        if isinstance(rigid, dict):
            assert z["base_optimizer_param_groups"] == rigid["param_groups"]
            assert z["base_optimizer_state_step"] == rigid["param_groups"][0].get("step")
            assert partitions == [len(next(iter(tensors(rigid["state"][i])))) for i in range(len(lengths))]


def test_rigid_slots_that_deepspeed_needs_whole_stay_whole_and_a_note_says_why(tmp_path):
    reasons = {
        "s2_bf16_dp2": "cannot load step",
        "s2_bf16_dp2_client": "a scheduler",
        "s1_bf16_dp2_bf16opt": "BF16_Optimizer",
        "s2_bf16_dp2_bf16master": "exp_avg",
    }
    for name, reason in reasons.items():
        done = strip(FIXTURES / name, tmp_path / name, padding=True)
        assert any("keep their padding" in note and reason in note for note in done.notes), done.notes
        for before, z in zip(optimizer_files(FIXTURES / name), optimizer_files(tmp_path / name), strict=True):
            for one, other in zip(
                tensors(before["base_optimizer_state"]), tensors(z["base_optimizer_state"]), strict=True
            ):
                assert_same(other, one, name)


def test_zero3_keeps_its_padding_and_says_so():
    done = strip(FIXTURES / "s3_bf16_dp3", Path("same"), padding=True)
    assert done.saved == {}
    assert any("ZeRO-3" in note for note in done.notes)


# --- optimizer state goes


@pytest.mark.parametrize("name", FLAT + OTHERS)
@pytest.mark.every(6)
def test_model_is_there_without_the_optimizer(name):
    source, truth = FIXTURES / name, Truth(FIXTURES / name)
    before = zckpt.open(source)
    done = strip(source, Path("model"), optimizer=True)
    assert nbytes_in(source) - nbytes_in("model") == sum(done.saved.values())
    after = zckpt.open("model")
    assert set(after.slot_names()) <= {"weight", "master"}
    assert list(after.parameters) == list(before.parameters)
    flat = name in FLAT and not name.startswith("pp")
    assert bool(list(Path("model").rglob("*optim_states.pt"))) is (not flat and not name.startswith("s0"))
    for slot in set(before.slot_names()) - {"weight", "master"}:
        slots = [p.slots[slot] for p in [*before.parameters.values(), *before.unnamed.values()] if slot in p.slots]
        assert done.saved[slot] >= sum(one.nbytes for one in slots)
    for parameter, value in truth.weights.items():
        if "weight" in after.owner(parameter).slots:
            assert_same(after.read(after.owner(parameter).name, "weight"), value, parameter)


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s1_bf16_dp2_elastic", "s3_bf16_dp3", "s0_bf16_dp2",
                                  "moe_ep2_s2_fp32_dp4", "tp2_s1_bf16_dp2"])  # fmt: skip
@pytest.mark.every(2)
def test_slots_by_name_stay_bit_for_bit(name):
    truth = Truth(FIXTURES / name)
    strip(FIXTURES / name, Path("some"), keep_slots=["exp_avg_sq"])
    some = zckpt.open("some")
    assert set(some.slot_names()) - {"weight", "step"} == {"master", "exp_avg_sq"}
    for kind, slot in (("exp_avg_sq", "exp_avg_sq"), ("fp32", "master")):
        for parameter, value in truth.kind(kind).items():
            if parameter in some.parameters and slot in some.parameters[parameter].slots:
                assert_same(some.read(parameter, slot), value, parameter)


def test_only_masters_stay():
    strip(FIXTURES / "s2_bf16_dp2", Path("masters"), keep_slots=["master"])
    assert [z["base_optimizer_state"]["state"] for z in optimizer_files(Path("masters"))] == [{}, {}]
    truth = Truth(FIXTURES / "s2_bf16_dp2")
    checkpoint = zckpt.open("masters")
    assert checkpoint.slot_names() == ["weight", "master"]
    for parameter, value in truth.masters.items():
        assert_same(checkpoint.read(parameter, "master"), value, parameter)


def test_a_tuple_of_states_is_the_elastic_form():
    source, run = FIXTURES / "s1_bf16_dp2_elastic", copy("s1_bf16_dp2_elastic")

    def as_tuple(content):
        state = content["optimizer_state_dict"]
        state["base_optimizer_state"] = tuple(state["base_optimizer_state"])

    edit_all(run, as_tuple, "*/*optim_states.pt")
    for number, how in enumerate(({"padding": True}, {"keep_slots": ["exp_avg"]})):
        targets = Path(f"same{number}"), Path(f"thin{number}")
        same, found = (strip(one, target, **how) for one, target in zip((source, run), targets, strict=True))
        assert found.saved.get("exp_avg_sq") == same.saved.get("exp_avg_sq")
        one, other = map(zckpt.open, targets)
        assert one.slot_names() == other.slot_names()
        assert zckpt.diff(one, other).equal


# --- what is around the checkpoint


def test_other_files_are_copied_and_other_checkpoints_left_out():
    run = copy("s2_bf16_dp2_multitag")
    torch.save({"last_epoch": 3}, run / "scheduler.pt")
    (run / "global_step3" / "deep").mkdir()
    (run / "global_step3" / "deep" / "note").write_text("kept")
    done = strip(run, Path("thin"), optimizer=True, tag="global_step3")
    assert any("global_step5" in note for note in done.notes)
    assert Path("thin/scheduler.pt").read_bytes() == (run / "scheduler.pt").read_bytes()
    assert Path("thin/global_step3/deep/note").read_text() == "kept"
    assert Path("thin/latest").read_text() == "global_step3"
    assert not Path("thin/global_step5").exists()
    assert zckpt.open("thin").step == 3


def test_other_checkpoints_are_left_out_where_tags_have_slashes():
    source, run = copy("s2_bf16_dp2_multitag"), Path("run")
    for tag in ("a/step 5", "a/step 6", "b/step 7", "step 8"):
        shutil.copytree(source / "global_step5", run / tag)
    (run / "a" / "note").write_text("kept")
    (run / "latest").write_text("a/step 5")
    done = strip(run, Path("thin"), optimizer=True)
    assert any("a/step 6, b/step 7, step 8" in note for note in done.notes)
    assert names_in("thin") == ["a", "latest"]
    assert names_in("thin/a") == ["note", "step 5"]
    assert zckpt.open("thin").details["tag"] == "a/step 5"


def test_shards_of_several_nodes_come_together():
    run = copy("s2_bf16_dp2")
    other = Path("node1/global_step5")
    other.mkdir(parents=True)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (run / "global_step5" / name).rename(other / name)
    with pytest.raises(ShardError):
        strip(run, Path("thin"), padding=True)
    strip(run, Path("thin"), padding=True, roots=[Path("node1")])
    assert_consolidated(Path("thin"), Truth(FIXTURES / "s2_bf16_dp2"))


def test_tag_directory_comes_out_as_one():
    strip(FIXTURES / "s2_bf16_dp2" / "global_step5", Path("thin"), padding=True)
    assert names_in("thin") == names_in(FIXTURES / "s2_bf16_dp2" / "global_step5")


@pytest.mark.parametrize(("asked", "stays"), [({"keep_slots": ["exp_avg"]}, False), ({"padding": True}, True)])
def test_a_fingerprint_of_what_goes_is_not_carried(asked, stays):
    run = copy("s2_bf16_dp4")
    (run / "global_step5" / "fingerprint.json").write_text("{}")
    strip(run, Path("thin"), **asked)
    assert Path("thin/global_step5/fingerprint.json").exists() is stays


def test_what_is_no_file_is_refused():
    run = copy("s2_bf16_dp2")
    (run / "loop").symlink_to(run.absolute())
    with refusing(SourceError, "link to a directory"):
        strip(run, Path("thin"), padding=True)
    (run / "loop").unlink()
    (run / "gone").symlink_to(run / "nowhere")
    with refusing(SourceError, "not a regular file"):
        strip(run, Path("thin"), padding=True)
    assert not Path("thin").exists()
