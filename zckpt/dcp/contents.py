"""What a state dict holds: the model and the optimizer in it by name, and the rest, found as in a directory of DCP.

A rank looks at its own state dict to know what its tensors are called; the coordinator at what all have written,
and what each has told it: a `Part`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from zckpt.engine.tensors import dtype_name
from zckpt.errors import UnsupportedError
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.dcp.reader import fill
from zckpt.formats.dcp.tree import Branch, build, find_optimizers, leaves
from zckpt.formats.native.rank_file import UNWRITTEN, Entry, Listed
from zckpt.formats.torch_files.tensors import TensorItem, encode
from zckpt.immutable import immutable
from zckpt.optim.values import Values, as_stored
from zckpt.state import WEIGHT, Checkpoint, Extent, Parameter, Shape, Span, most_steps, without
from zckpt.state.dtypes import is_floating
from zckpt.torchfile import Tensor, TorchFile
from zckpt.training.directory import Piece, entries
from zckpt.training.other_state import IN_MEMORY

Found = Mapping[str, "Held | object"]
"""The leaves of a state dict by key: a tensor as `Held`, anything else as an inert node."""

Paths = Mapping[str, Keys]
"""The keys and indices that lead to each."""

_MEMORY = TorchFile(IN_MEMORY, 0, "zip", "little", None, {}, {}, 2)
"""What stands for the file of nodes that are in memory."""


@immutable
class Held:
    """A tensor of a state dict.

    `shape`: of the whole tensor; `node`: its elements in memory, where it is neither the model's nor the optimizer's.
    """

    dtype: str
    shape: Shape
    node: Tensor | None = None


@immutable
class Contents:
    """The logical state.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its slots have one span, which has the key for a path.
    slots : dict
        Slot and parameter of each key that is of the model or the optimizer.
    lost : list of str
        Keys of tensors that are of neither, and not in memory.
    """

    checkpoint: Checkpoint
    slots: dict[str, tuple[str, str]]
    lost: list[str]


def contents(source: str, found: Found, paths: Paths) -> Contents:
    """Find the model and the optimizer in a state dict.

    Raises UnsupportedError: it has neither; DamagedFileError: its parts contradict each other.
    """
    checkpoint = Checkpoint(source, "zckpt")
    lost = fill(checkpoint, _tree(source, found, paths))
    slots = {
        slot.spans[0].path: (name, parameter.name)
        for parameter in checkpoint.holders()
        for name, slot in parameter.slots.items()
    }
    if checkpoint.step is None:
        checkpoint.step = most_steps(one.state.get("step") for one in checkpoint.parameters.values())
    return Contents(checkpoint, slots, lost)


def tie(checkpoint: Checkpoint, first: str, other: str) -> None:
    """Make one parameter another name of one that has the same weight; the optimizer's, if it has one, is the owner."""
    owner, alias = checkpoint.parameters[first], checkpoint.parameters[other]
    if alias.group is not None and owner.group is None:
        owner, alias = alias, owner
        owner.slots = {WEIGHT: alias.slots[WEIGHT], **without(owner.slots, WEIGHT)}
    checkpoint.parameters[alias.name] = Parameter(alias.name, owner.shape, owner.dtype, tied_to=owner.name)


def _tree(source: str, found: Found, paths: Paths) -> Branch:
    made: dict[str, TensorItem | ObjectItem] = {}
    for key, value in found.items():
        made[key] = ObjectItem(key, _MEMORY, value)
        if isinstance(value, Held):
            span = Span(Extent.whole(value.shape), key, 0, value.dtype)
            made[key] = TensorItem(key, value.dtype, value.shape, (span,), value.node, IN_MEMORY)
    return build(made, {**{key: (key,) for key in found if key not in paths}, **paths}, source)


@dataclass(slots=True)
class Part:
    """What a rank has written, or gives to the coordinator to write.

    Parameters
    ----------
    pieces : dict of str to Piece
        By the state dict's keys; those of the model and the optimizer.
    values : dict
        What is no tensor, and single numbers as Scalars.
    tensors : dict of str to Tensor
        Of neither the model nor the optimizer.
    tied : dict of str to str
        Keys of tensors that are other names of one, and the key of that.
    file : Listed
        Its file as a whole.
    sent : dict
        To a store, what the coordinator has to know to finish it.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    file: Listed = UNWRITTEN
    sent: dict[str, Any] = field(default_factory=dict)


def part_of(plan: SavePlan, planner: SavePlanner, source: str) -> tuple[Part, list[Entry]]:
    """Return what a rank writes by a plan, and the entries of its file.

    Raises UnsupportedError: the planner is not torch's own, or a class of it; a sharded tensor that is neither the
    model's nor the optimizer's; something that only a pickle could hold.
    """
    state: Mapping[str, Any] | None = getattr(planner, "state_dict", None)
    look_up: Callable[[MetadataIndex], object] | None = getattr(planner, "lookup_object", None)
    if state is None or look_up is None:
        raise UnsupportedError(
            f"the planner is a {type(planner).__name__}", path=source, expected="a DefaultSavePlanner"
        )
    slots, numbers = _own(state, getattr(planner, "mappings", {}), source)
    part = Part(tied=_tied(state, slots))
    held: list[tuple[Piece, torch.Tensor]] = []
    for item in plan.items:
        key = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            part.values[key] = look_up(item.index)
        elif key in numbers:
            part.values[key] = numbers[key]
        elif key not in slots:
            if item.type == WriteItemType.SHARD:
                raise UnsupportedError(
                    f"{key} is sharded, but belongs to neither the model nor the optimizer",
                    advice="save it as a separate checkpoint",
                )
            part.tensors[key] = _resolved(item, planner).detach().cpu()
        elif item.tensor_data is not None and key not in part.tied:  # what is tied is written under another name
            about, tensor = item.tensor_data, _resolved(item, planner)
            sizes, shape = tuple(about.chunk.sizes), tuple(about.size)
            if not tensor.numel() and Extent.whole(shape).numel:  # of a tensor of which this rank has nothing
                continue
            if key in part.pieces:
                raise UnsupportedError(f"{key} has several parts on one rank")
            slot, name = slots[key]
            extent = Extent(tuple(about.chunk.offsets), sizes, 0, tensor.numel())
            part.pieces[key] = Piece(name, slot, dtype_name(tensor.dtype), shape, extent)
            held.append((part.pieces[key], tensor.detach().contiguous()))
    return part, entries(held, None)


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor of an item. Raises UnsupportedError if the planner gives something else."""
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        raise UnsupportedError(
            f"the planner returned no tensor for {item.index.fqn}", expected="a tensor", found=type(found).__name__
        )
    return found


def _own(state: Mapping[str, Any], paths: Paths, source: str) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """Return which tensors of a rank's state dict are of the model or the optimizer, and the latter's single numbers.

    Numbers are 0-d tensors, such as steps.
    """
    values = Values()
    found: dict[str, object] = {
        key: Held(dtype_name(one.dtype), tuple(one.shape)) if isinstance(one, torch.Tensor) else values.node(one, key)
        for key, one in state.items()
    }
    numbers: dict[str, Any] = {}
    for item in (item for part in find_optimizers(_tree(source, found, paths)) for item in leaves(part.node)):
        if isinstance(item, TensorItem) and not item.shape:
            number: Any = as_stored(state[item.key])
            with suppress(UnsupportedError):  # of a kind that is none
                encode(number)
                numbers[item.key] = number
    return contents(source, {**found, **numbers}, paths).slots, numbers


def _tied(state: Mapping[str, Any], slots: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return keys of weights that have the memory of one before them, and its key; not of what a module counts."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for key, (slot, _) in slots.items():
        tensor = state[key]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if slot == WEIGHT and tensor.dim() > 1 and is_floating(dtype_name(tensor.dtype)) and local.numel():
            memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape)
            if (owner := first.setdefault(memory, key)) != key:
                found[key] = owner
    return found
