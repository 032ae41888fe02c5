"""Workers of a Ray cluster. A task whose worker dies is begun again on another, by Ray itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from zckpt.errors import WorkerError, require

RETRIES = 3
"""Times that a task is begun again when the process that ran it has died."""

SETTLED_SECONDS = 60
"""To wait for tasks that were cancelled."""

Result = TypeVar("Result")


class RayExecutor(Executor):
    """Runs tasks on the cluster that RAY_ADDRESS names or that runs on this machine; else on one of its own.

    Raises MissingPackageError: ray is not installed; WorkerError: the cluster cannot be reached.
    """

    def __init__(self) -> None:
        require("ray", "ray")
        import ray
        from ray.exceptions import RayError, RayTaskError

        self._ray, self._task_error = ray, RayTaskError
        self._is_own = not ray.is_initialized()
        if self._is_own:
            try:
                ray.init(logging_level=logging.ERROR, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise WorkerError("cannot reach a Ray cluster", found=str(error)) from error
        self.workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        self.lost = (RayError,)
        self._call = ray.remote(max_retries=RETRIES, retry_exceptions=False)(call)
        self._refs: dict[Future[Any], Any] = {}

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:  # noqa: ANN401
        """Queue a call."""
        ref = self._call.remote(fn, args, kwargs)
        future: Future[Result] = Future()
        self._refs[future] = ref
        future.add_done_callback(self._ended)
        ref.future().add_done_callback(lambda found: self._arrived(future, found))
        return future

    def _arrived(self, future: Future[Any], found: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        error = found.exception()
        if error is None:
            future.set_result(found.result())
        else:
            cause = getattr(error, "cause", None)
            is_of_task = isinstance(error, self._task_error) and isinstance(cause, BaseException)
            future.set_exception(cause if is_of_task else error)

    def _ended(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._ray.cancel(self._refs[future])
        else:
            del self._refs[future]

    def settle(self) -> None:
        """Wait until no worker runs a task that was cancelled."""
        refs = list(self._refs.values())
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=SETTLED_SECONDS, fetch_local=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Leave the cluster."""
        if self._is_own:
            self._ray.shutdown()


def call(fn: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Call a function on a worker."""
    return fn(*args, **kwargs)
