"""Ranks as processes: fork them with DeepSpeed already imported, join them by gloo, bring back what they say.

A fork server imports DeepSpeed once (seconds) and forks every rank from itself (milliseconds), so that
the calling process needs neither DeepSpeed nor to be safe to fork.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT = 100  # seconds a rank waits for its peers; then it says itself where it waited
TIMEOUT = 180  # seconds for the whole run
GRACE = 2.0  # seconds that the other ranks get to report, too, once one has failed

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.deepspeed_engine.preload"])


def _start_server() -> None:
    """Start the fork server where it finds this package: Python 3.11's ignores the caller's sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class WorkerError(RuntimeError):
    """A rank failed, died or hung; the message holds the tracebacks and the end of the rank's output."""


def run(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Run `function(rank, world_size, *args)` on `world_size` gloo ranks and return what each returned.

    `function` must be importable by name; arguments and results travel by pickle.

    Raises
    ------
    WorkerError
        With every failing rank's traceback.
    """
    _start_server()
    with tempfile.TemporaryDirectory(prefix="zckpt-engine-") as folder:
        scratch = Path(folder)
        processes = [
            _context.Process(target=_rank_main, args=(rank, world_size, scratch, function, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            finished = _wait(processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.close()
        if not finished or any(codes):
            raise WorkerError(_explain(scratch, codes, finished=finished, timeout=timeout))
        return [pickle.loads((scratch / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _wait(processes: list[Any], timeout: float) -> bool:
    """Wait until all ranks ended, or one failed and the others had their grace; False if time ran out."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            return False
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
            while time.monotonic() < deadline and any(process.is_alive() for process in processes):
                time.sleep(0.02)
            return True
        time.sleep(0.02)
    return True


def _explain(scratch: Path, codes: list[int | None], *, finished: bool, timeout: float) -> str:
    lines = [f"ranks exited with {codes}" if finished else f"no end within {timeout} s; exit codes {codes}"]
    for rank, code in enumerate(codes):
        error, log = scratch / f"error{rank}", scratch / f"log{rank}"
        if error.exists():
            lines.append(f"--- rank {rank} raised\n{error.read_text()}")
        elif (code or not finished) and log.exists():
            lines.append(f"--- rank {rank} wrote last\n{log.read_text(errors='replace')[-2000:]}")
    return "\n".join(lines)


def _rank_main(rank: int, world_size: int, scratch: Path, function: Callable[..., Any], args: tuple) -> None:
    log = os.open(scratch / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _join(rank, world_size, scratch / "rendezvous")
        result = function(rank, world_size, *args)
        (scratch / f"result{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (scratch / f"error{rank}").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads and DeepSpeed's exit handlers may wait for peers that are gone


def _join(rank: int, world_size: int, rendezvous: Path) -> None:
    """Make this process rank `rank` of a new gloo world."""
    for key, value in {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "LOCAL_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }.items():  # fmt: skip
        os.environ[key] = str(value)
    from tests.deepspeed_engine import preload  # first: it sets the environment that DeepSpeed reads

    preload.patch()
    import deepspeed
    import numpy as np
    import torch

    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False, init_method=f"file://{rendezvous}",
        rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
    )  # fmt: skip
