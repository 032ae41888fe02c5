"""Elements looked at block by block are the slot's, however its spans lie; what does not cover it once is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import in_file, slot_of
from tests.strategies import cuts
from zckpt.engine.scan import SlotSet, scan
from zckpt.errors import LayoutError
from zckpt.state import Extent, Slot, Span

NUMEL = 12
VALUES = np.arange(NUMEL, dtype=np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of the values: 100 bytes from its beginning, as big-endian numbers from 1000, transposed from 2000 on."""
    file = tmp_path_factory.mktemp("scan") / "values"
    parts = {100: VALUES, 1000: VALUES.astype(">f4"), 2000: VALUES.reshape(4, 3).T}
    data = bytearray(3000)
    for offset, part in parts.items():
        data[offset : offset + 4 * NUMEL] = part.tobytes()
    file.write_bytes(data)
    return str(file)


def flat(path: str, start: int, numel: int, base: int = 100, order: str = "little") -> Span:
    """A range of the values."""
    return Span(Extent.flat((4, 3), start, numel), path, base + 4 * start, "float32", None, order)


def seen(slot: Slot, numel: int) -> list[float]:
    """What is looked at, block after block."""
    sets = [SlotSet("weight", (slot,), ("float32",))]
    blocks = scan(sets, lambda _set, _start, arrays: arrays[0].copy(), numel=numel)
    return [float(one) for _, block in blocks for one in block.reshape(-1)]


@given(st.data(), cuts(NUMEL), st.integers(1, NUMEL))
def test_any_blocks_of_spans_in_any_order_are_the_elements(path, data, lengths, numel):
    spans = [flat(path, start, length, *data.draw(st.sampled_from([(100, "little"), (1000, "big")])))
             for start, length in lengths]  # fmt: skip
    assert seen(slot_of(*data.draw(st.permutations(spans)), shape=(4, 3)), numel) == VALUES.tolist()


@pytest.mark.parametrize("numel", [1, 5, NUMEL])
def test_elements_that_lie_otherwise_are_the_elements_and_those_that_are_not_there_once_are_refused(path, numel):
    strided = in_file(path, (4, 3), at=2000, strides=(1, 4))
    assert seen(slot_of(strided), numel) == VALUES.tolist()
    first, rest = flat(path, 0, 5), flat(path, 5, 7)
    for spans in ([first], [first, rest, rest]):
        with pytest.raises(LayoutError):
            seen(slot_of(*spans, shape=(4, 3)), numel)
