"""`convert --to megatron`: a run's directory that holds the source, whole, under Megatron-Core's keys; or a refusal.

That Megatron-Core loads it, `tests/interop/test_megatron_target.py` proves.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from tests.formats.holding import converted
from tests.logical import assert_same_slots
from tests.refusals import refusing
from zckpt.errors import TargetExistsError, UnsupportedError, UsageError
from zckpt.formats.account import take_inventory
from zckpt.formats.megatron.keys import Placed, placed
from zckpt.formats.megatron.names import filed_names, keyed_names
from zckpt.torchfile import read_torchfile

FIXTURES = Path(__file__).parents[2] / "fixtures"
OTHER = FIXTURES / "other"
LLAMA = FIXTURES / "hf_llama_s2_bf16_dp2"
MAPPED: dict[str, Any] = {
    "map": "llama-huggingface-megatron",
    "map_config": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 67,
                   "padded_vocab_size": 67, "intermediate_size": 24, "num_hidden_layers": 2},
}  # fmt: skip
FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"


def model(layers=2) -> dict[str, torch.nn.Parameter]:
    shapes = {FC1.format(i): (4, 6) for i in range(layers)}
    shapes |= {f"decoder.layers.{i}.mlp.linear_fc1.bias": (4,) for i in range(layers)}
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def trained(at, weights: dict[str, torch.nn.Parameter], *groups, of=None) -> list[str]:
    """Write a file of torch; each group is `keys` (a test of names) and hyperparameters. Return the names in order."""
    listed = [{**{k: v for k, v in one.items() if k != "keys"}, "params": [n for n in weights if one["keys"](n)]}
              for one in groups]  # fmt: skip
    names = [name for one in listed for name in one["params"]]
    optimizer = (of or torch.optim.AdamW)([{**one, "params": [weights[n] for n in one["params"]]} for one in listed])
    sum(one.square().sum() for one in weights.values()).backward()
    optimizer.step()
    torch.save({"model": dict(weights), "optimizer": optimizer.state_dict(), "step": 9}, at)
    return names


def is_matrix(name) -> bool:
    return name.endswith("weight")


def is_bias(name) -> bool:
    return not is_matrix(name)


DECAYED, UNDECAYED = {"keys": is_matrix, "weight_decay": 0.1}, {"keys": is_bias, "weight_decay": 0.0}


# --- what arrives


@pytest.mark.parametrize("name", [
    "mcore013_bf16_model_dp2", "mcore_bf16_moe_freq", "mcore_bf16_plain_tp2", "mcore_legacy_tp2_pp2",
    "mcore_legacy_dist_ep2",
])  # fmt: skip
@pytest.mark.every(2)
def test_megatrons_own_checkpoints_arrive_whole(name):
    source = OTHER / name / "ckpt"
    converted(source, "out", "megatron", world_size=2)
    found, expected = zckpt.open("out"), zckpt.open(source)
    assert [list(one.parameters) for one in found.param_groups] == [list(g.parameters) for g in expected.param_groups]
    assert set(expected.metadata) <= set(found.metadata) | {"content_metadata"}
    assert take_inventory(found).left_out == []
    assert ("optimizer sharding" in found.details) is ("plain" not in name and name != "mcore_legacy_tp2_pp2")
    assert found.metadata["content_metadata"].get("non_homogeneous_layers", False) is (name == "mcore_bf16_moe_freq")
    assert not zckpt.verify("out", deep=True).findings


def test_keys_and_common_values_are_megatrons():
    """As torch itself reads them."""
    zckpt.convert(OTHER / "mcore_bf16_moe_freq" / "ckpt", "own", to="megatron")
    assert Path("own/latest_checkpointed_iteration.txt").read_bytes() == b"4"
    source = OTHER / "mcore013_bf16_model_dp2" / "ckpt"
    zckpt.convert(source, "out", to="megatron", world_size=3)
    folder = Path("out/iter_0000004")
    about = dcp.FileSystemReader(folder).read_metadata()
    assert about.planner_data is None
    shapes = {key: tuple(one.size) for key, one in about.state_dict_metadata.items() if hasattr(one, "size")}
    assert shapes["decoder.layers.mlp.linear_fc1.weight"] == (2, 48, 16)
    assert shapes["optimizer.state.param.decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == (2, 16)
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    wanted = {key: torch.zeros(shapes[key])}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    opened = zckpt.open(source)
    for layer in range(2):
        assert torch.equal(wanted[key][layer], opened.read(f"decoder.layers.{layer}.mlp.linear_fc2.weight", "exp_avg"))
    objects = {key for key in about.state_dict_metadata if key not in shapes}
    assert {f"decoder.layers.mlp.linear_fc2._extra_state/shard_{i}_2" for i in range(2)} <= objects
    assert "rng_state/shard_0.0_1.1" in objects
    common = zckpt.open(folder).metadata
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["checkpoint_version"] == 3.0


@pytest.mark.parametrize("name", ["mcore013_bf16_model_dp2", "mcore_bf16_moe_freq", "mcore_bf16_plain_tp2"])
def test_flattened_slices_are_what_megatron_core_0_13_cuts_on_one_rank(name):
    """Each tensor is a slice, but for gated layers, of which each half is. 0.13 itself has loaded such files."""
    source = OTHER / name / "ckpt"
    converted(source, "out", "megatron", optimizer="flattened")
    about = dcp.FileSystemReader(Path("out/iter_0000004")).read_metadata()
    theirs = {key: one["nd_reformulated_orig_global_shape"] for key, one in about.mcore_data.items()}
    cut = {key: tuple(about.state_dict_metadata[key].size) for key in theirs}
    assert len(theirs) == len([key for key in about.state_dict_metadata if key.startswith("optimizer.state.")])
    for key, found in cut.items():
        shape = theirs[key]
        is_stacked = ".experts." in key if name == "mcore_bf16_moe_freq" else "decoder.layers." in key
        own, gated = int(is_stacked), "linear_fc1.weight" in key and name != "mcore_bf16_plain_tp2"
        assert found[own:-1] == (1 + gated, *(1 for _ in shape[own + 1 :])), key
        assert torch.Size(found).numel() == torch.Size(shape).numel()


def test_other_names_and_ties_come_back():
    zckpt.convert(LLAMA, "out", to="megatron", verify=True, **MAPPED)
    opened = zckpt.open("out")
    assert [len(one.parameters) for one in opened.param_groups] == [9, 5]
    assert [one.hyperparameters["wd_mult"] for one in opened.param_groups] == [1.0, 0.0]
    assert "ds_config" in opened.metadata
    zckpt.convert("out", "back", to="zckpt", **MAPPED)
    compared = zckpt.diff(LLAMA, "back")
    assert (compared.changed, compared.only_in_a, compared.only_in_b) == ([], [], [])
    assert not any("ds_config" in one.key for one in compared.settings)


def test_norms_of_local_layers_have_the_keys_of_the_linear_layers_behind_them(torch_file):
    front = "decoder.layers.0."
    names = [f"{front}input_layernorm.weight", f"{front}pre_mlp_layernorm.weight"]
    linear = [f"{front}self_attention.linear_qkv.weight", f"{front}mlp.linear_fc1.weight"]
    new = [f"{front}self_attention.linear_qkv.layer_norm_weight", f"{front}mlp.linear_fc1.layer_norm_weight"]
    assert filed_names([*names, *linear]) == dict(zip([*names, *linear], [*new, *linear], strict=True))
    assert filed_names([*names, linear[0]])[names[1]] == names[1]
    zckpt.convert(torch_file({name: torch.ones(3) for name in [*names, *linear]}), "out", to="megatron")
    assert {*zckpt.open("out").parameters} == {*names, *linear}
    Path("out/release/zckpt.pt").unlink()
    assert {*zckpt.open("out").parameters} == {*new, *linear}


def test_grouped_experts_have_the_keys_of_those_that_are_modules(torch_file):
    grouped = {f"decoder.layers.0.mlp.experts.linear_fc{n}.weight{e}": torch.randn(4, 4) for n in "12" for e in (0, 1)}
    path = torch_file({**grouped, "decoder.layers.0.self_attention.linear_proj.weight": torch.ones(2, 2)})
    zckpt.convert(path, "out", to="megatron", verify=True)
    assert {*grouped} < {*zckpt.open("out").parameters}
    Path("out/release/zckpt.pt").unlink()
    found = zckpt.open("out")
    for name, value in grouped.items():
        front, _, rest = name.partition("linear_fc")
        assert torch.equal(found.read(f"{front}local_experts.{rest[-1]}.linear_fc{rest[:-1]}"), value)


def test_weights_alone_are_a_release(torch_file):
    path = torch_file(dict(model()))
    zckpt.convert(path, "out", to="megatron", dtype="bfloat16")
    assert Path("out/latest_checkpointed_iteration.txt").read_text() == "release"
    opened = zckpt.open("out")
    assert {one.dtype for one in opened.parameters.values()} == {"bfloat16"}
    assert not opened.param_groups
    zckpt.convert(path, "five", to="megatron", iteration=5)
    assert Path("five/iter_0000005/common.pt").is_file()


# --- options


@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
def test_a_torch_optimizer_becomes_megatrons(optimizer):
    names = trained("x.pt", model(), DECAYED, UNDECAYED)
    done = zckpt.convert("x.pt", "out", to="megatron", names=names, optimizer=optimizer)
    assert any("no weight decay there" in note for note in done.notes)
    common = torch.load("out/iter_0000009/common.pt", weights_only=False)
    inner = common["optimizer"] if optimizer == "plain" else common["optimizer"]["optimizer"]
    assert [(g["wd_mult"], g["weight_decay"], g["is_expert_parallel"]) for g in inner["param_groups"]] == [
        (1.0, 0.1, False), (0.0, 0.0, False),
    ]  # fmt: skip
    if optimizer == "plain":
        assert inner["state"]["common_step"] == torch.tensor(1.0)
    else:
        assert [one["step"] for one in inner["param_groups"]] == [1.0, 1.0]
    opened, source = zckpt.open("out"), zckpt.open("x.pt", names=names)
    for name in names:
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(opened.read(name, slot), source.read(name, slot))
    assert ("master" in opened.slot_names()) is (optimizer == "distributed")


@pytest.mark.parametrize("optimizer", ["distributed", "flattened", "plain"])
def test_a_parameter_without_dimensions_comes_back(optimizer):
    """As the scale of a model's logits."""
    weights = {**model(), "logit_scale": torch.nn.Parameter(torch.tensor(2.5))}
    names = trained("x.pt", weights, {"keys": lambda _: True, "weight_decay": 0.0})
    zckpt.convert("x.pt", "out", to="megatron", names=names, optimizer=optimizer)
    assert_same_slots(zckpt.open("out"), zckpt.open("x.pt", names=names), "logit_scale")


def test_experts_are_an_optimizer_of_their_own_above_one_rank(tmp_path):
    source = OTHER / "mcore_bf16_moe_freq" / "ckpt"
    for size, chained in ((1, False), (2, True), (None, True)):
        zckpt.convert(source, tmp_path / str(size), to="megatron", expert_parallel_size=size)
        common = read_torchfile(tmp_path / str(size) / "iter_0000004" / "common.pt").root  # names classes of Megatron's
        assert (sorted(common["optimizer"]) == [0, 1]) is chained
        compared = zckpt.diff(source, tmp_path / str(size))
        assert compared.equal is chained
        assert (compared.changed, compared.only_in_a, compared.only_in_b) == ([], [], [])
    groups = zckpt.open(tmp_path / "1").param_groups
    assert not any(one.hyperparameters["is_expert_parallel"] for one in groups)
    with refusing(UsageError, "at least 1"):
        zckpt.convert(source, tmp_path / "0", to="megatron", expert_parallel_size=0)


def test_layers_are_stacked_where_they_are_alike_and_not_where_they_were_not():
    shapes = {FC1.format(0): ((4, 6), "x"), FC1.format(1): ((4, 6), "x"), "a": ((2,), "x")}
    assert placed(shapes, apart=None)[FC1.format(1)] == Placed(FC1.format("").replace("..", "."), (1,), (2,))
    assert placed(shapes, apart=True)[FC1.format(1)] == Placed(FC1.format(1))
    other = shapes | {FC1.format(1): ((4, 6), "y")}
    assert placed(other, apart=None)[FC1.format(0)] == Placed(FC1.format(0))
    with refusing(UnsupportedError, "cannot be stacked"):
        placed(other, apart=False)
    local = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    grouped = "mtp.layers.0.mlp.experts.linear_fc1.weight{}"
    found = placed({one.format(e): ((4, 6), "x") for one in (local, grouped) for e in range(3)}, apart=None)
    assert found[local.format(2)] == Placed("decoder.layers.mlp.experts.experts.linear_fc1.weight", (0, 2), (1, 3))
    assert found[grouped.format(1)] == Placed("mtp.layers.0.mlp.experts.experts.linear_fc1.weight", (1,), (3,))
    source = OTHER / "mcore_bf16_moe_freq" / "ckpt"
    for at, to in ((source, "zckpt"), (Path("zckpt"), "megatron")):
        zckpt.convert(at, to, to=to)
    assert zckpt.open("megatron").details["layers"] == "apart"
    with refusing(UnsupportedError, "cannot be stacked"):
        zckpt.convert(source, "stacked", to="megatron", layers="stacked")


def test_only_what_zckpt_wrote_is_replaced():
    source = OTHER / "mcore_bf16_plain_tp2" / "ckpt"
    for _ in range(2):
        zckpt.convert(source, "out", to="megatron", overwrite=True)
    shutil.copytree(source, "theirs")
    with refusing(TargetExistsError, "holds other files"):
        zckpt.convert("out", "theirs", to="megatron", overwrite=True)


# --- what is refused


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["transformer.h.0.mlp.c_fc.weight"], "not those of a Megatron-Core model"),
        ([FC1.format(0), "decoder.layers.1.mixer.in_proj.weight"], "in another form"),
        ([FC1.format(0), "decoder.layers.0.mlp.experts.weight1"], "in another form"),
        ([FC1.format(1)], "has no layer 0"),
        ([FC1.format(0), "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"], "not numbered c"),
    ],
)
def test_models_that_cannot_be_written_are_named(names, said, torch_file):
    with refusing(UnsupportedError, said):
        zckpt.convert(torch_file({name: torch.ones(3, 2) for name in names}), "out", to="megatron")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("groups", "of", "said"),
    [
        ([{"keys": lambda n: n == FC1.format(0), "lr": 0.5}, {"keys": lambda n: n != FC1.format(0), "lr": 0.25}], None,
         "param groups that are one in Megatron differ.*lr 0.5 and 0.25"),
        ([{"keys": lambda _: True}], torch.optim.NAdam, "cannot hold mu_product"),
        ([{"keys": lambda _: True, "lr_mult": [1.0]}], None, "by numbers: expected lr_mult as a number, found list"),
        ([{"keys": lambda n: "layers.0" in n}], None, "layers that differ|has no exp_avg"),
    ],
    ids=["groups", "values", "numbers", "frozen"],
)  # fmt: skip
def test_state_that_megatron_has_no_place_for_is_named(groups, of, said):
    names = trained("x.pt", model(), *groups, of=of)
    with refusing(UnsupportedError, said):
        zckpt.convert("x.pt", "out", to="megatron", names=names, layers="stacked")
    assert not Path("out").exists()


def test_a_step_is_needed_to_go_on():
    names = trained("x.pt", model(), DECAYED, UNDECAYED)
    content = torch.load("x.pt", weights_only=False)
    del content["step"]
    for value in content["optimizer"]["state"].values():
        value.pop("step")
    torch.save(content, "x.pt")
    with refusing(UsageError, "--iteration N"):
        zckpt.convert("x.pt", "out", to="megatron", names=names)


def test_norms_have_the_keys_that_their_implementation_asks_for():
    front, dense = "decoder.layers.0", ["self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"]
    experts = [f"{front}.{name}" for name in ("input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight",
                                               dense[0])]  # fmt: skip
    keys = keyed_names(experts, "local")
    assert keys[experts[0]] == f"{front}.self_attention.linear_qkv.layer_norm_weight"
    assert keys[experts[1]] == f"{front}.mlp.linear_fc1.layer_norm_weight"
    back = keyed_names(keys.values(), "transformer_engine")
    assert back[keys[experts[1]]] == experts[1]
    assert keyed_names(experts, "transformer_engine") == keyed_names(experts, None)
    latent = [f"{front}.{name}" for name in ("self_attention.linear_kv_up_proj.layer_norm_weight", dense[1],
              "mlp.linear_fc1.layer_norm_weight", "self_attention.linear_kv_down_proj.weight")]  # fmt: skip
    keys = keyed_names(latent, "local")
    assert keys[latent[0]] == f"{front}.self_attention.kv_layernorm.weight"
    assert keys[latent[2]] == f"{front}.pre_mlp_layernorm.weight"
