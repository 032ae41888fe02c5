"""Elements of a tensor are those that torch has at the same indexes, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.pairwise import each
from tests.refusals import refusing

SOURCE = FIXTURES / "s2_bf16_dp3"
SLICES = [
    None, "0", "-1", "2:5", ":", "::"[:1], "1:,2", "3:3", "0:4,:", "-3:-1,1:", "5:1", "7,-8", " 1 , 2:4 ", "0:99999,0",
]  # fmt: skip


@pytest.mark.parametrize(("text", "slot"), each(SLICES, ["weight", "exp_avg"]))
def test_a_slice_is_what_numpy_says_it_is(slot, text):
    whole = zckpt.open(SOURCE).read("fc1.weight", slot).float().numpy()
    found = zckpt.show(SOURCE, "fc1.weight", slot=slot, slice=text)
    expected = eval(f"whole[{text or ':'}]", {"whole": whole})
    assert found.values is not None
    assert found.values.shape == expected.shape
    assert np.array_equal(found.values.astype(np.float32), expected)


@pytest.mark.parametrize("name", ["s3_bf16_dp3", "tp2_s1_bf16_dp2", "other/plain_mixed/ckpt.pt"])
def test_any_format(name):
    opened = zckpt.open(FIXTURES / name)
    for one in opened.tensors():
        if one.tied_to is None and "complex" not in one.dtype:
            found = zckpt.show(opened, one.name, slice=":1" if one.shape else None)
            values = opened.read(one.name)
            expected = (values[:1] if one.shape else values).double().numpy()
            assert np.array_equal(found.values.astype(np.float64), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int64", "bool", "complex64", "float32"])
def test_a_file_of_numpy_has_all_values(dtype):
    tensor = (torch.randn(50, 41, generator=torch.Generator().manual_seed(1)) * 2).to(getattr(torch, dtype))
    torch.save({"model": {"w": tensor}}, "x.pt")
    found = zckpt.show("x.pt", "w", slice="3:,:", npy="w.npy")
    assert (found.values, found.file) == (None, "w.npy")
    written = np.load("w.npy")
    expected = tensor.float() if dtype in ("bfloat16", "float8_e4m3fn") else tensor
    assert np.array_equal(written, expected[3:].numpy())
    with refusing(zckpt.TargetExistsError, "w.npy"):
        zckpt.show("x.pt", "w", npy="w.npy")
    zckpt.show("x.pt", "w", npy="w.npy", overwrite=True)
    assert np.load("w.npy").shape == (50, 41)


def test_a_part_is_read_where_the_rest_is_gone():
    torch.save({"model": {"w": torch.arange(1 << 20, dtype=torch.int64).reshape(1 << 10, -1)}}, "x.pt")
    opened = zckpt.open("x.pt")
    span = opened["w"].slots["weight"].spans[0]
    with Path("x.pt").open("r+b") as file:
        file.truncate(span.offset + 4 * (1 << 10) * 8)
    assert zckpt.show(opened, "w", slice="3,5").values == 3 * (1 << 10) + 5
    with pytest.raises(zckpt.DamagedFileError):
        zckpt.show(opened, "w", slice="4,5")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,0,0", "a slice with 3 dimensions: expected at most 2"),
        ("13", "dimension 0 has no index 13"),
        ("0,-9", "dimension 1 has no index -9"),
        ("0:4:2", "not a slice of a tensor"),
        ("a", "not a slice of a tensor"),
        ("", "not a slice of a tensor"),
    ],
)
def test_what_is_no_slice_of_it_is_refused(text, said):
    with refusing(zckpt.UsageError, said):
        zckpt.show(SOURCE, "fc1.weight", slice=text)


def test_more_than_is_shown_is_refused():
    torch.save({"model": {"w": torch.zeros(1 << 24, 2, dtype=torch.uint8)}}, "x.pt")
    with refusing(zckpt.UsageError, "too many elements to show"):
        zckpt.show("x.pt", "w")
    assert zckpt.show("x.pt", "w", slice=":,1").values.shape == (1 << 24,)


def test_what_is_printed():
    values = zckpt.open(SOURCE).read("fc1.weight", "weight").float()
    command = "show fixtures/s2_bf16_dp3 fc1.weight --slot weight --slice"
    assert printed(command, "0:2,:")["values"] == values[:2].tolist()
    text = succeeded(command, "0:2,:3").stdout
    assert text.splitlines()[0] == "weight of fc1.weight: bfloat16 [13, 8] [0:2,:3]"
    refused(2, "show fixtures/s2_bf16_dp3 fc1.weigth", words="did you mean fc1.weight")
    refused(2, "show fixtures/s2_bf16_dp3 wte", words="`zckpt inspect --parameters` lists them")
