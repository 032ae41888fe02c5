"""The optimizer of a DeepSpeed checkpoint that is to be written, as trees. See `shards` for the form of its files.

At stage 0 it is in the model file, and `stage0` reads what is written here:

Form      engine                                    what it holds
PLAIN     float32, or none that scales              {state: {number: slots}, param_groups}: torch's own, all parameters
UNFUSED   FP16_UnfusedOptimizer                     the same of the trained ones; fp32_groups: their masters
FUSED     FP16_Optimizer                            the same of one flat tensor for each group; fp32_groups_flat
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zckpt.formats.deepspeed.aliases import aliases, joined
from zckpt.formats.deepspeed.auto_ep import auto_layers
from zckpt.formats.deepspeed.muon import MOMENTUM, keeps_whole_matrices
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.shards import GROUPS_KEY
from zckpt.formats.deepspeed.target import Part, Target, TargetGroup, Unpartitioned
from zckpt.formats.deepspeed.zenflow import keeps_zenflow
from zckpt.formats.torch_files.writer import (
    Content,
    FromFile,
    PackContent,
    SlotContent,
    SlotTensor,
    new_storage,
    value_node,
    view,
)
from zckpt.state import MASTER, WEIGHT, Extent, Parameter, Slot
from zckpt.torchfile import Global, Object, OrderedMapping, Tensor, node_of


def slot_contents(slot: Slot, label: str, start: int, position: int, numel: int) -> Iterator[SlotContent]:
    """Yield what a slot has of an extent of a parameter: all, or none of a vocabulary's padding rows.

    Parameters
    ----------
    slot : Slot
        Of the parameter's shape, or with fewer rows: what it does not have stays zero.
    start : int, elements
        Of the extent, in the parameter.
    position : int, elements
        Of the extent, in the storage.
    numel : int, elements
    """
    count = min(numel, slot.numel - start)
    if count > 0:
        yield SlotContent(position, slot, label, Extent.flat(slot.shape, start, count))


_STAGE_ENUM = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")

_COMMON_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What the forms of all stages have in common and is carried over."""

_FLAT_KEYS = (
    *_COMMON_KEYS, "clip_grad", "base_optimizer_state", "single_partition_of_fp32_groups", "zero_stage",
    "group_paddings",
    "param_alignment_paddings", "partition_count", "ds_version", "param_slice_mappings",
)  # fmt: skip
_PARAMETERWISE_KEYS = (
    "zero_stage", *_COMMON_KEYS, "partition_count", "optimizer_state_dict", "fp32_flat_groups",
)  # fmt: skip


def optimizer_tree(target: Target, mp: Rank, rank: int) -> object:
    """Return the content of one rank's optimizer file."""
    source = mp.members[0]
    old = source.content
    cut = _cut(target, mp, rank)
    if not target.bf16_optimizer:
        cut["zero_stage"] = Object(_STAGE_ENUM, args=(target.stage,))
    same = (source.stage == 3) == (target.stage == 3)
    as_it_was = same and not target.origin.is_foreign
    keys = list(old) if as_it_was else list(_PARAMETERWISE_KEYS if target.stage == 3 else _FLAT_KEYS)
    keys += [key for key in (GROUPS_KEY,) if key in cut and key not in keys]
    if target.elastic != source.elastic and same:
        keys = [key for key in keys if key not in ("base_optimizer_state_step", "base_optimizer_param_groups")]
    content = {key: cut[key] if key in cut else FromFile.of(source.file, old[key]) for key in keys
               if key in cut or key in old}  # fmt: skip
    root = source.file.root
    top = root if isinstance(root, dict) else {}
    written = {"optimizer_state_dict": content, "ds_config": config_tree(target)}
    return {key: written[key] if key in written else FromFile.of(source.file, value) for key, value in top.items()}


def config_tree(target: Target) -> object:
    """Return DeepSpeed's configuration, true of the target where it speaks of what was changed."""
    config = target.origin.model.configuration
    if not isinstance(config, dict):
        return config
    changed = dict(config)
    zero = changed.get("zero_optimization")
    if isinstance(zero, dict):
        flat = {"elastic_checkpoint": target.elastic, "round_robin_gradients": target.round_robin,
                "parameter_alignment": target.alignment}  # fmt: skip
        changed["zero_optimization"] = {**zero, "stage": target.stage} | {
            key: value for key, value in flat.items() if key in zero or value
        }
        members = target.origin.members
        keeps = bool(members) and keeps_zenflow(target.checkpoint, members[0].stage, target.stage)
        # From another format matrices are in order, as 0.19.8 has them with ZenFlow, too, but at ZeRO-3.
        if not (target.stage != 3 if target.origin.is_foreign else keeps):
            changed["zero_optimization"].pop("zenflow", None)
    changed |= batch_of(changed, target.world_size)
    sliced = changed.get("tensor_parallel")
    if isinstance(sliced, dict) and type(sliced.get("autotp_size")) is int:
        changed["tensor_parallel"] = {**sliced, "autotp_size": target.tp}
    experts = changed.get("expert_parallel")
    if isinstance(experts, dict) and type(experts.get("autoep_size")) is int:
        degree = max((len(group.experts) for mp in target.ranks for group in mp.groups), default=1)
        changed["expert_parallel"] = {**experts, "autoep_size": degree}
    return FromFile.of(target.origin.model.file, changed)


def batch_of(config: Mapping[object, object], world_size: int) -> dict[object, object]:
    """Return the batch of one of so many ranks, where the whole batch divides among them."""
    batch, steps = config.get("train_batch_size"), config.get("gradient_accumulation_steps", 1)
    if type(batch) is int and type(steps) is int and steps > 0 and batch % (world_size * steps) == 0:
        return {"train_micro_batch_size_per_gpu": batch // (world_size * steps)}
    return {}


def _hyperparameters(
    target: Target, mp: Rank, rank: int, group: TargetGroup, params: list[int]
) -> dict[object, object]:
    """Return a param group with the numbers of its partitions, and what the rank has of its own in it."""
    own = {
        one.key: one.value for one in target.own_values(mp.mp_rank, rank) if one.in_group and one.group == group.index
    }
    values = {**group.values.hyperparameters, **own}
    groups = mp.members[0].groups if own else []
    order = [*(groups[group.index] if group.index < len(groups) else ()), *values]
    return {**{key: value_node(values[key]) for key in dict.fromkeys(order) if key in values}, "params": params}


def _state(
    target: Target, mp: Rank, rank: int, group: TargetGroup, number: int, tensors: dict[object, object]
) -> dict[object, object]:
    """Return the state of one of a rank's partitions: slots, single values, and what it has of its own, or cut for it.

    Its keys are in the order that the source's have.
    """
    coded = target.coded.get((mp.mp_rank, group.index))
    state: dict[object, object] = {key: value_node(value) for key, value in group.values.state.items()}
    state |= tensors if coded is None else coded.of(tensors, group.position(rank), group.partition)
    for one in target.own_values(mp.mp_rank, rank) if not target.coded else ():
        if one.part == number and not one.in_group:
            state[one.key] = value_node(one.value)
    source = mp.members[0]
    known = [key for one, more in zip(source.scalars, source.tensors, strict=True) for key in (*one, *more)]
    return {key: state[key] for key in dict.fromkeys([*known, *map(str, state)]) if key in state}


def _dtype(parameters: list[Parameter], key: str) -> str:
    return next((p.slots[key].dtype for p in parameters if key in p.slots), "float32")


def _cut(target: Target, mp: Rank, rank: int) -> dict[str, object]:
    """Return the keys of an optimizer file that depend on how it is cut."""
    source, flat, config = mp.members[0], target.stage != 3, target.origin.model.config
    known = source.masters if (source.stage != 3) == flat else []
    masters: list[object] = []
    states: list[dict[object, object]] = []
    paddings: list[object] = []
    mappings: list[object] = []
    groups: dict[int, object] = {}
    held: dict[int, list[int]] = {}
    for group in mp.groups:
        position, numbers = group.position(rank), held.setdefault(group.index, [])  # experts may be a part of a group
        for part in group.parts(rank):
            number = len(masters)
            numbers.append(number)
            padding = part.padding(position)
            stripped = part.numel - padding
            like = known[min(number, len(known) - 1)] if known else None
            masters.append(_partition(part, MASTER, position, part.numel if target.bf16_optimizer else stripped, like))
            length = stripped if target.elastic else part.numel
            tensors: dict[object, object] = {key: _partition(part, key, position, length) for key in part.keys}
            if MOMENTUM in tensors and keeps_whole_matrices(
                group.values.hyperparameters, config, partition=target.bf16_optimizer or not flat
            ):  # it would take a partition for some matrices
                its = [part.parameters[share.index] for share in part.shares(position)]
                tensors |= {MOMENTUM: whole(its, MOMENTUM)}
                if not its:
                    del tensors[MOMENTUM]
            states.append(_state(target, mp, rank, group, number, tensors))
            if flat:
                last = group.shared_by * part.numel - part.total if position == group.shared_by - 1 else 0
                paddings.append(last if target.bf16_optimizer else padding)
                mapping = OrderedMapping()
                for share in part.shares(position):
                    where: dict[object, object] = {"numel": share.numel, "start": share.position}
                    address = Object(_FRAGMENT, how="newobj", state=where, has_state=True)
                    mapping[part.parameters[share.index].name] = address
                mappings.append(mapping)
        groups[group.index] = _hyperparameters(target, mp, rank, group, numbers)
    joined(dict(enumerate(states)), aliases(source), len(source.masters), len(states))
    base = {"state": {n: state for n, state in enumerate(states) if state}, "param_groups": [*groups.values()]}
    if not flat:
        cut = {"partition_count": target.world_size, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        if auto_layers(target.origin.model):
            from zckpt.formats.deepspeed.auto_ep_shards import partition_groups

            cut[GROUPS_KEY] = partition_groups(target, mp.groups, rank)
        return cut
    cut = {
        "base_optimizer_state": states if target.elastic else base,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "partition_count": [group.shared_by for group in mp.groups],
        "param_slice_mappings": mappings,
    }
    if not target.bf16_optimizer:
        clipping = target.origin.members[0].content.get("clip_grad")
        if clipping is None:
            clipping = config.get("gradient_clipping")
        if clipping is not None:  # else the engine's own: what is usual depends on its version
            cut["clip_grad"] = clipping
        cut["ds_version"] = source.version
    # The version that wrote the source may write alignment pads down, even if they are zero.
    if not target.bf16_optimizer and (target.alignment or target.origin.members[0].alignment_paddings is not None):
        cut["param_alignment_paddings"] = [list(group.pads) for group in mp.groups]
    return cut


def _partition(part: Part, key: str, position: int, length: int, like: Tensor | None = None) -> Tensor:
    """Return one slot of one rank's part: a storage of all its elements, of which the tensor shows `length`."""
    dtype = _dtype(part.parameters, key)
    row = part.row(key, dtype)
    contents: list[Content] = [] if row is None else [PackContent(0, row.pack(position))]
    for share in part.shares(position) if row is None else ():
        contents += _contents(part.parameters[share.index], key, share.start, share.position, share.numel)
    return view(new_storage(dtype, part.numel, contents), (length,), like=like)


def whole(parameters: Sequence[Parameter], key: str) -> Tensor:
    """Return one slot of whole parameters, end to end; zeros where one has none."""
    contents: list[SlotContent] = []
    at = 0
    for p in parameters:
        contents += _contents(p, key, 0, at, p.numel)
        at += p.numel
    return view(new_storage(_dtype(list(parameters), key), at, contents), (at,))


def _contents(parameter: Parameter, key: str, start: int, position: int, numel: int) -> Iterator[SlotContent]:
    slot = parameter.slots.get(key)
    if slot is not None:
        yield from slot_contents(slot, f"{key}/{parameter.name}", start, position, numel)


PLAIN, UNFUSED, FUSED = "plain", "unfused", "fused"

_SCALING = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""Of loss scaling: what both optimizers in 16 bits hold."""


def form_of(held: Mapping[object, object]) -> str:
    """Return the form of what a model file holds of an optimizer."""
    return FUSED if "fp32_groups_flat" in held else UNFUSED if "fp32_groups" in held else PLAIN


def stage0_optimizer(mp: Rank, how: Unpartitioned) -> dict[str, object]:
    """Return what a stage-0 model file holds of the optimizer."""
    if how.form == PLAIN:
        return _numbered(mp, how)
    scaling = {**how.scaling, **{key: value for key, value in _known_scaling(mp).items() if key in how.scaling}}
    if how.form == FUSED:
        flat = [whole(group.experts[0], MASTER) for group in mp.groups]
        return {**scaling, "optimizer_state_dict": _numbered(mp, how), "fp32_groups_flat": flat}
    masters = [[_whole(mp.owner(name), MASTER) for name in names] for names in how.numbered]
    return {**scaling, "optimizer_state_dict": _numbered(mp, how), "fp32_groups": masters}


def _numbered(mp: Rank, how: Unpartitioned) -> dict[str, object]:
    """Return an optimizer with the state of each parameter under its number; of flat masters, of each group."""
    state: dict[int, object] = {}
    groups: list[object] = []
    number, fused = 0, how.form == FUSED
    for group, names in zip(mp.groups, how.numbered, strict=True):
        numbers = []
        every = [mp.owner(name) if name in mp.parameters else None for name in names]
        owned = [[one] if one is not None and one.group is not None else [] for one in every]
        for its in [group.experts[0]] if fused else owned:
            single = {} if how.own_state and not fused else group.values.state
            for one in its if not fused else ():
                single = {**single, **one.state}
            keys = dict.fromkeys(key for p in its for key in p.slots if key not in (WEIGHT, MASTER))
            if (its or fused) and (keys or single):
                state[number] = {key: value_node(value) for key, value in single.items()} | {
                    key: whole(its, key) if fused else _whole(its[0], key)
                    for key in keys if not (fused and key in single)
                }  # fmt: skip
            numbers.append(number)
            number += 1
        found = {key: value_node(value) for key, value in group.values.hyperparameters.items()}
        groups.append({**found, "params": numbers} | ({"param_names": list(names)} if how.named and names else {}))
    return {"state": state, "param_groups": groups}


def _whole(parameter: Parameter, key: str) -> SlotTensor:
    slot = parameter.slots[key]
    return SlotTensor(slot, slot.dtype, f"{key}/{parameter.name}")


def _known_scaling(mp: Rank) -> dict[str, object]:
    """Return what the source's optimizer files say of loss scaling, in stage 0's words."""
    if not mp.members:
        return {}
    content = mp.members[0].content
    scaler = content.get("loss_scaler")
    node = node_of(scaler)
    state = node.state if isinstance(node, Object) and isinstance(node.state, dict) else {}
    found = {str(key): value for key, value in state.items() if key in _SCALING}
    if "dynamic" in state:
        found["dynamic_loss_scale"] = state["dynamic"]
    return found
