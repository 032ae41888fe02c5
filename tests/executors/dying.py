"""A worker that is killed once, in the middle of a task: what a test lets workers do in the place of `write_batch`.

As a program, the command line in which each batch is written so: `python -m tests.executors.dying VERB ...`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from zckpt.engine import workers
from zckpt.engine import write as written
from zckpt.storage import journal

MARK = "ZCKPT_TEST_MARK"
"""Names a file: who makes it dies. Its directory is the test's own."""

RANK = "ZCKPT_TEST_RANK"
"""Only this rank dies."""

_write_batch = written.write_batch


def write_batch(batch: written.Batch) -> Any:
    """Write a batch, and die after the first one that anybody has written.

    Beside a file `held` each batch is told in `batches`, and does not end before there is a file `go`; beside a file
    `slow` each takes a while, and none dies.
    """
    found = _write_batch(batch)
    mark = Path(os.environ[MARK])
    if mark.with_name("slow").exists():
        time.sleep(0.05)
        return found
    if mark.with_name("held").exists():
        with mark.with_name("batches").open("ab") as file:
            file.write(b".")
        while not mark.with_name("go").exists():
            time.sleep(0.02)
        return found
    if os.environ.get("RANK", os.environ.get("PMI_RANK")) == os.environ.get(RANK, os.environ.get("RANK")):
        try:
            mark.open("x").close()
        except FileExistsError:
            return found
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return found


def small_tasks(set_attribute: Any = setattr) -> None:
    """Let a few megabytes be many batches and many tasks, and worth going on with."""
    set_attribute(workers, "BATCH_NBYTES", 1 << 16)
    set_attribute(workers, "LEAST_TASK_NBYTES", 1 << 18)
    set_attribute(journal, "LEAST_NBYTES", 0)


if __name__ == "__main__":
    from importlib import import_module

    from zckpt.cli import main

    small_tasks()
    if any("dask" in word for word in sys.argv):  # which begins threads
        import_module("zckpt.executors.on_dask").TOLD_SECONDS = 0
    written.write_batch = import_module("tests.executors.dying").write_batch  # by the name that other processes know
    main()
