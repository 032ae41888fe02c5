"""The model files of a DeepSpeed checkpoint that is to be written, as trees. See `shards` for their form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.auto_ep import auto_experts, listed_layers
from zckpt.formats.deepspeed.experts import is_expert, numbers_of_experts
from zckpt.formats.deepspeed.gpt_model import SHARED, arguments_in, with_degrees
from zckpt.formats.deepspeed.nested import is_nested, renested, unwrapped
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.deepspeed.tp_rules import ARGUMENTS, INFO_KEY
from zckpt.formats.deepspeed.write_optimizer import config_tree, slot_contents, stage0_optimizer
from zckpt.formats.deepspeed.zenflow import transposed, upright
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.formats.torch_files.writer import FromFile, SlotContent, SlotTensor, new_storage, view
from zckpt.state import MASTER, WEIGHT, Parameter, Slot
from zckpt.state.partition import shard_numel, shard_share
from zckpt.torchfile import OrderedMapping, Size, Tensor

_OF_ZERO = ("param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments")
"""Keys that a model file of stage 0 has with None."""


def model_tree(target: Target, mp: Rank, rank: int) -> object:
    """Return the content of a model-parallel rank's model file: the only one, or under ZeRO-3 that of one rank."""
    source = carried_from(mp, rank)
    written = {
        "module": _module(target, mp, source),
        "param_shapes": _param_shapes(target, mp),
        "shared_params": _shared(source, mp, rank),
        "dp_world_size": target.world_size,
        "mp_world_size": len(target.ranks),
        "ds_config": config_tree(target),
    }
    dimensions = source.content.get("checkpoint_parallel_dimensions")
    if isinstance(dimensions, dict):
        degrees = {"pp_degree": target.pp, "tp_degree": target.tp}
        known = {key: degree for key, degree in degrees.items() if key in dimensions}
        written["checkpoint_parallel_dimensions"] = {**dimensions, **known}
    if is_filed(target):
        written["module"] = None
    if mp.members:
        written["optimizer"] = None  # BF16_Optimizer of stage 0 has a copy of one rank's there
    if target.stages is not None:
        written["buffer_names"] = list(mp.buffers)
        written["num_experts"] = numbers_of_experts(mp.parameters)
    in_files = {name for name in mp.parameters if is_expert(name)} | auto_experts(source).keys()
    frozen = [p for p in mp.parameters.values() if p.frozen and p.name not in in_files]
    if target.transposed and target.stage == 3:
        frozen = [transposed(p) for p in frozen]
    # DeepSpeed has one list of these for all ranks, under rank 0's numbers of experts: each rank would load rank 0's.
    # Without it, all ranks have loaded what is frozen with the rest of the model, from their experts' files.
    listed_anew = target.stage == 3 or not any(p.frozen and p.name in in_files for p in mp.parameters.values())
    if (
        target.stage in (0, 1)
        or not target.lists_frozen
        or not (listed_anew and (frozen or mp.model.frozen_shapes is not None or mp.members[0].stage == 1))
    ):
        written["frozen_param_shapes"] = written["frozen_param_fragments"] = None
    else:
        written["frozen_param_shapes"] = _shapes(frozen)
        written["frozen_param_fragments"] = _frozen_shards(target, frozen, rank if target.stage == 3 else None)
    if target.stage == 0:
        written |= dict.fromkeys(_OF_ZERO)
    content = {key: written[key] if key in written else FromFile.of(source.file, value)
               for key, value in source.content.items()}  # fmt: skip
    if mp.unpartitioned is not None:
        content["optimizer"] = stage0_optimizer(mp, mp.unpartitioned)
    if ARGUMENTS in content:
        content[ARGUMENTS] = with_degrees(content[ARGUMENTS], _degrees(target, source))
    if target.rules is not None:
        content[INFO_KEY] = FromFile.of(mp.model.file, target.rules)
    layers = _expert_ranks(target, mp, rank)
    return content | listed_layers(source, layers, target.world_size, sharded=target.stage == 3)


def _degrees(target: Target, source: ModelShard) -> dict[str, int | None]:
    """Return what Megatron-DeepSpeed's arguments say of ranks, and of the rows of its vocabulary."""
    words = f".{SHARED}"
    every = (p for mp in target.ranks for p in mp.parameters.values())
    rows = next((p.shape[0] * target.tp for p in every if p.name.endswith(words)), None)
    apart = (arguments_in(source.content) or {}).get("ds_sequence_parallel_size") in (None, 1)
    return {
        "tensor_model_parallel_size": target.tp,
        "pipeline_model_parallel_size": target.pp,
        "transformer_pipeline_model_parallel_size": target.pp,
        "data_parallel_size": target.world_size if apart else None,
        "world_size": target.world_size * len(target.ranks),
        "padded_vocab_size": rows,
    }


def is_filed(target: Target) -> bool:
    """Tell whether a target is a pipeline whose layers have files of their own: one without experts."""
    if target.origin.layers or not target.origin.is_foreign or target.stages is None:
        return bool(target.origin.layers)
    return "num_experts" not in target.origin.model.content


def _expert_ranks(target: Target, mp: Rank, rank: int) -> dict[str, tuple[int, int, int]]:
    """Return for each layer of AutoEP, by its prefix: over how many ranks it is, this one's number, and its place."""
    own = auto_experts(target.origin.model)
    found = {}
    for group in mp.groups:
        degree = len(group.experts)
        for p in group.experts[0]:
            if p.name in own:
                found[own[p.name].prefix] = degree, group.expert_rank(rank), group.position(rank)
    return found


def carried_from(mp: Rank, rank: int) -> ModelShard:
    """Return the source's model file that a rank carries everything from that does not depend on the cut."""
    return mp.model_files[rank] if rank < len(mp.model_files) else mp.model


def _shared(source: ModelShard, mp: Rank, rank: int) -> object:
    """Return the list of tied parameters; DeepSpeed lets the first rank of all write it, others have an empty one."""
    listed = source.content.get("shared_params")
    first = mp.mp_rank == 0 and rank == 0
    if listed == {} and first and source is mp.model:  # some writers leave it empty where parameters are tied
        return {p.name: p.tied_to for p in mp.parameters.values() if p.tied_to is not None}
    return listed if first or listed is None or source is not mp.model else {}


def _param_shapes(target: Target, mp: Rank) -> list[OrderedMapping]:
    """Return shapes by group, under ZeRO-3 by sub-group; plain tuples where the source has those."""
    old = mp.model.content.get("param_shapes")
    first = old[0] if isinstance(old, list) and old and isinstance(old[0], dict) else {}
    groups = [part.parameters for part in target.parts(mp)]
    if target.stage != 3 and target.transposed:
        groups = [[transposed(p) for p in parameters] for parameters in groups]
    return [_shapes(parameters, tuples=any(type(shape) is tuple for shape in first.values())) for parameters in groups]


def _shapes(parameters: Sequence[Parameter], *, tuples: bool = False) -> OrderedMapping:
    shapes = OrderedMapping()
    for p in parameters:
        shapes[p.name] = p.shape if tuples else Size(p.shape)
    return shapes


def _weight(parameter: Parameter) -> Slot:
    """Return what a parameter's weight is written from.

    It is rounded from the master where no file has it, and where both are means over ranks: the mean of rounded
    values need not be the rounded mean.
    """
    slot = parameter.slots.get(WEIGHT) or parameter.slots.get(MASTER)
    if slot is None:
        raise UnsupportedError(f"no file holds the values of {parameter.name}")
    return parameter.slots.get(MASTER, slot) if slot.replicas else slot


def _module(target: Target, mp: Rank, source: ModelShard) -> object:
    """Return the module in the source's order: views of one storage for each group, or empty under ZeRO-3.

    Experts are in files of their own, and their model's other tensors do not share storages.
    """
    module = OrderedMapping()
    old = source.content.get("module")
    if isinstance(old, OrderedMapping):
        module.state = old.state
    weights: dict[str, Tensor] = {}
    apart = "num_experts" in source.content
    elsewhere = auto_experts(target.origin.model)
    for group in mp.groups if target.stage in (1, 2) and not apart else []:
        weights.update(_views(group, columns=target.transposed))
    for name in dict.fromkeys([*source.module, *mp.parameters, *mp.buffers]):
        if name in mp.buffers:
            slot = _buffer(target, mp, source, name)
            module[name] = SlotTensor(slot, slot.dtype, name)
        elif name in mp.parameters and (name in source.module or not (is_expert(name) or name in elsewhere)):
            owner = mp.owner(name)
            if owner.name not in weights and not apart:
                weights[owner.name] = single(target, owner)
            # Each name gets a tensor of its own, as a view of what it shares with others.
            module[name] = replace(weights[owner.name]) if not apart else single(target, owner)
    filed = {name: own for files in target.origin.ranks for name, own in files.model.filed.items()}
    if target.origin.is_foreign:
        filed = {name: unwrapped(name) for name in (*mp.parameters, *mp.buffers)}
    if filed:
        listed, module = module, OrderedMapping()
        module.state = listed.state
        module.update({filed.get(str(name), name): value for name, value in listed.items()})
    if isinstance(old, dict) and is_nested(old):
        return renested(old, module, source.file)
    for name, value in source.extra.items():
        module[name] = FromFile.of(source.file, value)
    return module


def _buffer(target: Target, mp: Rank, source: ModelShard, name: str) -> Slot:
    """Return a buffer; under ZeRO-3 every rank has written its own, and they may differ."""
    slot = mp.buffers[name].slots[WEIGHT]
    own = source.module.get(name)
    if target.stage == 3 and source is not mp.model and own is not None and own.shape == slot.shape:
        return slot_of(WEIGHT, own, source.path)
    return slot


def single(target: Target, parameter: Parameter) -> Tensor:
    """Return a weight that lies in a storage of its own; under ZeRO-3 an empty one."""
    if target.stage == 3:
        return view(new_storage(parameter.dtype, 0), (0,))
    columns = target.transposed and parameter.group is not None
    stored = transposed(parameter) if columns else parameter
    contents = slot_contents(_weight(stored), stored.name, 0, 0, stored.numel)
    made = view(new_storage(stored.dtype, stored.numel, list(contents)), stored.shape)
    return upright(made, columns=columns)


def _views(group: TargetGroup, *, columns: bool) -> dict[str, Tensor]:
    """Return the weights of a group as views of its flat buffer, as DeepSpeed keeps them."""
    parameters, starts = group.experts[0], group.starts
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1:
        return {}
    contents: list[SlotContent] = []
    for start, p in zip(starts, parameters, strict=False):
        contents += slot_contents(_weight(p), p.name, 0, start, p.numel)
    storage = new_storage(dtypes.pop(), group.partition * group.shared_by, contents)
    return {
        p.name: upright(view(storage, p.shape, start=start), columns=columns)
        for start, p in zip(starts, parameters, strict=False)
    }


def _frozen_shards(target: Target, frozen: Sequence[Parameter], rank: int | None) -> OrderedMapping:
    """Return the frozen parameters: whole, or under ZeRO-3 one rank's shards."""
    shards = OrderedMapping()
    for parameter in frozen:
        slot, numel, shape = _weight(parameter), parameter.numel, parameter.shape
        start, count = 0, numel
        if rank is not None:
            start, count = shard_share(numel, target.world_size, rank)
            numel = shard_numel(numel, target.world_size)
            shape = (numel,)
        contents = list(slot_contents(slot, parameter.name, start, 0, count))
        shards[parameter.name] = view(new_storage(slot.dtype, numel, contents), shape)
    return shards
