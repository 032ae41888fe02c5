"""The files of a DeepSpeed checkpoint that is to be written, as trees: of models, then of optimizers. See `shards`.

At stage 0 the optimizer is in the model file, and `stage0` reads what is written here:

Form      engine                                    what it holds
PLAIN     float32, or none that scales              {state: {number: slots}, param_groups}: torch's own, all parameters
UNFUSED   FP16_UnfusedOptimizer                     the same of the trained ones; fp32_groups: their masters
FUSED     FP16_Optimizer                            the same of one flat tensor for each group; fp32_groups_flat
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from zckpt.formats.deepspeed.axes.auto_ep import Places, auto_experts, auto_layers, listed_layers
from zckpt.formats.deepspeed.axes.experts import is_expert, numbers_of_experts
from zckpt.formats.deepspeed.axes.gpt_model import SHARED, arguments_in
from zckpt.formats.deepspeed.axes.tp_rules import ARGUMENTS, INFO_KEY
from zckpt.formats.deepspeed.loss_scaling import SCALING_KEYS, in_stage0
from zckpt.formats.deepspeed.nested import ordered, renested, unwrapped
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.rare.aliases import aliases, joined
from zckpt.formats.deepspeed.rare.muon import MOMENTUM, keeps_whole_matrices
from zckpt.formats.deepspeed.rare.zenflow import keeps_zenflow, transposed, upright
from zckpt.formats.deepspeed.shards import GROUPS_KEY, ModelShard, address_of, section, stage_of
from zckpt.formats.deepspeed.target import Part, Target, TargetGroup, Unpartitioned, dtype_of
from zckpt.formats.deepspeed.values import weight_or_master
from zckpt.formats.torch_files.tensors import arguments_with, as_mapping, slot_of
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
from zckpt.state import MASTER, WEIGHT, Parameter, Slot, by_key, dict_of, list_of, stated
from zckpt.state.partition import flat_starts, shard_numel, shard_share
from zckpt.torchfile import OrderedMapping, Size, Tensor, TorchFile

Key = TypeVar("Key")


def model_tree(target: Target, mp: Rank, rank: int) -> object:
    """Return the content of a model-parallel rank's model file: the only one, or under ZeRO-3 that of one rank."""
    source = carried_from(mp, rank)
    groups = [part.parameters for part in target.parts(mp)]  # under ZeRO-3 sub-groups
    if target.stage != 3 and target.transposed:
        groups = [[transposed(p) for p in parameters] for parameters in groups]
    in_files = {name for name in mp.parameters if is_expert(name)} | auto_experts(source).keys()
    every = [p for p in mp.parameters.values() if p.frozen]
    frozen = [p for p in every if p.name not in in_files]
    if target.transposed and target.stage == 3:
        frozen = [transposed(p) for p in frozen]
    # DeepSpeed has one list of these for all ranks, under rank 0's numbers of experts: each rank would load rank 0's.
    # Without it, all ranks have loaded what is frozen with the rest of the model, from their experts' files.
    lists = target.stage == 3 or (target.stage == 2 and len(frozen) == len(every))
    # DeepSpeed looks for all of its own in it, and ZeRO-1, which has none, does not tell whether some were left out.
    lists &= target.lists_frozen and (mp.model.frozen_shapes is not None or bool(frozen))
    first = list_of(mp.model.content.get("param_shapes"))[:1]
    tuples = any(type(shape) is tuple for one in first for shape in dict_of(one).values())  # where the source has such
    written = {
        "module": None if is_filed(target) else _module(target, mp, source),
        "buffer_names": _listed_buffers(target, mp, source),
        "param_shapes": [shapes_of(parameters, tuples=tuples) for parameters in groups] if target.stage else None,
        "shared_params": _shared(source, mp, rank) if target.stage else None,
        "frozen_param_shapes": shapes_of(frozen) if lists else None,
        "frozen_param_fragments": _frozen_shards(target, frozen, rank) if lists else None,
        "dp_world_size": target.world_size,
        "mp_world_size": len(target.ranks),
        "ds_config": config_tree(target),
    }
    dimensions = source.content.get("checkpoint_parallel_dimensions")
    if isinstance(dimensions, dict):
        degrees = {"pp_degree": target.pp, "tp_degree": target.tp}
        written["checkpoint_parallel_dimensions"] = {key: degrees.get(key, value) for key, value in dimensions.items()}
    if mp.members:
        written["optimizer"] = None  # BF16_Optimizer of stage 0 has a copy of one rank's there
    if target.stages is not None:
        written["num_experts"] = numbers_of_experts(mp.parameters)
    content = restated(source.file, dict_of(source.file.root), written)  # keys that are no texts, too
    if lists and target.stage == 3:  # where values of frozen parameters are; no file had lists of these before 2023
        content |= {key: written[key] for key in ("frozen_param_shapes", "frozen_param_fragments")}
    if mp.unpartitioned is not None:
        content["optimizer"] = stage0_optimizer(mp, mp.unpartitioned)
    arguments = arguments_in(source.content)
    if arguments is not None:
        content[ARGUMENTS] = arguments_with(content[ARGUMENTS], _degrees(target, arguments))
    if target.rules is not None:
        content[INFO_KEY] = FromFile.of(mp.model.file, target.rules)
    places = _places(target, mp, rank)
    return content | listed_layers(source, places, target.world_size, sharded=target.stage == 3)


def _listed_buffers(target: Target, mp: Rank, source: ModelShard) -> list[str]:
    """Return what DeepSpeed lists, with further names of these: what is written has a storage for each."""
    names, module = source.buffer_names, source.module
    storages = {module[name].storage for name in names if name in module}
    return [
        name for name in mp.buffers
        if target.stages is not None or name in names or (name in module and module[name].storage in storages)
    ]  # fmt: skip


def restated(file: TorchFile, content: Mapping[Key, object], anew: Mapping[Key, object]) -> dict[Key, object]:
    """Return the content of a file that is to be written: what is said anew of its keys, the rest as it is there."""
    return {key: anew[key] if key in anew else FromFile.of(file, value) for key, value in content.items()}


def _degrees(target: Target, arguments: Mapping[object, object]) -> dict[str, int]:
    """Return what Megatron-DeepSpeed's arguments say of ranks, and of the rows of its vocabulary."""
    every = (p for mp in target.ranks for p in mp.parameters.values())
    rows = next((p.shape[0] * target.tp for p in every if p.name.endswith(f".{SHARED}")), None)
    apart = arguments.get("ds_sequence_parallel_size") in (None, 1)
    return stated(
        {
            "tensor_model_parallel_size": target.tp,
            "pipeline_model_parallel_size": target.pp,
            "transformer_pipeline_model_parallel_size": target.pp,
            "data_parallel_size": target.world_size if apart else None,
            "world_size": target.world_size * len(target.ranks),
            "padded_vocab_size": rows,
        }
    )


def is_filed(target: Target) -> bool:
    """Tell whether a target is a pipeline whose layers have files of their own: one without experts."""
    origin = target.origin
    return bool(origin.layers) or (
        origin.is_foreign and target.stages is not None and "num_experts" not in origin.model.content
    )


def _places(target: Target, mp: Rank, rank: int) -> Places:
    """Return where a rank stands in each layer of AutoEP."""
    own = auto_experts(target.origin.model)
    return {
        own[p.name].prefix: (len(group.experts), group.expert_rank(rank), group.position(rank))
        for group in mp.groups
        for p in group.experts[0]
        if p.name in own
    }


def carried_from(mp: Rank, rank: int) -> ModelShard:
    """Return the source's model file that a rank carries everything from that does not depend on the cut."""
    return mp.model_files[rank] if rank < len(mp.model_files) else mp.model


def _shared(source: ModelShard, mp: Rank, rank: int) -> object:
    """Return the list of tied parameters; DeepSpeed lets the first rank of all write it, others have an empty one.

    It is made anew: some writers leave it empty, DeepSpeed takes empty parameters for tied ones, and it does not list
    all that are.
    """
    listed = source.content.get("shared_params")
    if listed is None or source is not mp.model:
        return listed
    return mp.aliases if mp.mp_rank == 0 and rank == 0 else {}


def shapes_of(parameters: Iterable[Parameter], *, tuples: bool = False) -> OrderedMapping:
    """Return the shapes of parameters by name, as model files list them."""
    return ordered((p.name, p.shape if tuples else Size(p.shape)) for p in parameters)


def _weight(parameter: Parameter) -> Slot:
    """Return what a parameter's weight is written from.

    It is rounded from the master, too, where both are means over ranks: the mean of rounded values need not be the
    rounded mean.
    """
    slot = weight_or_master(parameter)
    return parameter.slots.get(MASTER, slot) if slot.replicas else slot


def _module(target: Target, mp: Rank, source: ModelShard) -> object:
    """Return the module in the source's order: views of one storage for each group, or empty under ZeRO-3.

    Experts are in files of their own, and their model's other tensors do not share storages.
    """
    old = dict_of(source.content.get("module"))
    module = ordered((), old)
    weights: dict[str, Tensor] = {}
    apart = "num_experts" in source.content
    elsewhere = auto_experts(target.origin.model)
    filed = {name: own for files in target.origin.ranks for name, own in files.model.filed.items()}
    if target.origin.is_foreign:
        filed = {name: unwrapped(name) for name in (*mp.parameters, *mp.buffers)}
    for group in mp.groups if target.stage in (1, 2) and not apart else []:
        weights.update(_views(group, columns=target.transposed))
    for name in dict.fromkeys([*source.module, *mp.parameters, *mp.buffers]):
        key = filed.get(name, name)
        if name in mp.buffers:
            slot, own = mp.buffers[name].slots[WEIGHT], source.module.get(name)
            # Under ZeRO-3 every rank has written its own, and they may differ.
            if target.stage == 3 and source is not mp.model and own is not None and own.shape == slot.shape:
                slot = slot_of(WEIGHT, own, source.path)
            module[key] = SlotTensor(slot, slot.dtype, name)
        elif name in mp.parameters and (name in source.module or not (is_expert(name) or name in elsewhere)):
            owner = mp.owner(name)
            if apart or owner.name not in weights:
                weights[owner.name] = single(target, owner)
            # Each name gets a tensor of its own, as a view of what it shares with others.
            module[key] = replace(weights[owner.name])
        elif target.stage == 3 and name in source.module and source.module[name].shape == (0,):
            module[key] = view(new_storage(source.module[name].dtype, 0), (0,))  # whose, no file says; DeepSpeed asks
    if any(isinstance(value, dict) for value in old.values()):
        return renested(old, module, source.file)
    for name, value in source.extra.items():
        module[name] = FromFile.of(source.file, value)
    return module


def single(target: Target, parameter: Parameter) -> Tensor:
    """Return a weight that lies in a storage of its own; under ZeRO-3 an empty one."""
    if target.stage == 3:
        return view(new_storage(parameter.dtype, 0), (0,))
    columns = target.transposed and parameter.group is not None
    stored = transposed(parameter) if columns else parameter
    made = view(new_storage(stored.dtype, stored.numel, _contents(stored, WEIGHT, 0)), stored.shape)
    return upright(made, columns=columns)


def _views(group: TargetGroup, *, columns: bool) -> dict[str, Tensor]:
    """Return the weights of a group as views of its flat buffer, as DeepSpeed keeps them."""
    places = list(zip(group.experts[0], group.starts, strict=False))
    dtypes = {p.dtype for p, _ in places}
    if len(dtypes) != 1:
        return {}
    contents = [one for p, start in places for one in _contents(p, WEIGHT, start)]
    storage = new_storage(dtypes.pop(), group.partition * group.shared_by, contents)
    return {p.name: upright(view(storage, p.shape, start=start), columns=columns) for p, start in places}


def _frozen_shards(target: Target, frozen: Sequence[Parameter], rank: int) -> OrderedMapping:
    """Return the frozen parameters: whole, or under ZeRO-3 one rank's shards."""
    shards = OrderedMapping()
    world = target.world_size if target.stage == 3 else 1
    for parameter in frozen:
        numel = shard_numel(parameter.numel, world)
        contents = _contents(parameter, WEIGHT, 0, *shard_share(parameter.numel, world, rank))
        shape = (numel,) if target.stage == 3 else parameter.shape
        shards[parameter.name] = view(new_storage(_weight(parameter).dtype, numel, contents), shape)
    return shards


_FLAT_KEYS = (
    *SCALING_KEYS, "clip_grad", "base_optimizer_state", "single_partition_of_fp32_groups", "zero_stage",
    "group_paddings",
    "param_alignment_paddings", "partition_count", "ds_version", "param_slice_mappings",
)  # fmt: skip
_PARAMETERWISE_KEYS = (
    "zero_stage", *SCALING_KEYS, "partition_count", "optimizer_state_dict", "fp32_flat_groups",
)  # fmt: skip


def optimizer_tree(target: Target, mp: Rank, rank: int) -> object:
    """Return the content of one rank's optimizer file."""
    source = mp.members[0]
    old = source.content
    cut = _cut(target, mp, rank)
    if not target.bf16_optimizer:
        cut["zero_stage"] = stage_of(target.stage)
    same = (source.stage == 3) == (target.stage == 3)
    as_it_was = same and not target.origin.is_foreign
    keys = [*(old if as_it_was else _PARAMETERWISE_KEYS if target.stage == 3 else _FLAT_KEYS)]
    keys += [key for key in (GROUPS_KEY, "param_alignment_paddings") if key in cut and key not in keys]
    if target.elastic != source.elastic and same:
        keys = [key for key in keys if key not in ("base_optimizer_state_step", "base_optimizer_param_groups")]
    content = restated(source.file, {key: old.get(key) for key in keys if key in cut or key in old}, cut)
    anew: dict[object, object] = {"optimizer_state_dict": content, "ds_config": config_tree(target)}
    return restated(source.file, as_mapping(source.file.root), anew)


def config_tree(target: Target) -> object:
    """Return DeepSpeed's configuration, true of the target where it speaks of what was changed."""
    config = target.origin.model.configuration
    if not isinstance(config, dict):
        return config
    changed = dict(config)
    zero = changed.get("zero_optimization")
    if isinstance(zero, dict):
        flat = {"elastic_checkpoint": target.elastic, **target.configured}
        changed["zero_optimization"] = {**zero, "stage": target.stage} | {
            key: value for key, value in flat.items() if key in zero or value
        }
        members = target.origin.members
        keeps = bool(members) and keeps_zenflow(target.checkpoint, members[0].stage, target.stage)
        # From another format matrices are in order, as 0.19.8 has them with ZenFlow, too, but at ZeRO-3.
        if not (target.stage != 3 if target.origin.is_foreign else keeps):
            changed["zero_optimization"].pop("zenflow", None)
    changed |= batch_of(changed, target.world_size)
    experts = max((len(group.experts) for mp in target.ranks for group in mp.groups), default=1)
    for name, key, degree in (
        ("tensor_parallel", "autotp_size", target.tp),
        ("expert_parallel", "autoep_size", experts),
    ):
        if type(section(changed, name).get(key)) is int:
            changed[name] = {**section(changed, name), key: degree}
    return FromFile.of(target.origin.model.file, changed)


def batch_of(config: Mapping[object, object], world_size: int) -> dict[object, object]:
    """Return the batch of one of so many ranks, where the whole batch divides among them."""
    batch, steps = config.get("train_batch_size"), config.get("gradient_accumulation_steps", 1)
    if type(batch) is int and type(steps) is int and steps > 0 and batch % (world_size * steps) == 0:
        return {"train_micro_batch_size_per_gpu": batch // (world_size * steps)}
    return {}


def _ordered_like(values: Mapping[Key, object], keys: Iterable[Key]) -> dict[Key, object]:
    """Return values in the order of these keys, and then of their own."""
    return {key: values[key] for key in dict.fromkeys([*keys, *values]) if key in values}


def _cut(target: Target, mp: Rank, rank: int) -> dict[str, object]:
    """Return the keys of an optimizer file that depend on how it is cut."""
    source, flat, config = mp.members[0], target.stage != 3, target.origin.model.config
    known = source.masters if (source.stage != 3) == flat else []
    own = target.own_values.get((mp.mp_rank, rank), ())
    keys = [key for one, more in zip(source.scalars, source.tensors, strict=True) for key in (*one, *more)]
    parts = [(group, group.position(rank), part) for group in mp.groups for part in group.parts(rank)]
    masters: list[object] = []
    states: list[dict[object, object]] = []
    numbers = by_key((group.index, number) for number, (group, *_) in enumerate(parts))  # experts may be some of one
    for number, (group, position, part) in enumerate(parts):
        stripped = part.numel - part.padding(position)
        like = known[min(number, len(known) - 1)] if known else None
        masters.append(_partition(part, MASTER, position, part.numel if target.bf16_optimizer else stripped, like))
        length = stripped if target.elastic else part.numel
        tensors: dict[object, object] = {key: _partition(part, key, position, length) for key in part.keys}
        if MOMENTUM in tensors and keeps_whole_matrices(
            group.values.hyperparameters, config, partition=target.bf16_optimizer or not flat
        ):  # it would take a partition for some matrices
            its = [part.parameters[share.index] for share in part.shares(position)]
            if its:
                tensors[MOMENTUM] = whole(its, MOMENTUM)
            else:
                del tensors[MOMENTUM]
        coded = target.coded.get((mp.mp_rank, group.index))
        state = _nodes(group.values.state)
        state |= tensors if coded is None else coded.of(tensors, position, group.partition)
        of_part = (one for one in own if one.part == number and not (one.in_group or target.coded))
        state |= _nodes({one.key: one.value for one in of_part})
        states.append(_ordered_like(state, keys))
    joined(dict(enumerate(states)), aliases(source), len(source.masters))
    groups: dict[int, object] = {}
    for group in mp.groups:
        of_group = {one.key: one.value for one in own if one.in_group and one.group == group.index}
        values = {**group.values.hyperparameters, **of_group}
        kept = _ordered_like(values, source.group(group.index) if of_group else ())
        groups[group.index] = {**_nodes(kept), "params": numbers.get(group.index, [])}
    base = {"state": {n: state for n, state in enumerate(states) if state}, "param_groups": [*groups.values()]}
    if not flat:
        cut = {"partition_count": target.world_size, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        if auto_layers(target.origin.model):
            from zckpt.formats.deepspeed.axes.auto_ep_shards import partition_groups

            cut[GROUPS_KEY] = partition_groups(target, mp.groups, rank)
        return cut
    on_last = [group.shared_by * part.numel - part.total if position == group.shared_by - 1 else 0
               for group, position, part in parts]  # fmt: skip
    cut = {
        "base_optimizer_state": states if target.elastic else base,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": on_last if target.bf16_optimizer else [part.padding(at) for _, at, part in parts],
        "partition_count": [group.shared_by for group in mp.groups],
        "param_slice_mappings": [
            ordered((part.parameters[one.index].name, address_of(one.numel, one.position)) for one in part.shares(at))
            for _, at, part in parts
        ],
    }
    if target.bf16_optimizer:
        return cut
    first = target.origin.members[0]
    clipping = first.content.get("clip_grad")
    # Where nothing says it, the engine's own stays: what is usual depends on its version.
    cut |= stated({"clip_grad": config.get("gradient_clipping") if clipping is None else clipping})
    cut["ds_version"] = source.version
    if target.alignment or first.alignment_paddings is not None:  # some versions write pads down, even if all are zero
        cut["param_alignment_paddings"] = [list(group.pads) for group in mp.groups]
    return cut


def _partition(part: Part, key: str, position: int, length: int, like: Tensor | None = None) -> Tensor:
    """Return one slot of one rank's part: a storage of all its elements, of which the tensor shows `length`."""
    row = part.rows.get(key)
    contents: list[Content] = [] if row is None else [PackContent(0, row.pack(position))]
    for share in part.shares(position) if row is None else ():
        contents += _contents(part.parameters[share.index], key, share.position, share.start, share.numel)
    return view(new_storage(part.dtypes[key], part.numel, contents), (length,), like=like)


def whole(parameters: Sequence[Parameter], key: str) -> Tensor:
    """Return one slot of whole parameters, end to end; zeros where one has none."""
    starts = flat_starts([p.numel for p in parameters])
    contents = [one for p, at in zip(parameters, starts, strict=False) for one in _contents(p, key, at)]
    return view(new_storage(dtype_of(parameters, key), starts[-1], contents), (starts[-1],))


def _contents(
    parameter: Parameter, key: str, position: int, start: int = 0, numel: int | None = None
) -> list[SlotContent]:
    """Return what a slot has of an extent of a parameter, by default of all of it; of a vocabulary's padding nothing.

    Parameters
    ----------
    position : int, elements
        Of the extent, in the storage. What the slot does not have stays zero there.
    start : int, elements
        Of the extent, in the parameter.
    """
    slot = _weight(parameter) if key == WEIGHT else parameter.slots.get(key)
    if slot is None or (count := min(parameter.numel if numel is None else numel, slot.numel - start)) <= 0:
        return []
    label = parameter.name if key == WEIGHT else f"{key}/{parameter.name}"
    return [SlotContent(position, slot, label, slot.flat(start, count))]


PLAIN, UNFUSED, FUSED = "plain", "unfused", "fused"


def form_of(held: Mapping[Any, object]) -> str:
    """Return the form of what a model file holds of an optimizer, or of the attributes of an engine's."""
    return FUSED if "fp32_groups_flat" in held else UNFUSED if "fp32_groups" in held else PLAIN


def stage0_optimizer(mp: Rank, how: Unpartitioned) -> dict[str, object]:
    """Return what a stage-0 model file holds of the optimizer: state by the number of each parameter.

    Of flat masters it is by the number of each group.
    """
    states: list[dict[Any, object]] = []
    groups: list[object] = []
    for group, names in zip(mp.groups, how.numbered, strict=True):
        first, common, its = len(states), group.values.state, group.experts[0]
        if how.form == FUSED:
            keys = dict.fromkeys(key for p in its for key in p.optimizer_slots if key not in common)
            states.append(_nodes(common) | {key: whole(its, key) for key in keys})
        for name in names if how.form != FUSED else ():
            one = mp.owner(name) if name in mp.parameters else None
            if one is None or one.group is None:
                states.append({})
            else:
                single = one.state if how.own_state else {**common, **one.state}
                states.append(_nodes(single) | {key: _whole(one, key) for key in one.optimizer_slots})
        found = {**_nodes(group.values.hyperparameters), "params": list(range(first, len(states)))}
        groups.append(found | ({"param_names": list(names)} if how.named and names else {}))
    numbered: dict[str, object] = {
        "state": {number: one for number, one in enumerate(states) if one},
        "param_groups": groups,
    }
    if how.form == PLAIN:
        return numbered
    known = in_stage0(mp.members[0].content) if mp.members else {}
    content: dict[str, object] = {key: known.get(key, value) for key, value in how.scaling.items()}
    content["optimizer_state_dict"] = numbered
    if how.form == FUSED:
        content["fp32_groups_flat"] = [whole(group.experts[0], MASTER) for group in mp.groups]
    else:
        content["fp32_groups"] = [[_whole(mp.owner(name), MASTER) for name in names] for names in how.numbered]
    return content


def _whole(parameter: Parameter, key: str) -> SlotTensor:
    slot = parameter.slots[key]
    return SlotTensor(slot, slot.dtype, f"{key}/{parameter.name}")


def _nodes(values: Mapping[Any, object]) -> dict[Any, object]:
    return {key: value_node(value) for key, value in values.items()}
