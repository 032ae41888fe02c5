"""One command that mpiexec or torchrun started on every rank: the first rank drives, the others work.

Every command passes here, so nothing is imported that takes time unless there are ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Executor

MPI, TORCHRUN = "mpi", "torchrun"

DRIVEN: ContextVar[tuple[str, Executor] | None] = ContextVar("driven", default=None)
"""The ranks that this process drives, and how they are called."""

MAY_FORK: ContextVar[bool] = ContextVar("may_fork", default=False)
"""Whether this process is a command's own, so that its work may be given to forks of it unasked."""


@contextmanager
def launched(arguments: Sequence[str]) -> Iterator[bool]:
    """Tell whether this process only was a worker of a command that mpiexec or torchrun started on every rank.

    The first rank drives the others within this context, and what it runs there runs on them. Every other rank works
    until the first has left it. `arguments`: of the command line, which are the same on all ranks.
    """
    name = None
    for at, one in enumerate(arguments):  # the last --executor counts
        if one == "--":
            break
        if one == "--executor" and at + 1 < len(arguments):
            name = arguments[at + 1]
        elif one.startswith("--executor="):
            name = one.partition("=")[2]
    if name == TORCHRUN or (name is None and _is_torchrun_child()):
        from zckpt.executors.on_ranks import ranks as enter

        name = TORCHRUN
    elif name == MPI:
        from zckpt.executors.on_mpi import ranks as enter
    else:
        token = MAY_FORK.set(True)
        try:
            yield False
        finally:
            MAY_FORK.reset(token)
        return
    with enter() as executor:
        if executor is None:
            yield True
            return
        from zckpt.engine.workers import running_on
        from zckpt.state.context import during

        with during(DRIVEN, (name, executor)), running_on(executor):
            yield False


def _is_torchrun_child() -> bool:
    """Tell whether torchrun started this very process, and not a program that it has started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:  # noqa: PTH123
            words = file.read().split(b"\0")
    except OSError:  # not Linux: --executor torchrun says it
        return False
    names = (b"torchrun", b"torch.distributed.run", b"torch.distributed.launch", b"torch/distributed/run.py")
    return any(word.endswith(names) for word in words)
