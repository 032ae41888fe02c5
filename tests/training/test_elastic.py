"""Ranks that are lost and added in an elastic run of torchrun: each restart resumes, at the ranks that are there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import run
from tests.training.elastic import EVERY
from tests.training.trainings import BY_NAME, Training

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

TIMEOUT = 120  # seconds in which a restart has to be over


class Run:
    """A run of agents, one after the other, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, workers: int) -> subprocess.Popen[bytes]:
        """Start an agent."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", f"--nproc-per-node={workers}",
            "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={len(self.agents)}",
            "--rdzv-conf=last_call_timeout=1", "--local-addr=localhost", "-m", "tests.training.elastic",
            str(self.directory),
        ]  # fmt: skip
        with (self.directory / f"agent{len(self.agents)}").open("wb") as log:
            self.agents.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        return self.agents[-1]

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
def elastic(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.end()


def unbroken(rank: int, world_size: int, steps: int) -> list[float]:
    return Training.of(BY_NAME["zero2-plain-float32"]).train(range(steps))


def test_ranks_that_are_killed_and_added_go_on_where_the_run_was(elastic: Run) -> None:
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
    steps = elastic.steps()
    expected = run(unbroken, 2, max(one["step"] for one in steps))[0]
    assert [one["loss"] for one in steps] == pytest.approx([expected[one["step"] - 1] for one in steps], rel=1e-5)
