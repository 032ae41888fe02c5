"""Elements that lie apart, with any strides: as numpy itself picks them, whatever is read and moved at once."""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.refusals import refusing
from zckpt.engine import copy
from zckpt.engine.copy import gather_mapped, in_order, place
from zckpt.errors import DamagedFileError
from zckpt.state.spans import reach_of
from zckpt.storage import files
from zckpt.storage.files import Sources

NBYTES = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "s").write_bytes(np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8).tobytes())
    return tmp_path / "s"


def boxes(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape, and strides of elements: permuted, with gaps, repeated or over each other."""
    chosen = random.Random(seed)
    while True:
        shape = tuple(chosen.choice([1, 2, 3, 5, 16, 40, 300]) for _ in range(chosen.randrange(1, 5)))
        order = chosen.sample(range(len(shape)), len(shape))
        strides, step = [0] * len(shape), 1
        for axis in order:
            step += chosen.choice([0, 0, 0, 1, 7, 500, 5000])
            strides[axis] = chosen.choice([step] * 9 + [0, 1])
            step *= shape[axis]
        if reach_of(shape, [4 * one for one in strides], 4) < NBYTES - 100:
            return shape, tuple(4 * one for one in strides)


@pytest.mark.parametrize("window", [1 << 6, 1 << 12, 1 << 24])
def test_any_box_is_gathered(window, source, monkeypatch):
    monkeypatch.setattr(copy, "WINDOW_NBYTES", window)
    data = source.read_bytes()
    with Sources() as sources:
        for seed in range(250 if window > 1 << 6 else 20):
            shape, strides = boxes(seed)
            found = np.empty(shape, "u4")
            gather_mapped(found, sources, str(source), 3, strides)
            expected = np.ndarray(shape, "u4", data, 3, strides)
            assert np.array_equal(found, expected), (shape, strides)
            assert in_order(expected).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["u1", "u2", "u8", "V16"])
def test_placed_elements_are_those_of_numpy(dtype):
    noise = np.random.default_rng(0).integers(0, 256, 16 * 40_000, np.uint8).view(dtype)[:40_000]
    for shape, axes in [((40_000,), (0,)), ((200, 200), (1, 0)), ((500, 80), (1, 0)), ((10, 40, 100), (2, 0, 1)),
                        ((1, 40_000), (1, 0)), ((40, 1000), (0, 1)), ((2, 10, 20, 100), (3, 1, 2, 0))]:  # fmt: skip
        values = noise.reshape(shape).transpose(axes)
        for widened in (0, 3):
            target = np.zeros((*values.shape[:-1], values.shape[-1] + widened), dtype)[..., : values.shape[-1]]
            place(target, values)
            assert target.tobytes() == values.tobytes()


@pytest.mark.parametrize("is_kept", [True, False])
def test_mappings_are_windows_of_bounded_size_and_kept_as_far_as_they_have_so_many_bytes(is_kept, source, monkeypatch):
    monkeypatch.setattr(copy, "WINDOW_NBYTES", 1 << 16)
    monkeypatch.setattr(files, "MAPPED_NBYTES", 1 << 24 if is_kept else 1 << 17)
    counts = []
    with mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as mapped, Sources() as sources:
        for start in (8, 24):
            found = np.empty((200, 4), "u4")
            gather_mapped(found, sources, str(source), start, (5000, 4))
            assert np.array_equal(found, np.ndarray((200, 4), "u4", source.read_bytes(), start, (5000, 4)))
            counts.append(mapped.call_count)
    assert counts[0] > 7
    assert counts[1] == counts[0] * (1 if is_kept else 2)
    most = max(call.args[1] for call in mapped.call_args_list)
    assert most <= (1 << 16) + files.NEXT_NBYTES + mmap.ALLOCATIONGRANULARITY


def test_file_that_ends_within_a_box_is_refused(source):
    with Sources() as sources, refusing(DamagedFileError, "too early"):
        gather_mapped(np.empty((9, 8), "u4"), sources, str(source), 0, (1 << 17, 4))
