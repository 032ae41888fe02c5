"""Processes forked from this one: where Python computes what is written, threads would wait for each other's turns.

They know what this one knows, so nothing is imported or opened again; they end with it, however it ends.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from functools import partial
from mmap import mmap
from multiprocessing import current_process, get_context
from typing import TYPE_CHECKING

from zckpt.engine.workers import WANTED, run_at_once
from zckpt.errors import WorkerError
from zckpt.executors.asking import Answer, AskingExecutor, Call, answer
from zckpt.storage.disk import of_libc
from zckpt.storage.memory import confine_threads

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

FORKS = range(2, 9)
"""Fewest and most: more than there are cores get in each other's way."""

SIGNALS = {signal.SIGINT, signal.SIGTERM}

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class Forks(AskingExecutor):
    """As many processes as this machine has cores, within a range. Raises WorkerError: there can be none."""

    def __init__(self) -> None:
        context, self._is_ending = get_context("fork"), mmap(-1, 1)
        self._processes: list[ForkProcess] = []
        asks: list[Callable[[Call], Answer]] = []
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if not _can_fork():
                raise OSError("not Linux, or this process has other threads, or is a daemon")  # noqa: TRY301
            for _ in range(run_at_once(None, FORKS)):
                ours, others = context.Pipe()
                process = context.Process(target=_work, args=(others, os.getpid(), self._is_ending), daemon=True)
                process.start()
                others.close()
                self._processes.append(process)
                asks.append(partial(_asked, ours))
            super().__init__("process", asks, EOFError, OSError)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # where a signal that has come meanwhile is raised
        except BaseException as error:
            self._kill()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if not isinstance(error, OSError):
                raise
            advice = "use --executor=threads"
            raise WorkerError("no processes can be forked", found=str(error), advice=advice) from error

    def end(self) -> None:
        """Let tasks that run end before their next batch."""
        self._is_ending[0] = 1

    def settle(self) -> None:
        """Let tasks run again."""
        self._is_ending[0] = 0

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, of which nothing is wanted any more."""
        self._kill()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _can_fork() -> bool:
    """Tell whether a fork is as good as this process, of which it has one thread; a daemon may have no processes."""
    try:
        return len(os.listdir("/proc/self/task")) == 1 and not current_process().daemon  # noqa: PTH208
    except OSError:  # not Linux
        return False


def _asked(connection: Connection, call: Call) -> Answer:
    connection.send(call)
    found: Answer = connection.recv()
    return found


def _work(connection: Connection, parent: int, is_ending: mmap) -> None:
    """Answer the calls of the process that has forked this one, and end with it; it alone hears of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what is looked through for garbage is copied
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    prctl = of_libc("prctl", "iI")
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    confine_threads()
    WANTED.set(lambda: not is_ending[0])
    while True:
        connection.send(answer(connection.recv()))
