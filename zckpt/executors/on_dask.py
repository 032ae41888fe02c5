"""Workers of a Dask scheduler. A task whose worker dies is begun again on another, by the scheduler itself.

The scheduler gives a task up, and so do we, when several workers in a row have died of it (`KilledWorker`). What a
worker runs when its task is cancelled, or when the driver is gone, it runs on: so it is told to look, before every
batch, whether its worker still counts the task as running.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar

from zckpt.engine.tasks import while_wanted
from zckpt.errors import WorkerError, require

CONNECTED_SECONDS = 15
"""To wait for a scheduler, and for its first worker."""

SETTLED_SECONDS = 60
"""To wait for tasks that were cancelled; each ends with the batch that it is in."""

Result = TypeVar("Result")


class DaskExecutor(Executor):
    """Runs tasks on the workers of a scheduler.

    Parameters
    ----------
    address : str
        HOST:PORT, or the absolute path of the scheduler's `--scheduler-file`.

    Raises
    ------
    MissingPackageError
        Dask is not installed.
    WorkerError
        There is no scheduler, or it has no workers.
    """

    def __init__(self, address: str) -> None:
        require("distributed", "dask")
        from distributed import Client, KilledWorker
        from distributed.comm import CommClosedError

        where = {"scheduler_file": address} if address.startswith("/") else {"address": f"tcp://{address}"}
        try:
            self._client = Client(**where, timeout=CONNECTED_SECONDS, set_as_default=False, name="zckpt")
        except (OSError, ValueError, TimeoutError) as error:
            raise WorkerError(
                "no Dask scheduler can be reached",
                path=address,
                found=str(error),
                advice="start one with `dask scheduler`, and give its HOST:PORT",
            ) from error
        try:
            self._client.wait_for_workers(1, timeout=CONNECTED_SECONDS)
        except TimeoutError as error:
            self._client.close()
            raise WorkerError(
                "the Dask scheduler has no workers", path=address, advice=f"start some: `dask worker {address}`"
            ) from error
        self.workers = max(sum(self._client.nthreads().values()), 1)
        self.lost = (KilledWorker, CommClosedError, CancelledError)
        self._pool = self._client.get_executor(pure=False)
        self._run = _unpacked_there()
        self._name = uuid.uuid4().hex

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:  # noqa: ANN401
        """Queue a call."""
        from distributed.protocol.pickle import dumps

        data = dumps((run_on_worker, (self._name, fn, args, kwargs)))
        future: Future[Result] = self._pool.submit(self._run, data)
        return future

    def settle(self) -> None:
        """Wait until no worker runs a task of this executor."""
        end = time.monotonic() + SETTLED_SECONDS
        while any(self._client.run(count_of, self._name, on_error="ignore").values()) and time.monotonic() < end:
            time.sleep(0.05)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Leave the scheduler, and its workers running."""
        self._client.close()


def _unpacked_there() -> Callable[[bytes], Any]:
    """Return what unpacks a call on a worker: a function of no module, as the scheduler, too, unpacks what it is sent.

    So the scheduler needs no zckpt.
    """

    def unpacked(data: bytes) -> Any:  # noqa: ANN401
        from distributed.protocol.pickle import loads

        function, arguments = loads(data)
        return function(*arguments)

    return unpacked


_running: dict[str, int] = {}
"""On a worker, how many tasks it runs, by their executor."""


def run_on_worker(name: str, fn: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Call a function on a worker, and let it know whether its result is still wanted."""
    from distributed import get_worker
    from distributed.worker import thread_state

    worker, key = get_worker(), thread_state.key

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state in ("executing", "long-running")

    _running[name] = _running.get(name, 0) + 1
    try:
        with while_wanted(wanted):
            return fn(*args, **kwargs)
    finally:
        _running[name] -= 1
        if not _running[name]:
            del _running[name]


def count_of(name: str) -> int:
    """Return how many tasks of an executor this worker runs."""
    return _running.get(name, 0)
