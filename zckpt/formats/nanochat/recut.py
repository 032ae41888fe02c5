"""The files of a step for other ranks: the model and its metadata as they are, and each rank's share of the state."""

from __future__ import annotations

from typing import Any

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.companions import copy_of
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.nanochat.directory import Step, rank_name
from zckpt.formats.nanochat.reader import KIND, MUON
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.writer import SlotTensor
from zckpt.state import Checkpoint, Parameter, ParamGroup, Slot
from zckpt.state.partition import check_world_size, rows_of_rank, stack_of_rank
from zckpt.state.views import concat, narrow, pad, reshape, zeros


def recut(job: Job) -> TargetFiles:
    """Return the files of a step for other ranks.

    Raises UsageError: a world without ranks; UnsupportedError: there is no optimizer; LayoutError: rows of a parameter
    cannot be shared evenly.
    """
    checkpoint, world_size = job.checkpoint, job.options.world_size
    check_world_size(world_size)
    step = checkpoint.origin
    if not isinstance(step, Step) or not checkpoint.param_groups:
        raise UnsupportedError("has no optimizer's state: any number of ranks can load it as it is")
    copies = [copy_of(path, path.name) for path in (step.model, step.meta)]
    files = [_file(checkpoint, rank, world_size, rank_name(step, rank)) for rank in range(world_size)]
    return TargetFiles([*copies, *files], copied={one.name for one in copies})


def _file(checkpoint: Checkpoint, rank: int, world_size: int, name: str) -> TargetFile:
    """Return a rank's file."""
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group in checkpoint.param_groups:
        numbers = range(number, number := number + len(group.parameters))
        members = [checkpoint.parameters[one] for one in group.parameters]
        groups.append({**group.hyperparameters, "params": [*numbers]})
        if group.hyperparameters[KIND] == MUON and members:
            its = _of_stack(members, rank, world_size)
            state |= {numbers[0]: its} if its else {}
        else:
            its_rows = (_of_rows(group, one, rank, world_size) for one in members)
            state |= {at: its for at, its in zip(numbers, its_rows, strict=True) if its}
    return torch_writer.lay_out(name, {"state": state, "param_groups": groups})


def _of_rows(group: ParamGroup, parameter: Parameter, rank: int, world_size: int) -> dict[str, Any]:
    """Return what a rank has of a parameter: some rows, or all of them."""
    rows = rows_of_rank(parameter.shape, world_size)
    slots = parameter.optimizer_slots
    if rows is not None:
        slots = {key: narrow(slot, 0, rank * rows, rows) for key, slot in slots.items()}
    return {**group.state, **parameter.state, **_tensors(slots, parameter.name)}


def _of_stack(members: list[Parameter], rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's part of each stack of some matrices, padded with zeros."""
    length = stack_of_rank(len(members), world_size)
    own = members[rank * length :][:length]
    slots = {}
    for key, first in members[0].optimizer_slots.items():
        its = [reshape(one.slots[key], (1, *first.shape)) for one in own]
        whole = concat(its, 0) if its else zeros(first, (0, *first.shape))
        slots[key] = pad(whole, 0, 0, length - len(own))
    return _tensors(slots, members[0].name)


def _tensors(slots: dict[str, Slot], name: str) -> dict[str, SlotTensor]:
    return {key: SlotTensor(slot, slot.dtype, f"{name} {key}") for key, slot in slots.items()}
