"""An executor by its name: connected to, used for what is done in a context, and left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

from zckpt.engine.workers import running_on
from zckpt.errors import UsageError, WorkerError
from zckpt.executors.launch import DRIVEN, MAY_FORK, MPI, TORCHRUN
from zckpt.state.context import during
from zckpt.storage.memory import buffers_within

THREADS, PROCESSES, DASK, RAY = "threads", "processes", "dask://", "ray"

EXPECTED = "threads, processes, dask://HOST:PORT, mpi, ray or torchrun"

FORKED_NBYTES = 1 << 28
"""From so much on that is computed, processes gain more than it takes to start them; so much memory is to be free."""


def check_executor(executor: Executor | str | None) -> None:
    """Raise UsageError unless it is an executor, the name of one, or None; nothing is connected to."""
    if executor is None or isinstance(executor, Executor):
        return
    named = isinstance(executor, str) and (
        executor in (THREADS, PROCESSES, MPI, RAY, TORCHRUN)
        or re.fullmatch(rf"{DASK}(/.+|[^/@?\s]+)", executor) is not None
    )
    if not named:
        raise UsageError("no such executor", expected=EXPECTED, found=repr(executor))


@contextmanager
def using(executor: Executor | str | None, computed_nbytes: int = 0) -> Iterator[None]:
    """Let an executor run what is written, read or looked at in this context.

    `executor`: of the caller's, who ends it; or a name, see the package: then it is connected to, and left, here. None:
    the one that is used around this context already; of a command line, which has its process for itself, processes
    where so many bytes are computed that they gain by it. Raises UsageError: it is no executor, its package is missing,
    or it needs a launcher that did not start this process; WorkerError: it cannot be reached.
    """
    check_executor(executor)
    with ExitStack() as stack:
        if executor is not None:
            stack.enter_context(running_on(stack.enter_context(_executor(executor))))
            stack.enter_context(during(MAY_FORK, False))
        elif MAY_FORK.get() and computed_nbytes >= FORKED_NBYTES <= buffers_within(FORKED_NBYTES):
            with suppress(WorkerError):  # threads it is
                stack.enter_context(running_on(stack.enter_context(_executor(PROCESSES))))
        yield


def _executor(given: Executor | str) -> AbstractContextManager[Executor | None]:
    """Return an executor to be used; one that is connected to here is left with the context."""
    driven = DRIVEN.get()
    if isinstance(given, Executor):
        return nullcontext(given)
    if given == THREADS:
        return nullcontext()
    if driven is not None and driven[0] == given:
        return nullcontext(driven[1])
    if given == PROCESSES:
        from zckpt.executors.on_forks import Forks

        return Forks()
    if given == RAY:
        from zckpt.executors.on_ray import RayExecutor

        return RayExecutor()
    if given.startswith(DASK):
        from zckpt.executors.on_dask import DaskExecutor

        return DaskExecutor(given.removeprefix(DASK))
    if given != MPI:
        raise UsageError(
            "only torchrun's ranks can be these workers",
            expected="`torchrun --nproc-per-node N -m zckpt ...`",
            advice="in Python, enter zckpt.executors.on_ranks.ranks() on every rank",
        )
    from zckpt.executors.on_mpi import pool

    return pool()
