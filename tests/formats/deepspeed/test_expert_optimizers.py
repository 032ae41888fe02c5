"""Experts whose optimizer is in files of its own: without ZeRO all of it, before 0.19 under ZeRO nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import content_of, run_of
from tests.formats.deepspeed.shards import FIXTURES, copy, edit, edit_all, model_file, optimizer_file
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated
from zckpt.formats.deepspeed.axes.auto_ep import layer_from

WITHOUT_ZERO = ["moe_ep2_s0_bf16_dp2", "moe_ep2_s0_fp32_dp4"]
ONLY_IN_019 = (
    "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "ds_config",
    "ds_version", "optimizer", "checkpoint_parallel_dimensions", "ds_autoep_layers",
)  # fmt: skip


def experts_file(tag, rank) -> Path:
    return tag / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def before_019(name) -> Path:
    """A checkpoint under ZeRO as DeepSpeed 0.14 and 0.16 write it: fewer keys, and files that hold nothing."""
    tag = copy(name)

    def drop(content):
        for key in ONLY_IN_019:
            content.pop(key, None)

    edit(model_file(tag), drop)
    edit_all(tag, lambda content: content["optimizer_state_dict"].pop("param_alignment_paddings", None))
    for rank in range(zckpt.open(run_of(name)).topology.ep):
        torch.save({"optimizer": None}, experts_file(tag, rank))
    return tag


@pytest.mark.parametrize("name", WITHOUT_ZERO)
def test_optimizer_of_experts_is_put_together(name):
    found, truth = zckpt.open(run_of(name)), Truth(FIXTURES / name)
    (slot,) = truth.slots
    assert (found.topology.ep, found.zero_stage, found.unnamed, found.warnings) == (2, 0, {}, [])
    for key, value in truth.kind(slot).items():
        assert torch.equal(found.read(key, slot).float(), value), key
    dense, sparse = found.param_groups
    assert dense.parameters == truth.facts["order"][0]
    local = truth.facts["order"][1]
    assert len(sparse.parameters) == 2 * len(local)
    assert sparse.parameters[: len(local)] == local
    assert all(found.parameters[key].group == index for index in (0, 1) for key in found.param_groups[index].parameters)


@pytest.mark.parametrize("name", WITHOUT_ZERO)
def test_copies_of_the_dense_state_are_compared(name):
    verified = zckpt.verify(run_of(name), deep=True)
    assert verified.sound, verified.findings
    tag = copy(name)

    def change(content):
        base = content["optimizer"].get("optimizer_state_dict", content["optimizer"])
        next(iter(base["state"][0].values())).mul_(2)

    edit(experts_file(tag, 1), change)
    names = {name for one in zckpt.verify(tag, deep=True).findings for name in one.parameters}
    assert names == {zckpt.open(tag).param_groups[0].parameters[0]}


def test_every_damaged_file_of_the_optimizer_is_told(tmp_path):
    tag = copy(WITHOUT_ZERO[0], tmp_path)
    files = [experts_file(tag, rank) for rank in range(2)]
    for path in files:
        path.write_bytes(path.read_bytes()[:300])
    assert [one.file for one in zckpt.verify(tag).findings] == list(map(str, files))


@pytest.mark.parametrize("to", ["zckpt", "consolidated", "dcp"])
def test_it_is_converted(to):
    name = "moe_ep2_s0_bf16_dp2"
    zckpt.convert(run_of(name), "out", to=to, verify=True)
    assert zckpt.fingerprint("out").text == zckpt.fingerprint(run_of(name)).text


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_expert_rank_is_named(rank):
    tag = copy("moe_ep2_s0_fp32_dp4")
    experts_file(tag, rank).unlink()
    with refusing(zckpt.ShardError, "expert ranks are missing"):
        zckpt.open(tag)


def test_files_of_another_model_parallel_rank_are_none_of_the_only_one():
    tag = copy("moe_ep2_s0_fp32_dp4")
    for rank in range(2):
        experts_file(tag, rank).rename(tag / f"expp_rank_{rank}_mp_rank_01_optim_states.pt")
    found = zckpt.open(tag)
    assert any("no optimizer files of experts of mp_rank 0" in warning for warning in found.warnings)
    assert found.param_groups == []
    with refusing(zckpt.LeftOutError, "would be lost"):
        zckpt.convert(tag, "out", to="zckpt")


def test_number_in_a_name_may_be_any():
    tag = copy("moe_ep2_s0_fp32_dp4")
    experts_file(tag, 1).rename(tag / f"expp_rank_{10**30}_mp_rank_00_optim_states.pt")
    with refusing(zckpt.ShardError, "missing"):
        zckpt.open(tag)


def test_expert_rank_of_another_run_is_named():
    tag = copy("moe_ep2_s0_fp32_dp4")
    edit(experts_file(tag, 1), lambda content: content["optimizer"]["param_groups"][0].update(lr=0.5))
    with refusing(zckpt.ShardError, "expert rank 1"):
        zckpt.open(tag)


def test_masters_of_a_group_that_are_no_list_are_refused():
    tag = copy("moe_ep2_s0_bf16_dp2")
    edit(model_file(tag), lambda content: content["optimizer"]["fp32_groups"].__setitem__(0, True))
    with refusing(zckpt.DamagedFileError, "masters and param groups disagree"):
        zckpt.open(tag)


def test_a_layer_of_more_experts_than_any_model_has_is_unreadable():
    """Nothing is made of as many as a file says."""
    entry = {"expert_key_prefix": "experts", "num_experts": 10**12, "ep_size": 10**12, "expert_placement": {}}
    with refusing(zckpt.DamagedFileError, "unreadable ds_autoep_layers"):
        layer_from(entry)


def test_a_layer_of_auto_ep_may_be_left_out_and_its_maps_are_checked():
    """DeepSpeed leaves frozen experts out (`exclude_frozen_parameters`), and lists their layer."""
    tag = copy("s1_fp32_dp2")

    def list_layer(**maps):
        entry = {"expert_key_prefix": "mlp.experts", "num_experts": 4, "ep_size": 2, "affine_maps": maps}
        edit(model_file(tag), lambda content: content.update(ds_autoep_layers=[entry]))

    list_layer(params={"mlp.experts.w1": {"logical_shape": [4, 2, 3]}})
    zckpt.reshard(tag, "cut", world_size=4)
    assert zckpt.diff(tag, "cut").equal
    for maps in ({}, {"logical_shape": ["4", 2]}):
        list_layer(params={"mlp.experts.w1": maps})
        with refusing(zckpt.DamagedFileError, "unreadable ds_autoep_layers: expected maps of whole tensors"):
            zckpt.reshard(tag, "other", world_size=4)


def test_degree_is_what_the_groups_say():
    tag = copy("moe_ep2_s0_fp32_dp4")

    def name(group, value, **others):
        edit_all(tag, lambda content: content["optimizer"]["param_groups"][group].update(name=value, **others))

    name(1, "ep_size_4")
    with refusing(zckpt.ShardError, "missing, or there are too many: expected 4 ranks, found 0, 1"):
        zckpt.open(tag)
    name(1, "mine")
    with refusing(zckpt.UnsupportedError, "does not say over how many ranks"):
        zckpt.open(tag)
    name(1, "ep_size_2")
    name(0, "ep_size_1", moe=True)
    with refusing(zckpt.UnsupportedError, "which layers over how many"):
        zckpt.open(tag)


@pytest.mark.parametrize("name", ["moe_ep1_s2_bf16_dp2", "moe_ep2_s2_bf16_dp2", "moe_ep2_s2_fp32_dp4"])
@pytest.mark.every(2)
def test_files_before_019_are_read_and_cut(name):
    tag, truth = before_019(name), Truth(FIXTURES / name)
    assert zckpt.verify(tag, deep=True).sound
    Path("own").mkdir()
    assert_consolidated(tag, truth, Path("own"))
    assert zckpt.open(tag).metadata["ds_config"] == zckpt.open(run_of(name)).metadata["ds_config"]
    cut = Path("cut")
    zckpt.reshard(tag, cut, world_size=4, expert_parallel_size=4)
    Path("its").mkdir()
    assert_consolidated(cut, truth, Path("its"))
    assert [content_of(experts_file(cut, rank)) for rank in range(4)] == [{"optimizer": None}] * 4
    assert "ds_config" not in content_of(model_file(cut))
    assert content_of(optimizer_file(cut, 3))["ds_config"]["zero_optimization"]["stage"] == 2


def test_state_beside_that_of_zero_is_refused():
    tag = before_019("moe_ep2_s2_bf16_dp2")
    torch.save({"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}}, experts_file(tag, 1))
    with refusing(zckpt.UnsupportedError, "although ZeRO's files") as error:
        zckpt.open(tag)
    assert "expp_rank_1" in str(error.value)
