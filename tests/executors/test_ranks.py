"""The command line on ranks that mpiexec and torchrun start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest

from tests.cli.console import command, environment
from tests.executors.dying import MARK, RANK
from tests.folders import names_in
from zckpt.engine.workers import WANTED
from zckpt.errors import WorkerError
from zckpt.executors import on_ranks
from zckpt.executors.asking import AskingExecutor

BIN = Path(sys.executable).parent
MPIEXEC = shutil.which("mpiexec", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")

LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "mpi": [MPIEXEC or "mpiexec", "-n"],
}


def launched(kind: str, ranks: int, module: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    if kind == "mpi" and MPIEXEC is None:
        pytest.fail("there is no mpiexec, which `mpich` of the extra `test` brings")
    words = [*LAUNCHERS[kind], str(ranks), *([sys.executable] if kind == "mpi" else []), "-m", module]
    words += map(str, (*arguments, *(["--executor", "mpi"] if kind == "mpi" else [])))
    given = {**environment(), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(words, env=given, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_ranks_write_what_threads_write(kind, source, written):
    done = launched(kind, 2, "zckpt", "consolidate", source, "ranks.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wrote ") == 1
    assert Path("ranks.safetensors").read_bytes() == written


@pytest.mark.nightly
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_error_of_the_first_rank_ends_all(kind):
    done = launched(kind, 3, "zckpt", "fingerprint", "absent")
    assert done.returncode == (1 if kind == "torchrun" else 3)
    assert done.stderr.count("cannot be opened") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_rank_that_is_killed_ends_all_nothing_has_the_name_and_it_can_be_gone_on_with(kind, source):
    Path("out").mkdir()
    target = Path("out/t.safetensors")
    given = {MARK: "mark", RANK: "1"}
    done = launched(kind, 4, "tests.executors.dying", "consolidate", source, target, **given)
    assert done.returncode != 0
    assert time.time() - Path("mark").stat().st_mtime < 120
    assert not target.exists()
    if kind == "torchrun":  # MPI kills the first rank, too
        assert "found rank 1 is gone" in done.stderr
        assert "--resume continues with them" in done.stderr
    assert launched(kind, 2, "zckpt", "consolidate", source, target, "--resume").returncode == 0
    assert names_in("out") == ["t.safetensors"]


def test_rank_that_is_lost_is_named_though_torchrun_ends_the_first_one_before_it_knows(monkeypatch):
    def gone(call):
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer")

    executor = AskingExecutor("rank", [gone], RuntimeError)
    future = executor.submit(int)
    on_ranks._ended(executor)
    with pytest.raises(BrokenExecutor, match="rank 0 is gone"):
        future.result()
    monkeypatch.setattr(on_ranks, "LAST_WORDS_SECONDS", 0)
    with pytest.raises(WorkerError, match="another rank has ended"):
        on_ranks._ended(AskingExecutor("rank", [], RuntimeError))


def test_own_task_of_the_first_rank_ends_where_another_is_lost():
    """Torchrun waits for 30 seconds."""

    def gone(call):
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer")

    def batches():
        while WANTED.get()():
            time.sleep(0.01)

    executor = object.__new__(on_ranks.RanksExecutor)
    AskingExecutor.__init__(executor, "rank", [executor._own, gone], RuntimeError)
    for future in [executor.submit(batches) for _ in range(2)]:  # one on each
        with pytest.raises(BrokenExecutor, match="rank 1 is gone"):
            future.result()


@pytest.mark.nightly
def test_ray_writes_what_threads_write(source, written, tmp_path):
    pytest.importorskip("ray")
    words = command("consolidate", source, tmp_path / "ray.safetensors", "--executor", "ray")
    subprocess.run(words, env=environment(), check=True, capture_output=True, timeout=600)
    assert Path("ray.safetensors").read_bytes() == written
