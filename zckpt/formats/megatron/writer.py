"""Lay out a run's directory with one `torch_dist` checkpoint, which Megatron-Core loads at any parallelism.

RUN/latest_checkpointed_iteration.txt     "4", or "release" where no training has been saved
RUN/iter_0000004/metadata.json            the mark
                 .metadata, __R_0.distcp  every layer and expert of a tensor is a chunk of it
                 common.pt                what is not sharded: step, hyperparameters, and what the source has
                 zckpt.pt                 what these have no place for: see `objects`

<key>                                     a weight: see `keys`
optimizer.state.param.<key>               its master, as the distributed optimizer has it (`fully_reshardable`)
optimizer.state.fp32_param.<key>          as the others have it
optimizer.state.<slot>.<key>              everything else that the optimizer has of it
<module>._extra_state/shard_<i>_<n>       [None], which modules ask for, or what the source has

Source: megatron-core 0.16, `DistributedOptimizer.sharded_state_dict`, `make_sharded_tensors_for_checkpoint`.

The legacy files have the same tensors, param groups and values. Megatron-Core takes hyperparameters from the group
with the same `wd_mult`, `lr_mult`, `is_expert_parallel` and `is_decoupled_lr`. A source of another program has none of
these: its groups are parted and joined by Megatron's default rule (`optimizer`), where all that come to be in one have
the same hyperparameters. Experts are a second optimizer's where they are spread over ranks. That has one step for all
parameters.
"""

from __future__ import annotations

import heapq
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from zckpt.compare.logical import parameter_values, single
from zckpt.engine.computed import Computed
from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence import refuse_ungrouped, refuse_unnamed
from zckpt.formats.companions import copy_of, files_below
from zckpt.formats.consolidated.model import model_tensors
from zckpt.formats.dcp.directory import NAME as INDEX
from zckpt.formats.dcp.writer import Archives, Chunk, Entry, TensorPiece, metadata
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.latest import TRACKER, folder_of
from zckpt.formats.megatron.cut import is_gated
from zckpt.formats.megatron.directory import (
    AS_IT_IS,
    COMMON,
    FOLDER,
    FORMAT,
    MARK,
    OF_TRAINING,
    RELEASE,
    TORCH_DIST,
    TRAIN_STATE,
)
from zckpt.formats.megatron.keys import Placed, check_names, is_of_one_layer, placed
from zckpt.formats.megatron.names import by_itself, is_expert, keyed_names
from zckpt.formats.megatron.objects import ARGUMENTS, EXTRA_STATE, OPTIMIZER, VERSION, own_tree, states_by
from zckpt.formats.megatron.optimizer import (
    COMMON_STEP,
    DECOUPLED,
    EXPERTS,
    GROUPS,
    SCALER,
    SHARDING,
    STATES,
    STEP,
    WEIGHT_DECAY,
    by_rule_decays,
    factor,
)
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import arguments_of
from zckpt.formats.torch_files.writer import SlotTensor, ValueTensor, value_node
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Shape, Slot, first_of, number_of, stated, without
from zckpt.state.views import narrow, reshape
from zckpt.torchfile import node_of, put_back

DISTRIBUTED, FLATTENED, PLAIN = "distributed", "flattened", "plain"
"""Whose state it is: the distributed optimizer's, in either form, or another's."""

SHARDED = "optimizer sharding"
"""Under which `Checkpoint.details` say how a distributed optimizer's state was cut."""

SCALERS = (SCALER, f"1.{SCALER}")
"""Under which `Checkpoint.optimizer_metadata` have the loss scalers, that of experts where it is another."""

CONTENT, ITERATION = "content_metadata", "iteration"
CURRENT = 3.0
"""The version of a checkpoint whose queries, keys and values are ordered as everything here has them."""

OF_PROGRAM = frozenset({ARGUMENTS, "num_floating_point_operations_so_far", "opt_param_scheduler",
                        "rerun_state_machine"})  # fmt: skip
"""Keys of `common.pt` that are Megatron-LM's, wherever a checkpoint has been in between."""

RESTATED = frozenset({CONTENT, VERSION, ITERATION})

_SHARDS = re.compile(r"[0-9.]*_[0-9.]*")


Content = dict[object, object]
"""What is to be in a file, by key."""

FACTORS = {WEIGHT_DECAY: 1.0, "lr_mult": 1.0, EXPERTS: False, DECOUPLED: False}
"""By what Megatron-Core tells groups, and what each is in a group that says nothing of it."""

RATES = ("max_lr", "min_lr")
"""By what it tells some of its own apart since 0.16, too."""


@mutable
class Group:
    """A group that is to be written: its hyperparameters, and the names of its parameters."""

    values: dict[str, object]
    members: list[str] = field(default_factory=list)

    @property
    def is_of_experts(self) -> bool:
        """Whether it is of an optimizer that experts have for themselves."""
        return bool(factor(self.values, EXPERTS))


@immutable
class Source:
    """A checkpoint as it is to be written, by its own names."""

    checkpoint: Checkpoint
    tensors: Mapping[str, tuple[Slot, str]]
    """Of the model, with the types that they are to have, without further names of tied parameters."""
    trained: Mapping[str, Parameter]
    kind: str  # {DISTRIBUTED, FLATTENED, PLAIN}; whose optimizer's state it is to be
    groups: list[Group]
    step: float | None
    iteration: int | None  # at which it was saved; None: no training has saved it
    notes: list[str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: object, expert_parallel_size: int | None) -> Source:
        """Return what a checkpoint is.

        `options`: of `convert` or `reshard`. Raises UsageError: nothing says at which iteration a trained model was
        saved; UnsupportedError: it is no model of Megatron's, or has state that its optimizer has no place for.
        """
        notes: list[str] = []
        refuse_unnamed(checkpoint, "which Megatron-Core has for its state")
        several = checkpoint.optimizers() or checkpoint.models()
        if several:
            raise UnsupportedError("Megatron-Core has one model and one optimizer", found=listed(several))
        check_names(checkpoint.names)
        tensors = model_tensors(checkpoint, getattr(options, "dtype", "keep"), tied="drop")
        absent = [one.name for one in checkpoint.owners if one.name not in tensors]
        if absent:
            raise UnsupportedError("the model lacks some of its tensors", found=listed(absent))
        trained = {one.name: one for one in checkpoint.parameters.values() if one.group is not None}
        groups = _groups(checkpoint, expert_parallel_size, notes)
        step = _step(checkpoint, list(trained.values()))
        kind = getattr(options, "optimizer", None)
        if not kind:  # as the source's arguments say, or else as its files do where they are Megatron-Core's
            facts = checkpoint.converted_from or {"format": checkpoint.format}
            distributed = facts.get("format") != FORMAT or SHARDED in {**facts, **checkpoint.details}
            said = arguments_of(checkpoint.metadata.get(ARGUMENTS)).get("use_distributed_optimizer")
            is_plain = said is False if isinstance(said, bool) else checkpoint.param_groups and not distributed
            kind = PLAIN if is_plain else DISTRIBUTED
        masters = (one.name for one in trained.values() if isinstance(one.master, Computed))
        computed = first_of([*masters, *(name for name, (slot, _) in tensors.items() if isinstance(slot, Computed))])
        if computed and (kind == FLATTENED or getattr(options, "ckpt_format", "torch") == "torch"):
            raise UnsupportedError(f"{computed} is computed from what the files have, and this target cuts it",
                                   advice="write torch_dist, then this target from that")  # fmt: skip
        chosen = first_of([getattr(options, ITERATION, None), checkpoint.step])
        if chosen is None and trained:
            raise UsageError("SOURCE does not state its iteration", expected="--iteration N")
        if chosen is not None and chosen < 0:
            raise UsageError("unusable iteration", expected="at least 0", found=chosen)
        return cls(checkpoint, tensors, trained, kind, groups, step, chosen, notes)

    @property
    def folder(self) -> str:
        """Its directory within the run."""
        return RELEASE if self.iteration is None else folder_of(str(self.iteration))

    def states(self, name: str) -> Iterator[tuple[str, Slot, str]]:
        """Yield key, slot and type of all that the optimizer has of a parameter, the master first.

        An optimizer without masters of 32-bit weights is a plain one: that of others has a copy of these, too. Raises
        UnsupportedError: a slot is not of its parameter's shape.
        """
        one, (written, dtype) = self.trained[name], self.tensors[name]
        if self.kind != PLAIN or dtype != "float32":
            master = one.master
            yield MASTER, master or written, "float32" if master is None else master.dtype
        for key, slot in one.optimizer_slots.items():
            if key == STEP and not slot.shape:
                continue
            if slot.shape != one.shape:
                raise UnsupportedError(f"Megatron cannot hold {key} of {one.name}",
                                       expected=f"its shape, {one.shape}", found=slot.shape)  # fmt: skip
            yield key, slot, slot.dtype

    @property
    def group_step(self) -> Content:
        """The step as each group has it; the optimizers that have one of their own have it not."""
        return {} if self.step is None or (self.kind == PLAIN and type(self.step) is float) else {STEP: self.step}

    @property
    def own_step(self) -> ValueTensor | None:
        """The step of an optimizer whose groups have none."""
        if self.step is None or self.group_step:
            return None
        return ValueTensor(struct.pack("<f", self.step), "float32", ())

    def optimizers(self) -> Iterator[tuple[list[Group], list[Content], Content]]:
        """Yield the groups of each optimizer, experts' last, their values in the file, and what is around them."""
        known = [self.checkpoint.optimizer_metadata.get(key) for key in SCALERS]
        for of_experts in (False, True):
            own = [one for one in self.groups if one.is_of_experts == of_experts]
            scaler = first_of([known[of_experts], known[0]])
            if own:
                values: list[Content] = [
                    {**{key: value_node(value) for key, value in one.values.items()}, **self.group_step} for one in own
                ]
                yield own, values, stated({SCALER: scaler})

    @property
    def is_megatrons(self) -> bool:
        """Whether Megatron saved it, whatever it was since."""
        return FORMAT in (self.checkpoint.format, self.checkpoint.converted_from.get("format"))

    @property
    def of_training(self) -> dict[str, object]:
        """What Megatron-Bridge has in files of their own, by their stems."""
        every = self.checkpoint.metadata.items() if self.is_megatrons else ()
        return {key: value for key, value in every if OF_TRAINING.fullmatch(f"{key}.pt")}

    def common_tree(self, but: Iterable[str]) -> Content:
        """Return what `common.pt` holds but for the optimizer, and for some keys of metadata."""
        apart = {OPTIMIZER, *self.of_training}
        tree: Content = {
            key: value
            for key, value in without(self.checkpoint.metadata, *but, *RESTATED).items()
            if key in OF_PROGRAM or (self.is_megatrons and not FOLDER.match(key) and key not in apart)
        }
        return {**tree, VERSION: CURRENT, **stated({ITERATION: self.iteration})}

    def finished(
        self,
        files: list[TargetFile],
        held: Iterable[str],
        names: Mapping[str, str],
        ranks: Mapping[str, int] | None = None,
    ) -> TargetFiles:
        """Return all files of the run: with that of what the others have no place for, and that which names it.

        `held`: keys of metadata that they have; `names`: the checkpoint's names by those in the files; `ranks`: of
        legacy files: how many of each kind.
        """
        apart = {f"{self.folder}/{key}.pt": value for key, value in self.of_training.items()}
        apart |= {f"latest_{key}.pt": value for key, value in self.of_training.items() if key == TRAIN_STATE}
        has = {*held, *RESTATED, *(SCALERS if self.groups else ()), *self.of_training}
        own = own_tree(self.checkpoint, held=has, groups=[one.members for one in self.groups], names=names, ranks=ranks)
        tracker = TargetFile.of(TRACKER, f"{self.folder if self.iteration is None else self.iteration}".encode())
        # Copies of what Megatron-Bridge reads beside a checkpoint.
        source = Path(self.checkpoint.source)
        beside = files_below(source) if ranks is None and self.checkpoint.format == FORMAT and source.is_dir() else ()
        copies = [copy_of(path, f"{self.folder}/{name}") for name, path in beside if AS_IT_IS.fullmatch(name)]
        every = [
            *files,
            *(torch_writer.lay_out(name, value) for name, value in apart.items()),
            *copies,
            torch_writer.lay_out(f"{self.folder}/{OWN_NAME}", own),
            tracker,
        ]
        lacks = [what for key, what in ((ARGUMENTS, "--no-load-rng"), ("opt_param_scheduler", "its own scheduler"))
                 if key not in has]  # fmt: skip
        if lacks and self.iteration is not None and self.checkpoint.format != FORMAT:
            self.notes.append(f"SOURCE has no Megatron-LM state: start Megatron-LM with {' and '.join(lacks)}")
        return TargetFiles(
            every,
            notes=self.notes,
            restated=RESTATED | ({ARGUMENTS} if ranks is not None else set()),
            copied={one.name for one in copies},
            replaceable=lambda name: AS_IT_IS.fullmatch(name) is not None,
        )


def _groups(checkpoint: Checkpoint, expert_parallel_size: int | None, notes: list[str]) -> list[Group]:
    """Return the groups to write, those of experts last where they are an optimizer of their own.

    `notes`: gets what was done. Raises UsageError: a size that cannot be; UnsupportedError: which group a parameter is
    in is not known, some lack state that others have, or groups that Megatron has as one differ.
    """
    if expert_parallel_size is not None and expert_parallel_size < 1:
        raise UsageError("unusable --expert-parallel-size", expected="at least 1", found=expert_parallel_size)
    groups = checkpoint.param_groups
    refuse_ungrouped(checkpoint)
    trained = [checkpoint.parameters[name] for name in checkpoint.grouped]
    most = {key for one in trained for key in one.optimizer_slots}
    for one in trained:
        for key in sorted(most - one.slots.keys()):
            raise UnsupportedError(f"{one.name} has no {key}, but others do",
                                   expected="state for all trained parameters")  # fmt: skip
    as_source = checkpoint.topology.ep > 1 or any(one.hyperparameters.get(EXPERTS) is True for one in groups)
    chained = as_source if expert_parallel_size is None else expert_parallel_size > 1
    own = all(factor(group.hyperparameters, WEIGHT_DECAY) is not None for group in groups)
    found: dict[tuple[object, ...], Group] = {}
    for group in groups:
        for name in group.parameters or ([""] if own else []):  # a group of nothing is one, too
            values = dict(group.hyperparameters)
            factors = FACTORS | stated({key: factor(values, key) for key in FACTORS})
            for key, value in factors.items():
                if not isinstance(number_of(value), (int, float)):
                    raise UnsupportedError("Megatron tells param groups by numbers", expected=f"{key} as a number",
                                           found=type(value).__name__)  # fmt: skip
            if name:
                factors[EXPERTS] = chained and is_expert(name)
            if not own:
                factors[WEIGHT_DECAY] = 1.0 if by_rule_decays(checkpoint.parameters[name]) else 0.0
            values |= {f"pre_{key}" if f"pre_{key}" in values else key: value for key, value in factors.items()}
            rates = [values.get(key) for key in RATES] if own else []
            its = found.setdefault((*factors.values(), *rates), Group(values))
            for key in {**its.values, **values}:
                if its.values.get(key) != values.get(key):
                    raise UnsupportedError(
                        "param groups that are one in Megatron differ",
                        expected="the same hyperparameters for all parameters with weight decay, and for all biases "
                        "and parameters of one axis",
                        found=f"{key} {its.values.get(key)} and {values.get(key)}",
                    )
            its.members += [name] if name else []
    made = sorted(found.values(), key=lambda one: (one.is_of_experts, not own and one.values[WEIGHT_DECAY] == 0.0))
    if not own:
        count = f"{len(groups)} param groups were" if len(groups) > 1 else "the param group was"
        notes.append(f"{count} became Megatron's {len(made)}: biases and tensors of one axis have no weight decay "
            "there, and its own arguments set learning rates and weight decay")  # fmt: skip
    return made


def _step(checkpoint: Checkpoint, trained: Sequence[Parameter]) -> float | None:
    """Return the step that the optimizer has for all parameters; None where it counts none.

    Raises UnsupportedError: parameters have different ones, or other single values.
    """
    found: dict[float, float] = {}
    for one in trained:
        for key, value in parameter_values(checkpoint, one).items():
            if isinstance(value, Slot) and (value.shape or key != STEP):
                continue
            number = single(value)
            if key != STEP or not isinstance(number, (int, float)):
                raise UnsupportedError(
                    f"Megatron cannot hold {key} of {one.name}",
                    expected="tensors of its shape, or a step",
                )
            found[float(number)] = number
    if len(found) > 1:
        raise UnsupportedError("Megatron has one step for all parameters",
                               found=" and ".join(f"{step:g}" for step in sorted(found)[:2]))  # fmt: skip
    return next(iter(found.values()), None)


def shards_of(value: object) -> dict[str, object]:
    """Return what ranks have of an object, by the keys that they have for it; nothing for other values."""
    node = node_of(value)
    if not isinstance(node, dict) or not all(isinstance(key, str) and _SHARDS.fullmatch(key) for key in node):
        return {}
    return {key: put_back(value, one) for key, one in node.items()}


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
