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
import re
from collections.abc import Mapping
from dataclasses import field

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError
from zckpt.formats.dcp.directory import NAME as INDEX
from zckpt.formats.dcp.write_metadata import Chunk, Entry, metadata
from zckpt.formats.dcp.writer import Archives, TensorPiece
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.megatron.cut import is_gated
from zckpt.formats.megatron.directory import COMMON, MARK, TORCH_DIST
from zckpt.formats.megatron.keys import Placed, is_of_one_layer, placed
from zckpt.formats.megatron.names import by_itself
from zckpt.formats.megatron.norms import keyed_names
from zckpt.formats.megatron.objects import ARGUMENTS, EXTRA_STATE, OPTIMIZER, states_by
from zckpt.formats.megatron.optimizer import COMMON_STEP, GROUPS, SHARDING, STATES
from zckpt.formats.megatron.write_common import CONTENT, DISTRIBUTED, FLATTENED, PLAIN, Content, Source, shards_of
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import arguments_of
from zckpt.formats.torch_files.writer import SlotTensor
from zckpt.immutable import mutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, Shape, Slot
from zckpt.state.views import narrow, reshape

CUT = {DISTRIBUTED: "fully_reshardable", FLATTENED: "fully_sharded_model_space"}
"""How the distributed optimizer cuts its state: as the model's; each slice flattened, of which here each is a whole."""

LAYERS, APART = "layers", "apart"
"""Under which `Checkpoint.details` say that the files have each layer under keys of its own."""

EMPTY = [None]
"""The state of a module that has none."""

_MODULE = re.compile(
    r"(.+\.(?:linear_\w+|\w*norm|eh_proj)(?=\.weight)|(?:.+\.)?output_layer(?=\.bias))\.(?:weight|bias)"
)


@mutable
class Items:
    """What goes into the files: the pieces of every tensor by key with its shape and type, and objects by theirs."""

    tensors: dict[str, tuple[Shape, str, list[TensorPiece]]] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    flattened: dict[str, Shape] = field(default_factory=dict)

    def add(self, key: str, at: Placed, slot: Slot, dtype: str, label: str, parts: int = 0) -> None:
        """Add a slot at a place: as it is, or flattened, as `CUT` says, in equal parts along its first axis.

        Of a gated layer these have to be two: its halves are loaded one by one, and two of one chunk are not.
        """
        whole, axes = slot, len(slot.shape)
        if parts:
            self.flattened[key] = (*at.sizes, *slot.shape)
            whole = reshape(slot, (*(parts, *(1,) * axes)[:axes], slot.numel // parts))
        _, _, pieces = self.tensors.setdefault(key, ((*at.sizes, *whole.shape), dtype, []))
        for part in range(max(parts, 1)):
            own = narrow(whole, 0, part, 1) if parts else whole
            sizes, index = (*(1 for _ in at.index), *own.shape), (part, *(0,) * axes)[: len(own.shape)]
            pieces.append(TensorPiece(SlotTensor(reshape(own, sizes), dtype, label), (*at.index, *index), sizes))


def lay_out(job: Job) -> TargetFiles:
    """Return the files of a run's directory.

    Raises UsageError: an iteration that is needed, or cannot be; UnsupportedError: it is no model of Megatron-Core, or
    has state that its optimizer has no place for.
    """
    checkpoint, options = job.checkpoint, job.options
    source = Source.of(checkpoint, options, options.expert_parallel_size)
    tensors, kind = source.tensors, source.kind
    said = arguments_of(checkpoint.metadata.get(ARGUMENTS)).get("transformer_impl")  # by the source
    keyed = keyed_names(tensors, options.transformer_impl or said)
    filed = {name: by_itself(new) for name, new in keyed.items()}
    slots = {name: sorted({*one.slots} - {WEIGHT}) for name, one in source.trained.items()}
    kinds = {filed[name]: (slot.shape, (dtype, *slots.get(name, ()))) for name, (slot, dtype) in tensors.items()}
    stored = checkpoint.details.get(LAYERS), checkpoint.converted_from.get(LAYERS)  # as the source's own files had them
    apart = APART in stored or None if options.layers is None else options.layers == APART
    places = placed(kinds, apart=apart)
    items = Items()
    for name, (slot, dtype) in tensors.items():
        items.add(places[filed[name]].key, places[filed[name]], slot, dtype, name)
    masters = "param" if kind == DISTRIBUTED else "fp32_param"
    shapes, has_masters = {name: slot.shape for name, (slot, _) in tensors.items()}, kind != PLAIN
    for name in source.trained:
        at = places[filed[name]]
        parts = (2 if is_gated(name, shapes) else 1) if kind == FLATTENED else 0
        for slot_name, slot, dtype in source.states(name):
            has_masters |= slot_name == MASTER
            key = masters if slot_name == MASTER else slot_name
            items.add(f"optimizer.state.{key}.{at.key}", at, slot, dtype, f"{key}/{name}", parts)
    held = _objects(checkpoint, places, items)
    tree = source.common_tree(held)
    held |= {str(key) for key in tree}
    sharding = CUT.get(kind) if source.trained else None
    tree[CONTENT] = _content(sharding, one_by_one=any(is_of_one_layer(at.key) for at in places.values()))
    cut: Content = {} if sharding is None else {SHARDING: sharding}
    every = []
    for _, values, around in source.optimizers():
        step = source.own_step
        inner: Content = {GROUPS: values, **({} if step is None else {STATES: {COMMON_STEP: step}})}
        # FP32Optimizer, which has no masters, is none within another
        every.append({OPTIMIZER: inner, **cut, **around} if has_masters else {**inner, **around})
    if every:
        tree[OPTIMIZER] = every[0] if len(every) == 1 else dict(enumerate(every))
    mark = {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1, "common_backend": "torch",
            "common_backend_version": 1}  # fmt: skip
    files = [
        *_items(items, source.folder, options.world_size),
        torch_writer.lay_out(f"{source.folder}/{COMMON}", tree),
        TargetFile.of(f"{source.folder}/{MARK}", json.dumps(mark).encode()),
    ]
    return source.finished(files, held, {new: name for name, new in filed.items()})


def _objects(checkpoint: Checkpoint, places: Mapping[str, Placed], items: Items) -> set[str]:
    """Add objects: the source's, and the empty state of modules; return the keys of metadata that they are."""
    for at in places.values():
        shard = f"shard_{'.'.join(map(str, at.index or (0,)))}_{'.'.join(map(str, at.sizes or (1,)))}"
        items.objects |= {f"{state}/{shard}": EMPTY for state in states_by(at.key, _MODULE)}
    every = {name: shards for name, value in checkpoint.metadata.items() if (shards := shards_of(value))}
    for name, shards in every.items():
        for shard, node in shards.items():
            key = f"{name}/shard_{shard}"
            if name.endswith(EXTRA_STATE) and key not in items.objects:
                raise UnsupportedError(
                    "holds a module's state that would be stored differently",
                    found=key,
                    advice="give --layers as in SOURCE",
                )
            items.objects[key] = node
    return set(every)


def _content(sharding: str | None, *, one_by_one: bool) -> Content:
    """Return what the directory says of how it was written."""
    content: Content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if one_by_one:
        content["non_homogeneous_layers"] = True
    if sharding is not None:
        content["distrib_optim_sharding_type"] = sharding
    if sharding == CUT[DISTRIBUTED]:
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return content


def _items(items: Items, folder: str, world_size: int) -> list[TargetFile]:
    """Return the files of all items, and that which says where they are."""
    archives = Archives()
    names = [f"__{rank}_0.distcp" for rank in range(world_size)]
    files = [TargetFile(f"{folder}/{name}", 0) for name in names]
    least = [(0, rank) for rank in range(world_size)]

    def chunk(value: object, offsets: Shape = (), sizes: Shape = ()) -> Chunk:
        """Put a value into the file that has the least so far."""
        load, rank = least[0]
        heapq.heapreplace(least, (load + archives.nbytes(value), rank))
        return Chunk(offsets, sizes, names[rank], *archives.put(files[rank], value))

    entries = []
    for key, (shape, dtype, pieces) in items.tensors.items():
        chunks = [chunk(one, one.offsets, one.sizes) for one in sorted(pieces, key=lambda one: one.offsets)]
        entries.append(Entry(key, (), dtype, shape, tuple(chunks)))
    entries += (Entry(key, (), None, (), (chunk(node),)) for key, node in items.objects.items())
    content = metadata(entries, paths=False, flattened=items.flattened)
    index = TargetFile.of(f"{folder}/{INDEX}", content)
    return [*(file for file in files if file.nbytes), index]
