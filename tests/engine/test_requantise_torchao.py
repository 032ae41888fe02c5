"""torchao's codes and scales of floats: bit for bit those of its own functions, and the nearest that there are."""

from __future__ import annotations

import numpy as np
import pytest

from zckpt.engine.cast import numpy_dtype
from zckpt.engine.quantise import by_torchao, nearest, quantised
from zckpt.state import Slot

BLOCK = 64


def made(values: np.ndarray, qmap: np.ndarray | None, *, packed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales."""
    slot = Slot("x", "float32", values.shape, ())
    its = None if qmap is None else Slot("qmap", "float32", qmap.shape, ())
    inputs = [values.copy] if qmap is None else [values.copy, lambda: qmap]
    every = [quantised(slot, BLOCK, its, by_torchao, scales=one, halves=packed) for one in (False, True)]
    types = "float8_e4m3fn" if qmap is None else "uint8", "float32"
    found = [one.compute(inputs, 0, one.portions[0].count, dtype) for one, dtype in zip(every, types, strict=True)]
    return found[0], found[1]


def values(seed: int) -> np.ndarray:
    """Blocks of many sizes; of zeros, of one value, of halves between two codes; more than once what is largest."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((40, BLOCK)).astype(np.float32)
    found *= np.float32(10) ** random.integers(-20, 20, (40, 1)).astype(np.float32)
    found[0], found[1], found[2, 1:] = 0, 3, 0
    found[3] = np.linspace(-1, 1, BLOCK)
    found[4] = np.abs(found[4])
    return found.reshape(-1)


def test_codes_are_of_the_nearest():
    qmap = np.array([-1, -0.5, 0, 0.25, 1], np.float32)
    given = np.array([-2, -1, -0.8, -0.75, -0.7, 0.12, 0.125, 0.13, 0.9, 2, np.nan], np.float32)
    assert nearest(given, qmap).tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 0]


def test_scales_are_the_largest_of_a_block_and_codes_give_values_back():
    given = values(0)
    qmap = np.linspace(-1, 1, 256, dtype=np.float32)
    codes, scales = made(given, qmap)
    assert np.array_equal(scales, np.maximum(np.abs(given.reshape(-1, BLOCK)).max(axis=1), np.float32(1e-12)))
    error = np.abs(qmap[codes].reshape(-1, BLOCK) * scales[:, None] - given.reshape(-1, BLOCK))
    assert (error <= scales[:, None] * 1.01 / 255).all()
    few = np.linspace(-1, 1, 16, dtype=np.float32)
    packed, alone = made(given, few, packed=True)[0], made(given, few)[0]
    assert np.array_equal(packed, alone[::2] << 4 | alone[1::2])


@pytest.mark.parametrize("seed", range(3))
def test_they_are_those_of_torchao(seed):
    pytest.importorskip("torchao.optim")
    import torch
    from torchao.optim import quant_utils as own
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    given = values(seed)
    whole = torch.from_numpy(given)
    scaled, scales = own.scale_tensor(whole, BLOCK)
    for maps, quantise in ((subclass_8bit, own.quantize_8bit_with_qmap), (subclass_4bit, own.quantize_4bit_with_qmap)):
        for qmap in (maps.get_qmap_signed(), maps.get_qmap_unsigned()):
            codes, found = made(given, np.array(qmap, np.float32))
            assert np.array_equal(codes, quantise(scaled, torch.tensor(qmap)).numpy())
            assert found.tobytes() == scales.numpy().tobytes()
    theirs, scales = subclass_fp8.quantize_fp8(whole, BLOCK)
    codes, found = made(given, None)
    assert codes.dtype == numpy_dtype("float8_e4m3fn")
    assert codes.tobytes() == theirs.view(torch.uint8).numpy().tobytes()
    assert found.tobytes() == scales.numpy().tobytes()
