"""Weights that all ranks have whole: one rank reads each of them, and sends it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from zckpt.operations.tensors import Wanted, read_tensors
from zckpt.optim.ranks import Ranks

ROUND_NBYTES = 64 << 20
"""Read by each rank before all of it is sent: what a rank needs beside the weights."""


def read_and_broadcast(wanted: Sequence[Wanted], ranks: Ranks) -> None:
    """Read what all ranks want, each rank some of it, and send it around.

    All ranks must want the same tensors in the same order.

    Raises
    ------
    SourceError
        A file cannot be read: on all ranks, if on one.
    """
    for turn in _rounds(wanted, ranks.world_size):
        mine = [one for reader, one in turn if reader == ranks.rank]
        ranks.do(partial(read_tensors, mine))
        for reader, one in turn:
            _send(one.tensor, ranks, reader)


def _rounds(wanted: Sequence[Wanted], world_size: int) -> Iterator[list[tuple[int, Wanted]]]:
    """Yield who reads what; in each round every rank reads about as much."""
    turn: list[tuple[int, Wanted]] = []
    loads = [0] * world_size
    for one in wanted:
        reader = loads.index(min(loads))
        turn.append((reader, one))
        loads[reader] += one.tensor.nbytes
        if min(loads) >= ROUND_NBYTES:
            yield turn
            turn, loads = [], [0] * world_size
    if turn:
        yield turn


def _send(tensor: torch.Tensor, ranks: Ranks, reader: int) -> None:
    there = tensor if tensor.is_contiguous() else tensor.contiguous()
    dist.broadcast(there, src=ranks.members[reader], group=ranks.given or dist.group.WORLD)
    if there is not tensor:
        tensor.copy_(there)
