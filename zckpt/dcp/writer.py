"""`Writer`: `torch.distributed.checkpoint.save` in zckpt's own format.

coordinator     makes the partial directory when all plans are there
every rank      looks what its state dict holds: the model and the optimizer in it by name, and the rest, found as in a
                directory of DCP; writes its file, and tells what is in it: a `Part`
coordinator     writes the first file, which has tensors beside the model and the optimizer, and the document; renames
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import field, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from zckpt.engine.tensors import dtype_name
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.dcp.reader import fill
from zckpt.formats.dcp.tree import Branch, build, find_optimizers, leaves
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED
from zckpt.formats.native.rank_file import UNWRITTEN, Entry, Listed
from zckpt.formats.suffixes import check_directory
from zckpt.formats.torch_files.tensors import TensorItem, encode
from zckpt.immutable import immutable, mutable
from zckpt.operations.places import lasting_place_of, place_of
from zckpt.operations.shared_target import SharedTarget, shared_target
from zckpt.optim.ranks import Place
from zckpt.optim.values import Values, as_stored
from zckpt.state import WEIGHT, Checkpoint, Extent, Shape, Span, Topology, alias_of, by_key, most_steps, without
from zckpt.state.dtypes import is_floating
from zckpt.torchfile import Tensor, TorchFile
from zckpt.training.directory import Piece, entries, new_identity, storage_entries, write_document, write_rank
from zckpt.training.other_state import IN_MEMORY
from zckpt.version import __version__

_WRITING: WeakValueDictionary[Place, Writer] = WeakValueDictionary()
"""By target, who has a partial directory of it: DCP does not tell a coordinator that another rank has failed."""


Found = Mapping[str, "Held | object"]
"""The leaves of a state dict by key: a tensor as `Held`, anything else as an inert node."""

Paths = Mapping[str, Keys]
"""The keys and indices that lead to each."""

_MEMORY = TorchFile(IN_MEMORY, 0, "zip", "little", None, {}, {}, 2)
"""What stands for the file of nodes that are in memory."""


class Writer(StorageWriter):
    """Write a checkpoint in zckpt's format with `dcp.save` or `dcp.async_save`; each rank writes its own part.

        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(state | {"step": step}, storage_writer=zckpt.dcp.Writer("run/step-500"))

    The model and the optimizer are recognised in the state dict by their form, under any keys: as from `get_state_dict`
    of `torch.distributed.checkpoint.state_dict`, nested or flattened, or as from their own `state_dict`. Everything
    else is saved, too: plain data, numpy arrays and unsharded tensors, which should be small, since the coordinator
    writes them. Replicas are written once, as DCP's planner assigns them.

    The checkpoint appears whole or not at all. `zckpt.open`, `load`, `convert` and so on read it, and so does
    `dcp.load` with `zckpt.dcp.Reader`.

    Parameters
    ----------
    path : path-like, optional
        A directory that does not exist, on a file system that all ranks share, or its URL in a store. Default: the
        `checkpoint_id` given to `dcp.save`.
    overwrite : bool
        Replace an existing directory of zckpt's format.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> None:
        self.path = None if path is None else os.fspath(path)
        self._overwrite = overwrite
        self._made: SharedTarget | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The path, as DCP calls it."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path on a file system, or a URL."""
        try:
            place_of(checkpoint_id)
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over; called on each rank."""
        self._abandon()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: object, use_collectives: bool = True, **kwargs: object
    ) -> None:
        """Start a save; called on each rank.

        Raises
        ------
        UsageError
            No path was given, or that of a file; or ranks would save without communicating.
        """
        del is_coordinator, args, kwargs  # torch gives what it sees that there is a place for
        self._abandon()
        if self.path is None:
            raise UsageError("no checkpoint to write", advice="give Writer a path, or dcp.save a checkpoint_id")
        check_directory(Path(self._target()))
        if not use_collectives:
            raise UsageError("zckpt's format has one document for all ranks", advice="do not change use_collectives")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the partial directory and tell each rank its file; called on the coordinator.

        Raises
        ------
        TargetError
            The directory exists or cannot be written.
        """
        target = self._target()
        before = _WRITING.pop(target, None)
        if before is not None:
            before._abandon()
        made = shared_target(target, last=[DOCUMENT_NAME])
        identity = new_identity()
        with _ending(made, only_in_error=True):  # planners that keep plans give ranks an earlier save's `storage_data`
            made.begin(overwrite=self._overwrite, owned=OWNED, note=identity.encode())
        self._made = made
        _WRITING[target] = self
        count = len(plans) + 1
        return [replace(plan, storage_data=(rank + 1, count)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Raises
        ------
        UnsupportedError
            The format cannot hold something.
        TargetError
            It cannot be written.
        """
        target, (file, count) = self._target(), plan.storage_data
        part, entries = part_of(plan, planner, str(self.path))
        shared = self._made or shared_target(target)
        with nullcontext() if self._made is not None else _ending(shared):
            part.file = write_rank(shared.path, file, count, entries, shared.noted().decode())
            part.sent = shared.sent()
        done: Future[list[WriteResult]] = Future()
        sent: Part | bytes = part
        if dist.is_initialized():  # torch's pickles of tensors alone, as it sends objects, cannot be read of every type
            torch.save(part, whole := BytesIO())
            sent = whole.getvalue()
        done.set_result([WriteResult(MetadataIndex(part.file.name), part.file.nbytes, sent)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the document and make the checkpoint appear; called on the coordinator.

        Raises
        ------
        UsageError
            No save has been planned with this writer.
        ZckptError
            It cannot be written; nothing has been.
        """
        made, self._made = self._made, None
        if made is None:
            raise UsageError("this writer has not planned a save", advice="use it through dcp.save")
        _WRITING.pop(self._target(), None)
        every = (one.storage_data for of_rank in results for one in of_rank)
        parts: list[Part] = [
            torch.load(BytesIO(one), weights_only=False) if isinstance(one, bytes) else one for one in every
        ]
        with _ending(made):
            directory, identity, values = made.path, made.noted().decode(), Values()
            checkpoint = _whole(metadata, parts, values, str(self.path))
            checkpoint.format_version = f"zckpt {__version__}"
            checkpoint.world_size = len(parts)
            checkpoint.topology = Topology(dp=len(parts))
            stored = storage_entries(checkpoint, values)
            files = [write_rank(directory, 0, len(parts) + 1, stored, identity), *(part.file for part in parts)]
            where = by_key((key, (rank, one)) for rank, part in enumerate(parts, 1) for key, one in part.pieces.items())
            write_document(checkpoint, where, identity, files, directory)
            made.commit([made.sent(), *(part.sent for part in parts)])

    def _target(self) -> Place:
        return lasting_place_of(str(self.path))

    def _abandon(self) -> None:
        """Remove what a save that failed on another rank has left."""
        made, self._made = self._made, None
        if made is not None:
            made.abort(InterruptedError("another rank has failed"))
            made.close()


@contextmanager
def _ending(shared: SharedTarget, *, only_in_error: bool = False) -> Iterator[None]:
    """Let go of a directory at the end, after an error without what has been written; or only then."""
    try:
        yield
    except BaseException as error:
        shared.abort(error)
        shared.close()
        raise
    if not only_in_error:
        shared.close()


def _whole(metadata: Metadata, parts: list[Part], values: Values, source: str) -> Checkpoint:
    """Return the logical state of what all ranks have written."""
    found: dict[str, object] = {}
    tied: dict[str, str] = {}
    for part in parts:
        tied.update(part.tied)
        found.update({key: Held(piece.dtype, piece.shape) for key, piece in part.pieces.items()})
        found.update({key: values.node(value, key) for key, value in part.values.items()})
        for key, tensor in part.tensors.items():
            node = values.tensor(tensor, key)
            found[key] = Held(node.dtype, node.shape, node)
    found.update({alias: found[owner] for alias, owner in tied.items() if owner in found})
    paths = {key: path for key, path in (metadata.planner_data or {}).items() if key in found}
    checkpoint, slots = contents(source, found, paths)
    held = (key for key, one in found.items() if isinstance(one, Held) and one.node is None)
    if lost := [key for key in held if key not in slots]:
        raise UnsupportedError(f"there is no information about {', '.join(lost[:4])}", path=source)
    for alias, owner in tied.items():
        names = [slots[key][1] for key in (owner, alias)]
        if set(names) <= checkpoint.parameters.keys():
            tie(checkpoint, *names)
    return checkpoint


@immutable
class Held:
    """A tensor of a state dict.

    `shape`: of the whole tensor; `node`: its elements in memory, where it is neither the model's nor the optimizer's.
    """

    dtype: str
    shape: Shape
    node: Tensor | None = None


Slots = dict[str, tuple[str, str]]
"""Slot and parameter of each key that is of the model or the optimizer."""


def contents(source: str, found: Found, paths: Paths) -> tuple[Checkpoint, Slots]:
    """Find the model and the optimizer in a state dict: as logical state, where keys are the paths of spans.

    Raises UnsupportedError: it has neither; DamagedFileError: its parts contradict each other.
    """
    checkpoint = Checkpoint(source, "zckpt")
    fill(checkpoint, _tree(source, found, paths))
    slots = {
        slot.spans[0].path: (name, parameter.name)
        for parameter in checkpoint.holders()
        for name, slot in parameter.slots.items()
    }
    if checkpoint.step is None:
        checkpoint.step = most_steps(one.state.get("step") for one in checkpoint.parameters.values())
    return checkpoint, slots


def tie(checkpoint: Checkpoint, first: str, other: str) -> None:
    """Make one parameter another name of one that has the same weight; the optimizer's, if it has one, is the owner."""
    owner, alias = checkpoint.parameters[first], checkpoint.parameters[other]
    if alias.group is not None and owner.group is None:
        owner, alias = alias, owner
        owner.slots = {WEIGHT: alias.slots[WEIGHT], **without(owner.slots, WEIGHT)}
    checkpoint.parameters[alias.name] = alias_of(owner, alias.name)


def _tree(source: str, found: Found, paths: Paths) -> Branch:
    made: dict[str, TensorItem | ObjectItem] = {}
    for key, value in found.items():
        made[key] = ObjectItem(key, _MEMORY, value)
        if isinstance(value, Held):
            span = Span(Extent.whole(value.shape), key, 0, value.dtype)
            made[key] = TensorItem(key, value.dtype, value.shape, (span,), value.node, IN_MEMORY)
    return build(made, {**{key: (key,) for key in found if key not in paths}, **paths}, source)


@mutable
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
    slots, numbers, tied = _own(state, getattr(planner, "mappings", {}), source)
    part = Part(tied=tied)
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


def _own(state: Mapping[str, Any], paths: Paths, source: str) -> tuple[Slots, dict[str, Any], dict[str, str]]:
    """Return which tensors of a rank's state dict are of the model or the optimizer, numbers, and keys that are tied.

    Numbers are the optimizer's 0-d tensors, such as steps. Tied are weights that have the memory of one before them, by
    its key; not what a module counts.
    """
    values = Values()
    found: dict[str, object] = {
        key: Held(dtype_name(one.dtype), tuple(one.shape)) if isinstance(one, torch.Tensor) else values.node(one, key)
        for key, one in state.items()
    }
    numbers: dict[str, Any] = {}
    for item in (item for part in find_optimizers(_tree(source, found, paths)) for item in leaves(part.node)):
        if isinstance(item, TensorItem) and not item.shape:
            with suppress(UnsupportedError):  # of a kind that is none
                number: Any = as_stored(state[item.key])
                encode(number)
                numbers[item.key] = number
    _, slots = contents(source, {**found, **numbers}, paths)
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for key, (slot, _) in slots.items():
        tensor = state[key]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if slot == WEIGHT and tensor.dim() > 1 and is_floating(dtype_name(tensor.dtype)) and local.numel():
            memory = (local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape)
            if (owner := first.setdefault(memory, key)) != key:
                tied[key] = owner
    return slots, numbers, tied
