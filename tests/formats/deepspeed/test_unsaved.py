"""What DeepSpeed 0.17.6 wrote at bfloat16 without ZeRO: weights, and no optimizer in any file."""

from __future__ import annotations

import pytest
import torch

import zckpt
from tests.formats.deepspeed.shards import FIXTURES, copy, edit, model_file
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import ShardError, UnsupportedError

NAME = "ds0176_s0_bf16_dp2"


def test_weights_are_read_and_the_rest_is_said_not_to_be_there():
    found = zckpt.open(FIXTURES / NAME)
    content = torch.load(next((FIXTURES / NAME).rglob("mp_rank*")), weights_only=False)
    weights = {name: value for name, value in content["module"].items() if name not in content["buffer_names"]}
    assert set(found.parameters) == set(weights)
    for name, value in weights.items():
        assert_same(found.read(found.parameters[name].tied_to or name), value, name)
    assert [name for name, p in found.parameters.items() if p.frozen] == [n for n in weights if "frozen" in n]
    assert any("DeepSpeed 0.17.6 saved no optimizer" in warning for warning in found.warnings)
    assert zckpt.verify(FIXTURES / NAME, deep=True).sound


def test_without_an_optimizer_at_stage_1_there_is_nothing_to_cut():
    def sum_in_floats(content):
        content["ds_config"]["zero_optimization"]["stage"] = 1
        content["ds_config"]["data_types"] = {"grad_accum_dtype": "fp32"}

    tag = copy(NAME)
    edit(model_file(tag), sum_in_floats)
    with refusing(UnsupportedError, r"holds no optimizer.*0\.17\.6.*consolidate"):
        zckpt.reshard(tag, "cut", world_size=4)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda content: content.update(ds_version="0.17.5"), id="an older version"),
        pytest.param(lambda content: content["ds_config"]["zero_optimization"].update(stage=1), id="under ZeRO"),
    ],
)
def test_files_that_were_written_and_are_lost_are_missing(change):
    tag = copy(NAME)
    edit(model_file(tag), change)
    with refusing(ShardError, "optimizer files are missing"):
        zckpt.open(tag)


def test_parts_of_base_weights_are_said_to_be_such():
    """`OptimizedLinear` over several ranks: the first one's part is flat, and no file has the others."""
    tag = copy("s1_bf16_dp2")
    shapes = {"weight": (64,), "lora_weight_1.weight": (4, 8), "lora_weight_2.weight": (16, 4)}

    def add(content):
        content["module"].update({f"{one}.{name}": torch.ones(shape) for one in "ab" for name, shape in shapes.items()})
        content["module"]["b.weight"] = torch.ones(16, 8)

    edit(model_file(tag), add)
    (warning,) = zckpt.open(tag).warnings
    assert "a.weight" in warning
    assert "base_weight_sharding" in warning
    assert "b.weight" not in warning
