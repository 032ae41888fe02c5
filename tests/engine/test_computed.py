"""Slots that are computed: the same bits as torch's, whatever the layout of the inputs, the cut and the memory."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import file_of, hole_of, part_of, write_directory
from tests.refusals import refusing
from tests.strategies import shapes, tilings
from zckpt.engine.computed import Computed
from zckpt.engine.copy import read_extent
from zckpt.engine.plan import Plan, plan
from zckpt.engine.quantise import end_to_end
from zckpt.engine.sums import KEPT_NBYTES, Decayed, LowRank, Mean
from zckpt.engine.targets import Hole, TargetFile
from zckpt.engine.workers import running_on
from zckpt.errors import LayoutError
from zckpt.state import Extent, Slot, Span
from zckpt.storage.files import Sources
from zckpt.storage.recent import Recent

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a slice of one element may keep a stride of its own
    flat.copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def stored(path: str | Path, tensor: torch.Tensor, pieces: list[Extent] | None = None) -> Slot:
    """Write a tensor in pieces, one after the other, and return it as a slot."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    spans, data = [], b""
    for extent in pieces or [Extent.whole(tuple(tensor.shape))]:
        spans.append(Span(extent, str(path), len(data), dtype))
        data += raw(part_of(tensor, extent))
    Path(path).write_bytes(data)
    return Slot("weight", dtype, tuple(tensor.shape), tuple(spans))


def computed(function: Mean | Decayed | LowRank, shape: tuple[int, ...]) -> Computed:
    return Computed("weight", "float32", shape, (), function=function)


def planned(slot: Slot, dtype: str = "float32") -> Plan:
    return plan([file_of(hole_of(slot, 3, dtype))])


def written(slot: Slot, dtype: str = "float32", memory: int = 64 << 20) -> bytes:
    write_directory(planned(slot, dtype), "target", memory=memory, overwrite=True)
    return Path("target/target").read_bytes()[3:]


def stored_each(tensors: list[torch.Tensor]) -> tuple[Slot, ...]:
    return tuple(stored(str(number), one) for number, one in enumerate(tensors))


@given(st.data())
def test_a_mean_is_torchs_in_float32_rounded_once(data):
    shape = data.draw(shapes())
    target = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    weights = data.draw(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=4))
    weights = [weight / math.fsum(weights) for weight in weights]
    dtypes = data.draw(st.lists(st.sampled_from(sorted(DTYPES)[:3]), min_size=len(weights), max_size=len(weights)))
    memory = data.draw(st.sampled_from([1, 4 << 10, 64 << 20]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for dtype in dtypes]
    slots = tuple(stored(str(i), t, data.draw(tilings(shape))) for i, t in enumerate(tensors))
    found = written(computed(Mean(slots, "float32", tuple(weights)), shape), target, memory)
    used = [1.0] * len(weights) if len(set(weights)) == 1 else weights
    total = used[0] * tensors[0].float()
    for weight, tensor in zip(used[1:], tensors[1:], strict=True):
        total = total + weight * tensor.float()
    assert found == raw((total / len(used) if used[0] == 1 else total).to(DTYPES[target]))


def test_a_decayed_mean_is_the_one_that_torch_keeps():
    from torch.optim.swa_utils import get_ema_avg_fn

    tensors = [torch.randn(7, 5) for _ in range(4)]
    found = written(computed(Decayed(stored_each(tensors), "float32", 0.97), (7, 5)))
    average, mean = get_ema_avg_fn(0.97), tensors[0]
    for one in tensors[1:]:
        mean = average(mean, one, 1)
    assert found == raw(mean)


def test_float64_is_computed_in_float64():
    tensors = [torch.randn(33, dtype=torch.float64) for _ in range(3)]
    mean = computed(Mean(stored_each(tensors), "float64", (0.2, 0.3, 0.5)), (33,))
    found = written(mean, "float64")
    assert found == raw(0.2 * tensors[0] + 0.3 * tensors[1] + 0.5 * tensors[2])


@pytest.mark.filterwarnings("error")
def test_what_is_no_number_stays_none():
    odd = [torch.tensor([math.inf, math.inf, math.nan, 3e38, 65000.0]), torch.tensor([1, -math.inf, 1, 3e38, 65000.0])]
    mean = computed(Mean(stored_each(odd), "float32", (0.75, 0.25)), (5,))
    found = np.frombuffer(written(mean, "float16"), np.float16)
    assert np.isnan(found).tolist() == [False, True, True, False, False]
    assert np.isinf(found).tolist() == [True, False, False, True, False]  # the mean of 3e38 is beyond float16


def low_rank(rows: int, columns: int, rank: int, *, transposed: bool = False):
    """Return a function of files, and what torch says of it in one product."""
    generator = torch.Generator().manual_seed(rows)
    base = torch.randn(rows, columns, generator=generator).bfloat16()
    left = torch.randn(rows, rank, generator=generator)
    right = torch.randn(rank, columns, generator=generator)
    factors = (left.T, right.T) if transposed else (left, right)
    slots = stored_each([base, *factors])
    function = LowRank(*slots, 0.5, "float32", transposed, Recent(KEPT_NBYTES))
    return function, base.double() + 0.5 * (left.double() @ right.double())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1000, 700, 4), (1, 9, 1), (5, 1, 3), (3, 400_000, 2)])
def test_a_product_is_added_in_blocks(rows, columns, rank, transposed):
    function, truth = low_rank(rows, columns, rank, transposed=transposed)
    found = np.frombuffer(written(computed(function, (rows, columns)), memory=1), np.float32)
    np.testing.assert_allclose(found, truth.numpy().reshape(-1), rtol=1e-5, atol=1e-5)


def test_bits_of_a_product_do_not_depend_on_who_asks():
    """Of parts of it, nor of other processes."""
    function, _ = low_rank(1000, 700, 16)
    slot = computed(function, (1000, 700))
    found = written(slot)
    with Sources() as sources:
        for start, numel in [(0, 1), (349_999, 2), (123_457, 300_000), (699_999, 1)]:
            some = read_extent(slot, Extent.flat(slot.shape, start, numel), sources, dtype="float32")
            assert some.tobytes() == found[4 * start : 4 * (start + numel)]
    assert pickle.loads(pickle.dumps(function)).step == function.step
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool, running_on(pool):
        write_directory(planned(slot), "again", memory=64 << 20)
    assert Path("again/target").read_bytes()[3:] == found


def test_the_right_factor_is_read_once():
    function, _ = low_rank(1000, 700, 4)
    reads = []
    right = np.ones(2800, np.float32)
    for _ in range(2):
        inputs = [lambda: np.ones(700, np.float32), lambda: np.ones(4, np.float32), lambda: reads.append(1) or right]
        function.compute(inputs, 0, 0, "float32")
    assert reads == [1]


def test_a_plan_counts_what_is_read_and_written():
    slots = stored_each([torch.randn(10, 3).bfloat16() for _ in range(3)])
    found = planned(computed(Mean(slots, "float32", (1, 1, 1)), (10, 3)))
    assert (found.read_nbytes, found.copy_nbytes, found.write_nbytes) == (180, 120, 123)
    assert {Path(one).name for one in found.sources} == set("012")


def test_an_input_with_a_gap_is_refused_before_anything_is_written():
    whole = stored("0", torch.randn(10))
    gap = stored("1", torch.randn(10), [Extent.flat((10,), 0, 4), Extent.flat((10,), 5, 5)])
    with refusing(LayoutError, "some elements are missing"):
        planned(computed(Mean((whole, gap), "float32", (1, 1)), (10,)))


def test_a_box_of_a_computed_slot_is_refused():
    slot = computed(Mean((stored("0", torch.randn(4, 4)),), "float32", (1,)), (4, 4))
    file = TargetFile("x", 16, [], [Hole(0, "w", slot, Extent((0, 0), (2, 2), 0, 4), "float32")])
    with refusing(LayoutError, "computed"):
        plan([file])


@pytest.mark.parametrize("start", [0, 3, 7])
def test_what_no_content_of_a_partition_holds_is_zero(start):
    values = torch.arange(1, 6.0)
    partition = end_to_end([(start, 5, 0, stored("x", values))], 12)
    with Sources() as sources:
        for _ in range(3):
            np.full(12, np.nan, np.float32)  # whose memory comes next
            found = read_extent(partition, partition.whole, sources)
            assert found.tolist() == [0] * start + values.tolist() + [0] * (7 - start)
