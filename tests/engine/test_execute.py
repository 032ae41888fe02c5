"""Plans that run on real files: every byte in its place, whatever the budget of memory and whoever runs the copies."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.folders import names_in
from tests.pairwise import each
from tests.plans import Counter, file_of, hole_of, in_file, noise, part_of, slot_of, stored, write_directory
from tests.refusals import refusing
from tests.strategies import extents, shapes, storages, tilings
from zckpt.engine.cast import numpy_dtype
from zckpt.engine.copy import elements, pieces
from zckpt.engine.plan import Fill, Plan, fill, plan
from zckpt.engine.targets import Checksum, Hole, Literal, TargetFile
from zckpt.engine.workers import BATCH_NBYTES, LEAST_BUFFER_NBYTES, running_on
from zckpt.engine.write import BUFFER_NBYTES
from zckpt.errors import DamagedFileError, SourceError, UnsupportedError
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.operations.target import write_target
from zckpt.state import Extent, Slot, Span
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import Sources
from zckpt.torchfile import OrderedMapping

BUDGETS = [1, 4 << 10, 1 << 20, 64 << 20]


def written(slot: Slot, target: Path, *, dtype: str | None = None, **options: object) -> np.ndarray:
    """Execute a plan that writes one slot; return the target's elements in the slot's shape."""
    write_target(plan([file_of(hole_of(slot, dtype=dtype))]), target, **options)
    return np.fromfile(target, numpy_dtype(dtype or slot.dtype)).reshape(slot.shape)


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        yield pool


# --- the right bytes in the right place -------------------------------------------------------------------------

SIZES = [0, 1, 2, 4095, 4096, 4097, BUFFER_NBYTES - 1, BUFFER_NBYTES + 1, BATCH_NBYTES, BATCH_NBYTES + 1,
         3 * BATCH_NBYTES]  # fmt: skip


@pytest.mark.parametrize("nbytes", SIZES)
def test_run_of_any_length_is_copied(nbytes):
    data = np.frombuffer(random.Random(nbytes).randbytes(nbytes), np.uint8)
    assert written(slot_of(stored("s", data, before=3)), "t").tobytes() == data.tobytes()


@pytest.mark.parametrize("memory", BUDGETS)
def test_budget_of_memory_does_not_change_a_byte(memory):
    data = noise(1_000_003)
    slot = slot_of(stored("s", data, before=5))
    assert np.array_equal(written(slot, "as it is", memory=memory), data)
    cast = written(slot, "cast", memory=memory, dtype="bfloat16")
    assert np.array_equal(cast, data.astype(numpy_dtype("bfloat16")))


def test_holes_and_literals_fill_the_file_as_laid_out():
    a, b = noise(10), noise(7, "float16")
    slots = [slot_of(stored("a", a, before=1)), slot_of(stored("b", b, before=9))]
    file = TargetFile("t", 80, [Literal(0, b"head"), Literal(58, b"middle"), Literal(78, b"ok")])
    file.holes = [hole_of(slots[0], 8), hole_of(slots[1], 64)]
    write_target(plan([TargetFile.of("index", b"index"), file]), "t")
    found = Path("t").read_bytes()
    assert found == b"head" + bytes(4) + a.tobytes() + bytes(10) + b"middle" + b.tobytes() + b"ok"
    assert Path("index").read_bytes() == b"index"


def test_one_source_is_read_for_several_files_each_of_which_is_under_its_name():
    data = noise(100)
    slot = slot_of(stored("s", data))
    made = plan([file_of(hole_of(slot), name="zero/w/fp32.pt"), file_of(hole_of(slot, dtype="float16"), name="x")])
    write_directory(made, "t")
    assert Path("t/zero/w/fp32.pt").read_bytes() == data.tobytes()
    assert Path("t/x").read_bytes() == data.astype(np.float16).tobytes()


def sliced(whole: np.ndarray, dim: int, ranks: int, folder: Path | str = "") -> Slot:
    """Cut a tensor along a dimension, one file a rank."""
    at, spans = 0, []
    for rank, part in enumerate(np.array_split(whole, ranks, dim)):
        span = stored(Path(folder, f"rank{rank}"), np.ascontiguousarray(part), before=rank)
        offsets = tuple(at if d == dim else 0 for d in range(whole.ndim))
        spans.append(replace(span, extent=Extent(offsets, part.shape, 0, part.size)))
        at += part.shape[dim]
    return slot_of(*spans, shape=whole.shape)


LONG_ROWS = (3, 200_000), 1
"""Larger than the budget."""


@pytest.mark.parametrize(("memory", "cut"), each(BUDGETS, [LONG_ROWS, *(((37, 61, 53), dim) for dim in (1, 2, 0))]))
def test_tensor_parallel_slices_are_put_together(cut, memory):
    shape, dim = cut
    whole = noise(math.prod(shape)).reshape(shape)
    slot = sliced(whole, dim, 4)
    assert np.array_equal(written(slot, "t", memory=memory), whole)
    assert np.array_equal(written(slot, "c", memory=memory, dtype="float16"), whole.astype(np.float16))


def test_more_sources_than_a_worker_keeps_open():
    whole = noise(500)
    assert np.array_equal(written(sliced(whole, 0, 100), "t"), whole)


@given(st.data(), shapes(), st.sampled_from([4, 8, 12, 40, 100, 10_000]))
def test_pieces_of_any_part_of_any_layout_fill_the_hole_within_their_bound(data, shape, most):
    tensor, extent = np.arange(math.prod(shape), dtype="<i4").reshape(shape), data.draw(extents(shape))
    with tempfile.NamedTemporaryFile() as file:
        spans = []
        for tile in data.draw(tilings(shape)):
            spans.append(Span(tile, file.name, file.tell(), "int32"))
            file.write(part_of(tensor, tile).tobytes())
        file.flush()
        hole = Hole(100, "w", slot_of(*spans, shape=shape), extent, "int32")
        found = sorted(pieces(Fill(hole, tuple(fill(hole))), most, most), key=lambda piece: piece.offset)
        with Sources() as sources:
            content = [bytes(elements(piece, sources)) for piece in found]
    assert b"".join(content) == part_of(tensor, extent).tobytes()
    assert [piece.nbytes for piece in found] == [len(data) for data in content]
    assert all(0 < piece.nbytes <= most for piece in found)


# --- other element types, orders and layouts of the source ------------------------------------------------------


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_on_the_way_is_torchs(source, target):
    data = noise(10_001, source)
    found = written(slot_of(stored("s", data)), "t", dtype=target, memory=1)
    expected = torch.frombuffer(bytearray(data.tobytes()), dtype=getattr(torch, source)).to(getattr(torch, target))
    assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_cast_that_is_not_done_leaves_nothing_behind(dtype):
    slot = slot_of(stored("s", np.zeros(5, dtype)))
    with pytest.raises(UnsupportedError):
        written(slot, "t", dtype="float32")
    assert names_in() == ["s"]


@pytest.mark.parametrize("dtype", ["int16", "float32", "float64", "int64", "complex64", "complex128", "uint8", "bool"])
def test_big_endian_source_is_turned(dtype):
    data = (np.random.default_rng(0).standard_normal(5000) * 100).astype(np.dtype(dtype).newbyteorder(">"))
    span = replace(stored("s", data, before=2), byteorder="big")  # bytes have no order of their own
    assert np.array_equal(written(slot_of(span), "t", memory=1), data.astype(dtype))


def test_big_endian_bfloat16_is_turned_and_cast():
    data = noise(100, "bfloat16")
    span = replace(stored("s", data.view(np.uint16).astype(">u2")), dtype="bfloat16")
    assert np.array_equal(written(slot_of(span), "t", dtype="float32"), data.astype(np.float32))


def viewed(view: torch.Tensor, folder: Path | str = "", before: int = 3) -> Slot:
    """Store what a view looks at, as torch.save does, and return the slot of the view."""
    file = Path(folder, "s")
    stored(file, torch.tensor([], dtype=torch.uint8).set_(view.untyped_storage()).numpy(), before=before)
    offset = before + view.storage_offset() * view.itemsize
    dtype = str(view.dtype).removeprefix("torch.")
    return slot_of(in_file(file, tuple(view.shape), dtype, offset, strides=tuple(view.stride())))


VIEWS = {
    "transposed": lambda: torch.randn(300, 200).t(),
    "permuted": lambda: torch.randn(20, 30, 40).permute(2, 0, 1),
    "channels last": lambda: torch.randn(8, 3, 16, 16).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(50, 1).expand(50, 400),
    "expanded from a number": lambda: torch.randn(()).expand(100, 100),
    "every third": lambda: torch.randn(9000)[::3],
    "one column": lambda: torch.randn(1000, 50)[:, 7],
    "inner block": lambda: torch.randn(60, 70, 80)[3:50, 10:20, 5:7],
    "diagonal": lambda: torch.randn(500, 500).diagonal(),
    "unfolded, overlapping": lambda: torch.randn(1000).unfold(0, 10, 1),
}


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_view_is_written_in_row_major_order(view, memory):
    torch.manual_seed(0)
    tensor = view()
    slot = viewed(tensor)
    assert np.array_equal(written(slot, "t", memory=memory), tensor.numpy())
    assert np.array_equal(written(slot, "c", memory=memory, dtype="float16"), tensor.half().numpy())


@given(st.data(), shapes(empty=False))
def test_tensor_with_any_strides_is_written_in_row_major_order(data, shape):
    strides, numel = data.draw(storages(shape))
    storage = torch.arange(numel, dtype=torch.int32)
    tensor = storage.as_strided(shape, strides)
    assert np.array_equal(written(viewed(tensor), "t", memory=1, overwrite=True), tensor.numpy())


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_are_averaged(dtype, memory):
    several = [noise(30_000, dtype) * numpy_dtype(dtype).type(i + 1) for i in range(3)]
    spans = [stored(f"s{i}", one, before=i) for i, one in enumerate(several)]
    slot = replace(slot_of(spans[0]), replicas=tuple((span,) for span in spans[1:]))
    total = sum(torch.from_numpy(one.astype(np.float32)) for one in several)
    expected = (total / 3).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(written(slot, "t", memory=memory).astype(np.float32), expected)


# --- checksums --------------------------------------------------------------------------------------------------


def checked(slot: Slot, target: str, **options: object) -> None:
    """Write a slot and its checksum, in two places, and compare it with zlib's."""
    nbytes = slot.nbytes
    file = TargetFile("t", nbytes + 20, [Literal(0, b"head"), Literal(nbytes + 4, b"tail")], [hole_of(slot, 4)])
    file.checksums = [Checksum(4, 4 + nbytes, (nbytes + 8, nbytes + 12)), Checksum(0, nbytes + 8, (nbytes + 16,))]
    write_target(plan([file]), target, **options)
    found = Path(target).read_bytes()
    data, places = found[4 : 4 + nbytes], found[nbytes + 8 :]
    assert places[:8] == zlib.crc32(data).to_bytes(4, "little") * 2
    assert places[8:] == zlib.crc32(b"head" + data + b"tail").to_bytes(4, "little")


@pytest.mark.parametrize(("nbytes", "memory"), each(SIZES[1:], BUDGETS))
def test_checksum_of_a_run(nbytes, memory):
    data = np.frombuffer(random.Random(1).randbytes(nbytes), np.uint8)
    checked(slot_of(stored("s", data)), "t", memory=memory)


@pytest.mark.parametrize("memory", BUDGETS)
def test_checksum_of_interleaved_slices(memory):
    checked(sliced(noise(90 * 110 * 30).reshape(90, 110, 30), 1, 4), "t", memory=memory)


def test_checksum_of_nothing():
    slot = Slot("weight", "float32", (0,), ())
    file = TargetFile("t", 8, [Literal(0, b"abcd")], [hole_of(slot, 4)], [Checksum(4, 4, (4,))])
    write_target(plan([file]), "t")
    assert Path("t").read_bytes() == b"abcd" + bytes(4)


def test_checksum_over_a_gap_that_nothing_fills():
    data = noise(10)
    file = TargetFile("t", 100, [Literal(0, b"head")], [hole_of(slot_of(stored("s", data)), 20)])
    file.checksums = [Checksum(0, 90, (96,))]
    write_target(plan([file]), "t")
    found = Path("t").read_bytes()
    assert found[96:] == zlib.crc32(b"head" + bytes(16) + data.tobytes() + bytes(30)).to_bytes(4, "little")


@pytest.mark.parametrize("memory", BUDGETS)
def test_archive_passes_every_reader_of_zip_files(memory):
    whole = noise(300 * 400).reshape(300, 400)
    tree = OrderedMapping()
    tree["plain"] = torch_writer.SlotTensor(slot_of(stored("plain", noise(50_000))), "float32", "plain")
    tree["cast"] = torch_writer.SlotTensor(slot_of(stored("cast", noise(50_000))), "bfloat16", "cast")
    tree["sliced"] = torch_writer.SlotTensor(sliced(whole, 1, 3), "float32", "sliced")
    write_target(plan([torch_writer.lay_out("m.pt", tree)]), "m.pt", memory=memory)
    assert zipfile.ZipFile("m.pt").testzip() is None
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", "m.pt"], check=True, capture_output=True)
    for mmap in (False, True):
        loaded = torch.load("m.pt", weights_only=True, mmap=mmap)
        assert np.array_equal(loaded["plain"].numpy(), noise(50_000))
        assert torch.equal(loaded["cast"], torch.from_numpy(noise(50_000)).bfloat16())
        assert np.array_equal(loaded["sliced"].numpy(), whole)


# --- who runs the copies ----------------------------------------------------------------------------------------


def everything(folder: Path | str = "") -> tuple[Plan, bytes]:
    """Return a plan of large, cast, strided and interleaved copies, and the bytes it writes."""
    large, whole = noise(3_000_000), noise(200 * 300).reshape(200, 300)
    turned = torch.from_numpy(noise(120 * 50)).reshape(120, 50).t()
    slots = [slot_of(stored(Path(folder, "large"), large)), sliced(whole, 1, 3, folder), viewed(turned, folder)]
    holes, at = [], 0
    for slot, dtype in zip(slots, ["float32", "bfloat16", "float32"], strict=True):
        holes.append(hole_of(slot, at, dtype))
        at += holes[-1].nbytes
    expected = large.tobytes() + whole.astype(numpy_dtype("bfloat16")).tobytes() + turned.contiguous().numpy().tobytes()
    file = TargetFile("t", at + 4, holes=holes, checksums=[Checksum(0, at, (at,))])
    return plan([file]), expected + zlib.crc32(expected).to_bytes(4, "little")


@pytest.mark.parametrize("workers", [None, 1, 3, 16, "processes"])
def test_executors_of_the_callers_write_the_same_bytes_and_are_left_running(workers, processes, tmp_path):
    made, expected = everything(tmp_path)
    pool = ThreadPoolExecutor(workers) if isinstance(workers, int) else processes
    with running_on(None if workers is None else pool):
        write_target(made, tmp_path / "t")
    assert pool.submit(sum, [1, 2]).result() == 3
    assert Path("t").read_bytes() == expected


def test_error_in_another_process_arrives_as_it_is(processes, tmp_path):
    slot = slot_of(stored(tmp_path / "s", noise(100)))
    os.truncate("s", 200)
    match = r"s: the file ends too early: expected at least 400 bytes, found 200"
    with running_on(processes), refusing(DamagedFileError, match):
        written(slot, tmp_path / "t")
    assert names_in() == ["s"]


class Slow(ThreadPoolExecutor):
    """Two threads that take their time with all tasks but the first; knows all its futures."""

    def __init__(self) -> None:
        super().__init__(2)
        self.futures: list[Future[object]] = []

    def submit(self, task, *args):
        wait = 0.05 if self.futures else 0
        self.futures.append(super().submit(lambda: (time.sleep(wait), task(*args))[1]))
        return self.futures[-1]


def test_no_copy_runs_on_after_a_failure():
    """A copy still running could write into the file of the next attempt."""

    class Fails(Counter):
        def advance(self, nbytes):
            raise RuntimeError("stop")

    slot = slot_of(stored("s", np.zeros(4 * BATCH_NBYTES, np.uint8)))
    with Slow() as pool:
        with running_on(pool), pytest.raises(RuntimeError, match="stop"):
            written(slot, "t", reporter=Fails())
        assert len(pool.futures) > 1
        assert all(future.done() for future in pool.futures)


# --- progress ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", BUDGETS)
def test_progress_adds_up_to_what_was_announced(memory):
    made, _ = everything()
    counter = Counter()
    write_target(made, "t", reporter=counter, memory=memory)
    assert counter.told[0] == ("begin", made.copy_nbytes)
    assert counter.told[-1] == ("end", 0)
    steps = counter.told[1:-1]
    assert {what for what, _ in steps} == {"advance"}
    assert sum(nbytes for _, nbytes in steps) == made.copy_nbytes


def test_large_copy_is_reported_in_many_steps():
    counter = Counter()
    written(slot_of(stored("s", np.zeros(5 * BATCH_NBYTES, np.uint8))), "t", reporter=counter)
    assert counter.told.count(("advance", BATCH_NBYTES)) == 5


# --- sources that changed since they were planned ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"], ids=["as it is", "cast"])
@pytest.mark.parametrize("kept", [0, 399, BUFFER_NBYTES])
def test_source_truncated_after_planning_leaves_nothing_behind(kept, dtype):
    slot, counter = slot_of(stored("s", noise(BUFFER_NBYTES))), Counter()
    made = plan([file_of(hole_of(slot, dtype=dtype))])
    os.truncate("s", kept)
    with refusing(DamagedFileError, "ends too early"):
        write_target(made, "t", reporter=counter)
    assert names_in() == ["s"]
    assert (counter.told[0], counter.told[-1]) == (("begin", made.copy_nbytes), ("end", 0))


@pytest.mark.parametrize("view", ["one column", "transposed"])
def test_truncated_source_of_a_view_leaves_nothing_behind(view):
    slot = viewed(VIEWS[view]())
    os.truncate("s", Path("s").stat().st_size // 2)
    with refusing(DamagedFileError, "ends too early"):
        written(slot, "t")
    assert names_in() == ["s"]


def test_source_that_is_removed_or_becomes_a_directory_leaves_nothing_behind():
    slot = slot_of(stored("s", noise(100)))
    Path("s").unlink()
    with refusing(SourceError, "cannot be opened: found No such file"):
        written(slot, "t")
    Path("s").mkdir()
    with refusing(SourceError, "is not a regular file"):
        written(slot, "t")
    assert names_in() == ["s"]


# --- memory -----------------------------------------------------------------------------------------------------


def test_smallest_budget_still_reads_more_than_a_page_at_once():
    """A budget of one byte is met as closely as makes sense, not with a read for every element."""
    slot = slot_of(stored("s", noise(1 << 20)))
    hole = hole_of(slot, dtype="float16")
    found = pieces(Fill(hole, tuple(fill(hole))), LEAST_BUFFER_NBYTES, 1)
    assert len(list(found)) == (1 << 22) // LEAST_BUFFER_NBYTES
    assert itemsize("float32") * len(written(slot, "t", memory=1)) == 1 << 22
