"""The codec of chunks: whatever was encoded is decoded to the same bytes, and what is damaged is refused."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from zckpt.storage.packed.chunks import AS_IT_IS, SAMPLE_NBYTES, TO_BFLOAT16, TO_FLOAT16, Way, decode, encode


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 4000), st.integers(0, 99), st.integers(0, 2),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.booleans(),
)  # fmt: skip
def test_what_is_encoded_is_decoded_whatever_predicts_it(width, numel, seed, predictions, changed, small):
    data = noise(width * numel, seed)
    bases = []
    for number in range(predictions):
        base = data.copy()
        at = np.random.default_rng(seed + number).random(len(base)) < changed
        base[at] = (base[at] + 1) if small else noise(int(at.sum()), seed)
        bases.append((AS_IT_IS, base))
    way, which, stored = encode(data, width, bases)
    found = decode(stored, way, len(data), bases[which][1] if bases else None)
    assert found.tobytes() == data.tobytes()


@pytest.mark.parametrize("nbytes", [SAMPLE_NBYTES - 8, SAMPLE_NBYTES, SAMPLE_NBYTES + 8, (1 << 20) - 16, 1 << 20])
def test_large_chunks_are_told_by_a_sample(nbytes):
    data = noise(nbytes, 1)
    data[nbytes // 2 :] = 7
    way, _, stored = encode(data, 4, [(AS_IT_IS, data + 1)])
    assert decode(stored, way, nbytes, data + 1).tobytes() == data.tobytes()


@pytest.mark.parametrize(("cast", "dtype"), [(TO_BFLOAT16, "bfloat16"), (TO_FLOAT16, "float16")])
def test_a_weight_costs_nothing_beside_the_master_that_it_is_rounded_from(cast, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    master = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    master[:5] = [np.inf, -np.inf, 0.0, -0.0, 1e-42]
    weight = master.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).view(np.uint8)
    way, _, stored = encode(weight, 2, [(cast, master.view(np.uint8))])
    assert len(stored) < 100
    assert decode(stored, way, len(weight), master.view(np.uint8)).tobytes() == weight.tobytes()


def test_a_chunk_of_another_size_is_refused_before_it_takes_memory():
    huge = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(ValueError, match="another size"):
        decode(huge, Way(1, 1), 100, None)


@given(st.binary(max_size=200), st.integers(0, 3), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2))
def test_noise_is_refused_or_gives_bytes_of_the_size(stored, op, width, cast):
    prediction = np.zeros(64 if cast == AS_IT_IS else 128, np.uint8)
    try:
        found = decode(stored, Way(op, width, cast), 64, prediction)
    except (ValueError, zstandard.ZstdError):
        return
    assert len(found) == 64
