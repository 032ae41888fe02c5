"""Ranks as processes: fork them with DeepSpeed already imported, join them by gloo, bring back what they return.

A fork server imports DeepSpeed once (seconds) and forks every rank from itself, so that the calling process needs
neither DeepSpeed nor to be safe to fork. Ranks stay and are used again: what torch and DeepSpeed do when they are
first used costs as much as a small test. Every call joins them again, and a rank that failed, hung or was left
otherwise than it was found (`tests/rank_state.py`, which puts back what an engine of DeepSpeed leaves) is replaced.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from tests.pairwise import some

COLLECTIVE_TIMEOUT = 300  # seconds a rank waits for its peers; then it says itself where it waited
TIMEOUT = 600  # seconds for the whole run: one that hangs fails, and one on a busy machine does not
GRACE = 2.0  # seconds that the other ranks get to report, too, once one has failed
LEAVING = 5.0  # seconds that a rank gets to leave a world that has done its work, or it is replaced
KEPT = 12  # ranks that stay: no test needs more

_context = multiprocessing.get_context("forkserver")
_server = forkserver._forkserver
_ADDRESS = ("_forkserver_address", "_forkserver_authkey")
_context.set_forkserver_preload(["tests.deepspeed_engine.preload"])


class WorkerError(RuntimeError):
    """A rank failed, died or hung; the message holds the tracebacks and the end of the rank's output."""


class _Rank:
    """A process that waits for work; `leaving` is true while it has not yet said how it left its last world."""

    def __init__(self) -> None:
        self.ours, theirs = _context.Pipe()
        self.process = _context.Process(target=_rank_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.leaving = False
        self.code: int | None = None

    def leave(self) -> None:
        self.ours.send_bytes(b"leave")
        self.leaving = True

    def as_it_was(self) -> bool:
        """Wait until it has left its last world; whether it can join another."""
        try:
            if self.leaving:
                self.leaving = not (self.ours.poll(LEAVING) and self.ours.recv_bytes() == b"clean")
        except (EOFError, OSError):
            return False
        return not self.leaving

    def end(self) -> int | None:
        """End it if it has not ended; its exit code."""
        if self.code is None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
            self.code = self.process.exitcode
            self.process.close()
            self.ours.close()
        return self.code


_kept: list[_Rank] = []
_in_use = threading.Lock()


@atexit.register
def _end_all() -> None:
    """End those that are kept: one that a test left with a handler of SIGTERM would be waited for without end."""
    for rank in _kept:
        rank.end()


def run(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT, fresh: bool = False
) -> list[Any]:
    """Run `function(rank, world_size, *args)` on `world_size` gloo ranks, in this directory; return what each returned.

    `function` must be importable by name; arguments and results travel by pickle. `fresh`: in processes that nothing
    else has run in or will: for what ends processes, or changes what `tests/rank_state.py` does not see.

    Raises
    ------
    WorkerError
        With every failing rank's traceback.
    """
    start_server()
    warm = not fresh and world_size <= KEPT and _in_use.acquire(blocking=False)
    try:
        # A rank that is done may still be giving up its store, a file here, while the folder is removed.
        with tempfile.TemporaryDirectory(prefix="zckpt-ranks-", ignore_cleanup_errors=True) as folder:
            ranks = _warm(world_size) if warm else [_Rank() for _ in range(world_size)]
            done = False
            try:
                results = _run(ranks, Path(folder), pickle.dumps((function, args)), timeout)
                done = True
            finally:
                if warm and done:
                    for rank in ranks:
                        rank.leave()
                else:
                    _kept[:] = [rank for rank in _kept if rank not in ranks]
                    for rank in ranks:
                        rank.end()
            return results
    finally:
        if warm:
            _in_use.release()


def on_ranks(*world_sizes: int, each: Sequence[Sequence[Any]] = ((),), fresh: bool = False) -> Callable[..., Any]:
    """Make a test of what each of so many ranks runs, given what it names: `rank`, `world_size`, and what pytest gives.

    `each`: further arguments, between these two and those of pytest; the same ranks run it with one after the other.
    Those that `tests/pairwise.py` has marked are another test, which is `nightly`.
    """
    every = [(bool(getattr(one, "marks", ())), getattr(one, "values", one)) for one in each]
    parts = {rest: [values for marked, values in every if marked == rest] for rest in (False, True)}

    def of(body: Callable[..., None]) -> Any:
        named = [*inspect.signature(body).parameters]
        of_rank = [name for name in named[:2] if name in ("rank", "world_size")]
        names = named[len(of_rank) + len(every[0][1]) :]
        given_number = ["world_size"] if len(world_sizes) > 1 else []
        names += ["rest"] if parts[True] else []

        def test(**given: Any) -> None:
            number = given.pop("world_size", world_sizes[0])
            run(_in_turn, number, body.__module__, body.__name__, given.pop("rest", False), given, fresh=fresh)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined]  # of which pytest would take the parameters
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*given_number, *names)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.body, test.each, test.of_rank = body, parts, of_rank  # type: ignore[attr-defined]
        if parts[True]:
            test = pytest.mark.parametrize("rest", some([False], [True]))(test)
        return pytest.mark.parametrize("world_size", world_sizes)(test) if given_number else test

    return of


def _in_turn(rank: int, world_size: int, module: str, name: str, rest: bool, given: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    told = {"rank": rank, "world_size": world_size}
    for arguments in test.each[rest]:
        try:
            test.body(*(told[one] for one in test.of_rank), *copy.deepcopy(arguments), **given)
        except BaseException as error:
            raise AssertionError(f"{name}, with {arguments}") from error


def _warm(world_size: int) -> list[_Rank]:
    """Ranks that are kept, and new ones for those that are not as they were."""
    for number in range(world_size):
        if number == len(_kept):
            _kept.append(_Rank())
        elif not _kept[number].as_it_was():
            _kept[number].end()
            _kept[number] = _Rank()
    return _kept[:world_size]


def _run(ranks: list[_Rank], scratch: Path, task: bytes, timeout: float) -> list[Any]:
    for number, rank in enumerate(ranks):
        rank.ours.send((number, len(ranks), scratch, Path.cwd(), task))
    outcomes, finished = _wait(ranks, timeout)
    if not finished or not all(outcome is True for outcome in outcomes):
        codes = [
            0 if outcome is True else 1 if outcome is False else rank.end()
            for outcome, rank in zip(outcomes, ranks, strict=True)
        ]
        raise WorkerError(_explain(scratch, codes, finished=finished, timeout=timeout))
    return [pickle.loads((scratch / f"result{number}").read_bytes()) for number in range(len(ranks))]


def _wait(ranks: list[_Rank], timeout: float) -> tuple[list[bool | None], bool]:
    """Wait until all ranks are done, or one failed and the others had their grace.

    Returns
    -------
    tuple of list of bool or None and bool
        Whether each succeeded, None for those that ended or did not come to an end; and False if time ran out.
    """
    deadline = time.monotonic() + timeout
    outcomes: list[bool | None] = [None] * len(ranks)
    waited = {rank.ours: number for number, rank in enumerate(ranks)}
    failed = False
    while waited:
        ready = connection.wait(list(waited), max(deadline - time.monotonic(), 0))
        if not ready:
            return outcomes, failed
        for one in ready:
            number = waited.pop(one)
            try:
                outcomes[number] = one.recv_bytes() == b"done"
            except (EOFError, OSError):  # it has ended
                ranks[number].process.join()
            if not outcomes[number] and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE)
    return outcomes, True


def _explain(scratch: Path, codes: list[int | None], *, finished: bool, timeout: float) -> str:
    lines = [f"ranks exited with {codes}" if finished else f"no end within {timeout} s; exit codes {codes}"]
    for rank, code in enumerate(codes):
        error, log = scratch / f"error{rank}", scratch / f"log{rank}"
        if error.exists():
            lines.append(f"--- rank {rank} raised\n{error.read_text()}")
        elif (code or not finished) and log.exists():
            lines.append(f"--- rank {rank} wrote last\n{log.read_text(errors='replace')[-2000:]}")
    return "\n".join(lines)


def start_server() -> None:
    """Start the fork server where it finds this package: Python 3.11's ignores the caller's sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), before]))
    try:
        _server.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def server_address() -> dict[str, Any]:
    """Say where the fork server is, for `use_server` of another process."""
    return {name: getattr(_server, name) for name in _ADDRESS if hasattr(_server, name)}


def use_server(address: dict[str, Any]) -> None:
    """Have the fork server of another process fork this one's ranks; it ends with that one."""
    vars(_server).update(address, _forkserver_alive_fd=os.pipe()[1])
    _server.ensure_running = resource_tracker.ensure_running


def forked(function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> Any:
    """Run `function(*args)` here in one process of the fork server, which is no rank, and return what it returned.

    Raises
    ------
    WorkerError
        With its traceback, or if it came to no end.
    """
    start_server()
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_report, args=(theirs, Path.cwd(), function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise WorkerError(f"no end within {timeout} s")
        failed, result = ours.recv()
    except EOFError:
        raise WorkerError("the process ended without a result") from None
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    if failed:
        raise WorkerError(result)
    return result


def _report(
    parent: connection.Connection, directory: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.chdir(directory)
    try:
        outcome = False, function(*args)
    except BaseException:
        outcome = True, traceback.format_exc()
    parent.send(outcome)


# --- in the ranks


def _rank_main(parent: connection.Connection) -> None:
    from tests.deepspeed_engine import preload  # first: it sets the environment that DeepSpeed reads

    preload.patch()
    before = preload.BEFORE
    try:
        while True:
            number, world_size, scratch, directory, task = parent.recv()
            os.chdir(directory)
            log = os.open(scratch / f"log{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            try:
                function, args = pickle.loads(task)
                before.learn()
                _join(number, world_size, scratch / "rendezvous")
                result = function(number, world_size, *args)
                (scratch / f"result{number}").write_bytes(pickle.dumps(result))
                del result, args
            except BaseException:
                (scratch / f"error{number}").write_text(traceback.format_exc())
                sys.stdout.flush()
                sys.stderr.flush()
                parent.send_bytes(b"failed")
                break
            sys.stdout.flush()
            sys.stderr.flush()
            parent.send_bytes(b"done")
            parent.recv_bytes()  # all are done: nobody waits for this rank any more
            _leave()
            parent.send_bytes(b"clean" if before.restored() else b"changed")
    except (EOFError, OSError):  # the test run is over
        pass
    finally:
        os._exit(0)  # gloo's threads and DeepSpeed's exit handlers may wait for peers that are gone


def _join(rank: int, world_size: int, rendezvous: Path) -> None:
    """Make this process rank `rank` of a new gloo world."""
    for key, value in {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "LOCAL_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }.items():  # fmt: skip
        os.environ[key] = str(value)
    import deepspeed
    import numpy as np
    import torch

    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False, init_method=f"file://{rendezvous}",
        rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
    )  # fmt: skip


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
