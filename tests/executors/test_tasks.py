"""What is sent to other processes, what they refuse, and what becomes of those that are lost."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import command, environment, refused
from tests.executors import dying
from tests.folders import names_in
from tests.refusals import refusing
from zckpt.engine import workers, write
from zckpt.engine.workers import Known, Portions, results_of, tasks_of
from zckpt.errors import MissingPackageError, UsageError, WorkerError
from zckpt.executors.launch import launched
from zckpt.storage import journal


def test_tasks_are_consecutive_batches_of_fewer_and_fewer_bytes():
    portions = Portions(1000 << 20, lambda batch: batch << 20)
    made = list(tasks_of(int, [5] * 200, portions, 5))
    assert [batch for task in made for batch in task.batches] == [5] * 200
    sizes = [len(task.batches) for task in made]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-5:-1]) == (20, [13] * 4)  # a tenth of all, then of what is left; 65 MB at the end
    assert len(sizes) < 18
    assert max(len(task.batches) for task in tasks_of(int, [0] * 200, portions, 5)) == workers.TASK_BATCHES


@pytest.mark.parametrize("number", [1, 1000])
def test_tasks_are_neither_tiny_nor_endless(number):
    portions = Portions(1 << 40, lambda batch: batch << 20)
    made = list(tasks_of(int, [8] * 64, replace(portions, total=(64 << 23) // number), number))
    nbytes = {sum(task.batches) << 20 for task in made}
    assert max(nbytes) <= workers.TASK_NBYTES
    assert min(nbytes) >= workers.LEAST_TASK_NBYTES


def test_worker_that_sees_another_file_stops():
    path = Path("s")
    path.write_bytes(bytes(10))
    portions = Portions(10, lambda _: 10, lambda _: [str(path), "absent"])
    (task,) = tasks_of(len, ["abc"], portions, 1)
    assert results_of(task) == [3]
    os.utime(path, (1, 1))
    with refusing(WorkerError, r"s: is another file on .*expected last changed at"):
        results_of(task)
    path.write_bytes(bytes(9))
    with refusing(WorkerError, "expected 10 bytes, found 9; all workers need one file system"):
        results_of(task)
    path.unlink()
    with refusing(WorkerError, "s: does not exist on "):
        results_of(task)


def test_worker_with_another_version_stops():
    (task,) = tasks_of(len, ["abc"], Portions(), 1)
    with refusing(WorkerError, r"has another version of zckpt: expected 0\.0"):
        results_of(replace(task, version="0.0"))


def test_target_that_is_not_there_is_not_made():
    known = Known("t", 5, None)
    with refusing(WorkerError, "t: does not exist"):
        known.check()
    Path("t").write_bytes(bytes(5))
    known.check()


def test_what_is_written_elsewhere_is_synced_there_and_what_is_written_here_by_the_driver(monkeypatch):
    Path("t").write_bytes(bytes(5))
    portions = Portions(5, lambda _: 5, lambda _: (), lambda _: ["t"])
    (task,) = tasks_of(len, ["abc"], portions, 1)
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append, raising=False)
    assert results_of(task) == [3]
    assert not synced or workers._kernel() is None
    with monkeypatch.context() as patched:
        patched.setattr(workers, "_kernel", lambda: "another machine")
        assert results_of(task) == [3]
    Path("u").write_bytes(bytes(5))
    Path("u").rename("t")  # another file, of the same size
    assert results_of(task) == [3]
    assert len(synced) >= 2


def test_lost_process_leaves_nothing_behind(source, monkeypatch):
    dying.small_tasks(monkeypatch.setattr)
    monkeypatch.setattr(journal, "LEAST_NBYTES", 1 << 40)  # or what the other one has written may be kept to go on with
    monkeypatch.setattr(write, "write_batch", dying.write_batch)
    Path("out").mkdir()
    monkeypatch.setenv(dying.MARK, "mark")
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        refusing(WorkerError, "workers were lost"),
    ):
        zckpt.consolidate(source, "out/t.safetensors", executor=pool)
    assert names_in("out") == []


SECRETS = ["dask://user:secret@127.0.0.1:9", "dask://127.0.0.1:9?token=secret"]


@pytest.mark.parametrize("name", ["dask://", "threads:2", "DASK://h:1", *SECRETS])
def test_unknown_executor_is_refused_before_anything(name, source):
    words = ("no such executor", "expected threads, processes, dask://HOST:PORT, mpi, ray or torchrun")
    assert "secret" not in refused(2, "consolidate", source, "t.pt", ["--executor", name], words=words)
    for unknown in (name, ""):
        with pytest.raises(UsageError):
            zckpt.fingerprint(source, executor=unknown)


def test_missing_package_is_named(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refusing(MissingPackageError, r"--executor=ray needs the package ray.*zckpt\[ray\]"):
        zckpt.fingerprint(source, executor="ray")


def test_ranks_that_nobody_started(source, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    refused(2, "fingerprint", source, "--executor", "torchrun", words=("torchrun --nproc-per-node N -m zckpt",))


def test_command_that_a_rank_of_a_training_starts_is_no_rank(source):
    ranks = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        command("fingerprint", source), env=environment() | ranks, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("zckpt1:"), done.stderr
    with launched(["verify", "x"]) as has_worked:
        assert not has_worked
