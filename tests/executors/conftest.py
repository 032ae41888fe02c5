"""A checkpoint of some megabytes, what threads make of it, and a Dask cluster of processes.

Tests here name files alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zckpt
from tests.cli.console import environment
from tests.executors.dying import MARK


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A torch file of 4 MB in 64 tensors."""
    path = tmp_path_factory.mktemp("source") / "model.pt"
    generator = torch.Generator().manual_seed(0)
    torch.save({f"layer{i}.weight": torch.randn(128, 128, generator=generator) for i in range(64)}, path)
    return path


@pytest.fixture(scope="session")
def written(source, tmp_path_factory) -> bytes:
    """What threads make of it."""
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    zckpt.consolidate(source, path)
    return path.read_bytes()


@contextmanager
def dask_cluster(folder: Path, workers: int) -> Iterator[str]:
    """Start a scheduler and workers, as a user does; yield what `--executor` calls them."""
    given = {**environment(), MARK: str(folder / "mark")}
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # a scheduler needs no zckpt
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    program = "from distributed.cli.dask_{0} import main; main()".format
    address = folder / "scheduler.json"
    of_scheduler = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", address]
    of_worker = ["--scheduler-file", address, "--nthreads", "1", "--no-nanny", "--no-dashboard",
                 "--local-directory", folder]  # fmt: skip
    processes = [subprocess.Popen([sys.executable, "-c", program("scheduler"), *of_scheduler], env=alone, **quiet)]
    worker = [sys.executable, "-c", program("worker"), *of_worker]
    processes += [subprocess.Popen(worker, env=given, **quiet) for _ in range(workers)]
    try:
        wait_until(lambda: address.exists() and address.read_bytes().endswith(b"}"))
        yield f"dask://{json.loads(address.read_bytes())['address'].removeprefix('tcp://')}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_until(true: object, seconds: float = 300) -> None:
    """Wait until a callable returns true."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)
