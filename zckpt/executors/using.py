"""An executor by its name: connected to, used for what is done in a context, and left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext

from zckpt.engine.workers import running_on
from zckpt.errors import UsageError
from zckpt.executors.launch import DRIVEN, MPI, TORCHRUN

THREADS, DASK, RAY = "threads", "dask://", "ray"

EXPECTED = "threads, dask://HOST:PORT, mpi, ray or torchrun"


def check_executor(executor: Executor | str | None) -> None:
    """Raise UsageError unless it is an executor, the name of one, or None; nothing is connected to."""
    if executor is None or isinstance(executor, Executor):
        return
    named = isinstance(executor, str) and (
        executor in (THREADS, MPI, RAY, TORCHRUN) or re.fullmatch(rf"{DASK}(/.+|[^/@?\s]+)", executor) is not None
    )
    if not named:
        raise UsageError("no such executor", expected=EXPECTED, found=repr(executor))


@contextmanager
def using(executor: Executor | str | None) -> Iterator[None]:
    """Let an executor run what is written, read or looked at in this context.

    `executor`: of the caller's, who ends it; or a name, see the package: then it is connected to, and left, here. None:
    the one that is used around this context already. Raises UsageError: it is no executor, its package is missing, or
    it needs a launcher that did not start this process; WorkerError: it cannot be reached.
    """
    check_executor(executor)
    if executor is None:
        yield
        return
    with _executor(executor) as own, running_on(own):
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
