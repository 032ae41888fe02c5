"""`load`: whatever checkpoint there is, into what is being trained; each rank reads the bytes of its own part."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.errors import UsageError
from zckpt.opened import OpenedCheckpoint
from zckpt.opened import open as open_checkpoint
from zckpt.optim import DistributedOptimizer, files
from zckpt.optim.ranks import ALONE, Ranks
from zckpt.optim.restoring import restoring_of
from zckpt.optim.shares import share_of
from zckpt.state import MASTER, WEIGHT, Parameter, Slot
from zckpt.tensor_reads import Wanted, dtype_name, read_tensors
from zckpt.training.broadcasting import read_and_broadcast
from zckpt.training.model_state import ModelState, Stateful, model_state, set_extra
from zckpt.training.optimizer_state import parameter_names
from zckpt.training.values import set_random_states, value_of
from zckpt.training.whole import EXTRA, EXTRA_STATE, GRAD_SCALER, RANDOM, SCHEDULER

SHOWN = 4


@dataclass(slots=True)
class Restored:
    """What a checkpoint had, and what was made of it.

    Parameters
    ----------
    path : str
    format : str
        Of the checkpoint.
    step : int or None
        How many steps had been trained.
    extra : dict
        What `save` was given as `extra`; of other formats, the client's state.
    world_size : int
        The number of ranks that saved.
    missing : list of str
        Tensors of the model that the checkpoint has not; they are as they were.
    unexpected : list of str
        Tensors of the checkpoint that the model has not.
    reshaped : list of str
        Tensors of another shape there; they are as they were.
    notes : list of str
        What else was not restored, and why.
    """

    path: str
    format: str
    step: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    grad_scaler: Stateful | None = None,
    strict: bool = True,
    broadcast: bool = False,
    random_states: bool = True,
    tag: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Restored:
    """Load a checkpoint of any format into what is being trained; all ranks call it together.

    Parameters are found by name. A rank reads what it needs: its own part of sharded tensors and state, and the whole
    of what it has whole. Elements are rounded where types differ.

    Parameters
    ----------
    path : path-like
    model : Module, optional
        As for `save`.
    optimizer : Optimizer, optional
        Any of zckpt's or of torch's, made for this model; its hyperparameters become the checkpoint's.
    scheduler, grad_scaler : optional
        Get what `load_state_dict` was saved of them, if it was.
    strict : bool
        Raise if the model and the checkpoint have not the same tensors, in the same shapes.
    broadcast : bool
        Let one rank read what all have whole, and send it to the others: for a file system that is slower than the
        network.
    random_states : bool
        Continue with the random numbers of the rank of the same number, if the checkpoint has its state.
    tag : str, optional
        Which checkpoint of a run's directory.
    process_group : ProcessGroup, optional
        The ranks that load; by default the optimizer's, else the whole world.

    Returns
    -------
    Restored

    Raises
    ------
    UsageError
        The checkpoint is of another model; nothing has been changed.
    SourceError
        It cannot be read: on all ranks, if on one.
    """
    purpose = ALONE if isinstance(optimizer, DistributedOptimizer) else ""
    ranks = Ranks(process_group or getattr(optimizer, "process_group", None), purpose=purpose)
    error: Exception | None = None
    loading = None
    try:
        loading = _Loading(path, model, optimizer, strict=strict, tag=tag)
    except Exception as failure:  # noqa: BLE001  # told to all ranks
        error = failure
    ranks.agree(error)
    assert loading is not None  # noqa: S101  # or else all have agreed on an error
    try:
        loading.read(ranks, broadcast=broadcast)
    except Exception as failure:  # noqa: BLE001  # told to all ranks
        error = failure
    ranks.agree(error)
    loading.publish()
    loading.restore_rest(scheduler, grad_scaler, ranks.rank if random_states else None)
    return loading.report


class _Loading:
    """One checkpoint on its way into one model and optimizer. Making it checks; nothing is changed yet."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None,
        optimizer: Optimizer | None,
        *,
        strict: bool,
        tag: str | None,
    ) -> None:
        self.path = os.fspath(path)
        self.model = model
        self.optimizer = optimizer
        self.checkpoint: OpenedCheckpoint = open_checkpoint(path, tag=tag)
        self.tensors: ModelState = model_state(model)
        self.report = Restored(
            self.path, self.checkpoint.format, self.checkpoint.step, world_size=self.checkpoint.world_size
        )
        self.found = self._match()
        if strict:
            self._be_strict()
        self.restoring = None
        if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
            names = parameter_names(optimizer, self.tensors.names())
            self.restoring = restoring_of(self.checkpoint, optimizer, names, self.path, strict=strict)
            self.report.notes += self.restoring.notes

    def _match(self) -> dict[str, Parameter]:
        """Return the checkpoint's tensor for each of the model's, and note what has none."""
        report, checkpoint = self.report, self.checkpoint
        if self.model is None:
            return {}
        found: dict[str, Parameter] = {}
        for name, tensor in self.tensors.tensors.items():
            its = _tensor_called(checkpoint, name)
            if its is None or not its.slots.keys() & {WEIGHT, MASTER}:
                report.missing.append(name)
            elif its.shape != tuple(tensor.shape):
                report.reshaped.append(name)
            else:
                found[name] = its
        known = self.tensors.tensors.keys() | self.tensors.tied.keys()
        report.unexpected = [one.name for one in checkpoint.tensors() if one.name not in known]
        return found

    def _be_strict(self) -> None:
        report = self.report
        for what, names in (
            ("the checkpoint has no", report.missing),
            ("the model has no", report.unexpected),
            ("another shape has", report.reshaped),
        ):
            if names:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                raise UsageError(
                    f"not a checkpoint of this model: {what} {', '.join(names[:SHOWN])}{more}",
                    path=self.path,
                    advice="give the model that was saved, or strict=False",
                )

    def read(self, ranks: Ranks, *, broadcast: bool) -> None:
        """Read weights into the model, and state into memory of its own."""
        if isinstance(self.optimizer, DistributedOptimizer):
            files.load(self.optimizer, self.path)
        made_of_masters = set(self.restoring.publishes) if self.restoring is not None else set()
        replicated, sharded = self._weights(made_of_masters)
        with torch.no_grad():
            if broadcast and ranks.world_size > 1:
                read_and_broadcast(replicated, ranks)
                replicated = []
            read_tensors([*replicated, *sharded])
            if self.restoring is not None:
                self.restoring.read()

    def _weights(self, made_of_masters: set[str]) -> tuple[list[Wanted], list[Wanted]]:
        """Return what all ranks want alike, and this rank's parts of what is sharded."""
        replicated: list[Wanted] = []
        sharded: list[Wanted] = []
        for name, its in self.found.items():
            tensor = self.tensors.tensors[name]
            share = None if name in made_of_masters else share_of(tensor, name)
            if share is not None and share.tensor.numel():
                wanted = Wanted(_weight_like(its, tensor.dtype), share.extent, share.tensor)
                (replicated if share.ranks is None else sharded).append(wanted)
        return replicated, sharded

    def publish(self) -> None:
        """Give the optimizer what was read of its state."""
        if self.restoring is not None:
            self.restoring.publish()

    def restore_rest(self, scheduler: Stateful | None, grad_scaler: Stateful | None, rank: int | None) -> None:
        """Restore what is beside the model and the optimizer."""
        metadata = self.checkpoint.metadata
        for key, target, name in ((SCHEDULER, scheduler, "scheduler"), (GRAD_SCALER, grad_scaler, "grad_scaler")):
            if target is not None:
                self._restore_one(key, target, name)
        for key, value in _mapping(value_of(metadata.get(EXTRA_STATE))).items():
            if self.model is not None:
                set_extra(self.model, key, value)
        self.report.extra = self._extra()
        if rank is not None and RANDOM in metadata:
            states = value_of(metadata[RANDOM])
            if isinstance(states, list) and rank < len(states) and states[rank]:
                set_random_states(states[rank])
            else:
                self.report.notes.append(f"no random states of rank {rank}: {len(states)} ranks have saved theirs")

    def _restore_one(self, key: str, target: Stateful, name: str) -> None:
        state = value_of(self.checkpoint.metadata.get(key))
        if isinstance(state, Mapping):
            target.load_state_dict(dict(state))
            return
        self.report.notes.append(f"the checkpoint has no state of a {name}: it goes on as it is")
        warnings.warn(f"{self.path}: {self.report.notes[-1]}", stacklevel=4)

    def _extra(self) -> dict[str, Any]:
        """Return what the program kept beside; of other formats, what they call the client's state."""
        metadata = self.checkpoint.metadata
        if self.checkpoint.format != "deepspeed" and EXTRA in metadata:
            return dict(_mapping(value_of(metadata[EXTRA])))
        own = {SCHEDULER, GRAD_SCALER, EXTRA, RANDOM, EXTRA_STATE}
        return {key: value_of(value) for key, value in metadata.items() if key not in own}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tensor_called(checkpoint: OpenedCheckpoint, name: str) -> Parameter | None:
    if name not in checkpoint.parameters and name not in checkpoint.buffers:
        return None
    return checkpoint.owner(name)


def _weight_like(parameter: Parameter, dtype: torch.dtype) -> Slot:
    """Return the slot that a weight of an element type is read from: one of the type, or the most exact."""
    slots = [parameter.slots[name] for name in (WEIGHT, MASTER) if name in parameter.slots]
    for slot in slots:
        if slot.dtype == dtype_name(dtype):
            return slot
    return slots[-1]
