"""Every verb on a real Dask scheduler and real workers, of which one is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import FIXTURES, environment, run
from tests.executors import dying
from tests.executors.conftest import dask_cluster, names, wait_until
from tests.executors.dying import MARK
from zckpt.engine import write as written
from zckpt.executors.on_dask import DaskExecutor


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dask")
    with dask_cluster(folder, 3) as name:
        yield name, folder / "mark"


def test_worker_killed_midway_changes_no_bit(three, source, tmp_path, monkeypatch):
    name, mark = three
    zckpt.consolidate(source, tmp_path / "threads.safetensors")
    dying.small_tasks(monkeypatch.setattr)
    monkeypatch.setattr(written, "write_batch", dying.write_batch)
    with DaskExecutor(name.removeprefix("dask://")) as executor:
        wait_until(lambda: len(executor._client.nthreads()) == 3)
        executor.workers = 3
        zckpt.consolidate(source, tmp_path / "dask.safetensors", executor=executor)
        assert mark.exists()
        wait_until(lambda: len(executor._client.nthreads()) == 2)
    assert (tmp_path / "dask.safetensors").read_bytes() == (tmp_path / "threads.safetensors").read_bytes()
    assert names(tmp_path) == ["dask.safetensors", "threads.safetensors"]


def test_verbs_find_and_write_the_same_there(three, tmp_path):
    name, _ = three
    source = FIXTURES / "s2_bf16_dp4"
    for verb in (["reshard", source, tmp_path / "{}r", "--world-size", 3, "--quiet", "--verify"],
                 ["convert", source, tmp_path / "{}c", "--to", "zckpt", "--quiet"],
                 ["fingerprint", source], ["verify", source, "--deep"], ["diff", source, FIXTURES / "s2_bf16_dp2"],
                 ["average", source, source, "-t", tmp_path / "{}a.safetensors", "--quiet"]):  # fmt: skip
        here, there = (run(*(str(one).format(where) for one in verb), *more)
                       for where, more in (("here", ()), ("there", ("--executor", name))))  # fmt: skip
        assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr), verb
    assert files(tmp_path / "herer") == files(tmp_path / "therer") != {}
    assert files(tmp_path / "herec") == files(tmp_path / "therec") != {}
    assert (tmp_path / "herea.safetensors").read_bytes() == (tmp_path / "therea.safetensors").read_bytes()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_damage_found_by_a_worker_is_said_as_ever(three, source, tmp_path):
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    name, _ = three
    here, there = (run("consolidate", tmp_path / "bad.pt", tmp_path / "t.safetensors", *more)
                   for more in ((), ("--executor", name)))  # fmt: skip
    assert there.returncode == here.returncode == 3
    assert there.stderr == here.stderr
    assert names(tmp_path) == ["bad.pt"]


def running() -> int:
    """Return how many tasks of anyone a worker runs."""
    from zckpt.executors import on_dask

    return sum(on_dask._running.values())


def executing(dask_worker: object) -> bool:
    """Whether a worker counts a task of anyone as running."""
    return any(task.state in ("executing", "long-running") for task in dask_worker.state.tasks.values())


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_writes_on_when_the_driver_is_gone(number, three, source, tmp_path):
    from distributed import Client

    name, mark = three
    held, go, batches = (mark.with_name(one) for one in ("held", "go", "batches"))
    go.unlink(missing_ok=True)
    batches.write_bytes(b"")
    held.touch()
    words = [sys.executable, "-m", "tests.executors.dying", "consolidate", source, tmp_path / "t.safetensors"]
    given = {**environment(), MARK: str(mark)}
    with Client(name.replace("dask", "tcp"), set_as_default=False) as client:
        process = subprocess.Popen([*words, "--executor", name], env=given, stderr=subprocess.DEVNULL)
        wait_until(lambda: batches.stat().st_size > 1)
        process.send_signal(number)
        wait_until(lambda: not any(client.run(executing).values()))  # each worker knows, in the middle of a batch
        go.touch()
        wait_until(lambda: not any(client.run(running).values()))
        process.wait(timeout=60)
    held.unlink()
    assert batches.stat().st_size <= 3  # one of each worker, of four or more of each task
    assert not (tmp_path / "t.safetensors").exists()
    assert number == signal.SIGKILL or names(tmp_path) == []
