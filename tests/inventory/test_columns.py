"""What is worked out for thousands of parameters at once is what is found one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from zckpt.formats.account import ranges, take_inventory
from zckpt.formats.deepspeed.layouts import per_parameter

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize(
    "name", ["s2_bf16_dp2_palign", "s3_bf16_dp3", "s3_bf16_dp2_subgroup", "tp2_s3_bf16_dp2", "ds0145_s1_fp32_dp2"]
)
def test_the_inventory_is_the_same_by_columns(name, monkeypatch):
    expected = take_inventory(zckpt.open(FIXTURES / name)).as_dict()
    for module, constant, value in (
        (ranges, "FEWEST_COLUMNS", 0),
        (per_parameter, "FEWEST_SHARDS", 0),
        (ranges, "MANY", 1),
    ):
        monkeypatch.setattr(module, constant, value)
    assert take_inventory(zckpt.open(FIXTURES / name)).as_dict() == expected
