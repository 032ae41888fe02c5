"""What buffers take together is at most what `memory` says, whatever is copied."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from zckpt.engine.plan import plan
from zckpt.engine.targets import Hole, TargetFile
from zckpt.engine.write import write
from zckpt.state import Extent, Slot, Span
from zckpt.state.dtypes import itemsize

NBYTES = 24 << 20
MEMORY = 4 << 20
ROWS = NBYTES // 4 // 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "s"
    path.write_bytes(bytes(NBYTES))
    return path


def slot(path: Path, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Slot:
    return Slot("w", dtype, shape, (Span(Extent.whole(shape), str(path), 0, dtype, strides),))


def averaged(path: Path) -> Slot:
    shape = (NBYTES // 16,)
    spans = [(Span(Extent.whole(shape), str(path), 64 * i, "bfloat16"),) for i in range(8)]
    return Slot("w", "bfloat16", shape, spans[0], tuple(spans[1:]))


def columns(path: Path) -> Slot:
    extents = [Extent((0, i * 4), (ROWS, 4), 0, ROWS * 4) for i in range(8)]
    spans = tuple(Span(extent, str(path), i * ROWS * 16, "float32") for i, extent in enumerate(extents))
    return Slot("w", "float32", (ROWS, 32), spans)


CASES = {
    "as it is": lambda path: (slot(path, "float32", (NBYTES // 4,)), "float32"),
    "narrowed": lambda path: (slot(path, "float32", (NBYTES // 4,)), "bfloat16"),
    "widened": lambda path: (slot(path, "bfloat16", (NBYTES // 8,)), "float64"),
    "transposed": lambda path: (slot(path, "float32", (ROWS, 32), (1, ROWS)), "bfloat16"),
    "every second": lambda path: (slot(path, "float32", (NBYTES // 8,), (2,)), "float32"),
    "columns": lambda path: (columns(path), "float32"),
    "averaged": lambda path: (averaged(path), "bfloat16"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_buffers_of_all_workers_together_are_within_the_budget(case, source, tmp_path):
    one, dtype = case(source)
    nbytes = one.numel * itemsize(dtype)
    planned = plan([TargetFile("t", nbytes, [], [Hole(0, "w", one, Extent.whole(one.shape), dtype)])])
    write(planned, [tmp_path / "t"], memory=MEMORY)  # what is loaded on the way is loaded
    tracemalloc.start(1)
    try:
        write(planned, [tmp_path / "t"], memory=MEMORY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY
    assert np.all(np.fromfile(tmp_path / "t", np.uint8) == 0)
