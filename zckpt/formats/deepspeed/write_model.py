"""The model files of a DeepSpeed checkpoint that is to be written, as trees. See `shards` for their form."""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.deepspeed.write_optimizer import config_tree
from zckpt.formats.torch_archive import FromFile, SlotPart, SlotTensor, new_storage, view
from zckpt.partition import flat_partition_numel, flat_starts, shard_fragment, shard_numel
from zckpt.state import MASTER, WEIGHT, Extent, Parameter, Slot
from zckpt.torchfile import OrderedMapping, Size, Tensor


def model_tree(target: Target, rank: int) -> object:
    """Return the content of a model file: the only one, or under ZeRO-3 that of one rank."""
    source = target.origin.model
    parameterwise = target.stage == 3
    made: dict[str, object] = {
        "module": _module(target),
        "param_shapes": [_shapes(group.parameters) for group in target.groups],
        "dp_world_size": target.world_size,
        "ds_config": config_tree(target),
    }
    frozen = [p for p in target.checkpoint.parameters.values() if p.frozen]
    if target.stage == 1 or not (frozen or source.frozen_shapes is not None or target.origin.members[0].stage == 1):
        made["frozen_param_shapes"] = made["frozen_param_fragments"] = None
    else:
        made["frozen_param_shapes"] = _shapes(frozen)
        made["frozen_param_fragments"] = _fragments(target, frozen, rank if parameterwise else None)
    return {key: made[key] if key in made else FromFile.of(source.file, value) for key, value in source.content.items()}


def _shapes(parameters: Sequence[Parameter]) -> OrderedMapping:
    shapes = OrderedMapping()
    for parameter in parameters:
        shapes[parameter.name] = Size(parameter.shape)
    return shapes


def _weight(parameter: Parameter) -> Slot:
    """Return what a parameter's weight is written from: itself, or rounded from the master where no file has it."""
    slot = parameter.slots.get(WEIGHT) or parameter.slots.get(MASTER)
    if slot is None:
        raise UnsupportedError(f"no file holds the values of {parameter.name}")
    return slot


def _module(target: Target) -> object:
    """Return the module in the source's order: views of one storage for each group, or empty under ZeRO-3."""
    source = target.origin.model
    module = OrderedMapping()
    old = source.content.get("module")
    if isinstance(old, OrderedMapping):
        module.state = old.state
    made: dict[str, object] = {}
    for group in target.groups if target.stage != 3 else []:
        made.update(_views(target, group))
    names = dict.fromkeys([*source.module, *target.checkpoint.parameters, *target.checkpoint.buffers])
    for name in names:
        if name in target.checkpoint.buffers:
            slot = target.checkpoint.buffers[name].slots[WEIGHT]
            module[name] = SlotTensor(slot, slot.dtype, name)
        elif name in target.checkpoint.parameters:
            owner = target.checkpoint.owner(name)
            if owner.name not in made:
                made[owner.name] = _single(target, owner, name)
            module[name] = made[owner.name]
    return module


def _single(target: Target, parameter: Parameter, name: str) -> object:
    """Return a weight that lies in a storage of its own; under ZeRO-3 an empty one."""
    if target.stage == 3:
        return view(new_storage(parameter.dtype, 0), (0,))
    return SlotTensor(_weight(parameter), parameter.dtype, name)


def _views(target: Target, group: TargetGroup) -> dict[str, Tensor]:
    """Return the weights of a group as views of its flat buffer, as DeepSpeed keeps them."""
    starts = flat_starts([p.numel for p in group.parameters], group.pads)
    dtypes = {p.dtype for p in group.parameters}
    if len(dtypes) != 1:
        return {}
    numel = flat_partition_numel(starts[-1], target.world_size) * target.world_size
    parts = [SlotPart(start, _weight(p), p.name) for start, p in zip(starts, group.parameters, strict=False) if p.numel]
    storage = new_storage(dtypes.pop(), numel, parts)
    return {p.name: view(storage, p.shape, start=s) for s, p in zip(starts, group.parameters, strict=False)}


def _fragments(target: Target, frozen: Sequence[Parameter], rank: int | None) -> OrderedMapping:
    """Return the frozen parameters: whole, or under ZeRO-3 one rank's shards."""
    fragments = OrderedMapping()
    for parameter in frozen:
        slot = _weight(parameter)
        if rank is None:
            fragments[parameter.name] = SlotTensor(slot, slot.dtype, parameter.name)
            continue
        start, count = shard_fragment(parameter.numel, target.world_size, rank)
        numel = shard_numel(parameter.numel, target.world_size)
        parts = [SlotPart(0, slot, parameter.name, Extent.flat(parameter.shape, start, count))] if count else []
        fragments[parameter.name] = view(new_storage(slot.dtype, numel, parts), (numel,))
    return fragments
