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

from zckpt.compare.optimizer_values import parameter_values
from zckpt.errors import UsageError
from zckpt.formats.remainder import VERSION
from zckpt.formats.zero_redundancy.directory import KEY, METADATA_NAME, MODEL_NAME, OWNED, rank_name
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim import param_groups
from zckpt.optim.distributed import DistributedOptimizer, LocalOptimizer
from zckpt.optim.named_groups import Names, group_hyperparameters, group_names, remote_names
from zckpt.optim.opening import open_for
from zckpt.optim.ranks import Ranks
from zckpt.optim.restoring import Restoring, restoring_of
from zckpt.optim.together import written_together
from zckpt.optim.wrapped import bare
from zckpt.optim.zero import ZeroOptimizer
from zckpt.optim.zero import files as zero_files
from zckpt.optim.zero_redundancy import ZeroRedundancyOptimizer
from zckpt.state import Scalar, Slot
from zckpt.storage.durable import written_directory
from zckpt.version import __version__

SPOILED = "the optimizer is in part the checkpoint's and must not be used: load a sound checkpoint, or make it anew"


def save(
    optimizer: ZeroRedundancyOptimizer | ZeroOptimizer | DistributedOptimizer,
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
    if isinstance(optimizer, DistributedOptimizer):
        _save_workers(optimizer, Path(path), step=step, beside=dict(beside or {}), overwrite=overwrite)
        return
    if isinstance(optimizer, ZeroOptimizer):
        zero_files.save(optimizer, Path(path), model=model, step=step, beside=dict(beside or {}), overwrite=overwrite)
        return
    names = group_names(optimizer.param_groups, model)
    param_groups.sync(optimizer.param_groups, optimizer.optim.param_groups)  # a scheduler may have changed them
    with written_together(Path(path), Ranks(optimizer.process_group), overwrite=overwrite, owned=OWNED) as partial:
        torch.save(_without_names(optimizer.optim.state_dict()), partial / rank_name(optimizer.rank))
        if optimizer.rank == 0:
            tensors, about = _model(names, optimizer.param_groups, model)
            torch.save(tensors, partial / MODEL_NAME)
            about |= {"step": step, "metadata": dict(beside or {})}
            about[KEY] = {"world_size": optimizer.world_size, "names": names, "shapes": {}, "unnamed": []}
            torch.save(about, partial / METADATA_NAME)


def load(
    optimizer: ZeroRedundancyOptimizer | ZeroOptimizer | DistributedOptimizer,
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
    if isinstance(optimizer, DistributedOptimizer):
        order = remote_names(optimizer.param_groups)
        hyperparameters = group_hyperparameters(open_for(path, (), order, names=names), order, path)
        optimizer.call(_read_worker, os.fspath(path), order, names)
        optimizer.call(_take_worker, hyperparameters)
        for group, its in zip(optimizer.param_groups, hyperparameters, strict=True):
            group.update(its)
        return
    ranks = Ranks(optimizer.process_group)
    restoring = ranks.do(lambda: _prepared(optimizer, path, model, names))
    ranks.do(restoring.read)
    ranks.do(restoring.take, spoiled=SPOILED)
    ranks.do(restoring.share, spoiled=SPOILED)


def _prepared(
    optimizer: ZeroRedundancyOptimizer | ZeroOptimizer,
    path: str | os.PathLike[str],
    model: torch.nn.Module | None,
    names: Sequence[str] | None,
) -> Restoring:
    """Open a checkpoint, and check all that can be known of what the optimizer needs of it."""
    order = group_names(optimizer.param_groups, model)
    live = [] if model is None else list(bare(model).parameters)
    checkpoint = open_for(path, live, order, names=names)
    pairs = zip(optimizer.param_groups, order, strict=True)
    called = {p: name for group, its in pairs for p, name in zip(group["params"], its, strict=True)}
    restoring = restoring_of(checkpoint, optimizer, called, os.fspath(path))
    restoring.check()
    return restoring


def read_state(checkpoint: OpenedCheckpoint, name: str) -> dict[str, Any]:
    """Return the state of one parameter as `torch.optim` keeps it; single values that were tensors are tensors."""
    owner = checkpoint.owner(name)
    found: dict[str, Any] = {}
    for key, value in parameter_values(checkpoint, owner).items():
        if isinstance(value, Slot):
            found[key] = checkpoint.read(owner.name, key)
        elif isinstance(value, Scalar):
            found[key] = torch.tensor(value.value, dtype=getattr(torch, value.dtype))
        else:
            found[key] = value
    return found


def _model(
    names: Names, groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors, and what is to be said of them."""
    trained = {
        name: p
        for ours, group in zip(names, groups, strict=True)
        for name, p in zip(ours, group["params"], strict=True)
    }
    if model is None:
        return {name: p.detach() for name, p in trained.items()}, _about({}, [], [])
    its = bare(model)
    tensors = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in its.state.items()}
    owners = {parameter: name for name, parameter in trained.items()}
    tied: dict[str, str] = {}
    frozen: list[str] = []
    for name, parameter in its.parameters.items():
        owner = owners.setdefault(parameter, name)
        if owner != name:
            tied[name] = owner
        elif name not in trained:
            frozen.append(name)
    return tensors, _about(tied, frozen, [name for name in tensors if name not in its.parameters])


def _about(tied: dict[str, str], frozen: list[str], buffers: list[str]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "origin": {"format": "zero-redundancy", "format_version": f"zckpt {__version__}"},
        "step": None,
        "loss_scale": None,
        "frozen": frozen,
        "tied": tied,
        "buffers": buffers,
        "masters": False,
        "metadata": {},
        "optimizer_metadata": {},
    }


def _without_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {"state": state_dict["state"], "param_groups": groups}


# --- workers


def _save_workers(
    optimizer: DistributedOptimizer, path: Path, *, step: int | None, beside: dict[str, Any], overwrite: bool
) -> None:
    names = remote_names(optimizer.param_groups)
    with written_directory(path, overwrite=overwrite, owned=OWNED) as partial:
        held = optimizer.call_each(
            _save_worker, [(str(partial.resolve()), rank) for rank in range(optimizer.num_workers)]
        )
        first = [sum(len(group) for group in names[:index]) for index in range(len(names))]
        shares = [[[number - start for number in mine] for mine, start in zip(one, first, strict=True)] for one in held]
        about = {**_about({}, [], []), "step": step, "metadata": beside}
        about[KEY] = {"world_size": len(held), "names": names, "shapes": {}, "unnamed": [], "held": shares}
        torch.save(about, partial / METADATA_NAME)


def _save_worker(local: LocalOptimizer, directory: str, rank: int) -> list[list[int]]:
    """Write a worker's part; return the numbers of its parameters by group."""
    with local.lock:
        torch.save(_without_names(local.optimizer.state_dict()), Path(directory) / rank_name(rank))
        names = [name for group in local.optimizer.param_groups for name in group["param_names"]]
        tensors = {name: p.detach() for name, p in zip(names, local.by_number().values(), strict=True)}
        torch.save(tensors, Path(directory) / f"model_rank_{rank}.pt")
    return local.numbers


def _read_worker(local: LocalOptimizer, path: str, order: Names, listed: Sequence[str] | None) -> None:
    """Read the state of a worker's parameters, which `_take_worker` takes when all workers have read theirs."""
    checkpoint = open_for(path, (), order, names=listed)
    names = [name for group in local.optimizer.param_groups for name in group["param_names"]]
    state: dict[int, dict[str, Any]] = {}
    for (number, parameter), name in zip(local.by_number().items(), names, strict=True):
        if name not in checkpoint.parameters:
            raise UsageError(f"the checkpoint has no parameter {name}", path=path)
        shape = checkpoint.owner(name).shape
        if shape != tuple(parameter.shape):
            raise UsageError(f"{name} has another shape", path=path, expected=tuple(parameter.shape), found=shape)
        state[number] = read_state(checkpoint, name)
    local.waiting = {number: values for number, values in state.items() if values}


def _take_worker(local: LocalOptimizer, hyperparameters: list[dict[str, Any]]) -> None:
    waiting, local.waiting = local.waiting, {}
    local.load(waiting, hyperparameters)
