"""The state that the files of one model-parallel rank describe: every parameter of that rank with its slots.

What a name in `module` is: a buffer if `buffer_names` has it; an alias if `shared_params` does; trained if a
param group has it; frozen if it is listed as that or may be one; else what a module puts next to its parameters, which
is kept as a buffer is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, listed
from zckpt.formats.deepspeed.aliases import notes
from zckpt.formats.deepspeed.auto_ep import auto_experts, auto_layers, check_shapes, from_files
from zckpt.formats.deepspeed.auto_ep_shards import cut_experts, has_own_groups, router_names
from zckpt.formats.deepspeed.expert_ranks import Spread, sharing
from zckpt.formats.deepspeed.experts import expert_number, experts_per_rank, global_name, is_expert
from zckpt.formats.deepspeed.flat import Case, FlatGroup, cut_group, element_slots, flat_cases, partition_numel
from zckpt.formats.deepspeed.groups import (
    MOMENTUM,
    complete_aliases,
    flat_groups,
    is_whole,
    keeps_whole_matrices,
    optimizer_order,
    tied_names,
    whole_slots,
)
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.per_parameter import FrozenPadding, ShardPadding, by_group, cut_parameters, frozen_weight
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.deepspeed.values import (
    Apart,
    copies_of,
    group_values,
    hyperparameter,
    own_hyperparameters,
    own_keys,
    quantised_keys,
    rank_values,
    weight_in,
)
from zckpt.formats.deepspeed.zenflow import are_transposed, flipped, transposed, transposed_slot, uses_zenflow
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import MASTER, WEIGHT, Parameter, ParamGroup, Shape, Slot
from zckpt.state.partition import flat_starts
from zckpt.state.views import concat
from zckpt.torchfile import Tensor

Trained = dict[str, tuple[Shape, dict[str, Slot], int]]
"""Shape, slots and group of each trained parameter."""


def read_rank(
    mp_rank: int,
    models: Sequence[ModelShard],
    members: Sequence[OptimizerShard],
    weights: Mapping[str, tuple[str, Tensor]],
    shared: Mapping[str, str] | None = None,
    *,
    spread: Spread[OptimizerShard] | None = None,
    apart: Apart = Apart(),  # noqa: B008  # frozen
) -> RankState:
    """Put together what the files of one model-parallel rank say.

    Parameters
    ----------
    models : sequence of ModelShard
        One; for ZeRO-3 one for each data-parallel rank, in order.
    members : sequence of OptimizerShard
        One for each data-parallel rank, in order; empty for stage 0.
    weights : mapping of str to (path, Tensor)
        Weights that lie outside the model file: of experts, of pipeline layers.
    shared : mapping of str to str, optional
        Tied parameters, alias to owner, that another model-parallel rank's file lists: DeepSpeed lets the first
        rank of all list them, and the others none.
    spread : Spread, optional
        The ranks over which experts are spread; by default `members`.
    apart : Apart, optional
        What other model-parallel ranks have otherwise.

    Raises
    ------
    LayoutError
        The files contradict each other.
    """
    state = RankState(mp_rank)
    trained: Trained = {}
    if members and members[0].stage == 3:
        _read_parameterwise(state, models, members, trained, apart)
    elif members:
        _read_flat(state, models[0], members, weights, trained, spread or Spread(members), apart)
    state.warnings += notes(members, {value.key for value in state.per_rank})
    parameterwise = bool(members) and members[0].stage == 3
    state.transposed = state.transposed or (parameterwise and uses_zenflow(models[0].config))
    if state.transposed:
        for name, (shape, slots, group) in trained.items():
            its = transposed(Parameter(name, shape, "", slots))
            trained[name] = its.shape, its.slots, group
    aliases = tied_names(models, trained, shared or {}, parameterwise=parameterwise)
    aliases = {**router_names(models[0], parameterwise=parameterwise), **aliases}
    weights, whole = from_files(weights, () if parameterwise else auto_layers(models[0]), trained)
    _place_parameters(state, models, trained, weights, whole, aliases, parameterwise=parameterwise)
    return state


def _read_flat(
    state: RankState,
    model: ModelShard,
    members: Sequence[OptimizerShard],
    weights: Mapping[str, tuple[str, Tensor]],
    trained: Trained,
    spread: Spread[OptimizerShard],
    apart_from_others: Apart,
) -> None:
    known = {name: tensor.shape for name, tensor in model.module.items()}
    known |= {name: tensor.shape for name, (_, tensor) in weights.items()}
    groups = flat_groups(model, members, known, spread)
    if uses_zenflow(model.config):
        held = model.module | {name: tensor for name, (_, tensor) in weights.items()}
        state.transposed = are_transposed(held, [group.shapes for group in groups])
    if state.transposed:
        groups = [replace(group, shapes=flipped(group.shapes)) for group in groups]
    by_group = [sharing(members, spread, group.index, list(group.shapes)) for group in groups]
    shared = [(group, ranks) for group, sets in zip(groups, by_group, strict=True) for ranks in sets]
    paths = {member.path for member in members}
    apart = [_apart(group, ranks, model) for group, ranks in shared]
    layers = auto_experts(model)
    keys = element_slots(
        case for (group, ranks), one in zip(shared, apart, strict=True) for case in flat_cases(group, ranks, one)
    )
    own = own_keys(members) | apart_from_others.state
    per_rank = experts_per_rank(name for group in groups for name in group.shapes)
    cuts = iter(zip(shared, apart, strict=True))
    read: dict[int, set[str]] = {}
    for group, sets in zip(groups, by_group, strict=True):
        count, ep = members[0].partition_count[group.index], len(sets)
        check_shapes(group.shapes, layers, ep)
        state.degrees.append(ep if any(map(is_expert, group.shapes)) else None)
        state.expert_parallel = max(state.expert_parallel, ep)
        names: list[str] = []
        rows: dict[str, list[dict[str, Slot]]] = {}
        for expert_rank in range(ep):
            (_, ranks), aside = next(cuts)
            per_element = keys[group.index].difference(*aside)
            slots, padding, padding_spans = cut_group(group, ranks, per_element)
            read[group.index] = per_element
            if any(MOMENTUM in one for one in aside):
                read[group.index] = per_element | {MOMENTUM}
                whole, copies = whole_slots(group.shapes, ranks, group.index, *_cut(group, ranks))
                state.duplicates += copies if members[0] in spread.members[:1] else []
                for name, slot in whole.items():
                    slots[name][MOMENTUM] = slot
            # Of experts that are spread over all tensor-parallel ranks, each says what its own files have.
            state.padding += [one for member, one in zip(ranks, padding, strict=True) if member.path in paths]
            state.padding_spans.append([one for one in padding_spans if one.path in paths])
            renamed = {name: global_name(name, expert_rank, per_rank) if ep > 1 else name for name in group.shapes}
            for name, shape in group.shapes.items():
                if name in layers:
                    rows.setdefault(name, []).append(slots[name])
                else:
                    _claim(trained, renamed[name], shape, slots[name], group.index)
            names += [renamed[name] for name in optimizer_order(list(group.shapes), model, count)]
        for name, parts in rows.items():
            whole = {
                key: concat([one[key] for one in parts], 0) for key in parts[0] if all(key in one for one in parts)
            }
            _claim(trained, name, whole[MASTER].shape, whole, group.index)
        names = list(dict.fromkeys(names))
        _add_group(state, members, group.index, [group.index], names, own, apart_from_others.groups)
    state.per_rank += rank_values(members, {index: index for index in read}, own, read)


def _cut(group: FlatGroup, ranks: Sequence[OptimizerShard]) -> tuple[list[int], int]:
    """Return where the parameters of a group start in its flat buffer, and the size of a partition, in elements."""
    starts = flat_starts(group.numels, group.pads)
    return starts, partition_numel(group, ranks, starts[-1])


def _apart(group: FlatGroup, ranks: Sequence[OptimizerShard], model: ModelShard) -> list[frozenset[str]]:
    """Return for each rank the keys of tensors that are no partitions, whatever their size."""
    first = ranks[0]
    hyperparameters = first.groups[group.index] if group.index < len(first.groups) else {}
    whole: frozenset[str] = frozenset()
    if keeps_whole_matrices(hyperparameters, model.config, partition=first.bf16_optimizer):
        tensors = [member.tensors[group.index].get(MOMENTUM) for member in ranks]
        if is_whole(tensors, group.numels, *_cut(group, ranks)):
            whole = frozenset({MOMENTUM})
    return [quantised_keys(member.tensors[group.index]) | whole for member in ranks]


def _claim(trained: Trained, name: str, shape: Shape, slots: dict[str, Slot], group: int) -> None:
    if name in trained:
        raise LayoutError(f"{name} is in two param groups", found=f"groups {trained[name][2]} and {group}")
    trained[name] = (shape, slots, group)


def _read_parameterwise(
    state: RankState,
    models: Sequence[ModelShard],
    members: Sequence[OptimizerShard],
    trained: Trained,
    apart_from_others: Apart,
) -> None:
    model = models[0]
    if model.param_shapes is None:
        raise LayoutError("no param_shapes", advice="the order of the shards is not known")
    shapes: Shapes = {}
    for one in model.param_shapes:
        shapes.update(one)
    if len(shapes) != sum(map(len, model.param_shapes)):
        raise LayoutError("a parameter is in two param groups")
    sizes = [(member, index, master.numel) for member in members for index, master in enumerate(member.masters)]
    keys = element_slots(
        Case(member, index, numel, numel, quantised_keys(member.tensors[index])) for member, index, numel in sizes
    )
    own = own_keys(members) | apart_from_others.state
    read = {sub: keys[sub] - quantised_keys(tensors) for sub, tensors in enumerate(members[0].tensors)}
    if has_own_groups(members):
        cut = cut_experts(models, members, read)
        shapes, slots, sub_groups, state.padding = cut.shapes, cut.slots, cut.sub_groups, cut.padding
        state.padding_spans, state.expert_parallel = [*cut.spans, FrozenPadding(models)], cut.degree
    else:
        slots, sub_groups, state.padding = cut_parameters(shapes, members, read)
        state.padding_spans = [ShardPadding(shapes, members, read), FrozenPadding(models)]
    groups = members[0].groups
    subs = [[int(n) for n in g.get("params", [i])] for i, g in enumerate(groups)]  # type: ignore[attr-defined]
    group_of = {sub: index for index, one in enumerate(subs) for sub in one}
    absent = sorted(sub for sub in group_of if not 0 <= sub < len(members[0].masters))
    if absent:
        raise LayoutError(
            "a param group names a sub-group that is not there",
            path=members[0].path,
            expected=f"below {len(members[0].masters)}",
            found=absent[0],
        )
    names: list[list[str]] = [[] for _ in groups]
    for name, shape in shapes.items():
        if sub_groups[name] not in group_of:
            raise LayoutError(f"sub-group {sub_groups[name]} is in no param group", path=members[0].path)
        index = group_of[sub_groups[name]]
        names[index].append(name)
        trained[name] = (shape, slots[name], index)
    for index, its_subs in enumerate(subs):
        _add_group(state, members, index, its_subs, names[index], own, apart_from_others.groups)
    state.per_rank += rank_values(members, group_of, own, {sub: read[sub] for sub in group_of})
    state.padding = by_group(state.padding, group_of)


def _add_group(
    state: RankState,
    members: Sequence[OptimizerShard],
    index: int,
    partitions: Sequence[int],
    names: list[str],
    own: Collection[str],
    apart_by_group: Sequence[Collection[str]],
) -> None:
    """Add a group with its hyperparameters and the state that is one value for all its elements."""
    groups, hyperparameters = members[0].groups, {}
    if index < len(groups):
        apart = own_hyperparameters(members, index).union(*apart_by_group[index : index + 1])
        kept = {k: v for k, v in groups[index].items() if k != "params" and k not in apart}
        hyperparameters = {k: hyperparameter(members[0], v) for k, v in kept.items()}
        state.per_rank += group_values(members, index, min(partitions, default=index), apart)
    values: dict[str, object] = {}
    for member in members:
        for partition in partitions:
            values = {**{k: v for k, v in member.scalars[partition].items() if k not in own}, **values}
    state.groups.append(ParamGroup(hyperparameters, names, values))


def _place_parameters(
    state: RankState,
    models: Sequence[ModelShard],
    trained: Trained,
    weights: Mapping[str, tuple[str, Tensor]],
    whole: Mapping[str, Slot],
    aliases: Mapping[str, str],
    *,
    parameterwise: bool,
) -> None:
    """Sort the names of the module, of other weight files and of the groups into parameters and buffers."""
    model = models[0]
    path = model.path
    lost = []
    known = {*model.module, *trained, *weights}
    for name, tensor in model.module.items():
        if name in model.buffer_names:
            state.buffers[name] = _buffer(name, tensor, path)
        elif name in aliases and aliases[name] in known:
            state.parameters[name] = Parameter(name, (), tensor.dtype, tied_to=aliases[name])
        elif name in trained:
            state.parameters[name] = _trained(name, trained, tensor, path, parameterwise=parameterwise)
        elif _is_other_tensor(name, tensor, model, parameterwise=parameterwise, has_groups=bool(trained)):
            state.buffers[name] = _buffer(name, tensor, path)
        elif (slot := _frozen(name, tensor, models, parameterwise=parameterwise)) is not None:
            slot = transposed_slot(slot) if parameterwise and state.transposed else slot
            state.parameters[name] = Parameter(name, slot.shape, slot.dtype, {WEIGHT: slot}, frozen=True)
        else:
            lost.append(name)
    _place_outside(state, trained, model, weights)
    for name, slot in whole.items():
        shape, slots, group = trained.get(name, (slot.shape, {}, None))
        if shape != slot.shape:
            raise LayoutError(f"{name} has two shapes", expected=f"{shape} as in param_shapes", found=slot.shape)
        slots = {WEIGHT: slot, **slots}
        state.parameters[name] = Parameter(name, shape, slot.dtype, slots, group, frozen=group is None)
    _place_without_weight(state, trained, model)
    complete_aliases(state.parameters)
    _note_duplicates(state, models, parameterwise=parameterwise)
    if lost:
        state.warnings.append(f"{path}: no file holds the values of {listed(lost)}; left out")


def _place_outside(
    state: RankState, trained: Trained, model: ModelShard, weights: Mapping[str, tuple[str, Tensor]]
) -> None:
    """Add the parameters and buffers whose weights lie outside the model file."""
    for name, (where, tensor) in weights.items():
        if name in model.buffer_names:
            state.buffers[name] = _buffer(name, tensor, where)
        elif name in state.parameters:
            continue
        elif name in trained:
            state.parameters[name] = _trained(name, trained, tensor, where, parameterwise=False)
        else:
            weight = weight_in(tensor, where)
            state.parameters[name] = Parameter(name, tensor.shape, tensor.dtype, weight, frozen=True)


def _place_without_weight(state: RankState, trained: Trained, model: ModelShard) -> None:
    """Add trained parameters that no file has a weight of; an expert has a file of its own, so that is an error."""
    for name, (shape, slots, group) in trained.items():
        if name in state.parameters:
            continue
        if is_expert(name):
            number = expert_number(name)
            raise ShardError(
                f"no file holds the weights of expert {number} ({name})",
                expected=f"a file layer_*_expert_{number}_mp_rank_*_model_states.pt next to it",
                code=MISSING_FILE,
                parameters=[name],
            )
        state.parameters[name] = Parameter(name, shape, model.dtype, slots, group)


def _note_duplicates(state: RankState, models: Sequence[ModelShard], *, parameterwise: bool) -> None:
    """Note the copies that the model files hold besides what is read: of tied weights, and each rank's buffers."""
    path = models[0].path
    for name, parameter in state.parameters.items():
        tensor = models[0].module.get(name)
        if parameter.tied_to is None or parameterwise or tensor is None:
            continue
        owner, copy = state.parameters[parameter.tied_to], weight_in(tensor, path)
        state.duplicates += copies_of(name, copy, owner.slots, kind="tied", of=owner.name)
    for name, tensor in (models[0].frozen_fragments or {}).items() if not parameterwise else ():
        if name in state.parameters:
            state.duplicates += copies_of(name, weight_in(tensor, path), state.parameters[name].slots)
    for model in models[1:]:
        for name, buffer in state.buffers.items():
            if name in model.module:
                copy = weight_in(model.module[name], model.path)
                state.duplicates += copies_of(name, copy, buffer.slots, model.shard.dp_rank, kind="buffer")


def _buffer(name: str, tensor: Tensor, path: str) -> Parameter:
    return Parameter(name, tensor.shape, tensor.dtype, weight_in(tensor, path))


def _trained(name: str, trained: Trained, tensor: Tensor, path: str, *, parameterwise: bool) -> Parameter:
    """Return a trained parameter with its weight, which under ZeRO-3 is in no file."""
    shape, slots, group = trained[name]
    if parameterwise:
        return Parameter(name, shape, tensor.dtype, slots, group)
    if tensor.shape != shape:
        raise LayoutError(
            f"{name} has two shapes", path=path, expected=f"{shape} as in param_shapes", found=tensor.shape
        )
    return Parameter(name, shape, tensor.dtype, {**weight_in(tensor, path), **slots}, group)


def _frozen(name: str, tensor: Tensor, models: Sequence[ModelShard], *, parameterwise: bool) -> Slot | None:
    shapes = models[0].frozen_shapes or {}
    if not parameterwise:
        return slot_of(WEIGHT, tensor, models[0].path)
    if name not in shapes:
        return None
    if math.prod(shapes[name]) == 0:
        return Slot(WEIGHT, tensor.dtype, shapes[name], ())
    return frozen_weight(name, shapes[name], models)


def _is_other_tensor(name: str, tensor: Tensor, model: ModelShard, *, parameterwise: bool, has_groups: bool) -> bool:
    """Tell whether a module has put a tensor into its state dict that is neither a parameter nor a buffer.

    A quantised weight has its scales and maps there (bitsandbytes: `weight.absmax`, `weight.quant_map`, ...), and
    without them its codes mean nothing. Every rank has them whole. They are known by what they are not: a trained
    parameter is in a group and a frozen one is listed. ZeRO-1 has no such list, and a file without its optimizer no
    groups; there, what lies below a tensor's name is no parameter of a module.
    """
    if name in (model.frozen_shapes or {}):
        return False
    if parameterwise:
        return tensor.numel > 0  # a parameter's own tensor is empty
    if model.frozen_shapes is not None and has_groups:
        return True
    words = name.split(".")
    return words[-1] == "_extra_state" or any(".".join(words[:end]) in model.module for end in range(1, len(words)))
