"""What `--memory` bounds: the buffers of all workers together, however many run, and of whatever executor."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import sleep

import numpy as np
import pytest
import torch

import zckpt
from tests.plans import file_of, hole_of, in_file, slot_of, write_directory
from zckpt.engine.plan import plan
from zckpt.engine.targets import TargetFile
from zckpt.engine.workers import LEAST_BUFFER_NBYTES, QUEUED, THREADS, Portions, Workers, budget, running_on
from zckpt.state import Extent, Span

MEBIBYTE = 1 << 20

BESIDES = 3 * MEBIBYTE
"""What is no buffer: pieces and batches that wait, threads, results."""


class Processes(Executor):
    """An executor of so many workers elsewhere; what it is given it runs at once."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor(1), ThreadPoolExecutor(48), Processes(1), Processes(64)])
@pytest.mark.parametrize("memory", [1, 100_000, 64 * 10**6])
def test_a_budget_is_divided_among_all_that_run_at_once(executor, memory):
    with running_on(executor):
        share = budget(memory, THREADS, buffers=4, most=8 * MEBIBYTE)
    assert share.at_once * share.nbytes * 4 <= max(memory, 4 * LEAST_BUFFER_NBYTES)
    if memory > MEBIBYTE and executor is not None:
        assert share.at_once == getattr(executor, "workers", None) or executor._max_workers


def test_no_more_run_at_once_than_a_budget_has_buffers_for():
    running, most, lock = 0, 0, Lock()

    def work(_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        sleep(0.002)
        with lock:
            running -= 1

    for executor in (None, ThreadPoolExecutor(8)):
        with running_on(executor), Workers(THREADS, at_once=3) as workers:
            assert len(list(workers.run(work, range(30), Portions()))) == 30
    assert most == 3


def test_a_few_batches_for_each_worker_are_made_ahead_of_what_is_done():
    made = done = most = 0

    def batches():
        nonlocal made, most
        for made in range(1, 201):
            most = max(most, made - done)
            yield made

    with Workers(THREADS, at_once=2) as workers:
        for _ in workers.run(lambda _: None, batches(), Portions()):
            done += 1
    assert done == made == 200
    assert 2 < most <= 2 * QUEUED + 1


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yield what tells the most memory that was taken within the context."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def cast_and_columns(path: Path) -> TargetFile:
    """A long tensor that is cast, and one whose columns are there in 8 slices."""
    rows = 12 << 10
    extents = [Extent((0, 16 * i), (rows, 16), 0, 16 * rows) for i in range(8)]
    slices = [Span(extent, str(path), 64 * i * rows, "float32") for i, extent in enumerate(extents)]
    cast = hole_of(slot_of(in_file(path, (3 * MEBIBYTE // 2,))), dtype="bfloat16")
    return file_of(cast, hole_of(slot_of(*slices, shape=(rows, 128)), cast.nbytes), name="x")


@pytest.mark.parametrize("threads", [None, 1, 16])
@pytest.mark.every(2)
def test_buffers_of_any_number_of_threads_stay_within_the_budget(threads):
    Path("s").write_bytes(np.random.default_rng(0).bytes(6 * MEBIBYTE))
    made = plan([cast_and_columns("s")])
    write_directory(made, "first")  # loads what is loaded once
    with running_on(None if threads is None else ThreadPoolExecutor(threads)):
        for memory in (2 * MEBIBYTE, 8 * MEBIBYTE):
            with traced() as peak:
                write_directory(made, "t", overwrite=True, memory=memory)
                assert peak() < memory + BESIDES
            assert Path("t/x").read_bytes() == Path("first/x").read_bytes()


def test_digests_and_a_deep_look_stay_within_the_budget():
    tensors = {"a": torch.randn(3 << 20), "b": torch.randn(3 << 20, dtype=torch.float64)}
    tensors["a"][7] = torch.nan
    torch.save(tensors, "m.pt")
    expected = zckpt.fingerprint("m.pt").text
    zckpt.verify("m.pt", deep=True)
    block = 2 * (1 << 18) * 8 * 4  # of doubles; a leaf is a leaf, whatever the budget
    for verb in (zckpt.fingerprint, lambda *given, **more: zckpt.verify(*given, deep=True, **more)):
        with traced() as peak:
            verb("m.pt", memory=2 * MEBIBYTE, executor=ThreadPoolExecutor(12))
            assert peak() < block + BESIDES
    assert zckpt.fingerprint("m.pt", memory=1, executor=ThreadPoolExecutor(12)).text == expected
    with running_on(ThreadPoolExecutor(12)):
        assert budget(2 * MEBIBYTE, THREADS, buffers=4, most=block, least=block).at_once == 1
