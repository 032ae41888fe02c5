"""Workers that answer: a thread for each sends it a call, waits for its answer, takes the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

Answer = tuple[bool, Any]
"""Whether a call succeeded, and its result or its error."""


class AskingExecutor(Executor):
    """Runs calls on workers.

    Parameters
    ----------
    what : str
        What a worker is.
    asks : sequence of callable
        For each worker: sends it a call, and returns its answer.
    *gone : type
        Of the errors that they raise when the worker is lost; then all calls fail.
    """

    def __init__(self, what: str, asks: Sequence[Callable[[Call], Answer]], *gone: type[Exception]) -> None:
        self.workers = len(asks)
        self.broken: BrokenExecutor | None = None
        self._what, self._gone = what, gone
        self._queue: SimpleQueue[tuple[Future[Any], Call] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=one, name=f"zckpt-{what}-{one[0]}", daemon=True)
            for one in enumerate(asks)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:  # noqa: ANN401
        """Queue a call."""
        if self.broken is not None:
            raise self.broken
        future: Future[Result] = Future()
        self._queue.put((future, (fn, args, kwargs)))
        return future

    def _serve(self, number: int, ask: Callable[[Call], Answer]) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                done, found = ask(call) if self.broken is None else (False, self.broken)
            except self._gone:
                self.broken = self.broken or BrokenExecutor(f"{self._what} {number} is gone")
                done, found = False, self.broken
            except Exception as error:  # noqa: BLE001  # a call that cannot be sent, say
                done, found = False, error
            (future.set_result if done else future.set_exception)(found)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Let the threads end, and wait for them unless a worker is lost."""
        for _ in self._threads:
            self._queue.put(None)
        if self.broken is None:
            for thread in self._threads:
                thread.join()


def answer(call: Call) -> Answer:
    """Run a call, on a worker."""
    fn, args, kwargs = call
    try:
        return True, fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is raised where it was asked for
        return False, error
