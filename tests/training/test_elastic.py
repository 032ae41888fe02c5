"""Ranks that are lost and added in an elastic run of torchrun: each restart resumes, at the ranks that are there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import run
from tests.training.elastic import EVERY
from tests.training.trainings import BY_NAME, Training

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

TIMEOUT = 600  # seconds in which a restart has to be over, on the busiest of machines


class Run:
    """A run of agents, one after the other, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, workers: int, *, port: int = 0, memory: Path | None = None) -> subprocess.Popen[bytes]:
        """Start an agent; those of one port are of one run. `memory` is where its node keeps spares."""
        rendezvous = [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={port or len(self.agents)}"]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", f"--nproc-per-node={workers}",
            "--max-restarts=3", "--rdzv-backend=c10d", *rendezvous,
            "--rdzv-conf=last_call_timeout=1", "--local-addr=localhost", "-m", "tests.training.elastic",
            str(self.directory), *([] if memory is None else ["spare"]),
        ]  # fmt: skip
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or torch lets no agent join later
        if memory is not None:
            memory.mkdir(exist_ok=True)
            environment["SPARE_IN"] = str(memory)
        with (self.directory / f"agent{len(self.agents)}").open("wb") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        self.agents.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and its workers, as when its node is lost."""
        for pid in [agent.pid, *workers_of(agent)]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def steps(self) -> list[dict[str, Any]]:
        """Return what has been written down of each step."""
        path = self.directory / "steps"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, holds: Callable[[list[dict[str, Any]]], object], what: str) -> list[dict[str, Any]]:
        """Wait for steps, and return them."""
        deadline = time.monotonic() + TIMEOUT
        while not holds(found := self.steps()):
            logs = [path.read_text()[-3000:] for path in sorted(self.directory.glob("agent*"))]
            assert time.monotonic() < deadline, "\n".join([f"not {what}", str(found[-3:]), *logs])
            time.sleep(0.1)
        return found

    def end(self) -> None:
        """End what is left of it; workers of an agent that is killed are in its session."""
        for agent in self.agents:
            if agent.poll() is None:
                for pid in [*workers_of(agent), agent.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            agent.wait()


def workers_of(agent: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of an agent's workers."""
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


@pytest.fixture
def elastic(tmp_path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.end()


def unbroken(rank, world_size, steps: int) -> list[float]:
    return Training.of(BY_NAME["zero2-plain-float32"]).train(range(steps))


def test_ranks_that_are_killed_and_added_go_on_where_the_run_was(elastic):
    agent = elastic.start(2)
    elastic.until(lambda steps: steps and steps[-1]["step"] >= EVERY + 2, "trained")
    os.kill(workers_of(agent)[1], signal.SIGKILL)  # then the agent starts all again
    again = elastic.until(
        lambda steps: steps[-1]["first"] > 0 and steps[-1]["step"] >= steps[-1]["first"] + 2, "started again"
    )
    assert again[-1]["first"] % EVERY == 0
    agent.send_signal(signal.SIGTERM)  # which it hands on, and the workers save
    agent.wait(TIMEOUT)
    last = elastic.steps()[-1]["step"]
    agent = elastic.start(3)
    more = elastic.until(lambda steps: steps[-1]["ranks"] == 3 and steps[-1]["step"] > last + 2, "more ranks")
    assert more[-1]["first"] == last  # no step was lost
    (elastic.directory / "enough").touch()
    assert agent.wait(TIMEOUT) == 0
    assert_unbroken(elastic)


@pytest.fixture
def memory(tmp_path) -> Iterator[Path]:
    """A directory in memory, which is there as long as the test is."""
    within = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    made = Path(tempfile.mkdtemp(dir=within, prefix="zckpt-test-"))
    yield made
    shutil.rmtree(made)


def since(count: int, ranks: int) -> Callable[[list[dict[str, Any]]], object]:
    """Two steps have been taken by so many ranks, after the steps that are known."""
    return lambda steps: len(steps) >= count + 2 and all(one["ranks"] == ranks for one in steps[-2:])


def assert_none_is_lost(before: dict[str, Any], steps: list[dict[str, Any]], *, sending: int = 0) -> None:
    """The last step that was told before a kill, or one that was kept and not told any more, was gone on from.

    Of a node that is lost, `sending` that were on their way to the next one may be lost with it.
    """
    first = steps[-1]["first"]
    told = [one["step"] for one in steps if one["first"] != first]
    assert told[-1] - sending <= first <= told[-1] + 1
    assert first >= before["step"] - sending


def test_workers_that_are_killed_lose_no_step(elastic, memory):
    agent = elastic.start(2, memory=memory / "a")
    for number in range(2):
        known = elastic.until(lambda steps: steps and steps[-1]["step"] >= steps[-1]["first"] + 3, "trained")
        os.kill(workers_of(agent)[number], signal.SIGKILL)
        count, first = len(known), known[-1]["first"]
        steps = elastic.until(lambda steps: steps[-1]["first"] > first, "started again")  # noqa: B023
        assert_none_is_lost(known[count - 1], steps)
    (elastic.directory / "enough").touch()
    assert agent.wait(TIMEOUT) == 0
    assert_unbroken(elastic)
    assert not list((memory / "a").rglob("*.safetensors"))


def test_agents_that_are_lost_and_added_lose_no_step(elastic, memory):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    first = elastic.start(2, port=port, memory=memory / "a")
    elastic.until(lambda steps: steps, "trained")
    second = elastic.start(1, port=port, memory=memory / "b")
    before = elastic.until(lambda steps: since(0, 3)(steps) and steps[-1]["step"] > steps[-1]["first"] + 2, "joined")
    elastic.kill(second)
    shutil.rmtree(memory / "b")
    steps = elastic.until(since(len(before), 2), "gone on without it")
    assert_none_is_lost(before[-1], steps, sending=1)
    third = elastic.start(2, port=port, memory=memory / "c")
    again = elastic.until(since(len(steps), 4), "gone on with another")
    assert_none_is_lost(steps[-1], again)
    (elastic.directory / "enough").touch()
    assert [first.wait(TIMEOUT), third.wait(TIMEOUT)] == [0, 0]
    assert_unbroken(elastic)


def assert_unbroken(elastic: Run) -> None:
    steps = elastic.steps()
    expected = run(unbroken, 2, max(one["step"] for one in steps))[0]
    assert [one["loss"] for one in steps] == pytest.approx([expected[one["step"] - 1] for one in steps], rel=1e-5)
