"""Work on threads, a few pieces ahead of whoever takes the results, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Done = TypeVar("Done")
Given = TypeVar("Given")

LEAST_THREADS, MOST_THREADS = 2, 16


def ahead(make: Callable[[Given], Done], every: Iterable[Given]) -> Generator[Done, None, None]:
    """Yield what is made of each, in order; what is not taken yet is bounded by the number of threads."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(max(cpus, LEAST_THREADS), MOST_THREADS)
    with ThreadPoolExecutor(threads, thread_name_prefix="zckpt-ahead") as pool:
        waiting: deque[Future[Done]] = deque()
        try:
            for one in every:
                waiting.append(pool.submit(make, one))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()
