"""How a run is told to end: SIGTERM on any rank, and in which call of `Checkpointer.step` all ranks then save.

As long as none is told, no rank waits for another, and `step` sends nothing: a thread of each rank looks into the store
of the process group now and then.

a rank that is told   votes, with how many calls it has made, and says in the store that it is told
the others            see that, and vote
all                   wait in their next call for all votes, and end in the call that follows the highest one: nobody
                      has begun it, and who is behind goes on up to it
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zckpt.errors import WorkerError
from zckpt.optim.ranks import Ranks

PERIOD = 0.5
"""Seconds between looks into the store: a small part of what schedulers give between SIGTERM and SIGKILL."""

VOTES_PERIOD = 0.02
"""Seconds between looks for votes, while training waits for them."""

PATIENCE = 60.0
"""Seconds in which every rank votes, whatever its training does; who does not is gone."""

TOLD = "told"


class Sigterm:
    """SIGTERM in this process, from `listen` to `close`.

    The handler that was there is called at once; what it raises, such as SystemExit, is raised when there has been a
    save. Where there was none, SIGTERM that has not been answered by `close` ends the process then.
    """

    def __init__(self) -> None:
        self.is_told = False
        self._is_open = False
        self._process = os.getpid()
        self._before: Any = None
        self._held: BaseException | None = None

    def listen(self) -> None:
        """Set the handler; Python lets the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._is_open = True
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        here = self._is_open and os.getpid() == self._process  # and not in a process that was forked
        self.is_told = self.is_told or here
        try:
            if callable(self._before):
                self._before(number, frame)
        except BaseException as error:
            if not here:
                raise
            self._held = error
        if not here and self._before == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def answer(self) -> None:
        """Raise what the handler that was there has raised: a save has answered, as far as it could."""
        self.is_told = False
        held, self._held = self._held, None
        if held is not None:
            raise held

    def close(self) -> None:
        """Put back the handler that was there, and let it have what nothing has answered."""
        if not self._is_open:
            return
        self._is_open = False
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and self._before is not None and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)  # else one was set on top of ours, which leads on to it
        if sys.exc_info()[1] is not None or not self.is_told:
            return  # an error is on its way, and is not to be lost
        if self._before == signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)
        self.answer()


class Ending:
    """Tells in which call of `is_due` all ranks end. All ranks make one together, and call it equally often.

    `sigterm`: of this rank.
    """

    def __init__(self, ranks: Ranks, sigterm: Sigterm) -> None:
        self._sigterm = sigterm
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._lock = threading.Lock()
        self._calls = 0
        self._has_voted = False
        self._last: float = math.inf
        self._failure: WorkerError | None = None
        self._counted = threading.Event()
        self._stopped = threading.Event()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        if ranks.group is None:
            return
        name = ranks.from_first(secrets.token_hex(8))  # what an earlier Checkpointer left is not this one's
        self._store = PrefixStore(f"zckpt/{name}", dist.distributed_c10d._get_default_store())
        self._thread = threading.Thread(target=self._watch, name="zckpt-ending", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before the interpreter takes its threads away

    def is_due(self) -> bool:
        """Tell whether all ranks end in this call, as in all later ones.

        Raises WorkerError: some rank has been told, and another does not answer, or the process group's store.
        """
        if self._store is None:
            return self._sigterm.is_told
        if self._sigterm.is_told:
            self._vote(told=True)
        with self._lock:
            self._calls += not self._has_voted
            if not self._has_voted:
                return False
        self._counted.wait()
        if self._failure is not None:
            raise self._failure
        self._calls += 1
        return self._calls >= self._last

    def close(self) -> None:
        """Let the others count on no more calls of this rank."""
        if self._store is not None:
            self._vote(told=False)
            self.stop()

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(PERIOD)

    def _vote(self, *, told: bool) -> None:
        """Write down how many calls this rank has made, once."""
        with self._lock:
            if self._has_voted:
                return
            self._has_voted = True
            with suppress(RuntimeError):  # the store is gone, which who counts votes sees, too
                self._store.set(str(self._rank), str(self._calls))
                if told:
                    self._store.set(TOLD, "1")

    def _watch(self) -> None:
        """Vote when some rank is told, and count votes."""
        try:
            while not self._stopped.wait(PERIOD):
                is_told = self._sigterm.is_told
                if is_told or self._has_voted or self._store.check([TOLD]):
                    self._vote(told=is_told)
                    self._count()
                    return
        except RuntimeError as error:  # at the end of a run its store is gone, and nobody asks
            self._failure = _disagreement("the process group's store answers", str(error))
        finally:
            self._counted.set()

    def _count(self) -> None:
        votes = [str(rank) for rank in range(self._world_size)]
        started = time.monotonic()
        while not self._store.check(votes):
            if time.monotonic() - started > PATIENCE:
                silent = [vote for vote in votes if not self._store.check([vote])]
                self._failure = _disagreement(
                    f"all ranks answer within {PATIENCE:.0f} s", f"no answer of ranks {', '.join(silent)}"
                )
                return
            if self._stopped.wait(VOTES_PERIOD):
                return
        self._last = 1 + max(int(vote) for vote in self._store.multi_get(votes))


def _disagreement(expected: str, found: str) -> WorkerError:
    return WorkerError("the ranks cannot agree where to end the run after SIGTERM", expected=expected, found=found)
