"""AutoEP under ZeRO-3, to be written: what each expert rank has of which param group, and who shares a sub-group.

DeepSpeed cuts each param group by the ranks that share its parameters: those that all share and experts are in
sub-groups of their own, in the order in which the group first has one of a kind. Experts are cut over the ranks that
have the same, and listed in `ds_zero_partition_groups`, without which it does not load them.

Source: DeepSpeed 0.19.8, `DeepSpeedZeroOptimizer_Stage3._get_trainable_parameter_groups`,
`_zero3_partition_group_metadata`, `_rigid_load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed.auto_ep import AutoLayer, auto_layers, expert_names, fused, inner_name
from zckpt.formats.deepspeed.expert_ranks import is_data_first
from zckpt.formats.deepspeed.experts import experts_per_rank
from zckpt.formats.deepspeed.foreign_experts import check_split, of_experts
from zckpt.formats.deepspeed.origin import RankState
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.deepspeed.tensor_parallel import moved
from zckpt.formats.deepspeed.tp_shares import Share
from zckpt.state import Parameter, ParamGroup, Slot, Span

if TYPE_CHECKING:
    from zckpt.formats.deepspeed.options import RecutOptions
    from zckpt.formats.deepspeed.origin import Origin

GROUP_NUMEL = 178_956_971
"""Elements of one rank's experts after which DeepSpeed may begin another param group, see `target_groups`."""


def check_in_order(origin: Origin, options: RecutOptions) -> None:
    """Raise UnsupportedError for experts of AutoEP under ZeRO-1 and 2 that are to be in another order, or aligned."""
    if (options.round_robin or options.parameter_alignment) and auto_layers(origin.model):
        raise UnsupportedError(
            "AutoEP's experts are written in order only: here each is a parameter, and what DeepSpeed would order or "
            "align is one tensor for all of a rank's",
            expected="no round_robin, no parameter_alignment",
        )


def check_sharded(
    origin: Origin, parameters: Mapping[str, Parameter], stage: int, world_size: int, degree: int | None
) -> bool:
    """Tell whether a target of ZeRO-3 has experts of AutoEP.

    Parameters
    ----------
    parameters : mapping of str to Parameter
        Of the checkpoint.
    degree : int or None
        Ranks over which experts are to be spread; None: as they are.

    Raises
    ------
    UsageError
        Experts cannot be spread over so many ranks.
    UnsupportedError
        Experts are frozen.
    """
    layers = auto_layers(origin.model)
    if not layers or stage != 3:
        return False
    frozen = [n for layer in layers for n in expert_names(layer) if n in parameters and parameters[n].frozen]
    if frozen:
        raise UnsupportedError(
            "frozen experts of AutoEP under ZeRO-3: what is frozen is cut over all ranks, and each has other experts",
            expected="stage 1 or 2", found=listed(frozen, most=4),
        )  # fmt: skip
    for layer in layers:
        wanted = layer.degree if degree is None else degree
        if layer.experts % wanted or world_size % wanted:
            raise UsageError(
                f"{layer.experts} experts of {layer.prefix} cannot be spread over {wanted} of {world_size} ranks",
                expected="an expert-parallel size that divides both", found=wanted,
                advice="give another --expert-parallel-size",
            )  # fmt: skip
    return True


def shard_groups(
    target: Target, groups: Sequence[ParamGroup], parameters: Mapping[str, Parameter], options: RecutOptions
) -> Iterator[TargetGroup]:
    """Yield what is cut over the same ranks of each param group, in the order of its sub-groups.

    Of a param group with experts and other parameters there are two, of the same index.

    Raises
    ------
    UnsupportedError
        How DeepSpeed would group experts at another degree is not known.
    """
    origin, degree = target.origin, options.expert_parallel_size
    data_first = is_data_first(origin.model)
    layers = {name: layer for layer in auto_layers(origin.model) for name in expert_names(layer)}
    for index, group in enumerate(groups):
        values = group
        kinds: dict[bool, list[str]] = {}
        for name in group.parameters:
            kinds.setdefault(name in layers, []).append(name)
        own = kinds.get(True, [])
        old = layers[own[0]].degree if own else 1
        wanted = old if degree is None else degree
        if own and wanted != old:
            _check_size(own, parameters, min(wanted, old))
            if group.hyperparameters.get("name") == f"ep_size_{old}":
                values = replace(group, hyperparameters={**group.hyperparameters, "name": f"ep_size_{wanted}"})
        for sparse, names in kinds.items():
            its = [parameters[name] for name in names]
            lists = [[local(p, layers[p.name], wanted, rank) for p in its] for rank in range(wanted if sparse else 0)]
            lists = lists or [its]
            pads, shared_by = [0] * len(its), target.world_size // len(lists)
            yield TargetGroup(index, values, lists, pads, shared_by, data_first=data_first)


def _check_size(names: Sequence[str], parameters: Mapping[str, Parameter], degree: int) -> None:
    """Raise where a rank's experts are so large that they may make several groups: with zero.Init they do not."""
    numel = sum(parameters[name].numel for name in names) // degree
    if numel > GROUP_NUMEL:
        raise UnsupportedError(
            "so large a param group of experts may be several at another expert-parallel size: it depends on how the "
            "model was made",
            expected=f"at most {GROUP_NUMEL} elements of one rank, or --expert-parallel-size left out",
            found=numel,
            advice="`zckpt convert --to dcp` or zckpt keeps them whole",
        )


def local(parameter: Parameter, layer: AutoLayer, degree: int, rank: int) -> Parameter:
    """Return what an expert rank has of the tensor of all experts."""
    if len(parameter.shape) != 3 or parameter.shape[0] != layer.experts:
        raise LayoutError(f"{parameter.name} is not of all experts", expected=f"{layer.experts}, rows and columns",
                          found=parameter.shape)  # fmt: skip
    count = layer.experts // degree
    shape = (count, *parameter.shape[1:])
    share = [Share(rank * count, 0, count)]
    slots = {
        key: Slot(key, slot.dtype, (count, *slot.shape[1:]), moved(slot.spans, 0, share)) if slot.shape else slot
        for key, slot in parameter.slots.items()
    }
    return replace(parameter, shape=shape, slots=slots)


def partition_groups(target: Target, groups: Sequence[TargetGroup], rank: int) -> list[object]:
    """Return `ds_zero_partition_groups` as a rank writes it."""
    found: list[object] = []
    layers = {name for layer in auto_layers(target.origin.model) for name in expert_names(layer)}
    for group in groups:
        sparse = any(p.name in layers for p in group.experts[0])
        degree = len(group.experts)
        expert_rank = group.placement.expert_rank(rank, degree)
        for _ in target.sub_groups(group):
            found.append({
                "sub_group": len(found),
                "partition_count": group.shared_by,
                "partition_rank": group.position(rank),
                "partition_ranks": [group.placement.rank(expert_rank, p, degree) for p in range(group.shared_by)],
                "families": ["autoep_expert" if sparse else "replicated"],
                "group_names": [f"ep_size_{degree}" if sparse else "replicated"],
            })  # fmt: skip
    return found


def restated(state: RankState, origin: Origin, stage: int) -> RankState:
    """Return a state with AutoEP's experts as a stage has them: under ZeRO-3 one tensor for all, else one by one."""
    layers = auto_layers(origin.model)
    if not layers or (stage == 3) == (origin.members[0].stage == 3) or not origin.ranks:
        return state
    if stage == 3:
        return fused(state)
    parameters, groups = expert_by_expert(state.parameters, state.groups, layers)
    totals = experts_per_rank(parameters)
    groups = [replace(group, parameters=of_experts(group, totals)) for group in groups]
    check_split(groups)
    return replace(state, parameters=parameters, groups=groups, degrees=[])


def expert_by_expert(
    known: Mapping[str, Parameter], known_groups: Sequence[ParamGroup], layers: Sequence[AutoLayer]
) -> tuple[dict[str, Parameter], list[ParamGroup]]:
    """Return parameters and groups in which each expert has parameters of its own."""
    of = {name: layer for layer in layers for name in expert_names(layer)}
    parameters: dict[str, Parameter] = {}
    for name, parameter in known.items():
        layer = of.get(name)
        if layer is None:
            parameters[name] = parameter
        else:
            parameters |= {one.name: one for one in _parts(parameter, layer)}
    groups = [
        replace(group, parameters=[
            one for name in group.parameters
            for one in ([inner_name(name, n) for n in range(of[name].experts)] if name in of else [name])
        ])
        for group in known_groups
    ]  # fmt: skip
    return parameters, groups


def _parts(parameter: Parameter, layer: AutoLayer) -> list[Parameter]:
    found = []
    for number in range(layer.experts):
        one = local(parameter, layer, layer.experts, number)
        slots = {key: _without_front(slot) if slot.shape else slot for key, slot in one.slots.items()}
        found.append(replace(one, name=inner_name(parameter.name, number), shape=one.shape[1:], slots=slots))
    return found


def _without_front(slot: Slot) -> Slot:
    """Return a slot without its first dimension, which is one."""
    return replace(slot, shape=slot.shape[1:], spans=tuple(map(_flat, slot.spans)))


def _flat(span: Span) -> Span:
    extent = replace(span.extent, offsets=span.extent.offsets[1:], sizes=span.extent.sizes[1:])
    return replace(span, extent=extent, strides=None if span.strides is None else span.strides[1:])
