"""Workers of a Dask scheduler. A task whose worker dies is begun again on another, by the scheduler itself.

The scheduler gives a task up, and so do we, when several workers in a row have died of it (`KilledWorker`). What a
worker runs when its task is cancelled, or when driver or scheduler are gone, it runs on: so it is told to look, before
every batch, whether its worker still counts the task as running.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from zckpt.engine.workers import WANTED
from zckpt.errors import WorkerError, require
from zckpt.state.context import during

CONNECTED_SECONDS = 15
"""To wait for a scheduler, and for its first worker."""

SETTLED_SECONDS = 60
"""To wait for tasks that were cancelled; each ends with the batch that it is in."""

NO_WORKERS = "distributed.scheduler.no-workers-timeout"
"""Dask's own setting, here in this process: how long to wait where no workers are left; else `NO_WORKERS_SECONDS`."""

NO_WORKERS_SECONDS = 300

TOLD_SECONDS, ASKED_SECONDS = 8, 5
"""Without workers until a user hears of it, and what the scheduler may take to say how many there are."""

Result = TypeVar("Result")


class DaskExecutor(Executor):
    """Runs tasks on the workers of a scheduler.

    `address`: HOST:PORT, or the absolute path of the scheduler's `--scheduler-file`. Raises MissingPackageError: dask
    is not installed; WorkerError: there is no scheduler, or it has no workers.
    """

    def __init__(self, address: str) -> None:
        require("dask.config", "dask")
        import dask.config

        loggers = ("distributed", "distributed.client", "tornado.application")
        with dask.config.set(logging=dict.fromkeys(loggers, "critical")):
            require("distributed", "dask")  # what they would print, an error here says
        from distributed import Client, KilledWorker
        from distributed.comm import CommClosedError, connect
        from distributed.utils import LoopRunner

        waited = (TimeoutError, asyncio.TimeoutError)  # one class from Python 3.11 on
        try:
            where = f"tcp://{address}"
            if address.startswith("/"):  # a scheduler may be about to write it
                end = time.monotonic() + CONNECTED_SECONDS
                while not Path(address).exists() and time.monotonic() < end:
                    time.sleep(0.1)
                where = json.loads(Path(address).read_bytes())["address"]
            comm = LoopRunner(asynchronous=False).run_sync(  # what takes the call and is no scheduler says nothing
                connect, where, timeout=CONNECTED_SECONDS, callback_timeout=CONNECTED_SECONDS
            )
            comm.abort()
            self._client = Client(where, timeout=CONNECTED_SECONDS, set_as_default=False, name="zckpt")
        except (*waited, OSError, ValueError, KeyError, TypeError) as error:
            raise WorkerError(
                "cannot reach the Dask scheduler",
                path=address,
                found="no answer of a scheduler" if isinstance(error, waited) else str(error),
                advice="start one with `dask scheduler`, and give its HOST:PORT",
            ) from error
        try:
            self._client.wait_for_workers(1, timeout=CONNECTED_SECONDS)
        except TimeoutError as error:
            self._client.close()
            raise WorkerError(
                "the Dask scheduler has no workers", path=address, advice=f"start some with `dask worker {address}`"
            ) from error
        self.workers = max(self._threads(), 1)
        self.lost = (KilledWorker, CommClosedError, CancelledError)
        self._pool = self._client.get_executor(pure=False)
        self._run = _unpacked_there()
        self._name = uuid.uuid4().hex
        self._why = ""
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._address = address
        self._patience = dask.utils.parse_timedelta(dask.config.get(NO_WORKERS, None) or NO_WORKERS_SECONDS)
        self._left = threading.Event()
        threading.Thread(target=self._watch, name="zckpt-dask", daemon=True).start()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:  # noqa: ANN401
        """Queue a call."""
        from distributed.protocol.pickle import dumps

        if self._client.status != "running":  # it would be queued for ever
            raise CancelledError
        data = dumps((run_on_worker, (self._name, fn, args, kwargs)))
        future: Future[Result] = self._pool.submit(self._run, data)
        self._futures.add(future)
        return future

    @property
    def why(self) -> str | None:
        """What is wrong, where all that was queued is cancelled."""
        return self._why or (None if self._client.status == "running" else "the scheduler is gone")

    def _threads(self) -> int:
        """Return how many threads all workers have."""
        return sum(self._client.sync(self._client.scheduler.ncores, callback_timeout=ASKED_SECONDS).values())

    def _watch(self) -> None:
        """Say when there are no workers; cancel all when there are none for too long, or no scheduler."""
        last, is_told = time.monotonic(), False
        while not self._left.wait(1):
            if self.why is not None:
                self._client.close()
                for one in list(self._futures):
                    one.cancel()
                continue
            try:
                what = "has no workers" if self._threads() == 0 else None
            except Exception:  # noqa: BLE001  # of the network, and of Dask
                what = "does not answer"
            waited = time.monotonic() - last
            if what is None:
                last, is_told = time.monotonic(), False
            elif waited > self._patience:
                self._why = f"the scheduler {what} for {waited:.0f} s"
            elif waited > TOLD_SECONDS and not is_told:
                is_told = True
                warnings.warn(f"dask://{self._address} {what}; waiting up to {self._patience:g} s", stacklevel=1)

    def settle(self) -> None:
        """Wait until no worker runs a task of this executor; without a scheduler, nobody can know."""
        end = time.monotonic() + SETTLED_SECONDS
        with suppress(OSError, RuntimeError, AttributeError):  # of a client that is closing
            while self._client.status == "running" and time.monotonic() < end:
                if not any(self._client.run(count_of, self._name, on_error="ignore").values()):
                    return
                time.sleep(0.05)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Leave the scheduler, and its workers running."""
        self._left.set()
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
        return worker.status.name == "running" and task is not None and task.state in ("executing", "long-running")

    _running[name] = _running.get(name, 0) + 1
    try:
        with during(WANTED, wanted):
            return fn(*args, **kwargs)
    finally:
        _running[name] -= 1
        if not _running[name]:
            del _running[name]


def count_of(name: str) -> int:
    """Return how many tasks of an executor this worker runs."""
    return _running.get(name, 0)
