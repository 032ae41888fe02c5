"""Parameters that are cut over many files, read together: the same elements as by themselves, each file read once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import file_of, hole_of, read_slot
from tests.refusals import refusing
from zckpt.engine.copy import read_extent
from zckpt.engine.plan import Cut, fine_cut, plan
from zckpt.engine.scan import SlotSet, scan
from zckpt.engine.targets import Checksum, TargetFile
from zckpt.engine.together import PackedSlot, read_together
from zckpt.engine.write import write
from zckpt.errors import ZckptError
from zckpt.state import CutFiles, CutSpans, Extent, Slot
from zckpt.state.cuts import Cuts
from zckpt.state.dtypes import itemsize
from zckpt.state.partition import flat_starts, shard_numel
from zckpt.storage.files import Sources


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return what gets the path and the size of each read."""
    found: list[tuple[str, int]] = []
    plain = Sources.read

    def noted(sources: Sources, path: str, offset: int, buffer: memoryview) -> None:
        found.append((path, len(buffer)))
        plain(sources, path, offset, buffer)

    monkeypatch.setattr(Sources, "read", noted)
    return found


def shards(numels: list[int], ranks: int, dtype: str = "float32", gap: int = 0) -> list[Slot]:
    """Write a file for each rank, with its shard of each parameter, and return the parameters' slots."""
    rng = np.random.default_rng(0)
    starts = np.cumsum([0, *(shard_numel(numel, ranks) + gap for numel in numels)]).tolist()
    paths = tuple(f"{dtype}_{rank}" for rank in range(ranks))
    for rank, path in enumerate(paths):
        Path(path).write_bytes(bytes(rank % 7) + rng.bytes(starts[-1] * itemsize(dtype)))
    files = CutFiles(paths, tuple(rank % 7 for rank in range(ranks)), dtype)
    return [
        Slot("master", dtype, (numel,), CutSpans(files, (numel,), 0, shard_numel(numel, ranks), at))
        for numel, at in zip(numels, starts, strict=False)
    ]


@given(data=st.data())
def test_elements_are_those_that_are_read_one_by_one(data):
    ranks = data.draw(st.integers(1, 9))
    numels = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "float64", "complex128"]))
    slots = shards(numels, ranks, dtype, data.draw(st.sampled_from([0, 0, 1, 5000])))
    cuts, end = [], 0
    for slot in data.draw(st.permutations(slots)):
        start = data.draw(st.integers(0, slot.numel - 1))
        cuts.append(Cut(slot.spans, start, data.draw(st.integers(1, slot.numel - start)), end))  # type: ignore[arg-type]
        end = cuts[-1].end
    memory = bytearray(end)
    with Sources() as sources:
        read_together(cuts, memoryview(memory), sources, data.draw(st.sampled_from([1, 100, 1 << 20])))
        for one in cuts:
            slot = next(slot for slot in slots if slot.spans is one.spans)
            alone = read_extent(slot, Extent.flat(slot.shape, one.start, one.numel), sources)
            assert bytes(memory[one.position : one.end]) == alone.tobytes()


def test_a_line_that_parameters_share_is_read_alike():
    paths = tuple(str(rank) for rank in range(12))
    for path in paths:
        Path(path).write_bytes(np.random.default_rng(len(path)).bytes(10 * 4))
    files, origin, cuts = CutFiles(paths, (0,) * 12, "float32"), 0, []
    for shape in ((7, 5), (61,), (2, 3, 4)):
        spans = CutSpans(files, shape, origin, 10)
        cuts.append(Cut(spans, 0, math.prod(shape), origin * 4))
        origin += math.prod(shape)
    memory = bytearray(cuts[-1].end)
    with Sources() as sources:
        read_together(cuts, memoryview(memory), sources, 1 << 20)
    assert bytes(memory) == b"".join(Path(path).read_bytes() for path in paths)[: len(memory)]


def test_each_file_is_read_once(reads):
    slots = [*shards([300] * 50, 100), *shards([300] * 50, 100, "bfloat16")]
    cuts, end = [], 0
    for slot in slots:
        assert fine_cut(slot, Extent.whole(slot.shape))
        cuts.append(Cut(slot.spans, 0, slot.numel, end))  # type: ignore[arg-type]
        end = cuts[-1].end
    with Sources() as sources:
        read_together(cuts, memoryview(bytearray(end)), sources, 1 << 20)
    assert len(reads) == len({path for path, _ in reads}) == 200
    assert sum(nbytes for _, nbytes in reads) == end


def test_parts_of_a_parameter_are_read_at_once(reads):
    (slot,) = shards([300], 100)
    cuts = [Cut(slot.spans, start, 75, (225 - start) * 4) for start in (0, 75, 150, 225)]  # type: ignore[arg-type]
    memory = bytearray(1200)
    with Sources() as sources:
        read_together(cuts, memoryview(memory), sources, 1 << 20)
    assert len(reads) == 100
    alone = read_slot(slot).tobytes()
    assert bytes(memory) == b"".join(alone[start : start + 300] for start in (900, 600, 300, 0))


def test_a_scan_reads_what_is_cut_finely_together(reads):
    slots = shards([4000, 3, 129] * 20, 128)
    sets = [SlotSet(str(number), (slot,), ("float32",)) for number, slot in enumerate(slots)]
    found = dict(scan(sets, lambda index, start, arrays: arrays[0].copy()))
    assert len(reads) < 500  # of 20 * (125 + 3 + 65) spans
    for index, slot in enumerate(slots):
        assert found[index].tobytes() == read_slot(slot).tobytes()


@pytest.mark.parametrize("files", [1, 30])
def test_targets_of_what_is_cut_finely_are_read_together(reads, files):
    slots = shards([4000, 3, 129] * 20, 128)
    targets, expected = [], []
    for number in range(files):
        mine = slots[number * len(slots) // files : (number + 1) * len(slots) // files]
        holes, at = [], 0
        for slot, dtype in zip(mine, ["float32", "float64"] * len(mine), strict=False):
            holes.append(hole_of(slot, at, dtype))
            at += holes[-1].nbytes
        targets.append(file_of(*holes, name=str(number), checksums=[Checksum(0, at, ())]))
        expected.append(mine)
    planned = plan(targets)
    assert planned.read_nbytes == 4 * sum(slot.numel for slot in slots)
    assert planned.sources == {path for slot in slots for path in [span.path for span in slot.spans]}
    paths = [Path(f"target{number}") for number in range(files)]
    write(planned, paths)
    assert len(reads) < 1000  # of 20 * (125 + 3 + 65) spans
    for path, mine in zip(paths, expected, strict=True):
        with np.errstate(invalid="ignore"):
            wanted = [read_slot(slot).astype(np.float64 if i % 2 else np.float32) for i, slot in enumerate(mine)]
        assert path.read_bytes() == b"".join(one.tobytes() for one in wanted)


def test_shares_of_many_ranks_are_read_once_for_all(reads):
    numels, ranks = [4000, 3, 129] * 20, 64
    slots = shards(numels, 128)
    held = [shard_numel(numel, ranks) for numel in numels]
    rules = [slot.spans for slot in slots]
    files = rules[0].files  # type: ignore[attr-defined]
    row = PackedSlot("master", files, Cuts(rules), flat_starts(held)[:-1], held)  # type: ignore[arg-type]
    targets = [TargetFile(str(rank), 4 * sum(held), packs=[row.pack(rank)]) for rank in range(ranks)]
    paths = [Path(f"target{rank}") for rank in range(ranks)]
    write(plan(targets), paths)
    assert len(reads) < 1000  # 64 times as many, if each rank's are read by themselves
    values = [read_slot(slot) for slot in slots]
    for rank, path in enumerate(paths):
        wanted = []
        for value, share in zip(values, held, strict=True):
            one = value[rank * share : (rank + 1) * share]
            wanted.append(np.pad(one, (0, share - len(one))))
        assert path.read_bytes() == b"".join(one.tobytes() for one in wanted)


def test_values_that_overflow_a_cast_are_counted():
    (slot,) = shards([640], 64)
    for rank, span in enumerate(slot.spans):
        Path(span.path).write_bytes(bytes(rank % 7) + np.full(10, 1e9 if rank == 5 else 1, np.float32).tobytes())
    with refusing(ZckptError, "10 values of weight/w overflow float16"):
        write(plan([file_of(hole_of(slot, dtype="float16"))]), [Path("t")])
