"""Pipelines for other stages, slices and data-parallel ranks: every value, what each stage says, what is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.folders import contents
from tests.formats.deepspeed.contents import alike, content_of, cut, run_of, state_of, tag_of, tensor_bytes
from tests.formats.deepspeed.shards import FIXTURES, copy, edit, edit_all, optimizer_file
from tests.formats.holding import converted
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, assert_same
from zckpt.errors import LayoutError, LeftOutError, ShardError, UnsupportedError, UsageError
from zckpt.formats.deepspeed import target_groups
from zckpt.formats.deepspeed.axes.stage_order import goes_by_modules, known_orders
from zckpt.state import Checkpoint, ParamGroup

PLAIN, SLICED, EXPERTS = "pp2_s1_fp32_dp2", "pp2_tp2_s1_bf16_dp1", "moe_pp2_ep2_s1_bf16_dp2"
LAYERS = "Embedding=embed,_Block,relu,_FeedForward,LayerNorm,Embedding=embed"
THREE: dict[str, Any] = {"pipeline_parallel_size": 3, "partition_method": "uniform"}
ONE: dict[str, Any] = {"pipeline_parallel_size": 1}
EXPERT_LAYERS = "Embedding=embed,_Experts,_FeedForward,_Experts,LayerNorm,Embedding=embed"
SLICED_LAYERS = "Embedding=embed,Layer*2,LayerNorm,Embedding=embed"


@pytest.fixture(scope="module")
def between(tmp_path_factory) -> Callable[[str, str], Path]:
    """Make a pipeline's checkpoint in another format once, for all to read."""

    @cache
    def make(name, to) -> Path:
        zckpt.convert(run_of(name), folder := tmp_path_factory.mktemp("between") / to, to=to)
        return folder

    return make


@pytest.fixture
def dealt() -> Callable[..., Path]:
    """Deal a pipeline's layers otherwise, on one data-parallel rank."""
    return lambda name=PLAIN, **options: cut(run_of(name), "cut", 1, **options)


def model_of(tag, mp_rank) -> dict[str, Any]:
    return content_of(tag / f"mp_rank_{mp_rank:02d}_model_states.pt")


def names_of(tag, mp_rank) -> list[list[str]]:
    return [list(group) for group in model_of(tag, mp_rank)["param_shapes"]]


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        (PLAIN, 3, {}),
        (PLAIN, 80, {}),  # more ranks than a group has elements
        (PLAIN, 2, THREE),
        ("pp2_s1_bf16_dp1", 2, ONE),
        (SLICED, 2, ONE),  # as many ranks in all
        (SLICED, 2, {**ONE, "tensor_parallel_size": 1}),
        (SLICED, 1, {"tensor_parallel_size": 4}),
        ("pp2_tp1_s1_fp32_dp2", 1, {**ONE, "tensor_parallel_size": 2}),
        (EXPERTS, 8, {"expert_parallel_size": 4}),
        (EXPERTS, 2, ONE),
        (EXPERTS, 1, {"expert_parallel_size": 1, "stage_bounds": "0,2,6", "pipeline_layers": EXPERT_LAYERS}),
    ],
)
@pytest.mark.every(5)
def test_everything_arrives(name, world_size, options):
    source = zckpt.open(run_of(name))
    tag = cut(run_of(name), "cut", world_size, **options)
    found = zckpt.open(tag)
    assert found.topology.dp == world_size
    assert found.topology.pp == options.get("pipeline_parallel_size", 2)
    assert found.topology.tp == options.get("tensor_parallel_size", source.topology.tp)
    assert_consolidated(tag, Truth(FIXTURES / name))
    assert [sorted(g.parameters) for g in found.param_groups] == [sorted(g.parameters) for g in source.param_groups]
    degree = options.get("expert_parallel_size")
    for group, old in zip(found.param_groups, source.param_groups, strict=True):
        renamed = {"name": f"ep_size_{degree}"} if degree and old.hyperparameters.get("moe") else {}
        assert group.hyperparameters == {**old.hyperparameters, **renamed}
    assert [g.state for g in found.param_groups] == [g.state for g in source.param_groups]
    assert zckpt.verify(tag, deep=True).sound


@pytest.mark.parametrize(
    ("name", "between", "back"),
    [
        (PLAIN, {}, {}),
        (PLAIN, THREE, {**THREE, "pipeline_parallel_size": 2}),
        (SLICED, {}, {}),
        (EXPERTS, {"expert_parallel_size": 1}, {"expert_parallel_size": 2}),
    ],
)
@pytest.mark.every(2)
def test_there_and_back_gives_the_same_files(name, between, back):
    original = tag_of(run_of(name))
    dp = zckpt.open(original).topology.dp
    cut(run_of(name), "between", 3, **between)
    found = cut("between", "back", dp, **back)
    for one in alike(found, original):
        assert tensor_bytes(found / one) == tensor_bytes(original / one), one


def test_each_stage_says_what_it_has(dealt):
    tag = dealt(**THREE)
    assert names_of(tag, 0) == [
        ["tied_modules.embed.weight", "1.mix.weight"],
        ["1.alpha", "1.norm.weight", "1.norm.bias", "1.mix.bias"],
    ]
    assert names_of(tag, 1) == [["3.up.weight", "3.down.weight"], ["3.up.bias"]]
    assert names_of(tag, 2) == [["tied_modules.embed.weight"], ["4.weight", "4.bias"]]
    models = [model_of(tag, rank) for rank in range(3)]
    assert [model["buffer_names"] for model in models] == [["1.scale"], [], []]
    for model in models:
        assert (model["module"], model["mp_world_size"], model["dp_world_size"]) == (None, 3, 1)
        assert model["checkpoint_parallel_dimensions"] == {"pp_degree": 3, "tp_degree": 1}
    for rank in range(3):
        mappings = state_of(optimizer_file(tag, 0, rank))["param_slice_mappings"]
        assert [list(group) for group in mappings] == names_of(tag, rank)


def optimizer_of(tag, mp_rank) -> dict[str, Any]:
    return torch.load(optimizer_file(tag, 0, mp_rank), weights_only=False)["optimizer_state_dict"]


def test_tied_layers_have_the_same_state_on_all_their_stages(dealt):
    tag = dealt(**THREE)
    numel = zckpt.open(tag).parameters["tied_modules.embed.weight"].numel
    of_stages = []
    for rank in (0, 2):
        state = optimizer_of(tag, rank)
        moment = state["base_optimizer_state"]["state"][0]["exp_avg_sq"]
        of_stages.append(torch.stack([state["single_partition_of_fp32_groups"][0][:numel], moment[:numel]]))
    assert torch.equal(*of_stages)
    assert of_stages[0].any(1).all()


def test_bits_that_only_one_stage_has_stay_where_they_are():
    """Stages that stay as they are keep their own copies of a tied layer; at others the first one's counts."""
    tag = copy(PLAIN)

    def first_master(of, mp_rank) -> torch.Tensor:
        return optimizer_of(of, mp_rank)["single_partition_of_fp32_groups"][0][0]

    def drift(content):
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[0] = 17.0

    edit(optimizer_file(tag, 0, 1), drift)
    kept = cut(tag.parent, "kept", 1, weight_check=False)
    assert first_master(kept, 1) == 17
    dealt = cut(tag.parent, "dealt", 1, weight_check=False, **THREE)
    assert first_master(dealt, 2) == first_master(dealt, 0) != 17


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"stage_bounds": "0,2,4,6", "pipeline_layers": LAYERS}, [[0, 1], [3], [0, 4]]),
        (
            {"pipeline_parallel_size": 3, "partition_method": "type:norm|forward|block", "pipeline_layers": LAYERS},
            [[0, 1], [3], [0, 4]],
        ),
        ({"stage_bounds": "0,4,7", "pipeline_layers": f"{LAYERS},softmax"}, [[0, 1, 3], [0, 4]]),
    ],
)
def test_the_training_can_deal_layers_in_any_way(options, stages, dealt):
    tag = dealt(**options)
    for rank, its in enumerate(stages):
        names = [name.replace("tied_modules.embed", "0") for group in names_of(tag, rank) for name in group]
        assert sorted({int(name.partition(".")[0]) for name in names}) == its


def test_stages_that_would_wait_for_each_other_are_refused(dealt):
    """A heavy embedding at both ends leaves it alone on the first and last."""
    with refusing(UnsupportedError, "waits forever|then waits"):
        dealt(pipeline_parallel_size=3, partition_method="parameters", pipeline_layers=LAYERS)


def test_a_tied_layer_that_has_a_file_for_each_use():
    """As one that no function wraps where it is used again: then the files say where that is."""
    tag = copy(PLAIN)
    saved = (tag / "layer_00-model_states.pt").read_bytes()  # whose archive is called as the file is
    (tag / "layer_05-model_states.pt").write_bytes(saved.replace(b"layer_00-model", b"layer_05-model"))
    found = cut(tag.parent, "cut", 1, **THREE)
    assert names_of(found, 2) == [["tied_modules.embed.weight"], ["4.weight", "4.bias"]]
    assert tensor_bytes(found / "layer_05-model_states.pt") == tensor_bytes(tag / "layer_00-model_states.pt")
    edit(tag / "layer_05-model_states.pt", lambda content: content["weight"].fill_(1.0))
    assert not zckpt.verify(tag, deep=True).sound


def test_where_files_leave_it_open_the_user_is_asked(dealt):
    with refusing(UnsupportedError, r"found 0,1,4,6 with embed in layers 0 and 5 or .*--partition-method"):
        dealt(pipeline_parallel_size=3)
    one = cut(run_of(PLAIN), "one", 1, **ONE).parent
    with refusing(UnsupportedError, "embed, with one known use; say how the training does: --pipeline-layers$"):
        cut(one, "cut", 1, pipeline_parallel_size=2, partition_method="uniform")
    tag = cut(one, "two", 2, pipeline_parallel_size=2, partition_method="uniform", pipeline_layers=LAYERS)
    for path in tag_of(run_of(PLAIN)).glob("zero_*"):
        assert tensor_bytes(tag / path.name) == tensor_bytes(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 0}, "at least 1"),
        ({"pipeline_parallel_size": 2, "partition_method": "best"}, "unknown partition method"),
        ({"partition_method": "uniform", "stage_bounds": "0,3,6"}, "one of them"),
        ({"partition_method": "type:block"}, "--pipeline-layers"),
        ({"partition_method": "type:x", "pipeline_layers": LAYERS}, "no layer has that type"),
        ({"partition_method": "type:(", "pipeline_layers": LAYERS}, "regular expression"),
        ({"stage_bounds": "0,3,3,6"}, "stage bounds"),
        ({"stage_bounds": "0,3"}, "at least 5"),
        ({"stage_bounds": "0,3,6", "pipeline_parallel_size": 3}, "4 numbers"),
        ({"stage_bounds": "0,3,7", "pipeline_layers": LAYERS}, "6 as the last number"),
        ({"stage_bounds": "0,2,3,6", "pipeline_layers": LAYERS}, "nothing to train"),
        ({"pipeline_parallel_size": 3, "pipeline_layers": "a*"}, "unusable list"),
        ({"pipeline_parallel_size": 3, "pipeline_layers": "a*9999"}, "unusable list"),
        ({"pipeline_parallel_size": 3, "pipeline_layers": "a*3"}, "at least 5 layers"),
        ({"pipeline_parallel_size": 3, "pipeline_layers": "a*6"}, "tied layers embed"),
        ({"pipeline_parallel_size": 3, "pipeline_layers": "a*4,a=embed*2"}, "embed in layer 0"),
        ({"pipeline_parallel_size": 3, "pipeline_layers": "a=embed*2,a*4"}, "with its own parameters"),
    ],
)
def test_options_that_cannot_be(options, words, dealt, tmp_path):
    with refusing(UsageError, words):
        dealt(**options)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_pipeline_has_no_stages(dealt):
    with refusing(UsageError, "not a pipeline"):
        dealt("s1_fp32_dp2", pipeline_parallel_size=2)
    dealt("s1_fp32_dp2", pipeline_parallel_size=1)


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_of_zero_that_have_no_pipelines_are_refused(stage, dealt):
    with refusing(UnsupportedError, "no pipelines under ZeRO-2 and 3"):
        dealt(stage=stage)


def in_another_order() -> Path:
    """A tag directory of which a group's order is not that of modules, as the program alone knew it."""
    tag = copy(PLAIN)
    edit(tag / "mp_rank_01_model_states.pt", lambda content: content["param_shapes"][1].move_to_end("3.up.bias"))
    edit_all(tag, lambda content: content["optimizer_state_dict"].pop("param_slice_mappings"), "*rank_01_optim*")
    return tag


def test_a_group_in_another_order_than_the_modules_is_dealt_only_where_its_order_is_known():
    """As of a training that lists some parameters of all layers first: with other layers the order would be unknown."""
    tag = in_another_order()
    with refusing(UnsupportedError, "order of the stage's modules"):
        cut(tag.parent, "one", 1, **ONE)
    dealt = cut(tag.parent, "two", 1, stage_bounds="0,2,6", weight_check=False)
    assert names_of(dealt, 1)[1] == ["4.weight", "4.bias", "3.up.bias"]


@pytest.mark.parametrize("options", [THREE, ONE, {"stage_bounds": "0,3,6"}, {"partition_method": "uniform"}])
def test_without_zero_stages_stay_until_names_are_known(options, dealt):
    with refusing(UnsupportedError, "which parameters each rank's optimizer numbers"):
        dealt("pp2_s0_fp32_dp2", **options)


def test_a_model_is_consolidated_whatever_its_optimizers_number():
    run = run_of("pp2_s0_fp32_dp2")
    known = zckpt.open(run)
    zckpt.consolidate(run, "model.safetensors")
    zckpt.average([run, run], "average.safetensors")
    for name in ("model", "average"):
        found = zckpt.open(f"{name}.safetensors")
        for one in known.tensors():
            assert torch.equal(found.read(one.name, "weight"), known.read(one.name, "weight"))
    with refusing(LeftOutError, "of which parameter it is the optimizer's state is uncertain"):
        zckpt.consolidate(run, "all.safetensors", slots="all")


def test_names_of_the_modules_by_renaming():
    """Back to one model whose names no pipeline gave."""
    names = [("3.", "feed_forward."), ("4.", "norm."), ("1.", "block."), ("tied_modules.embed.", "embed.")]
    zckpt.consolidate(run_of(PLAIN), "model.safetensors", rename=names)
    assert set(zckpt.open("model.safetensors").parameters) >= {"embed.weight", "norm.bias", "block.alpha"}


@pytest.mark.parametrize(
    ("name", "stages", "to", "options"),
    [
        (PLAIN, 2, "zckpt", {"pipeline_layers": LAYERS}),
        (PLAIN, 3, "zckpt", {"pipeline_layers": LAYERS}),
        (EXPERTS, 2, "dcp", {"pipeline_layers": EXPERT_LAYERS, "expert_parallel_size": 1}),
        (EXPERTS, 1, "consolidated", {"pipeline_layers": EXPERT_LAYERS}),
        (SLICED, 2, "universal", {"pipeline_layers": SLICED_LAYERS, "tensor_parallel_size": 4, "world_size": 1}),
    ],
)
@pytest.mark.every(4)
def test_another_format_is_dealt_to_stages(name, stages, to, options, between):
    """The files are those that `reshard` of the pipeline writes, but for what only DeepSpeed's own say."""
    options = {"pipeline_parallel_size": stages, "partition_method": "uniform", "world_size": 2, **options}
    zckpt.convert(between(name, to), "back", to="deepspeed", stage=1, **options)
    tag, same = tag_of("back"), cut(run_of(name), "cut", **options)
    # DeepSpeed before 0.19 looks for these, which hold nothing under ZeRO.
    wanted = {path.name for path in same.iterdir() if not path.name.startswith("expp_rank")}
    found_names = {path.name for path in tag.iterdir()}
    assert found_names >= wanted
    last = f"layer_0{5 if name == PLAIN else 4}"  # the tied layer's, which is there wherever it is used
    assert all(one.startswith(last) for one in found_names - wanted)
    assert len(list(tag.glob("layer_*"))) > 2
    for path in tag.glob("layer_*"):
        like = same / (path.name if path.name in wanted else path.name.replace(last, "layer_00"))
        found, expected = (torch.load(one, weights_only=False) for one in (path, like))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            padding = name == SLICED and len(value) == 10 and "-model_03" in path.name and key == "weight"
            assert found[key].shape == value.shape  # 40 rows over 4 ranks, of which another format keeps 37
            assert_same(found[key][: 7 if padding else None], value[: 7 if padding else None], key)
    for rank in range(len(list(tag.glob("mp_rank_*")))):
        assert names_of(tag, rank) == names_of(same, rank)
    assert zckpt.diff(tag, same).equal


def test_the_order_of_a_stage_is_known_as_long_as_its_groups_are_as_they_were():
    tag = in_another_order()
    checkpoint = zckpt.open(tag)
    assert str(checkpoint.details["stage_orders"]).startswith("|")  # the first group is in order
    [first, second] = known_orders(checkpoint)
    assert first is None
    assert [one[-1] for one in second or ()] == ["1.mix.bias", "3.up.bias"]
    zckpt.convert(checkpoint, "between", to="dcp", weight_check=False)  # elements stay where they were
    between = zckpt.open("between")
    assert known_orders(between) == [first, second]
    how = {
        "to": "deepspeed", "stage": 1, "world_size": 2, "pipeline_layers": LAYERS, "partition_method": "uniform",
        "weight_check": False,
    }  # fmt: skip
    zckpt.convert(between, "back", pipeline_parallel_size=2, **how)
    assert names_of(tag_of("back"), 1) == names_of(tag, 1)
    with refusing(UnsupportedError, "the stages that it was saved in"):
        zckpt.convert(between, "x", pipeline_parallel_size=3, **how)
    between.param_groups[1].parameters.reverse()
    assert known_orders(between) == [None, None]
    for text in ("|", "x", "|00000000;0-1", f"|{checkpoint.details['stage_orders']}"):
        between.details["origin"] = {"stage_orders": text}
        assert known_orders(between) in ([], [None, None])


def test_an_order_that_no_stage_shows_is_said():
    """A stage of one layer is in the order of modules even where the training lists weights after biases."""
    tag = cut(run_of(PLAIN), "three", 1, **THREE)
    how = {"to": "deepspeed", "stage": 1, "world_size": 1, "pipeline_layers": LAYERS}
    zckpt.convert(tag, "between", to="zckpt")
    said = "param group 1 is taken to be in the order of modules, {} before 4.weight: no stage"
    for name, bounds, first in (("one", "0,6", "1.norm.bias"), ("two", "0,2,6", "3.up.bias"), ("same", "0,2,4,6", "")):
        found = zckpt.convert("between", name, stage_bounds=bounds, **how)
        assert sum(said.format(first) in note for note in found.notes) == bool(first)
        found = zckpt.reshard(tag, f"{name}_direct", world_size=1, stage_bounds=bounds)
        assert sum(said.format(first) in note for note in found.notes) == bool(first)
        assert names_of(tag_of(name), 0) == names_of(Path(f"{name}_direct"), 0)
    found = zckpt.reshard(run_of(PLAIN), "shown", world_size=1, **ONE)
    assert not any("order of modules" in note for note in found.notes)


def test_the_experts_of_each_stage_are_counted_anew(between):
    """Of stages with other numbers of experts, another format has kept each stage's under a key of its file."""
    checkpoint = zckpt.open(between(EXPERTS, "zckpt"))
    checkpoint.metadata["mp_rank_01_model_states.num_experts"] = [2]
    zckpt.convert(checkpoint, "back", to="deepspeed", stage=1, world_size=2, pipeline_parallel_size=2,
                  pipeline_layers=EXPERT_LAYERS, partition_method="uniform")  # fmt: skip
    for stage in (0, 1):
        model = model_of(tag_of("back"), stage)
        assert model["num_experts"] == [4]
        assert not any("num_experts" in key and key != "num_experts" for key in model)


def test_rules_of_ones_own_slice_another_format(between, dealt):
    options = {
        "to": "deepspeed", "stage": 1, "world_size": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 2,
        "pipeline_layers": SLICED_LAYERS, "partition_method": "uniform",
    }  # fmt: skip
    options["padded_vocab_size"] = 40  # as in the source
    source, rules = between(SLICED, "dcp"), Path("rules.json")
    zckpt.convert(source, "known", **options)
    rules.write_text(json.dumps(model_of(tag_of(run_of(SLICED)), 0)["universal_checkpoint_info"]))
    zckpt.convert(source, "told", slice_rules=rules, **options)
    found, wanted = (tag_of(name) for name in ("told", "known"))
    for path in wanted.iterdir():
        assert tensor_bytes(found / path.name) == tensor_bytes(path)
    with refusing(UsageError, "--tp-rules FILE"):
        dealt(SLICED, slice_rules=str(rules))
    rules.write_text('{"rows": []}')
    with refusing(UsageError, "unknown tensor-parallel rules"):
        zckpt.convert(source, "x", slice_rules=str(rules), **options)


def test_slices_of_another_format_need_rules(between):
    options = {"world_size": 1, "stage": 1, "tensor_parallel_size": 2}
    layers = {"pipeline_parallel_size": 2, "pipeline_layers": LAYERS, "partition_method": "uniform"}
    with refusing(UnsupportedError, r"no rules how to cut them.*--slice-rules FILE"):
        zckpt.convert(between(PLAIN, "zckpt"), "back", to="deepspeed", **options, **layers)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "--pipeline-parallel-size"),
        ({"pipeline_parallel_size": 1}, "--pipeline-parallel-size"),
        ({"pipeline_parallel_size": 2}, "how to distribute the pipeline's layers over"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "A,B"}, "not match the checkpoint's layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": LAYERS, "stage": 2}, "no pipelines under ZeRO-2"),
    ],
)
def test_stages_of_another_format_have_to_be_said(options, match, between):
    options = {"to": "deepspeed", "world_size": 2, "stage": 1, **options}
    for to in ("zckpt", "dcp"):  # the latter has no stages, but names that only a pipeline has
        with refusing((UnsupportedError, UsageError), match):
            zckpt.convert(between(PLAIN, to), "back", **options)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["3.scale", "3.up.weight", "3.up.bias", "3.down.weight"], True),
        (["tied_modules.embed.weight", "1.a.b.weight", "1.a.c.weight", "11.a.weight"], True),
        (["3.up.weight", "3.down.weight", "3.up.bias"], False),
        (["3.a.up.weight", "3.b.weight", "3.a.down.weight"], False),
        ([], True),
    ],
)
def test_parameters_that_come_module_by_module(names, expected):
    assert goes_by_modules(names) is expected


def test_names_that_are_no_layers_are_not_dealt_to_stages(between):
    bounds = {"stage_bounds": "0,1,2", "world_size": 2}
    with refusing(LayoutError, "does not belong to a layer of the pipeline"):
        zckpt.convert(between("s1_fp32_dp1", "zckpt"), "back", to="deepspeed", **bounds)


def test_experts_of_a_stage_are_numbered_by_the_stage():
    """Each of two stages has a layer 0 of experts; of one stage they are 0 and 1, as its model file counts them."""
    tag = cut(run_of(EXPERTS), "cut", 2, **ONE)
    assert model_of(tag, 0)["num_experts"] == [4, 4]
    numbers = {path.name.split("_expert_")[0] for path in tag.glob("layer_*_expert_*")}
    assert numbers == {"layer_0", "layer_1"}
    assert all(name.startswith("3.") for name in content_of(tag / "layer_1_expert_2_mp_rank_00_model_states.pt"))


def test_experts_of_other_stages_are_split_into_groups_by_size(between, monkeypatch):
    """DeepSpeed splits a stage's experts where a rank has too many: those of one stage here, not those of two."""
    monkeypatch.setattr(target_groups, "EXPERT_GROUP_NUMEL", 400)
    layers = {"pipeline_layers": EXPERT_LAYERS, "partition_method": "uniform"}
    one = cut(run_of(EXPERTS), "one", 2, **ONE)
    assert [{name.split(".")[0] for name in group} for group in names_of(one, 0)[1:]] == [{"1"}, {"3"}]
    two = cut("one", "two", 2, pipeline_parallel_size=2, **layers)
    assert [names_of(two, rank) for rank in (0, 1)] == [names_of(tag_of(run_of(EXPERTS)), rank) for rank in (0, 1)]
    assert zckpt.diff(two, run_of(EXPERTS)).equal
    options = {"world_size": 2, "stage": 1, **ONE, **layers}
    zckpt.convert(between(EXPERTS, "zckpt"), "back", to="deepspeed", **options)
    assert names_of(tag_of("back"), 0) == names_of(one, 0)


def test_stages_of_older_versions_are_told_by_names():
    """DeepSpeed 0.16 does not record the degrees, and with experts there are no layer files to tell them."""
    folder = copy(EXPERTS)
    edit_all(folder, lambda content: content.pop("checkpoint_parallel_dimensions"), "mp_rank_0?_model_states.pt")
    assert zckpt.open(folder).topology.pp == 2
    assert zckpt.diff(folder, run_of(EXPERTS)).equal


def test_a_stage_without_experts_is_refused():
    layers = {"stage_bounds": "0,4,6", "pipeline_layers": EXPERT_LAYERS}
    with refusing(UnsupportedError, "stage 1 would"):
        zckpt.reshard(run_of(EXPERTS), "cut", world_size=1, **layers)


def test_experts_lost_from_a_stage_are_named():
    folder = copy(EXPERTS)
    next(folder.rglob("layer_0_expert_3_mp_rank_01_model_states.pt")).unlink()
    with refusing(ShardError, "no file holds the weights of expert 3"):
        zckpt.open(folder)


UNSTAGED = [("tied_modules.embed.*", "embed.*"), ("1.*", "block.*"), ("3.*", "feed.*"), ("4.*", "norm.*")]


def test_layers_under_other_names_are_one_model_as_convert_writes_it():
    done = zckpt.reshard(run_of(PLAIN), "cut", world_size=3, stage=2, rename=UNSTAGED, verify=True)
    assert any("has to list its parameters alike" in note for note in done.notes)
    zckpt.convert(run_of(PLAIN), "made", to="deepspeed", world_size=3, stage=2, rename=UNSTAGED)
    made = contents("made")
    assert len(made) == 5
    assert made.items() <= contents("cut").items()
    tag = tag_of(run_of(PLAIN))
    zckpt.reshard(tag, "tag", world_size=1, add_prefix="layers.")
    assert Path("tag/mp_rank_00_model_states.pt").exists()  # a tag directory, as the source is one
    assert "layers.tied_modules.embed.weight" in zckpt.open("tag").parameters


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (PLAIN, {"rename": UNSTAGED[1:]}, "tied_modules.embed.weight: only a pipeline has such names"),
        (PLAIN, {"rename": UNSTAGED, "pipeline_parallel_size": 2}, "--pipeline-parallel-size does not apply"),
        (PLAIN, {"rename": UNSTAGED, "stage_bounds": "0,6"}, "--stage-bounds does not apply"),
        (SLICED, {"add_prefix": "layers."}, "expected --tensor-parallel-size 1"),
        ("pp2_s0_fp32_dp2", {"add_prefix": "layers."}, "would be lost"),
        ("s1_fp32_dp2", {"add_prefix": "model."}, "--pipeline-layers as a pipeline"),
    ],
)
def test_other_names_that_make_no_model_are_refused(name, options, words, dealt, tmp_path):
    with refusing((UnsupportedError, UsageError, LeftOutError), words):
        dealt(name, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_order_of_endless_ranges_is_not_taken():
    """A text of a few kilobytes that would be a list of gigabytes."""
    checkpoint = Checkpoint("source", "zckpt")
    checkpoint.param_groups = [ParamGroup({}, ["0.weight"], {})]
    text = f"{zlib.crc32(b'0.weight'):08x};{','.join(['0-999999'] * 2000)}"
    checkpoint.details = {"origin": {"stage_orders": text}}
    assert known_orders(checkpoint) == []


def test_names_that_torch_keeps_in_groups_do_not_part_the_stages_groups():
    """Each stage has those of its own parameters, and a tied layer is in the groups of two."""
    tag = copy(PLAIN)

    def name(content):
        z = content["optimizer_state_dict"]
        for group, mapping in zip(z["base_optimizer_state"]["param_groups"], z["param_slice_mappings"], strict=True):
            group["param_names"] = list(mapping)

    edit_all(tag, name)
    groups, expected = (zckpt.open(one).param_groups for one in (tag, run_of(PLAIN)))
    assert [group.parameters for group in groups] == [group.parameters for group in expected]
    converted(tag, "dcp", "dcp")
