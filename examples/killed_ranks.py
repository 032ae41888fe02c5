"""A small GPT, and processes that train it together; one of them may be killed, after which the others end, too.

The model learns this library's source, byte by byte. A step's batch depends on its number alone.
"""

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
from torch import nn
from torch.nn.functional import cross_entropy

import zckpt

BATCH = 12
"""Sequences in a batch, of all ranks together: what 4, 3 and 2 ranks can share."""

BYTES = 128
"""The source is ASCII."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is.

    Parameters
    ----------
    width, layers, heads : int
    length : int
        Bytes of a sequence.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    length: int = 64


SMALL = Size(width=16, layers=1, heads=2, length=16)


class GPT(nn.Module):
    """Embeddings, causal layers, and a head that is tied to the embedding of bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, size.width)
        self.place = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        nn.init.normal_(self.byte.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)
        self.head.weight = self.byte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each byte from those before it.

        Parameters
        ----------
        ids : Tensor of int64, sequences x (length + 1)
        """
        given, expected = ids[:, :-1], ids[:, 1:]
        length = given.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.byte(given) + self.place.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), expected.flatten())


def source_text() -> torch.Tensor:
    """Return the bytes of this library's source."""
    root = Path(str(zckpt.__file__)).parent
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % BYTES


def batch(text: torch.Tensor, size: Size, seed: int, step: int) -> torch.Tensor:
    """Return the sequences of a step, for all ranks together: `BATCH` x (length + 1)."""
    numbers = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - size.length, (BATCH,), generator=numbers)
    return torch.stack([text[start : start + size.length + 1] for start in starts.tolist()])


SILENCE = 120.0
"""Seconds without a word from the first rank after which the training is given up."""

GRACE = 20.0
"""Seconds that the ranks have to end, or to find out that one of them is gone."""

PRELOADED = [__name__, "torch._dynamo", "zckpt.training.checkpointer", "zckpt.optim.zero"]
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
        receiver, sender = context.Pipe(duplex=False)
        ranks = [
            context.Process(
                target=_rank_main,
                args=(training, (rank, world_size), scratch, None if rank else sender, dies.get(rank)),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for one in ranks:
                one.start()
            sender.close()
            part = _listen(receiver, Part(world_size))
        except BaseException:
            _end(ranks, 0.0)
            raise
        hung = _end(ranks, GRACE)
        codes = [one.exitcode for one in ranks]
        if kill is not None and codes[kill[1]] == -signal.SIGKILL and kill[1] not in hung:
            part.killed = kill[1]
        elif any(codes) or max(part.losses, default=part.resumed) < training.steps:
            raise zckpt.ZckptError(f"training on {world_size} ranks failed", found=_reason(codes, Path(scratch)))
        return part


def _listen(receiver: Connection, part: Part) -> Part:
    """Hear the first rank until it ends."""
    while receiver.poll(SILENCE):
        try:
            what, *values = receiver.recv()
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
    training: Training, place: tuple[int, int], scratch: str, sender: Connection | None, dies: int | None
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
        _train(training, rank, world_size, sender, dies)
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001  # the exit status says so; of ranks that were left alone nobody wants to hear
        (Path(scratch) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # gloo's threads may wait for the one that is gone


def _train(training: Training, rank: int, world_size: int, sender: Connection | None, dies: int | None) -> None:
    """Go on with a training, from its newest checkpoint to its last step, or to the one after which this rank dies."""
    model = GPT(training.size)
    optimizer = zckpt.optim.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-3, stage=2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    parts: Any = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpointer = zckpt.Checkpointer(training.directory, every=training.every, keep=2, async_=True)
    restored = checkpointer.resume(**parts)
    done = (restored.step or 0) if restored else 0
    if sender is not None:
        sender.send(("resumed", done, restored.world_size if restored else None))
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
        if sender is not None:
            sender.send(("loss", step, mean.item() / world_size))
        checkpointer.step(step, **parts)
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)  # no handler, no farewell; a save may be going on
    checkpointer.close()
