"""Every verb on a real Dask scheduler and real workers, of which one is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

import zckpt
from tests.cli.console import FIXTURES, environment, refused, run
from tests.executors import dying
from tests.executors.conftest import dask_cluster, wait_until
from tests.executors.dying import MARK
from tests.folders import contents, names_in
from zckpt.engine import write
from zckpt.executors import on_dask
from zckpt.executors.on_dask import DaskExecutor


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The name of one with two workers, until a test kills one, and the file that tells who has died."""
    folder = tmp_path_factory.mktemp("dask")
    with dask_cluster(folder, 2) as name:
        yield name, folder / "mark"


def test_verbs_find_and_write_the_same_there(cluster, tmp_path):
    name, _ = cluster
    source = FIXTURES / "s2_bf16_dp4"
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    for verb in (["reshard", source, "{}/reshard", "--world-size", 3, "--quiet", "--verify"],
                 ["convert", source, "{}/convert", "--to", "zckpt", "--quiet"],
                 ["fingerprint", source], ["verify", source, "--deep"], ["diff", source, FIXTURES / "s2_bf16_dp2"],
                 ["average", source, source, "-t", "{}/average.safetensors", "--quiet"]):  # fmt: skip
        its, theirs = (run(*(str(one).format(folder) for one in verb), *more)
                       for folder, more in ((here, ()), (there, ("--executor", name))))  # fmt: skip
        assert (its.returncode, its.stdout, its.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr), verb
    assert names_in(here) == ["average.safetensors", "convert", "reshard"]
    assert contents(here) == contents(there)


def test_damage_found_by_a_worker_is_said_as_ever(cluster, source, tmp_path):
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    words = ("consolidate", tmp_path / "bad.pt", tmp_path / "t.safetensors")
    assert refused(3, *words, "--executor", cluster[0]) == refused(3, *words)
    assert names_in(tmp_path) == ["bad.pt"]


def test_worker_killed_midway_changes_no_bit(cluster, source, written, tmp_path, monkeypatch):
    name, mark = cluster
    dying.small_tasks(monkeypatch.setattr)
    monkeypatch.setattr(write, "write_batch", dying.write_batch)
    with DaskExecutor(name.removeprefix("dask://")) as executor:
        wait_until(lambda: len(executor._client.nthreads()) == 2)
        executor.workers = 2
        zckpt.consolidate(source, tmp_path / "dask.safetensors", executor=executor)
        assert mark.exists()
        wait_until(lambda: len(executor._client.nthreads()) == 1)
    assert (tmp_path / "dask.safetensors").read_bytes() == written
    assert names_in(tmp_path) == ["dask.safetensors"]


@pytest.mark.parametrize("gone", ["workers", "scheduler"])
def test_without_workers_or_a_scheduler_it_ends_and_can_be_gone_on_with(gone, source, written, tmp_path, monkeypatch):
    from distributed import Client

    folder, target = tmp_path / "cluster", tmp_path / "out/t.safetensors"
    target.parent.mkdir()
    folder.mkdir()
    (folder / "slow").touch()
    words = [sys.executable, "-m", "tests.executors.dying", "consolidate", source, target]
    given = {**environment(), MARK: str(folder / "mark"), "DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT": "3s"}
    with dask_cluster(folder, 1) as name:
        with Client(name.replace("dask", "tcp"), set_as_default=False) as client:
            client.wait_for_workers(1)
            pids = list(client.run(os.getpid).values()) if gone == "workers" else [client.run_on_scheduler(os.getpid)]
        quiet = ["-q"] if gone == "scheduler" else []
        process = subprocess.Popen([*words, "--executor", name, *quiet], env=given, stderr=subprocess.PIPE, text=True)
        journal = target.with_name(".t.safetensors.zckpt-journal")
        wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 4)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 6
    assert "--resume continues" in said[-1]
    assert f"the scheduler {'has no workers' if gone == 'workers' else 'is gone'}" in said[-1]
    assert len(said) == (2 if gone == "workers" else 1), said
    assert f"{name} has no workers" in said[0] or gone == "scheduler"
    dying.small_tasks(monkeypatch.setattr)
    zckpt.consolidate(source, target, resume=True)
    assert target.read_bytes() == written


def test_a_scheduler_that_is_nowhere_is_named_and_waited_for_no_longer_than_said(source, tmp_path, monkeypatch):
    monkeypatch.setattr(on_dask, "CONNECTED_SECONDS", 0.3)
    (tmp_path / "none.json").write_text("[]")
    with socket.create_server(("127.0.0.1", 0)) as other:  # takes the call, as a dashboard does, and says nothing
        silent = f"127.0.0.1:{other.getsockname()[1]}"
        for name in (tmp_path / "no.json", tmp_path / "none.json", "127.0.0.1:1", silent):
            words = (f"{name}: cannot reach the Dask scheduler", "no answer of a scheduler" if name == silent else "")
            refused(6, "consolidate", source, tmp_path / "t.pt", "--executor", f"dask://{name}", words=words)
    assert names_in(tmp_path) == ["none.json"]


def running() -> int:
    """Return how many tasks of anyone a worker runs."""
    from zckpt.executors import on_dask

    return sum(on_dask._running.values())


def executing(dask_worker: object) -> bool:
    """Whether a worker counts a task of anyone as running."""
    return any(task.state in ("executing", "long-running") for task in dask_worker.state.tasks.values())


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_writes_on_when_the_driver_is_gone(number, cluster, source, tmp_path):
    from distributed import Client

    name, mark = cluster
    held, go, batches = (mark.with_name(one) for one in ("held", "go", "batches"))
    go.unlink(missing_ok=True)
    batches.write_bytes(b"")
    held.touch()
    words = [sys.executable, "-m", "tests.executors.dying", "consolidate", source, tmp_path / "t.safetensors"]
    given = {**environment(), MARK: str(mark)}
    with Client(name.replace("dask", "tcp"), set_as_default=False) as client:
        process = subprocess.Popen([*words, "--executor", name], env=given, stderr=subprocess.DEVNULL)
        wait_until(lambda: batches.stat().st_size > 0)
        process.send_signal(number)
        wait_until(lambda: not any(client.run(executing).values()))  # each worker knows, in the middle of a batch
        go.touch()
        wait_until(lambda: not any(client.run(running).values()))
        process.wait(timeout=60)
    held.unlink()
    assert batches.stat().st_size <= 2  # one of each worker, of four or more of each task
    assert not (tmp_path / "t.safetensors").exists()
    assert number == signal.SIGKILL or names_in(tmp_path) == []
