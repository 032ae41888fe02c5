"""Stage 0 for other ranks: the same state in the same files, which say how many ranks there are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import alike, run_of
from tests.formats.deepspeed.shards import copy, edit_all
from tests.logical import assert_same_tree
from tests.refusals import refusing

NAMES = ["s0_bf16_dp2", "s0_fp32_dp2", "pp2_s0_fp32_dp2", "moe_ep2_s0_fp32_dp4"]


def load(file) -> dict[str, Any]:
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", NAMES)
def test_everything_but_the_number_of_ranks_stays(name):
    written = zckpt.reshard(run_of(name), "cut", world_size=6, verify=True)
    assert any("stage 0" in note for note in written.notes)
    before, after = run_of(name) / "global_step5", Path("cut/global_step5")
    alike(after, before, ["dp_world_size", "ds_config"])
    for path in before.iterdir():
        if "mp_rank" not in path.name or "model_states" not in path.name or path.name.startswith("layer"):
            assert (after / path.name).read_bytes() == path.read_bytes()
            continue
        old, new = load(path), load(after / path.name)
        assert new["dp_world_size"] == 6
        assert new["ds_config"]["train_micro_batch_size_per_gpu"] == 2
        for content in (old, new):
            content.pop("dp_world_size")
            content["ds_config"].pop("train_micro_batch_size_per_gpu")
        assert_same_tree(new, old)
    assert Path("cut/latest").read_text() == "global_step5"
    assert zckpt.diff(run_of(name), "cut").equal
    assert zckpt.open("cut").topology.dp == 6


def test_a_tag_comes_out_as_a_tag():
    zckpt.reshard(run_of("s0_bf16_dp2") / "global_step5", "tag", world_size=1)
    assert [path.name for path in Path("tag").iterdir()] == ["mp_rank_00_model_states.pt"]


def test_slices_of_what_is_trained_are_not_frozen():
    rules = Path("rules.json")
    rules.write_text('{"tp_replicated_parameter_patterns": [".*"]}')
    whole = zckpt.open(run_of("s0_bf16_dp2"), tp_rules=rules)
    zckpt.reshard(whole, "cut", world_size=1, tensor_parallel_size=2)
    both = [whole, zckpt.open("cut", tp_rules=rules)]
    before, after = ({name for name, p in one.parameters.items() if p.frozen} for one in both)
    assert before == after != set(whole.parameters)


def test_other_changes_are_refused_by_name():
    for options in ({"stage": 1}, {"elastic": True}):
        with refusing(zckpt.UnsupportedError, next(iter(options))):
            zckpt.reshard(run_of("s0_fp32_dp2"), "cut", world_size=2, **options)
    for name, options in (
        ("s0_fp32_dp2", {"tensor_parallel_size": 2}),
        ("pp2_s0_fp32_dp2", {"pipeline_parallel_size": 1}),
    ):
        with refusing(zckpt.UnsupportedError, "which parameters each rank's optimizer numbers"):
            zckpt.reshard(run_of(name), "cut", world_size=2, **options)
    with refusing(zckpt.UsageError, "experts spread over 2 ranks"):
        zckpt.reshard(run_of("moe_ep2_s0_fp32_dp4"), "cut", world_size=3)
    assert not Path("cut").exists()


NUMBERED = [
    "0.weight", "1.mix.weight", "1.alpha", "1.norm.weight", "1.norm.bias", "1.mix.bias",
    "0.weight", "3.up.weight", "3.down.weight", "3.up.bias", "4.weight", "4.bias",
]  # fmt: skip
KEYED = [name.replace("0.weight", "tied_modules.embed.weight") for name in NUMBERED]
LAYERS = "Embedding=embed,_Block,relu,_FeedForward,LayerNorm,Embedding=embed"


def test_a_list_of_layers_tells_the_key_of_a_tied_one():
    """No file of stage 0 has it: under the number of its layer it would be no tied one for ZeRO-1."""
    how = {"to": "deepspeed", "stage": 1, "world_size": 2, "pipeline_layers": LAYERS, "verify": True}
    written = zckpt.convert(run_of("pp2_s0_fp32_dp2"), "cut", names=NUMBERED, **how)
    assert "0.weight is called tied_modules.embed.weight, as --pipeline-layers says" in written.notes
    zckpt.convert(run_of("pp2_s0_fp32_dp2"), "keyed", names=KEYED, **how)
    for path in Path("keyed/global_step5").iterdir():
        assert Path("cut", "global_step5", path.name).read_bytes() == path.read_bytes()


def test_a_stage_in_float32_may_train_nothing():
    """DeepSpeed takes param groups without parameters from the optimizer of such a stage."""
    run, how = run_of("pp2_s0_fp32_dp2"), {"world_size": 2, "names": KEYED, "pipeline_layers": LAYERS, "verify": True}
    zckpt.reshard(run, "cut", stage_bounds="0,2,3,6", **how)
    idle = load("cut/global_step5/mp_rank_01_model_states.pt")
    assert idle["optimizer"] == {"state": {}, "param_groups": []}
    assert zckpt.diff(run, "cut").equal
    zckpt.reshard("cut", "back", stage_bounds="0,3,6", **how)
    assert zckpt.diff(zckpt.open(run, names=KEYED), zckpt.open("back", names=KEYED)).equal


def test_what_has_no_names_is_not_lost_without_saying_how_to_name_it():
    with refusing(zckpt.LeftOutError, "--names FILE may identify them"):
        zckpt.convert(run_of("pp2_s0_fp32_dp2"), "dcp", to="dcp")


def list_anew(orders: list[list[list[int]]]) -> Path:
    """Give each stage's optimizer its groups, and what they number, in another order, as a program may list them."""
    tag = copy("pp2_s0_fp32_dp2")
    for path, groups in zip(sorted(tag.glob("mp_rank_*")), orders, strict=True):
        content = load(path)
        optimizer, number = content["optimizer"], 0
        state, optimizer["state"] = optimizer["state"], {}
        optimizer["param_groups"] = optimizer["param_groups"][: len(groups)]
        for group, old in zip(optimizer["param_groups"], groups, strict=True):
            group["params"] = list(range(number, number + len(old)))
            optimizer["state"] |= dict(zip(group["params"], (state[one] for one in old), strict=True))
            number += len(old)
        torch.save(content, path)
    return tag.parent


def moments(checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name, "exp_avg") for name in sorted(checkpoint.parameters)}


def test_one_group_in_the_models_order_tells_its_names_tied_layers_too():
    """As of `module.parameters()`: shapes leave one way to read it, and the layers of each stage follow from that."""
    found = zckpt.open(list_anew([[[0, 2, 3, 4, 1, 5]], [[0, 1, 3, 2, 4, 5]]]))
    assert not found.warnings
    assert_same_tree(moments(found), moments(zckpt.open(run_of("pp2_s0_fp32_dp2"), names=NUMBERED)))


def test_two_groups_that_are_sorted_or_not_leave_files_that_nothing_tells_apart():
    """A norm's weight and bias, and another bias, have one shape: which is which is in the program only."""
    run = list_anew([[[0, 1], [2, 5, 4, 3]], [[0, 1, 2], [3, 4, 5]]])
    swapped = [*NUMBERED[:3], *NUMBERED[5:2:-1], *NUMBERED[6:]]
    assert swapped[2:6] == sorted(swapped[2:6])
    as_it_was = moments(zckpt.open(run_of("pp2_s0_fp32_dp2"), names=NUMBERED))
    assert_same_tree(moments(zckpt.open(run, names=swapped)), as_it_was)
    with pytest.raises(AssertionError):
        assert_same_tree(moments(zckpt.open(run, names=NUMBERED)), as_it_was)
    assert zckpt.verify(run, names=NUMBERED, deep=True).sound  # and so no evidence, but for whose names they are
    for one in (run, run_of("pp2_s0_fp32_dp2")):
        assert "is uncertain" in zckpt.open(one).warnings[0]


def test_names_that_torch_recorded_are_those_of_a_stage():
    """As of an optimizer made of `named_parameters()`; the target has them, too, and none is taken that cannot be."""
    run = copy("pp2_s0_fp32_dp2").parent
    record(run, KEYED)
    checkpoint = zckpt.open(run)
    assert not checkpoint.warnings
    assert zckpt.diff(checkpoint, zckpt.open(run_of("pp2_s0_fp32_dp2"), names=KEYED)).equal
    zckpt.reshard(run, "one", world_size=1, pipeline_parallel_size=1, verify=True)
    assert zckpt.diff(checkpoint, "one").equal
    for wrong in (KEYED[:1] * 2 + KEYED[2:], ["x." + name for name in KEYED]):
        record(run, wrong)
        assert "is uncertain" in zckpt.open(run).warnings[0]


def record(run, names: list[str]):
    rest = list(names)

    def name(content):
        for group in content["optimizer"]["param_groups"]:
            group["param_names"] = [rest.pop(0) for _ in group["params"]]

    edit_all(run, name, "*/mp_rank_*")
