"""ZenFlow: matrices that lie transposed in its files, or do not, and weights that are ahead of their masters."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.formats.deepspeed.contents import cut, run_of, tag_of, tensor_bytes
from tests.formats.deepspeed.shards import copy, edit, model_file, optimizer_file
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, assert_state

FLAT, BY_PARAMETER = "versions/ds0189_zenflow_s2_bf16_dp2", "versions/ds0189_zenflow_s3_bf16_dp2"


@pytest.mark.parametrize("name", [FLAT, BY_PARAMETER])
def test_matrices_are_read_upright(name):
    checkpoint, truth = zckpt.open(run_of(name)), Truth(run_of(name))
    assert checkpoint.details["transposed_matrices"] is True
    assert any("ZenFlow" in warning for warning in checkpoint.warnings)
    assert_consolidated(run_of(name), truth)
    assert_state(checkpoint, truth)


@pytest.mark.parametrize("name", [FLAT, BY_PARAMETER])
def test_it_is_cut_as_zenflow_stores_it(name):
    """Byte for byte at the same ranks, also after others."""
    source, same = tag_of(run_of(name)), cut(run_of(name), "2", 2)
    three, back = cut(run_of(name), "3", 3), cut("3", "back", 2, verify=True)
    for rank in range(2):
        stored = tensor_bytes(optimizer_file(same, rank))
        assert tensor_bytes(optimizer_file(back, rank)) == stored
        if name == FLAT:  # ZeRO-3 does not initialise padding
            assert tensor_bytes(optimizer_file(source, rank)) == stored
    assert zckpt.fingerprint(three).text == zckpt.fingerprint(source).text
    ours, theirs = (torch.load(sorted(tag.glob("*model_states.pt"))[0], weights_only=False) for tag in (back, source))
    assert [*map(dict, ours["param_shapes"])] == [*map(dict, theirs["param_shapes"])]
    assert ours["frozen_param_shapes"] == theirs["frozen_param_shapes"]
    assert "zenflow" in ours["ds_config"]["zero_optimization"]
    for its, other in zip(ours["module"].values(), theirs["module"].values(), strict=True):
        assert its.stride() == other.stride()
        assert torch.equal(its, other)
    assert zckpt.verify(three, deep=True).sound


@pytest.mark.parametrize(("name", "stage"), [(FLAT, 3), (BY_PARAMETER, 2)])
def test_for_zero_of_another_kind_it_is_written_without_zenflow(name, stage):
    tag = cut(run_of(name), "cut", 3, stage=stage, verify=True)
    written = zckpt.open(tag)
    assert "transposed_matrices" not in written.details
    assert "zenflow" not in written.metadata["ds_config"]["zero_optimization"]
    assert_state(written, Truth(run_of(name)))


def test_matrices_in_order_are_told_by_their_weights():
    """0.19.8 has weights and masters row by row."""
    tag = copy("s2_bf16_dp2")
    edit(model_file(tag), lambda content: content["ds_config"]["zero_optimization"].update(zenflow={"topk_ratio": 0.1}))
    found = zckpt.open(tag)
    assert found.details["transposed_matrices"] is False
    assert_state(found, Truth(run_of("s2_bf16_dp2")))


def test_weights_that_contradict_each_other_are_refused():
    tag = copy(FLAT)

    def change(content):
        content["module"]["head.weight"] = content["module"]["head.weight"].contiguous()

    edit(model_file(tag), change)
    with refusing(zckpt.LayoutError, r"embed.weight by columns|head.weight by rows"):
        zckpt.open(tag)


def test_weights_may_be_ahead_of_masters_in_any_format():
    tag = copy(FLAT)
    edit(model_file(tag), lambda content: content["module"]["head.weight"].add_(1))
    assert zckpt.verify(tag, deep=True).sound
    zckpt.convert(tag, "dcp", to="dcp", verify=True)
    assert zckpt.verify("dcp", deep=True).sound
    done = zckpt.convert("dcp", "back", to="deepspeed", stage=2, world_size=3, verify=True)
    assert any("ZenFlow of DeepSpeed 0.19.8" in note for note in done.notes)
    assert zckpt.open("back").details["transposed_matrices"] is False
    assert zckpt.verify("back", deep=True).sound
    zckpt.consolidate("dcp", "kept.safetensors", dtype="keep")
    weight = Truth(run_of(FLAT)).weights["head.weight"] + 1
    assert torch.equal(load_file("kept.safetensors")["head.weight"], weight)
