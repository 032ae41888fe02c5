"""The numbers that say how two tensors differ: against definitions spelled out one element at a time, and added up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zckpt.compare.slots import DECADES, Figures, Tolerance, figures
from zckpt.engine.cast import numpy_dtype

BITWISE = Tolerance()
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def measured(a, b, dtype="float32", tolerance: Tolerance = BITWISE) -> Figures:
    return figures(a, b, 0, (dtype, dtype), tolerance)


def float_arrays(numel) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, numel, elements=st.floats(width=32))


@st.composite
def two(draw) -> tuple[np.ndarray, np.ndarray]:
    """Draw two arrays that are alike in some elements."""
    numel = draw(st.integers(1, 40))
    a, b = draw(float_arrays(numel)), draw(float_arrays(numel))
    same = draw(hnp.arrays(bool, numel))
    return a, np.where(same, a, b)


@given(two())
def test_figures_are_what_their_definitions_say(arrays):
    a, b = arrays
    found = measured(a, b)
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    unequal = [i for i in range(a.size) if a[i].tobytes() != b[i].tobytes()]
    finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    changed = [pairs[i] for i in unequal if all(map(math.isfinite, pairs[i]))]
    assert (found.numel, found.num_different, found.first) == (a.size, len(unequal), unequal[0] if unequal else None)
    assert (found.nan_a, found.nan_b) == (sum(map(math.isnan, a.tolist())), sum(map(math.isnan, b.tolist())))
    assert (found.inf_a, found.inf_b) == (sum(map(math.isinf, a.tolist())), sum(map(math.isinf, b.tolist())))
    assert found.max_abs == max((abs(x - y) for x, y in changed), default=None)
    relative = [abs(x - y) / max(abs(x), abs(y)) if x or y else 0.0 for x, y in changed]
    assert found.max_rel == (pytest.approx(max(relative)) if relative else None)
    assert found.squares == pytest.approx(math.fsum((x - y) ** 2 for x, y in finite))
    assert found.squares_a == pytest.approx(math.fsum(x * x for x, _ in finite))
    assert found.products == pytest.approx(math.fsum(x * y for x, y in finite), abs=1e-9 * found.norm_a * found.norm_b)
    assert sum(found.decades) == len(changed)


@given(two(), st.data())
def test_figures_of_parts_add_up_to_those_of_the_whole(arrays, data):
    a, b = arrays
    cut = data.draw(st.integers(0, a.size))
    total = Figures()
    for start, end in ((0, cut), (cut, a.size)):
        total.add(
            figures(a[start:end], b[start:end], start, ("float32", "float32"), BITWISE) if end > start else Figures()
        )
    whole = measured(a, b)
    for name in ("numel", "num_different", "first", "nan_a", "inf_b", "max_abs", "max_rel", "max_ulp", "decades"):
        assert getattr(total, name) == getattr(whole, name), name
    for name in ("squares", "squares_a", "squares_b"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name)), name


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulps_count_representable_numbers(dtype):
    """All finite numbers of the 8-bit types, and some hundreds of the others, each beside its neighbour."""
    size = numpy_dtype(dtype).itemsize
    words = np.arange(0, 256 ** min(size, 2), dtype=f"u{size}")
    with np.errstate(invalid="ignore"):
        numbers = words.view(numpy_dtype(dtype)).astype(np.float64)
    values = np.unique(numbers[np.isfinite(numbers)]).astype(numpy_dtype(dtype))
    step = max(len(values) // 200, 1)
    for one, other in zip(values[:-1:step], values[1::step], strict=False):
        pair = np.array([one]), np.array([other])
        if size <= 2:  # there are no others between them
            assert measured(*pair, dtype).max_ulp == 1, (one, other)
        assert measured(*pair[::-1], dtype).max_ulp == measured(*pair, dtype).max_ulp


def test_ulps_over_zero_and_from_end_to_end():
    tiny = np.float32(1e-45)
    found = measured(np.array([tiny, 0, 1], np.float32), np.array([-tiny, -0.0, 1], np.float32))
    assert (found.num_different, found.max_ulp) == (2, 2)
    huge = np.finfo(np.float64).max
    assert figures(np.array([-huge]), np.array([huge]), 0, ("float64", "float64"), BITWISE).max_ulp == 2 * (
        2046 * 2**52 + 2**52 - 1
    )


def test_two_types_are_compared_by_value():
    a = np.array([1.0, 0.1, np.nan, np.inf], np.float32)
    b = a.astype(numpy_dtype("bfloat16"))
    found = figures(a, b, 10, ("float32", "bfloat16"), BITWISE)
    assert (found.num_different, found.first, found.max_ulp) == (1, 11, None)


@pytest.mark.parametrize(
    ("rtol", "atol", "different"), [(0.0, 0.0, 3), (0.0, 0.15, 1), (0.02, 0.0, 2), (0.02, 0.15, 1), (1.0, 0.0, 0)]
)
def test_tolerance_is_that_of_numpy(rtol, atol, different):
    a, b = (
        np.array([10.0, 1.0, 5.0, np.nan, np.inf], np.float32),
        np.array([10.1, 1.1, 7.0, np.nan, np.inf], np.float32),
    )
    found = measured(a, b, tolerance=Tolerance(rtol, atol))
    assert found.num_different == different == np.count_nonzero(~np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True))


def test_number_beside_none_is_far_whatever_the_tolerance():
    a, b = np.array([1.0, np.inf, np.nan], np.float32), np.array([np.nan, -np.inf, 1.0], np.float32)
    assert measured(a, b, tolerance=Tolerance(1e9, 1e9)).num_different == 3


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "complex64"])
def test_other_numbers_have_figures_too(dtype):
    a = np.array([0, 1, 1, 0]).astype(numpy_dtype(dtype))
    b = np.array([0, 1, 0, 1]).astype(numpy_dtype(dtype))
    found = measured(a, b, dtype)
    assert (found.num_different, found.first, found.max_abs, found.max_ulp) == (2, 2, 1.0, None)
    assert found.rel_l2 == pytest.approx(1.0)


def test_elements_that_numpy_has_no_type_for():
    a = np.frombuffer(bytes(range(8)), "V4")
    b = np.frombuffer(bytes([0, 1, 2, 3, 4, 5, 6, 8]), "V4")
    found = measured(a, b, "complex32")
    assert (found.num_different, found.first, found.max_abs) == (1, 1, None)


def test_decades_count_small_and_large_changes_at_the_ends():
    a = np.ones(4, np.float64)
    b = np.array([1.0 + 1e-12, 1.001, 1.5, -1.0])
    found = figures(a, b, 0, ("float64", "float64"), BITWISE)
    counted = dict(zip(DECADES, found.decades, strict=True))
    assert {power: count for power, count in counted.items() if count} == {-9: 1, -4: 1, -1: 1, 0: 1}


def test_norm_of_nothing_is_no_scale():
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert (measured(zero, zero).rel_l2, measured(zero, zero).cosine) == (None, None)
    assert measured(zero, one).rel_l2 == math.inf
    assert measured(one, -one).cosine == pytest.approx(-1)
