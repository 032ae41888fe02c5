"""Figures of tensors are those that NumPy finds of all their elements at once, in float64."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.refusals import refusing
from zckpt.operations.stats import Distribution, _measured, layer_of

FIXED = ["s2_bf16_dp2", "s3_bf16_dp3", "tp2_s1_bf16_dp2", "moe_ep2_s2_fp32_dp4"]


def assert_figures(found: Distribution, values: torch.Tensor) -> None:
    x = values.double().numpy().reshape(-1)
    finite = x[np.isfinite(x)]
    assert (found.numel, found.nan, found.inf) == (x.size, np.isnan(x).sum(), np.isinf(x).sum())
    assert found.zeros == (x == 0).sum()
    assert sum(found.magnitudes.values()) == (finite != 0).sum()
    if not finite.size:
        assert (found.least, found.most, found.std, found.norm) == (None,) * 4
        return
    assert (found.least, found.most) == (finite.min(), finite.max())
    for value, expected in (
        (found.mean, finite.mean()),
        (found.std, finite.std()),
        (found.norm, np.linalg.norm(finite)),
    ):
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12 * max(np.abs(finite).max(), 1e-30))


@pytest.mark.parametrize("name", FIXED)
def test_every_slot_has_its_figures(name):
    opened = zckpt.open(FIXTURES / name)
    found = zckpt.stats(opened)
    assert {(one.name, one.slot) for one in found.distributions} >= {
        (one.name, slot) for one in opened.owners for slot in one.slots
    }
    for one in found.distributions:
        assert_figures(one, opened.read(one.name, one.slot))


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "uint8",
        "bool",
        "complex64",
    ],
)
def test_every_type_over_more_than_one_block(dtype):
    made = torch.randn(3, 211, generator=torch.Generator().manual_seed(0)) * 3
    if dtype.startswith(("float", "bfloat")):
        made[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        made[1, :40] = 0
    made = made.abs() if dtype == "uint8" else made
    tensor = made.to(getattr(torch, dtype))
    torch.save({"model": {"a.0.w": tensor, "a.1.w": tensor[:0]}}, "x.pt")
    one, empty = zckpt.stats("x.pt", memory=4096).distributions
    assert_figures(one, tensor.abs() if dtype == "complex64" else tensor)
    assert (empty.numel, empty.least, empty.norm) == (0, None, None)


def test_elements_that_a_tensor_repeats_count_each_time():
    torch.save({"model": {"w": torch.tensor([[1.0], [0.0], [-3.0]]).expand(3, 1000)}}, "x.pt")
    [one] = zckpt.stats("x.pt").distributions
    assert_figures(one, torch.tensor([[1.0], [0.0], [-3.0]]).expand(3, 1000).contiguous())


@given(st.lists(st.floats(width=32), min_size=1, max_size=60), st.integers(0, 60))
def test_blocks_put_together_are_as_one(values, at):
    both = np.array(values, np.float32)
    whole, parts = Distribution("", "", ""), Distribution("", "", "")
    whole.add(_measured(0, 0, [both]))
    for part in (both[:at], both[at:]):
        parts.add(_measured(0, 0, [part]))
    assert parts.magnitudes == whole.magnitudes
    for name in ("numel", "zeros", "nan", "inf", "least", "most"):
        assert getattr(parts, name) == getattr(whole, name)
    if whole.norm is not None:
        assert parts.norm == pytest.approx(whole.norm, rel=1e-9)


def test_magnitudes_are_powers_of_two():
    found = _measured(0, 0, [np.array([1, 1.99, -2, 0.5, 0, 2.0**100], np.float64)])
    assert found.magnitudes == {0: 2, 1: 1, -1: 1, 100: 1}


def test_layers_sum_up_what_is_of_one_name_to_its_number():
    assert [layer_of(name) for name in ("h.0.attn.w", "h.10.w", "0.w", "emb.weight", "h.0", "w2.x")] == [
        "h.0", "h.10", "0", "emb", "h.0", "w2",
    ]  # fmt: skip
    found = zckpt.stats(FIXTURES / "moe_ep2_s2_fp32_dp4", slots=["weight"])
    layers = found.layers()
    assert sum(one.numel for one in layers) == sum(one.numel for one in found.distributions)
    assert len(layers) < len(found.distributions)


def test_what_is_printed():
    command = "stats fixtures/s2_bf16_dp2"
    document = printed(command, "--parameters fc*")
    lines = list(csv.DictReader(io.StringIO(succeeded(command, "--csv --parameters fc*").stdout)))
    assert [(one["name"], one["slot"], float(one["max"])) for one in lines] == [
        (one["name"], one["slot"], one["max"]) for one in document["slots"]
    ]
    heads = "layer slot dtype numel min max mean std norm zeros nan inf"
    assert succeeded(command, "--layers").stdout.splitlines()[1].split() == heads.split()
    refused(2, command, "--slots momentum")
    refused(2, command, "--csv --json")
    with refusing(zckpt.UsageError, "no such slot: expected some of weight, master"):
        zckpt.stats(FIXTURES / "s2_bf16_dp2", slots=["momentum"])
