"""A change of element type gives the bits that torch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.refusals import refusing
from tests.strategies import byte_strings
from zckpt.engine.cast import cast, is_finite, mean, numpy_dtype, resolved, swapped
from zckpt.errors import UnsupportedError
from zckpt.state.dtypes import DTYPES, itemsize

TARGETS = ["float32", "bfloat16", "float16"]
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
SOURCES = ["float64", "float32", *SMALL]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
COMPLEX = ["complex32", "complex64", "complex128"]
NEWER_COMPLEX = ["bcomplex32"]  # of torch 2.15

F32_EDGES = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000,  # tiny
    0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF,  # ties of bfloat16, to even down and up, and beside them
    0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF,  # the same of float16
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FFFFF,  # about the largest float16
    0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,  # about the largest bfloat16
    0x7F800000, 0xFF800000,  # infinities
    0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF,  # no numbers, of many payloads
]  # fmt: skip


def in_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(array.tobytes()), dtype=getattr(torch, dtype))


def assert_as_torch(array: np.ndarray, source: str, target: str) -> None:
    """Assert equal bits, where torch has no NaN, and a NaN where it has one."""
    expected = in_torch(array, source).to(getattr(torch, target))
    found = in_torch(cast(array, target), target)
    nan = expected.isnan()
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize(target)]
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.view(size)[~nan], expected.view(size)[~nan])


def patterns(dtype: str) -> np.ndarray:
    """Return an array of all values of an element type of one or two bytes."""
    size = itemsize(dtype)
    return np.arange(1 << 8 * size, dtype=f"u{size}").view(numpy_dtype(dtype))


@pytest.mark.parametrize("target", [*TARGETS, "float64"])
@pytest.mark.parametrize("source", SMALL)
def test_every_pattern_of_a_small_type(source, target):
    once = patterns(source)
    assert_as_torch(once, source, target)
    many = np.stack([once, once])[:, ::-1]  # of types of one byte, they are looked up
    assert_as_torch(many, source, target)
    assert cast(many, target).shape == many.shape


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("source", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_of_8_bits_also_where_the_processor_takes_small_floats_for_zeros(source, flushes):
    every = patterns(source)
    numbers = np.resize(every[np.isfinite(every.astype(np.float32))], 1001)
    expected = in_torch(numbers, source).float().numpy()
    assert torch.set_flush_denormal(flushes)
    try:
        found = cast(numbers, "float32")
    finally:
        torch.set_flush_denormal(False)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("target", [*TARGETS, "float64"])
def test_a_million_random_patterns_of_float32(target):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    assert_as_torch(bits.view(np.float32), "float32", target)


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
def test_ties_of_float8_are_ties_of_the_float_and_not_of_what_is_looked_up(target):
    """What follows the upper half of a float decides; every upper half, with nothing, little, and much behind it."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        numbers = (upper | lower).astype(np.uint32).view(np.float32)
        most = 448 if target == "float8_e4m3fn" else np.inf  # from there on, versions of torch differ
        assert_as_torch(numbers[~(np.abs(numbers) > most)], "float32", target)


@pytest.mark.parametrize("numel", [257, 259, 1001])
def test_any_number_of_elements_of_one_byte(numel):
    assert_as_torch(np.resize(patterns("float8_e4m3fn"), numel), "float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_ties_subnormals_and_ends_of_the_range(target, sign):
    bits = np.array(F32_EDGES, np.uint32) | np.uint32(sign)
    assert_as_torch(bits.view(np.float32), "float32", target)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_every_tie_between_neighbours_goes_to_even(target):
    values = patterns(target).astype(np.float32)
    values = np.sort(values[np.isfinite(values)]).astype(np.float64)
    assert_as_torch(((values[1:] + values[:-1]) / 2).astype(np.float32), "float32", target)


@pytest.mark.parametrize("target", TARGETS)
def test_random_patterns_of_float64(target):
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 1 << 64, 500_000, dtype=np.uint64).view(np.float64)
    usual = rng.standard_normal(500_000) * 10.0 ** rng.integers(-45, 40, 500_000)
    assert_as_torch(np.concatenate([anything, usual]), "float64", target)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_float64_is_rounded_twice_as_torch_does(target):
    """A little above a tie: float32 rounds it to the tie, which then goes to even; rounding once would go up."""
    step = 2.0**-11 if target == "float16" else 2.0**-8
    above = np.array([1 + step + 2.0**-40, -1 - step - 2.0**-40])
    assert_as_torch(above, "float64", target)
    assert cast(above, target).astype(np.float64).tolist() == [1, -1]


@pytest.mark.parametrize("width", [32, 64])
@given(st.data(), st.sampled_from(TARGETS))
def test_any_floats(width, data, target):
    numbers = data.draw(arrays(f"f{width // 8}", 50, elements=st.floats(width=width)))
    assert_as_torch(numbers, f"float{width}", target)


@pytest.mark.parametrize("dtype", SOURCES)
def test_own_type_is_left_alone(dtype):
    array = np.arange(16, dtype=np.uint8).view(numpy_dtype(dtype))
    assert cast(array, dtype) is array


@pytest.mark.parametrize("source", [*INTEGERS, *COMPLEX, "qint8"])
def test_what_is_no_real_floating_point_number_is_not_cast(source):
    array = np.zeros(2 * itemsize(source), np.uint8).view(numpy_dtype(source))
    with refusing(UnsupportedError, "cannot be cast to float32"):
        cast(array, "float32")


@pytest.mark.parametrize("target", [*INTEGERS, *COMPLEX, *NEWER_COMPLEX])
def test_nothing_is_cast_to_what_is_no_real_floating_point_number(target):
    with refusing(UnsupportedError, f"cannot be cast to {target}"):
        cast(np.ones(2, np.float32), target)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_element_type_has_its_size_in_numpy(dtype):
    assert numpy_dtype(dtype).itemsize == itemsize(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=byte_strings)
def test_bytes_in_the_other_order_are_reversed_number_by_number(dtype, data):
    part = itemsize(dtype) // (2 if dtype in COMPLEX + NEWER_COMPLEX else 1)
    data = data[: len(data) // itemsize(dtype) * itemsize(dtype)]
    found = swapped(np.frombuffer(data, numpy_dtype(dtype)), dtype)
    assert found.dtype == numpy_dtype(dtype)
    assert found.tobytes() == b"".join(data[at : at + part][::-1] for at in range(0, len(data), part))


def test_bytes_of_a_strided_array_are_reversed_in_its_order():
    array = np.arange(6, dtype=">f4").reshape(2, 3).T.view("<f4")
    assert swapped(array, "float32").tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_mean_is_summed_in_float32_in_order_and_rounded_once(dtype, count):
    rng = np.random.default_rng(count)
    several = [rng.standard_normal(1000).astype(np.float32).astype(numpy_dtype(dtype)) for _ in range(count)]
    for one in several:
        one.flags.writeable = False  # what is averaged is left alone
    expected = (sum(in_torch(one, dtype).float() for one in several) / count).to(getattr(torch, dtype))
    assert mean(several, dtype).tobytes() == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", *COMPLEX, *INTEGERS[:5]])
@given(data=st.binary(min_size=16, max_size=160), bits=st.sampled_from([("conj",), ("neg",), ("conj", "neg")]))
def test_lazy_views_are_resolved_as_torch_does(dtype, data, bits):
    size = itemsize(dtype)
    array = np.frombuffer(data[: len(data) // size * size], numpy_dtype(dtype))
    lazy = in_torch(array, dtype)
    for bit in bits:
        lazy = lazy.conj() if bit == "conj" else torch._neg_view(lazy)
    found = resolved(array, dtype, bits)
    if dtype != "complex32":  # which torch does not negate on a CPU
        expected = lazy.resolve_conj().resolve_neg()
        usual = ~expected.isnan()
        assert in_torch(found, dtype)[usual].view(torch.uint8).equal(expected[usual].view(torch.uint8))
    assert resolved(found, dtype, bits).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn", "quint4x2"])
def test_what_torch_does_not_negate_is_refused(dtype):
    with refusing(UnsupportedError, "cannot be negated"):
        resolved(np.zeros(4, numpy_dtype(dtype)), dtype, ("neg",))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"])
def test_what_is_finite_is_told_wherever_it_is_not(dtype):
    array = cast(np.random.default_rng(0).normal(size=300_001).astype(np.float32), dtype)
    assert is_finite(array)
    assert is_finite(-array)
    assert is_finite(array[:0])
    for at in (0, 262_143, 262_144, 300_000):
        for odd in (np.nan, -np.nan, *(() if dtype == "float8_e4m3fn" else (np.inf, -np.inf))):
            changed = array.copy()
            changed[at] = odd
            assert not is_finite(changed)
