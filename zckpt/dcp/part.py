"""What one rank writes of a state dict, and what it tells the coordinator of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from zckpt.dcp.contents import Contents, Held, contents, may_be_tied, single_numbers
from zckpt.errors import UnsupportedError
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.native.rank_file import UNWRITTEN, Entry, Listed, slot_entry
from zckpt.formats.torch_files.tensors import encode
from zckpt.operations.tensors import dtype_name, memory_of
from zckpt.state import WEIGHT, Extent, Scalar, Slot
from zckpt.training.pieces import key_of
from zckpt.training.values import Values


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a tensor that a rank has written, and what they are called in its file."""

    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    key: str


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
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    file: Listed = UNWRITTEN


def part_of(plan: SavePlan, planner: SavePlanner, source: str) -> tuple[Part, list[Entry]]:
    """Return what a rank writes by a plan, and the entries of its file.

    Raises
    ------
    UnsupportedError
        The planner is not torch's own, or a class of it; a sharded tensor that is neither the model's nor the
        optimizer's; something that only a pickle could hold.
    """
    local = _Local(planner, source)
    part = Part(tied=local.tied)
    entries: list[Entry] = []
    for item in plan.items:
        key = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            part.values[key] = local.look_up(item.index)
        elif key in local.numbers:
            part.values[key] = local.numbers[key]
        elif key in local.found.slots:
            _add(part, entries, item, planner, key_of(*local.found.slots[key]))
        else:
            part.tensors[key] = _beside(item, planner)
    return part, entries


def _add(part: Part, entries: list[Entry], item: WriteItem, planner: SavePlanner, name: str) -> None:
    """Add a piece; one of a tensor that is written under another name is only described."""
    about, key = item.tensor_data, item.index.fqn
    if about is None or key in part.tied:
        return
    tensor = _resolved(item, planner)
    sizes, shape = tuple(about.chunk.sizes), tuple(about.size)
    extent = Extent(tuple(about.chunk.offsets), sizes, 0, tensor.numel())
    if not extent.numel and Extent.whole(shape).numel:  # of a tensor of which this rank has nothing
        return
    if key in part.pieces:
        raise UnsupportedError(f"{key} has several parts on one rank")
    piece = Piece(dtype_name(tensor.dtype), shape, extent, name)
    slot = Slot(name, piece.dtype, shape, ())
    entries.append(slot_entry(name, slot, extent, memory_of(tensor.detach().cpu().contiguous())))
    part.pieces[key] = piece


def _beside(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    if item.type == WriteItemType.SHARD:
        raise UnsupportedError(
            f"{item.index.fqn} is sharded, and belongs to neither the model nor the optimizer",
            advice="save it as a checkpoint of its own",
        )
    return _resolved(item, planner).detach().cpu()


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor of an item. Raises UnsupportedError if the planner gives something else."""
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        raise UnsupportedError(
            f"the planner gives no tensor for {item.index.fqn}", expected="a tensor", found=type(found).__name__
        )
    return found


class _Local:
    """The state dict of this rank: what its tensors are, which are single numbers, and which are tied."""

    def __init__(self, planner: SavePlanner, source: str) -> None:
        state: Mapping[str, Any] | None = getattr(planner, "state_dict", None)
        look_up: Callable[[MetadataIndex], object] | None = getattr(planner, "lookup_object", None)
        if state is None or look_up is None:
            raise UnsupportedError(
                f"the planner is a {type(planner).__name__}", path=source, expected="a DefaultSavePlanner"
            )
        self.look_up = look_up
        paths: Mapping[str, Keys] = getattr(planner, "mappings", {})
        values = Values()
        found: dict[str, object] = {
            key: _held(one) if isinstance(one, torch.Tensor) else values.node(one, key) for key, one in state.items()
        }
        self.numbers = {}
        for key in single_numbers(source, found, paths):
            number = _number(state[key])
            if number is not None:
                self.numbers[key] = number
        self.found: Contents = contents(source, {**found, **self.numbers}, paths)
        self.tied = _tied(state, self.found)


def _held(tensor: torch.Tensor) -> Held:
    return Held(dtype_name(tensor.dtype), tuple(tensor.shape))


def _number(tensor: torch.Tensor) -> Scalar | None:
    """Return a 0-d tensor as a single number; None for a kind that is none."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    number = Scalar(whole.item(), dtype_name(tensor.dtype))
    try:
        encode(number)
    except UnsupportedError:
        return None
    return number


def _tied(state: Mapping[str, Any], found: Contents) -> dict[str, str]:
    """Return the keys of weights that have the memory of one before them."""
    first: dict[tuple[object, ...], str] = {}
    tied = {}
    for key, (slot, _) in found.slots.items():
        tensor = state[key]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if slot != WEIGHT or not may_be_tied(_held(tensor)) or not local.numel():
            continue
        memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape)
        owner = first.setdefault(memory, key)
        if owner != key:
            tied[key] = owner
    return tied
