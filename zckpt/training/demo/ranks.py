"""Processes that train together; one of them may be killed, upon which the others end, too."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zckpt.errors import ZckptError
from zckpt.optim import ZeroOptimizer
from zckpt.training.checkpointer import Checkpointer
from zckpt.training.demo.gpt import BATCH, GPT, Size, batch, source_text

SILENCE = 120.0
"""Seconds without a word from the first rank after which the training is given up."""

GRACE = 20.0
"""Seconds that the ranks have to end, or to find out that one of them is gone."""

PRELOADED = [__name__, "torch._dynamo"]
"""Imported once, not by each rank: torch, and what it imports when an optimizer is made."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained.

    Parameters
    ----------
    directory : Path
        Of the run's checkpoints.
    steps : int
        In all.
    every : int or None
        Steps between checkpoints; None: there are none.
    seed : int
    size : Size
    """

    directory: Path
    steps: int
    every: int | None
    seed: int
    size: Size


@dataclass(slots=True)
class Part:
    """What a group of ranks has done of a training, from its start or a checkpoint to its end or a kill.

    Parameters
    ----------
    world_size : int
    resumed : int
        The step of the checkpoint it began with; 0: none.
    saved_by : int or None
        Ranks that had saved the checkpoint.
    losses : dict of int to float
        By step, counted from 1.
    killed : int or None
        The rank that was killed.
    """

    world_size: int
    resumed: int = 0
    saved_by: int | None = None
    losses: dict[int, float] = field(default_factory=dict)
    killed: int | None = None


def run(training: Training, world_size: int, *, kill: tuple[int, int] | None = None) -> Part:
    """Train on some ranks.

    Parameters
    ----------
    training : Training
    world_size : int
    kill : (int, int), optional
        After which step which rank gets SIGKILL.

    Raises
    ------
    ZckptError
        A rank failed that was not killed.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    dies = {} if kill is None else {kill[1]: kill[0]}
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as scratch:
        told, tells = context.Pipe(duplex=False)
        ranks = [
            context.Process(
                target=_rank_main,
                args=(training, (rank, world_size), scratch, None if rank else tells, dies.get(rank)),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for one in ranks:
                one.start()
            tells.close()
            part = _listen(told, Part(world_size))
        except BaseException:
            _end(ranks, 0.0)
            raise
        hung = _end(ranks, GRACE)
        codes = [one.exitcode for one in ranks]
        if kill is not None and codes[kill[1]] == -signal.SIGKILL and kill[1] not in hung:
            part.killed = kill[1]
        elif any(codes) or max(part.losses, default=part.resumed) < training.steps:
            raise ZckptError(f"training on {world_size} ranks failed", found=_reason(codes, Path(scratch)))
        return part


def _listen(told: Connection, part: Part) -> Part:
    """Hear the first rank until it ends."""
    while told.poll(SILENCE):
        try:
            what, *values = told.recv()
        except (EOFError, ConnectionError):
            break
        if what == "resumed":
            part.resumed, part.saved_by = values
        else:
            part.losses[values[0]] = values[1]
    return part


def _end(ranks: list[Any], grace: float) -> set[int]:
    """Wait for the ranks; return those that did not end by themselves."""
    deadline = time.monotonic() + grace
    hung = set()
    for one in ranks:
        if one.pid is not None:
            one.join(max(0.0, deadline - time.monotonic()))
    for rank, one in enumerate(ranks):
        if one.is_alive():
            hung.add(rank)
            one.kill()
            one.join()
    return hung


def _reason(codes: list[int | None], scratch: Path) -> str:
    """Return what the first rank that failed has said."""
    logs = [path.read_text("utf-8", "replace").strip() for path in sorted(scratch.glob("error-*"))]
    return logs[0].splitlines()[-1] if logs else f"exit statuses {codes}"


def _rank_main(
    training: Training, place: tuple[int, int], scratch: str, tells: Connection | None, dies: int | None
) -> None:
    """Be one rank."""
    rank, world_size = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started the ranks ends them
    try:
        torch.set_num_threads(1)
        torch.manual_seed(training.seed)
        dist.init_process_group(
            "gloo",
            init_method=(Path(scratch) / "rendezvous").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=SILENCE),
        )
        _train(training, rank, world_size, tells, dies)
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001  # told by exit status; of ranks that were left alone nobody wants to hear
        (Path(scratch) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # gloo's threads may wait for the one that is gone


def _train(training: Training, rank: int, world_size: int, tells: Connection | None, dies: int | None) -> None:
    """Go on with a training, from its newest checkpoint to its last step, or to the one after which this rank dies."""
    model = GPT(training.size)
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-3, stage=2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    parts: Any = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpointer = Checkpointer(training.directory, every=training.every, keep=2, async_=True)
    restored = checkpointer.resume(**parts)
    done = (restored.step or 0) if restored else 0
    if tells is not None:
        tells.send(("resumed", done, restored.world_size if restored else None))
    text = source_text()
    share = BATCH // world_size
    for step in range(done + 1, training.steps + 1):
        mine = batch(text, training.size, training.seed, step)[rank * share : (rank + 1) * share]
        loss = model(mine)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if tells is not None:
            tells.send(("loss", step, mean.item() / world_size))
        checkpointer.step(step, **parts)
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)  # no handler, no farewell; a save may be going on
    checkpointer.close()
