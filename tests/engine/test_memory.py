"""What buffers take together is at most what `memory` says, whatever is copied."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.plans import file_of, hole_of, in_file, slot_of
from zckpt.engine.plan import plan
from zckpt.engine.write import write
from zckpt.state import Extent, Slot, Span

NBYTES = 24 << 20
MEMORY = 4 << 20
ROWS = NBYTES // 4 // 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "s"
    path.write_bytes(bytes(NBYTES))
    return path


def averaged(path: Path) -> Slot:
    spans = [in_file(path, (NBYTES // 16,), "bfloat16", 64 * i) for i in range(8)]
    return replace(slot_of(spans[0]), replicas=tuple((span,) for span in spans[1:]))


def columns(path: Path) -> Slot:
    extents = [Extent((0, i * 4), (ROWS, 4), 0, ROWS * 4) for i in range(8)]
    spans = [Span(extent, str(path), i * ROWS * 16, "float32") for i, extent in enumerate(extents)]
    return slot_of(*spans, shape=(ROWS, 32))


CASES = {
    "as it is": lambda path: (slot_of(in_file(path, (NBYTES // 4,))), "float32"),
    "narrowed": lambda path: (slot_of(in_file(path, (NBYTES // 4,))), "bfloat16"),
    "widened": lambda path: (slot_of(in_file(path, (NBYTES // 8,), "bfloat16")), "float64"),
    "transposed": lambda path: (slot_of(in_file(path, (ROWS, 32), strides=(1, ROWS))), "bfloat16"),
    "every second": lambda path: (slot_of(in_file(path, (NBYTES // 8,), strides=(2,))), "float32"),
    "columns": lambda path: (columns(path), "float32"),
    "averaged": lambda path: (averaged(path), "bfloat16"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_buffers_of_all_workers_together_are_within_the_budget(case, source):
    slot, dtype = case(source)
    planned = plan([file_of(hole_of(slot, dtype=dtype))])
    write(planned, [Path("t")], memory=MEMORY)  # what is loaded on the way is loaded
    tracemalloc.start(1)
    try:
        write(planned, [Path("t")], memory=MEMORY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY
    assert np.all(np.fromfile("t", np.uint8) == 0)
