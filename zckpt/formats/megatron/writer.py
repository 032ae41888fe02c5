"""Lay out a run's directory with one `torch_dist` checkpoint, which Megatron-Core loads at any parallelism.

RUN/latest_checkpointed_iteration.txt     "4", or "release" where no training has been saved
RUN/iter_0000004/metadata.json            the mark
                 .metadata, __R_0.distcp  every layer and expert of a tensor is a chunk of it
                 common.pt                what is not sharded: step, hyperparameters, and what the source has
                 zckpt.pt                 what these have no place for: see `own`

<key>                                     a weight: see `keys`
optimizer.state.param.<key>               its master, as the distributed optimizer has it (`fully_reshardable`)
optimizer.state.fp32_param.<key>          as the others have it
optimizer.state.<slot>.<key>              everything else that the optimizer has of it
<module>._extra_state/shard_<i>_<n>       [None], which modules ask for, or what the source has

Source: megatron-core 0.16, `DistributedOptimizer.sharded_state_dict`, `make_sharded_tensors_for_checkpoint`.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zckpt.engine.targets import Literal, TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.dcp.directory import NAME as INDEX
from zckpt.formats.dcp.write_metadata import Chunk, Entry, metadata
from zckpt.formats.dcp.writer import Archives, TensorPiece
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.megatron.directory import (
    COMMON,
    MARK,
    OWN_NAME,
    RELEASE,
    TORCH_DIST,
    TRACKER,
)
from zckpt.formats.megatron.keys import Placed, is_of_one_layer, placed
from zckpt.formats.megatron.norms import ENGINE, LOCAL, keyed_names
from zckpt.formats.megatron.objects import EXTRA_STATE, OPTIMIZER, arguments_of
from zckpt.formats.megatron.own import own_tree
from zckpt.formats.megatron.write_common import (
    CONTENT,
    DISTRIBUTED,
    FLATTENED,
    PLAIN,
    RESTATED,
    SCALERS,
    common_tree,
    folder_for,
    groups_for,
    master_type,
    missing_notes,
    model_for,
    optimizer_for,
    shards_of,
    state_of,
    text_file,
)
from zckpt.formats.megatron.write_groups import optimizer_node, step_of
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.writer import SlotTensor
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Slot

SHARDING = {DISTRIBUTED: "fully_reshardable", FLATTENED: "fully_sharded_model_space"}
"""How the distributed optimizer cuts its state: as the model's; each slice flattened, of which here each is a whole."""

APART, STACKED = "apart", "stacked"
LAYERS = "layers"
"""Under which `Checkpoint.details` say that the files have each layer under keys of its own."""

EMPTY = [None]
"""The state of a module that has none."""

_MODULE = re.compile(r"(.+\.(?:linear_\w+|\w*norm|eh_proj))\.weight")
_ATTENTION = re.compile(r"(.+attention)\.linear_proj\.weight")
_FIRST = re.compile(r"(.+\.)linear_fc1\.(?:weight|bias)([0-9]*)")


@dataclass(frozen=True, slots=True)
class Stacked(TensorPiece):
    """A slot that is one index of a larger tensor's first axes, or a range of it from element `start`."""

    start: int = 0

    @property
    def extent(self) -> Extent:
        """What of the slot it is."""
        shape, numel = self.tensor.slot.shape, math.prod(self.sizes)
        if numel == math.prod(shape):
            return Extent.whole(shape)
        return Extent.flat(shape, self.start, numel)


@dataclass(slots=True)
class Items:
    """What goes into the files: the pieces of every tensor by key with its shape and type, and objects by theirs."""

    tensors: dict[str, tuple[tuple[int, ...], str, list[Stacked]]] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    flattened: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, prefix: str, at: Placed, slot: Slot, dtype: str, label: str) -> None:
        """Add a slot of a tensor of the model at its place."""
        offsets = (*at.index, *(0 for _ in slot.shape))
        sizes = (*(1 for _ in at.index), *slot.shape)
        _, _, pieces = self.tensors.setdefault(prefix + at.key, ((*at.sizes, *slot.shape), dtype, []))
        pieces.append(Stacked(SlotTensor(slot, dtype, label), offsets, sizes))

    def add_flat(self, prefix: str, at: Placed, slot: Slot, dtype: str, label: str, parts: int) -> None:
        """Add a slot flattened, as `stacked` describes it, in equal parts along its first axis.

        Of a gated layer it has to be two: its halves are loaded one by one, and two of one chunk are not.
        """
        key, rest = prefix + at.key, tuple(1 for _ in slot.shape[1:])
        self.flattened[key] = (*at.sizes, *slot.shape)
        numel = slot.numel // parts
        whole = (*at.sizes, *((parts, *rest) if slot.shape else ()), numel)
        _, _, pieces = self.tensors.setdefault(key, (whole, dtype, []))
        for part in range(parts):
            inner = (part, *(0 for _ in rest)) if slot.shape else ()
            offsets = (*at.index, *inner, 0)
            sizes = (*(1 for _ in offsets[1:]), numel)
            pieces.append(Stacked(SlotTensor(slot, dtype, label), offsets, sizes, part * numel))


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a run's directory.

    Raises UsageError: an iteration that is needed, or cannot be; UnsupportedError: it is no model of Megatron-Core, or
    has state that its optimizer has no place for.
    """
    checkpoint, options = job.checkpoint, job.options
    notes: list[str] = []
    tensors = model_for(checkpoint, options.dtype)
    filed = keyed_names(tensors, options.transformer_impl or _implementation(checkpoint))
    trained = {one.name: one for one in checkpoint.parameters.values() if one.group is not None}
    kinds = {filed[name]: (slot.shape, (dtype, _slots(trained.get(name)))) for name, (slot, dtype) in tensors.items()}
    apart = _stored_apart(checkpoint) or None if options.layers is None else options.layers == APART
    places = placed(kinds, apart=apart)
    one_by_one = any(is_of_one_layer(at.key) for at in places.values())
    items = Items()
    for name, (slot, dtype) in tensors.items():
        items.add("", places[filed[name]], slot, dtype, name)
    kind = options.optimizer or optimizer_for(checkpoint)
    sharding = SHARDING.get(kind) if trained else None
    for name, one in trained.items():
        for key, slot, dtype in _state(one, tensors[name], kind):
            prefix, label = f"optimizer.state.{key}.", f"{key}/{name}"
            if kind == FLATTENED:
                items.add_flat(prefix, places[filed[name]], slot, dtype, label, 2 if _is_gated(name, tensors) else 1)
            else:
                items.add(prefix, places[filed[name]], slot, dtype, label)
    held = _objects(checkpoint, places, items)
    groups = groups_for(checkpoint, options.expert_parallel_size, notes)
    step = step_of(checkpoint, list(trained.values()))
    folder = folder_for(checkpoint, options.iteration, trained=bool(trained))
    tree = common_tree(checkpoint, folder, held)
    tree[CONTENT] = _content(sharding, one_by_one=one_by_one)
    if groups:
        scalers = {key: value for key, value in checkpoint.optimizer_metadata.items() if key in SCALERS}
        held |= set(scalers)
        tree[OPTIMIZER] = optimizer_node(groups, step, sharding=sharding, scalers=[scalers.get(key) for key in SCALERS])
    own = own_tree(checkpoint, held=held, groups=[one.members for one in groups],
                   names={new: name for name, new in filed.items()})  # fmt: skip
    mark = {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1, "common_backend": "torch",
            "common_backend_version": 1}  # fmt: skip
    files = [
        *_items(items, folder, options.world_size),
        torch_writer.lay_out(f"{folder}/{COMMON}", tree),
        torch_writer.lay_out(f"{folder}/{OWN_NAME}", own),
        text_file(f"{folder}/{MARK}", json.dumps(mark)),
        text_file(TRACKER, folder if folder == RELEASE else str(int(folder.rpartition("_")[2]))),
    ]
    notes += missing_notes(checkpoint, folder, tree)
    return TargetFiles(files, notes=notes, restated=RESTATED)


def _slots(one: Parameter | None) -> tuple[str, ...]:
    return () if one is None else tuple(sorted(key for key in one.slots if key != WEIGHT))


def _implementation(checkpoint: Checkpoint) -> str | None:
    """Return whose layers a source's own arguments say that its model has."""
    known = arguments_of(checkpoint.metadata.get("args")).get("transformer_impl")
    return str(known) if known in (ENGINE, LOCAL) else None


def _stored_apart(checkpoint: Checkpoint) -> bool:
    """Tell whether a source's own files had each layer under its own keys."""
    origin = checkpoint.details.get("origin")
    return any(isinstance(one, Mapping) and one.get(LAYERS) == APART for one in (checkpoint.details, origin))


def _state(one: Parameter, model: tuple[Slot, str], kind: str) -> Iterator[tuple[str, Slot, str]]:
    """Yield key, slot and type of all that the optimizer has of a parameter."""
    for key, slot in state_of(one, model, plain=kind == PLAIN):
        if key == MASTER:
            yield "param" if kind == DISTRIBUTED else "fp32_param", slot, master_type(one)
        else:
            yield key, slot, slot.dtype


def _is_gated(name: str, tensors: Mapping[str, tuple[Slot, str]]) -> bool:
    """Tell whether a tensor is of the first layer of a gated unit, which has twice the rows that the second expects."""
    match = _FIRST.fullmatch(name)
    second = tensors.get(f"{match[1]}linear_fc2.weight{match[2] or ''}") if match is not None else None
    return second is not None and tensors[name][0].shape[0] == 2 * second[0].shape[-1]


def _objects(checkpoint: Checkpoint, places: Mapping[str, Placed], items: Items) -> set[str]:
    """Add objects: the source's, and the empty state of modules; return the keys of metadata that they are."""
    for at in places.values():
        module, attention = _MODULE.fullmatch(at.key), _ATTENTION.fullmatch(at.key)
        shard = f"shard_{'.'.join(map(str, at.index or (0,)))}_{'.'.join(map(str, at.sizes or (1,)))}"
        if module is not None:
            items.objects[f"{module[1]}.{EXTRA_STATE}/{shard}"] = EMPTY
        if attention is not None:
            items.objects[f"{attention[1]}.core_attention.{EXTRA_STATE}/{shard}"] = EMPTY
    held = set()
    for name, value in checkpoint.metadata.items():
        shards = shards_of(value)
        for shard, node in shards.items():
            key = f"{name}/shard_{shard}"
            if name.endswith(EXTRA_STATE) and key not in items.objects:
                raise UnsupportedError(
                    "holds the state of a module that would be stored otherwise",
                    found=key,
                    advice="give --layers as SOURCE has them",
                )
            items.objects[key] = node
        held |= {name} if shards else set()
    return held


def _content(sharding: str | None, *, one_by_one: bool) -> dict[object, object]:
    """Return what the directory says of how it was written."""
    content: dict[object, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if one_by_one:
        content["non_homogeneous_layers"] = True
    if sharding is not None:
        content["distrib_optim_sharding_type"] = sharding
    if sharding == SHARDING[DISTRIBUTED]:
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return content


def _items(items: Items, folder: str, world_size: int) -> list[TargetFile]:
    """Return the files of all items, and that which says where they are."""
    archives = Archives()
    names = [f"__{rank}_0.distcp" for rank in range(world_size)]
    files = [TargetFile(f"{folder}/{name}", 0) for name in names]
    least = [(0, rank) for rank in range(world_size)]
    entries = []
    for key, (shape, dtype, pieces) in items.tensors.items():
        chunks = []
        for piece in sorted(pieces, key=lambda one: one.offsets):
            rank = _least(least, archives.nbytes(piece))
            offset, nbytes = archives.put(files[rank], piece)
            chunks.append(Chunk(piece.offsets, piece.sizes, names[rank], offset, nbytes))
        entries.append(Entry(key, (), dtype, shape, tuple(chunks)))
    for key, node in items.objects.items():
        rank = _least(least, archives.nbytes(node))
        offset, nbytes = archives.put(files[rank], node)
        entries.append(Entry(key, (), None, (), (Chunk((), (), names[rank], offset, nbytes),)))
    content = metadata(entries, paths=False, flattened=items.flattened)
    index = TargetFile(f"{folder}/{INDEX}", len(content), [Literal(0, content)])
    return [*(file for file in files if file.nbytes), index]


def _least(loads: list[tuple[int, int]], nbytes: int) -> int:
    """Return the rank that has the least so far, and give it this many bytes more."""
    load, rank = loads[0]
    heapq.heapreplace(loads, (load + nbytes, rank))
    return rank
