"""Sharded optimizers in files: what `zckpt convert --to zero-redundancy` writes, by those who have the state.

    save(optimizer, "run/step500", model=model)     on every rank of a ZeroRedundancyOptimizer
    load(optimizer, "run/step500", model=model)     the same, at any number of ranks

    save(optimizer, "run/step500")                  on the caller of a DistributedOptimizer: each of its workers writes
    load(optimizer, "run/step500")                  and reads its own part, and no state goes through the caller

    save(optimizer, "run/global_step500", model=model)      on every rank of a ZeroOptimizer: a checkpoint that
    load(optimizer, "run/global_step500", model=model)      DeepSpeed loads, too

`load` takes a checkpoint of any format that zckpt reads. Parameters are found by name, and only their bytes are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.optim.model_state import bare
from zckpt.optim.opening import open_for
from zckpt.optim.ranks import ALONE, Ranks
from zckpt.optim.states import Restoring
from zckpt.optim.states.protocol import Target
from zckpt.optim.states.several import Optimizers, process_group_of, workers_of

SPOILED = "the optimizer is in part the checkpoint's and must not be used: load a sound checkpoint, or make another"


def save(
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    step: int | None = None,
    beside: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a sharded optimizer and its parameters, each rank or worker its own part; appears whole or not at all.

    Parameters
    ----------
    optimizer : ZeroRedundancyOptimizer, ZeroOptimizer or DistributedOptimizer
        Of the first two, all ranks call this together.
    path : path-like
        A directory that does not exist, on a file system that all ranks or workers share. Of a ZeroOptimizer, it is
        the directory of a tag of DeepSpeed, and `latest` beside it will name it.
    model : Module, optional
        Names the parameters, where the optimizer was not given names, and has the buffers.
    step : int, optional
        How many steps have been trained.
    beside : mapping, optional
        What else is kept, by key: `lr_scheduler`, a scheduler's state; `extra`, which DeepSpeed calls the client's.
    overwrite : bool
        Replace a directory of the same format.

    Raises
    ------
    UsageError
        The parameters have no names.
    TargetError
        The target exists or cannot be written.
    """
    [state] = Optimizers(optimizer, {} if model is None else bare(model).names()).states.values()
    state.write(Target(Path(path), model, step, beside or {}, overwrite))


def load(
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Load state and hyperparameters from a checkpoint of any format.

    The parameters' values are left alone; but a ZeroOptimizer's are made of its masters.

    Parameters
    ----------
    optimizer : ZeroRedundancyOptimizer, ZeroOptimizer or DistributedOptimizer
    path : path-like
    model : Module, optional
        Names the parameters, where the optimizer was not given names.
    names : sequence of str, optional
        As for `zckpt.load`.

    Raises
    ------
    UsageError
        The checkpoint has other parameters; the message names some.
    SourceError
        It cannot be read: on all ranks, if on one. The optimizer is as it was, unless the message says otherwise.
    """
    of_model = None if model is None else bare(model)
    optimizers = Optimizers(optimizer, {} if of_model is None else of_model.names())
    ranks = Ranks(process_group_of(optimizer), purpose="" if workers_of(optimizer) is None else ALONE)

    def prepared() -> Restoring:
        checkpoint = open_for(path, () if of_model is None else of_model.parameters, optimizers.order, names=names)
        [restoring] = optimizers.restore(checkpoint, os.fspath(path), listed=names)
        restoring.check()
        return restoring

    restoring = ranks.do(prepared)
    ranks.do(restoring.read)
    ranks.do(restoring.take, spoiled=SPOILED)
    ranks.do(restoring.share, spoiled=SPOILED)
