"""The state that the files of one model-parallel rank describe: every parameter of that rank with its slots.

What a name in `module` is: a buffer if `buffer_names` has it; an alias if `shared_params` does; trained if a
param group has it; frozen otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, UnsupportedError
from zckpt.formats.deepspeed.experts import (
    expert_number,
    expert_parallel_size,
    experts_per_rank,
    global_name,
    is_expert,
)
from zckpt.formats.deepspeed.flat import Case, cut_group, element_slots, flat_cases
from zckpt.formats.deepspeed.groups import flat_groups, optimizer_order
from zckpt.formats.deepspeed.per_parameter import FragmentPadding, ShardPadding, cut_parameters, frozen_weight
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.deepspeed.tied import tied_names
from zckpt.formats.tensors import slot_of
from zckpt.state import WEIGHT, Duplicate, Padding, PaddingRun, Parameter, ParamGroup, Slot
from zckpt.torchfile import Tensor

Trained = dict[str, tuple[tuple[int, ...], dict[str, Slot], int]]
"""Shape, slots and group of each trained parameter."""


@dataclass(slots=True)
class RankState:
    """Parameters, buffers and groups of one model-parallel rank; shapes are those of this rank."""

    mp_rank: int
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Parameter] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    padding_runs: list[Iterable[PaddingRun]] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    expert_parallel: int = 1


def read_rank(
    mp_rank: int,
    models: Sequence[ModelShard],
    members: Sequence[OptimizerShard],
    weights: Mapping[str, tuple[str, Tensor]],
    shared: Mapping[str, str] | None = None,
) -> RankState:
    """Put together what the files of one model-parallel rank say.

    Parameters
    ----------
    mp_rank : int
    models : sequence of ModelShard
        One; for ZeRO-3 one for each data-parallel rank, in order.
    members : sequence of OptimizerShard
        One for each data-parallel rank, in order; empty for stage 0.
    weights : mapping of str to (path, Tensor)
        Weights that lie outside the model file: of experts, of pipeline layers.
    shared : mapping of str to str, optional
        Tied parameters, alias to owner, that another model-parallel rank's file lists: DeepSpeed lets the first
        rank of all list them, and the others none.

    Raises
    ------
    LayoutError
        The files contradict each other.
    """
    state = RankState(mp_rank)
    trained: Trained = {}
    if members and members[0].stage == 3:
        _read_parameterwise(state, models, members, trained)
    elif members:
        _read_flat(state, models[0], members, weights, trained)
    parameterwise = bool(members) and members[0].stage == 3
    aliases = tied_names(models, trained, shared or {}, parameterwise=parameterwise)
    _place_parameters(state, models, trained, weights, aliases, parameterwise=parameterwise)
    return state


def _read_flat(
    state: RankState,
    model: ModelShard,
    members: Sequence[OptimizerShard],
    weights: Mapping[str, tuple[str, Tensor]],
    trained: Trained,
) -> None:
    dp = len(members)
    known = {name: tensor.shape for name, tensor in model.module.items()}
    known |= {name: tensor.shape for name, (_, tensor) in weights.items()}
    groups = flat_groups(model, members, known)
    degrees = [expert_parallel_size(dp, members[0].partition_count[g.index], g.shapes) for g in groups]
    if any(1 < ep < dp for ep in degrees) and model.config.get("use_data_before_expert_parallelism") is True:
        raise UnsupportedError("experts whose ranks are numbered data-parallel first", path=model.shard.path)
    shared = [members[first::ep] for ep in degrees for first in range(ep)]
    owners = [group for group, ep in zip(groups, degrees, strict=True) for _ in range(ep)]
    keys = element_slots(case for g, ranks in zip(owners, shared, strict=True) for case in flat_cases(g, ranks))
    per_rank = experts_per_rank(name for group in groups for name in group.shapes)
    for group, ep in zip(groups, degrees, strict=True):
        count = members[0].partition_count[group.index]
        state.expert_parallel = max(state.expert_parallel, ep)
        names: list[str] = []
        for expert_rank in range(ep):
            slots, padding, runs = cut_group(group, members[expert_rank::ep], keys)
            state.padding += padding
            state.padding_runs.append(runs)
            renamed = {name: global_name(name, expert_rank, per_rank) if ep > 1 else name for name in group.shapes}
            for name, shape in group.shapes.items():
                _claim(trained, renamed[name], shape, slots[name], group.index, model.shard.path)
            names += [renamed[name] for name in optimizer_order(list(group.shapes), model, count)]
        state.groups.append(_param_group(members, group.index, [group.index], names, keys))


def _claim(trained: Trained, name: str, shape: tuple[int, ...], slots: dict[str, Slot], group: int, path: str) -> None:
    if name in trained:
        raise LayoutError(f"{name} is in two param groups", path=path, found=f"groups {trained[name][2]} and {group}")
    trained[name] = (shape, slots, group)


def _read_parameterwise(
    state: RankState, models: Sequence[ModelShard], members: Sequence[OptimizerShard], trained: Trained
) -> None:
    model = models[0]
    if model.param_shapes is None:
        raise LayoutError("no param_shapes", path=model.shard.path, advice="the order of the shards cannot be told")
    shapes: Shapes = {}
    for one in model.param_shapes:
        shapes.update(one)
    if len(shapes) != sum(map(len, model.param_shapes)):
        raise LayoutError("a parameter is in two param groups", path=model.shard.path)
    sizes = [(member, index, master.numel) for member in members for index, master in enumerate(member.masters)]
    keys = element_slots(Case(member, index, numel, numel) for member, index, numel in sizes)
    slots, sub_groups, state.padding = cut_parameters(shapes, members, keys)
    state.padding_runs = [ShardPadding(shapes, members, frozenset(keys)), FragmentPadding(models)]
    groups = members[0].groups
    subs = [[int(n) for n in g.get("params", [i])] for i, g in enumerate(groups)]  # type: ignore[attr-defined]
    group_of = {sub: index for index, one in enumerate(subs) for sub in one}
    names: list[list[str]] = [[] for _ in groups]
    for name, shape in shapes.items():
        if sub_groups[name] not in group_of:
            raise LayoutError(f"sub-group {sub_groups[name]} is in no param group", path=members[0].path)
        index = group_of[sub_groups[name]]
        names[index].append(name)
        trained[name] = (shape, slots[name], index)
    for index, parts in enumerate(subs):
        state.groups.append(_param_group(members, index, parts, names[index], keys))
    state.padding = _by_group(state.padding, group_of)


def _by_group(paddings: Sequence[Padding], group_of: Mapping[int, int]) -> list[Padding]:
    """Add up the padding of sub-groups by param group."""
    total: dict[tuple[int, int], tuple[int, int]] = {}
    for p in paddings:
        numel, nbytes = total.get((p.rank, group_of[p.group]), (0, 0))
        total[p.rank, group_of[p.group]] = (numel + p.numel, nbytes + p.nbytes)
    return [Padding(rank, group, *counts) for (rank, group), counts in total.items()]


def _param_group(
    members: Sequence[OptimizerShard], index: int, parts: Sequence[int], names: list[str], keys: set[str]
) -> ParamGroup:
    """Return a group with its hyperparameters and the state that is one value (or one tensor) for all its elements."""
    groups = members[0].groups
    hyperparameters = {k: v for k, v in groups[index].items() if k != "params"} if index < len(groups) else {}
    values: dict[str, object] = {}
    for member in members:
        for part in parts:
            values = {**member.scalars[part], **values}
            values |= {k: v for k, v in member.tensors[part].items() if k not in keys and k not in values}
    return ParamGroup(hyperparameters, names, values)


def _place_parameters(
    state: RankState,
    models: Sequence[ModelShard],
    trained: Trained,
    weights: Mapping[str, tuple[str, Tensor]],
    aliases: Mapping[str, str],
    *,
    parameterwise: bool,
) -> None:
    """Sort the names of the module, of other weight files and of the groups into parameters and buffers."""
    model = models[0]
    path = model.shard.path
    lost = []
    for name, tensor in model.module.items():
        if name in model.buffer_names:
            slots = {WEIGHT: slot_of(WEIGHT, tensor, path)}
            state.buffers[name] = Parameter(name, tensor.shape, tensor.dtype, slots)
        elif name in aliases:
            state.parameters[name] = Parameter(name, (), tensor.dtype, tied_to=aliases[name])
        elif name in trained:
            state.parameters[name] = _trained(name, trained, tensor, path, parameterwise=parameterwise)
        elif (slot := _frozen(name, tensor, models, parameterwise=parameterwise)) is not None:
            state.parameters[name] = Parameter(name, slot.shape, slot.dtype, {WEIGHT: slot}, frozen=True)
        else:
            lost.append(name)
    for name, (where, tensor) in weights.items():
        if name in model.buffer_names:
            slots = {WEIGHT: slot_of(WEIGHT, tensor, where)}
            state.buffers[name] = Parameter(name, tensor.shape, tensor.dtype, slots)
        elif name not in state.parameters:
            state.parameters[name] = _trained_outside(name, trained, tensor, where)
    _place_without_weight(state, trained, model)
    _complete_aliases(state, path)
    _note_duplicates(state, models, parameterwise=parameterwise)
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        state.warnings.append(f"{path}: no file holds the values of {shown}; left out")


def _place_without_weight(state: RankState, trained: Trained, model: ModelShard) -> None:
    """Add trained parameters that no file has a weight of; an expert has a file of its own, so that is an error."""
    for name, (shape, slots, group) in trained.items():
        if name in state.parameters:
            continue
        if is_expert(name):
            number = expert_number(name)
            raise ShardError(
                f"no file holds the weights of expert {number} ({name})",
                path=model.shard.path,
                expected=f"a file layer_*_expert_{number}_mp_rank_*_model_states.pt beside it",
                code=MISSING_FILE,
                parameters=[name],
            )
        state.parameters[name] = Parameter(name, shape, _model_dtype(model), slots, group)


def _complete_aliases(state: RankState, path: str) -> None:
    for name, parameter in state.parameters.items():
        if parameter.tied_to is None:
            continue
        owner = state.parameters.get(parameter.tied_to)
        if owner is None or owner.tied_to is not None:
            raise LayoutError(f"{name} is tied to a parameter that is not there", path=path, found=parameter.tied_to)
        parameter.shape, parameter.dtype = owner.shape, owner.dtype


def _note_duplicates(state: RankState, models: Sequence[ModelShard], *, parameterwise: bool) -> None:
    """Note the copies that the model files hold beside what is read: of tied weights, and each rank's buffers."""
    path = models[0].shard.path
    for name, parameter in state.parameters.items():
        tensor = models[0].module.get(name)
        if parameter.tied_to is None or parameterwise or tensor is None:
            continue
        owner = state.parameters[parameter.tied_to].slots.get(WEIGHT)
        copy = slot_of(WEIGHT, tensor, path)
        if owner is not None and owner.spans != copy.spans and owner.shape == copy.shape:
            state.duplicates.append(Duplicate("tied", name, parameter.tied_to, copy, owner))
    for name, tensor in (models[0].frozen_fragments or {}).items() if not parameterwise else ():
        weight = state.parameters[name].slots.get(WEIGHT) if name in state.parameters else None
        copy = slot_of(WEIGHT, tensor, path)
        if weight is not None and weight.spans != copy.spans and weight.shape == copy.shape:
            state.duplicates.append(Duplicate("parameter", name, name, copy, weight))
    for model in models[1:]:
        for name in state.buffers:
            tensor, first = model.module.get(name), state.buffers[name].slots[WEIGHT]
            if tensor is not None and tensor.shape == first.shape:
                copy = slot_of(WEIGHT, tensor, model.shard.path)
                state.duplicates.append(Duplicate("buffer", name, name, copy, first, model.shard.dp_rank))


def _trained(name: str, trained: Trained, tensor: Tensor, path: str, *, parameterwise: bool) -> Parameter:
    shape, slots, group = trained[name]
    if parameterwise:
        return Parameter(name, shape, tensor.dtype, slots, group)
    if tensor.shape != shape:
        raise LayoutError(
            f"{name} has two shapes",
            path=path,
            expected=f"{shape} as in param_shapes",
            found=f"{tensor.shape} in module",
        )
    return Parameter(name, shape, tensor.dtype, {WEIGHT: slot_of(WEIGHT, tensor, path), **slots}, group)


def _trained_outside(name: str, trained: Trained, tensor: Tensor, path: str) -> Parameter:
    weight = {WEIGHT: slot_of(WEIGHT, tensor, path)}
    if name not in trained:
        return Parameter(name, tensor.shape, tensor.dtype, weight, frozen=True)
    shape, slots, group = trained[name]
    if tensor.shape != shape:
        raise LayoutError(
            f"{name} has two shapes", path=path, expected=f"{shape} as in param_shapes", found=tensor.shape
        )
    return Parameter(name, shape, tensor.dtype, {**weight, **slots}, group)


def _frozen(name: str, tensor: Tensor, models: Sequence[ModelShard], *, parameterwise: bool) -> Slot | None:
    shapes = models[0].frozen_shapes or {}
    if not parameterwise:
        return slot_of(WEIGHT, tensor, models[0].shard.path)
    if name not in shapes:
        return None
    if math.prod(shapes[name]) == 0:
        return Slot(WEIGHT, tensor.dtype, shapes[name], ())
    return frozen_weight(name, shapes[name], models)


def _model_dtype(model: ModelShard) -> str:
    """Return the dtype of a model as its configuration says."""
    for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = model.config.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype
    return "float32"
