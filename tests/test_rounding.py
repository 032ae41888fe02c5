"""Masters that do not round to their weights are found wherever they are, and no others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zckpt.cast import numpy_dtype
from zckpt.rounding import not_rounded

WORDS = hnp.arrays(np.uint32, st.integers(0, 50), elements=st.integers(0, 2**32 - 1))


def expected(master: np.ndarray, weight: np.ndarray) -> list[int]:
    """What torch says, one element at a time."""
    rounded = torch.from_numpy(master).to(torch.bfloat16)
    found = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    alike = (rounded.view(torch.int16) == found.view(torch.int16)) | (rounded.isnan() & found.isnan())
    return (~alike).nonzero().reshape(-1).tolist()


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
