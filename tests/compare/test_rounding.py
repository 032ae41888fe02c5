"""Masters that do not round to their weights are found wherever they are, and no others."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zckpt.compare.weights import READ_WHOLE, not_rounded, one_nan, samples
from zckpt.engine.cast import numpy_dtype
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot, Span

WORDS = hnp.arrays(np.uint32, st.integers(0, 50), elements=st.integers(0, 2**32 - 1))


def expected(master, weight) -> list[int]:
    """What torch says, one element at a time; halfway, the larger bits are right, too."""
    rounded = torch.from_numpy(master).to(torch.bfloat16)
    found = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    alike = (rounded.view(torch.int16) == found.view(torch.int16)) | (rounded.isnan() & found.isnan())
    halfway = torch.from_numpy((weight.astype(np.uint32) << 16) - master.view(np.uint32) == 0x8000) & ~rounded.isnan()
    return (~(alike | halfway)).nonzero().reshape(-1).tolist()


@given(WORDS, st.data())
def test_any_bits(words, data):
    master = words.view(np.float32)
    with np.errstate(all="ignore"):
        weight = master.astype(ml_dtypes.bfloat16).view(np.uint16).copy()
    for index in data.draw(st.sets(st.integers(0, max(len(words) - 1, 0)), max_size=5)):
        if len(words):
            weight[index] = data.draw(st.integers(0, 2**16 - 1) | st.just((int(weight[index]) + 1) % 2**16))
    assert not_rounded(master, weight.view(ml_dtypes.bfloat16)).tolist() == expected(master, weight)


def test_every_weight_beside_the_masters_around_it():
    """All bfloat16s, each beside the masters at, around and halfway to the next one, on both sides."""
    weight = np.arange(1 << 16, dtype=np.uint16)
    for offset in (0, 1, -1, 0x7FFF, 0x8000, 0x8001, -0x7FFF, -0x8000, -0x8001, 0x10000, -0x10000):
        master = ((weight.astype(np.int64) << 16) + offset).astype(np.uint32).view(np.float32)
        finite = ~np.isnan(master)
        for chosen in (finite, np.ones_like(finite)):
            one, other = master[chosen].copy(), weight[chosen].copy()
            assert not_rounded(one, other.view(ml_dtypes.bfloat16)).tolist() == expected(one, other), offset


@pytest.mark.parametrize(
    "dtypes", [("float32", "float16"), ("float64", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_other_types(dtypes):
    master = np.random.default_rng(1).standard_normal(1000).astype(numpy_dtype(dtypes[0]))
    weight = master.astype(np.float32).astype(numpy_dtype(dtypes[1]))
    assert not_rounded(master, weight).tolist() == []
    weight[[3, 999]] += 1
    assert not_rounded(master, weight).tolist() == [3, 999]


NAN = {
    "float64": 0x7FF8000000000000, "float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF,
}  # fmt: skip


@pytest.mark.parametrize("dtype", NAN)
def test_every_nan_becomes_the_same_one(dtype):
    """All words of the small types, and those around the ends of the others."""
    kind = numpy_dtype(dtype)
    word = f"u{kind.itemsize}"
    if kind.itemsize <= 2:
        words = np.arange(256**kind.itemsize, dtype=word)
    else:
        near = np.array([0, NAN[dtype], np.array(np.inf, kind).view(word), np.array(-np.inf, kind).view(word)], word)
        words = np.unique(np.concatenate([near + np.array(step).astype(word) for step in (0, 1, 2, 77)]))
    with np.errstate(invalid="ignore"):
        nan = np.isnan(words.view(kind).astype(np.float64))
    assert nan.any()
    found = one_nan(words.view(kind)).view(word)
    assert set(found[nan].tolist()) == {NAN[dtype]}
    assert found[~nan].tolist() == words[~nan].tolist()
    assert one_nan(words[~nan].view(kind)).view(word).tolist() == words[~nan].tolist()


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "complex32"])
def test_what_has_no_nan_is_left_as_it_is(dtype):
    array = np.frombuffer(b"\xff" * 16, numpy_dtype(dtype))
    assert one_nan(array) is array


def test_parts_of_complex_numbers_are_numbers():
    words = np.array([0xFFC00001, 0x3F800000, 0x3F800000, 0x7FC00002], np.uint32)
    found = one_nan(words.view(np.complex64)).view(np.uint32)
    assert found.tolist() == [NAN["float32"], 0x3F800000, 0x3F800000, NAN["float32"]]


@pytest.mark.parametrize("numel", [1, 5, 16, 17, READ_WHOLE, READ_WHOLE + 1])
@pytest.mark.parametrize("wrong", [0, 7, 8, -9, -8, -1])
def test_the_ends_of_a_span_are_sampled_and_the_first_wrong_element_is_named(wrong, numel, tmp_path):
    """Of a parameter whose second half lies in another file; what is between the ends is not looked at."""
    weight = np.arange(2 * numel, dtype=np.float32).astype(ml_dtypes.bfloat16)
    master = weight.astype(np.float32)
    index = numel + wrong % numel
    master[index] += 1000
    spans = []
    for name, data in (("weight", weight), ("first", master[:numel]), ("second", master[numel:])):
        Path(name).write_bytes(data.tobytes())
        start = numel if name == "second" else 0
        spans.append(Span(Extent((0,), (2 * numel,), start, len(data)), name, 0, data.dtype.name))
    slots = {
        key: Slot(key, its[0].dtype, (2 * numel,), tuple(its))
        for key, its in ((WEIGHT, spans[:1]), (MASTER, spans[1:]))
    }
    checkpoint = Checkpoint(str(tmp_path), "zckpt")
    checkpoint.parameters["p"] = Parameter("p", (2 * numel,), "bfloat16", slots)
    found = list(samples(checkpoint))
    seen = min(wrong % numel, numel - 1 - wrong % numel) < 8
    assert [(one.numel, one.num_different) for one in found] == [(min(numel, 16), 0), (min(numel, 16), int(seen))]
    assert [one.error is not None and f"at element {index}" in str(one.error) for one in found] == [False, seen]
