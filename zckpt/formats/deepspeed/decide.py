"""From a checkpoint and the options for it to a `Target`, or to the reason why there can be none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed import aliases
from zckpt.formats.deepspeed.auto_ep import AutoLayer, auto_experts
from zckpt.formats.deepspeed.code_groups import FLOATS, HINT, codes_of
from zckpt.formats.deepspeed.expert_ranks import is_data_first
from zckpt.formats.deepspeed.experts import SLICED_EXPERTS, is_expert
from zckpt.formats.deepspeed.hyperparameters import configured, read_hyperparameters, with_hyperparameters
from zckpt.formats.deepspeed.muon import is_of_muon
from zckpt.formats.deepspeed.options import STAGES, RecutOptions
from zckpt.formats.deepspeed.origin import Origin, origin_of
from zckpt.formats.deepspeed.quantised import of_slices
from zckpt.formats.deepspeed.restage import check_stage, stage_states
from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.formats.deepspeed.target import Target, TargetGroup, TargetRank
from zckpt.formats.deepspeed.target_groups import Unit, units
from zckpt.formats.deepspeed.tensor_parallel import written_rules
from zckpt.formats.deepspeed.values import SUMS_IN_GROUPS
from zckpt.formats.deepspeed.zenflow import keeps_transposed, transposed
from zckpt.formats.remainder import origin as origin_of_state
from zckpt.formats.torch_files import torchao
from zckpt.formats.torch_files.quantised import NESTED
from zckpt.state import Checkpoint, Topology
from zckpt.state.checkpoint import how_to_drop, keys_listed
from zckpt.state.dtypes import itemsize
from zckpt.state.partition import (
    PARAMETER_ALIGNMENT_NBYTES,
    alignment_padding,
    check_world_size,
    flat_padding,
    round_robin_order,
    shard_numel,
)


def decide(checkpoint: Checkpoint, options: RecutOptions, *, zenflow: bool = True) -> Target:
    """Return the target for a checkpoint and options.

    Parameters
    ----------
    zenflow : bool
        Whether what ZenFlow has saved is to be for ZenFlow, with matrices as it stores them.

    Raises
    ------
    UsageError
        The options cannot be.
    UnsupportedError
        The source is of a kind that is not resharded.
    LayoutError
        A parameter does not divide among the target's tensor-parallel ranks.
    """
    origin = origin_of(checkpoint)
    check_world_size(options.world_size)
    if origin is not None and not origin.members and not checkpoint.param_groups:
        raise UnsupportedError(
            "holds no optimizer, whose state is what `reshard` cuts for other ranks: all have the same weights",
            found=f"DeepSpeed {checkpoint.format_version}, ZeRO stage {checkpoint.zero_stage}",
            advice="`zckpt consolidate` writes the model, with which a training on any ranks begins",
        )
    if origin is None or not origin.members:
        raise UnsupportedError("only DeepSpeed checkpoints of ZeRO-1, 2 and 3 are resharded",
                               found=f"{checkpoint.format}, ZeRO stage {checkpoint.zero_stage}",
                               advice="use `zckpt convert --to deepspeed --stage`")  # fmt: skip
    first = origin.members[0]
    stage = first.stage if options.stage is None else options.stage
    if stage not in STAGES:
        raise UsageError("unknown ZeRO stage", expected="1, 2 or 3", found=stage)
    elastic = first.elastic if options.elastic is None else options.elastic
    round_robin, aligned = options.round_robin, options.parameter_alignment
    # What a checkpoint of another format was once: the training that loads it is likely to be the same.
    was = checkpoint.details if origin.ranks or first.bf16_optimizer else origin_of_state(checkpoint)
    round_robin = was.get("round_robin_gradients") is True if round_robin is None else round_robin
    aligned = was.get("parameter_alignment") is True if aligned is None else aligned
    given = _given(checkpoint, first, options, needed=stage == 3 or not elastic)
    _refuse(checkpoint, origin, options, stage=stage, elastic=elastic)
    auto = auto_experts(origin.model)
    _refuse_degrees(checkpoint, origin, options, auto, stage=stage)
    degree = checkpoint.topology.tp if options.tensor_parallel_size is None else options.tensor_parallel_size
    states, dealt = stage_states(checkpoint, origin, degree, options)
    flat = stage != 3
    target = Target(checkpoint, origin, options.world_size, stage, elastic and flat, round_robin and flat,
                    aligned and flat, first.bf16_optimizer, written_rules(origin, states, checkpoint),
                    len(states), degree, dealt)  # fmt: skip
    target = replace(target, transposed=zenflow and keeps_transposed(checkpoint, first.stage, stage),
                     lists_frozen=not _lacks_frozen(origin, checkpoint))  # fmt: skip
    for number, files in enumerate(files for of_stage in states for files in of_stage):
        own = files.state
        rank = TargetRank(number, files.models, files.members, own.parameters, own.buffers, [], own.lanes)
        own = replace(own, groups=with_hyperparameters(own.groups, given))
        rank.groups.extend(_group(target, unit, number, own.lanes) for unit in units(own, options, stage, auto))
        target.ranks.append(rank)
    cut_rank_values(target)
    _check_aliases(target)
    return target


def _group(target: Target, unit: Unit, mp_rank: int, lanes: int) -> TargetGroup:
    """Return a param group in the order in which it is stored."""
    experts, lanes = unit.experts, lanes if unit.is_spread else 1
    shared_by = target.world_size * lanes // len(experts)
    if target.round_robin:
        order = round_robin_order(len(experts[0]), shared_by)
        experts = [[parameters[i] for i in order] for parameters in experts]
    if target.transposed:
        experts = [[transposed(p) for p in parameters] for parameters in experts]
    pads = [0] * len(experts[0])
    if target.alignment and experts[0]:
        multiple = max(PARAMETER_ALIGNMENT_NBYTES // itemsize(experts[0][0].dtype), 1)
        pads = alignment_padding([p.numel for p in experts[0]], multiple)
    lane = mp_rank % target.tp if lanes > 1 else 0
    first = is_data_first(target.origin.model)
    return TargetGroup(unit.number, unit.values, experts, pads, shared_by, lane, lanes, first)


def is_bare(first: OptimizerShard) -> bool:
    """Tell whether a checkpoint's files hold no hyperparameters."""
    return first.elastic and not first.groups


def _lacks_frozen(origin: Origin, checkpoint: Checkpoint) -> bool:
    """Tell whether frozen parameters were left out when it was saved: of tied ones the second name stays, alone.

    Notes
    -----
    Source: DeepSpeed 0.14.5 to 0.19.8, `exclude_frozen_parameters`: ZeRO-2 and 3 have None for a list then; ZeRO-1 has
    none at all.
    """
    if not origin.ranks or origin.members[0].stage != 1:
        return bool(origin.ranks) and origin.model.content.get("frozen_param_shapes", ()) is None
    return any(owner not in checkpoint.parameters for owner in (origin.model.shared or {}).values())


def _given(
    checkpoint: Checkpoint, first: OptimizerShard, options: RecutOptions, *, needed: bool
) -> list[dict[str, object]] | None:
    """Return the hyperparameters that a user gave for a checkpoint that has none."""
    if options.hyperparameters is None:
        return None
    path = Path(options.hyperparameters)
    if not is_bare(first):
        raise UsageError("the checkpoint has hyperparameters, and they are carried", found=f"--hyperparameters {path}")
    if not needed:
        raise UsageError("the elastic form holds no hyperparameters", path=path, expected="--rigid, or --stage 3")
    return read_hyperparameters(path, len(checkpoint.param_groups))


def _refuse(checkpoint: Checkpoint, origin: Origin, options: RecutOptions, *, stage: int, elastic: bool) -> None:
    if origin.members[0].bf16_optimizer and (
        stage != 1 or elastic or options.round_robin or options.parameter_alignment
    ):
        raise UnsupportedError(
            "a checkpoint of BF16_Optimizer stays one, whose loader takes no other form: stage 1, rigid, in order",
            advice="`zckpt convert --to dcp`, and from there `--to deepspeed --stage`, writes it for ZeRO's optimizers",
        )
    if is_bare(origin.members[0]) and options.hyperparameters is None and (stage == 3 or not elastic):
        needs = "ZeRO-3" if stage == 3 else "the rigid form"
        raise UnsupportedError(
            f"the elastic form holds no hyperparameters, which {needs} needs",
            found=configured(origin.model.config),
            advice="give them with --hyperparameters FILE, a JSON list with an object for each param group",
        )  # fmt: skip
    if elastic and stage != 3 and is_of_muon(checkpoint, origin.model.config):
        raise UnsupportedError(
            "the elastic form takes padding off each tensor, and Muon's momentum of whole matrices has none",
            expected="the rigid form",
        )


def _refuse_degrees(
    checkpoint: Checkpoint, origin: Origin, options: RecutOptions, auto: Mapping[str, AutoLayer], *, stage: int
) -> None:
    """Raise where experts, slices or stages of a pipeline would have to be put together in a way that is not known."""
    degrees = {"expert-parallel": options.expert_parallel_size, "tensor-parallel": options.tensor_parallel_size}
    for name, value in degrees.items():
        if value is not None and value < 1:
            raise UsageError(f"unusable {name} size", expected="at least 1", found=value)
    check_stage(checkpoint, origin, options, stage)
    if auto:
        _check_auto(checkpoint, origin, options, auto, stage)
        if stage == 3:
            return
    experts = bool(auto or origin.experts) or any(is_expert(name) for name in checkpoint.parameters)
    if not experts:
        if options.expert_parallel_size is not None:
            raise UsageError("the checkpoint has no experts, so an expert-parallel size does not apply")
        if options.sliced_experts is not None:
            raise UsageError("the checkpoint has no experts that could be sliced or spread")
        return
    _check_sliced_experts(checkpoint, origin, options)
    if origin.layers:  # DeepSpeed writes none
        raise UnsupportedError(
            "experts next to files of a pipeline's layers, which DeepSpeed writes in pipelines without experts only: "
            "which of both has a stage's weights is not known",
        )
    if stage == 3:
        raise UnsupportedError("DeepSpeed's own layer of experts does not run under ZeRO-3: it saves none of it there",
                               expected="stage 1 or 2")  # fmt: skip


def _check_auto(
    checkpoint: Checkpoint, origin: Origin, options: RecutOptions, auto: Mapping[str, AutoLayer], stage: int
) -> None:
    """Raise for what is not written of AutoEP's experts."""
    if not origin.ranks and options.tensor_parallel_size not in (None, 1):
        raise UnsupportedError(
            "experts of AutoEP from another format are not sliced: zckpt does not write what DeepSpeed keeps of both",
            expected="--tensor-parallel-size left out",
        )
    if stage != 3 and (options.round_robin or options.parameter_alignment):
        raise UnsupportedError(
            "AutoEP's experts are written in order only, as they are read",
            expected="no round_robin, no parameter_alignment",
        )
    frozen = [name for name in auto if name in checkpoint.parameters and checkpoint.parameters[name].frozen]
    if stage == 3 and frozen:
        raise UnsupportedError(
            "frozen experts of AutoEP under ZeRO-3: what is frozen is cut over all ranks, and each has other experts",
            expected="stage 1 or 2", found=listed(frozen, most=4),
        )  # fmt: skip
    for layer in auto.values():
        wanted, ranks = options.expert_parallel_size or layer.degree, options.world_size
        if layer.experts % wanted or ranks % wanted:
            raise UsageError(
                f"{layer.experts} experts of {layer.prefix} cannot be spread over {wanted} of {ranks} ranks",
                expected="an expert-parallel size that divides both", found=wanted,
                advice="give another --expert-parallel-size",
            )  # fmt: skip


def _check_sliced_experts(checkpoint: Checkpoint, origin: Origin, options: RecutOptions) -> None:
    """Raise where experts are to be slices, or spread, and that is nothing that can be changed."""
    asked = options.sliced_experts
    if asked is None:
        return
    degree = checkpoint.topology.tp if options.tensor_parallel_size is None else options.tensor_parallel_size
    if degree == 1:
        raise UsageError(
            "the target is not sliced, so sliced or spread experts do not apply", expected="--tensor-parallel-size"
        )
    if origin.ranks and checkpoint.topology.tp > 1 and asked != checkpoint.details.get(SLICED_EXPERTS):
        raise UnsupportedError(
            f"experts that are {'spread over' if asked else 'slices of'} tensor-parallel ranks stay so in `reshard`",
            expected=f"--{'spread' if asked else 'sliced'}-experts, or neither",
            advice="`zckpt convert --to zckpt`, and from there `--to deepspeed --tensor-parallel-size`, changes it",
        )


def cut_rank_values(target: Target) -> None:
    """Raise UnsupportedError where state that is each rank's own would have to be cut for others, and cannot be."""
    checkpoint, first = target.checkpoint, target.origin.members[0]
    _refuse_sums(target)
    if not checkpoint.per_rank or is_cut_alike(target):
        return
    quantised = any(value.key == NESTED for value in checkpoint.per_rank)
    of_torchao = any(torchao.is_quantised(value.value) for value in checkpoint.per_rank)
    found = codes_of(target) if quantised or of_torchao else None
    if found is not None:
        target.codes.update(found)
        return
    dp = checkpoint.topology.dp
    advice = HINT if quantised else FLOATS if of_torchao else how_to_drop(checkpoint.per_rank)
    if (quantised or of_torchao) and target.tp != checkpoint.topology.tp:
        advice = of_slices("").advice
    raise UnsupportedError(
        f"{keys_listed(checkpoint.per_rank)}: each rank has its own, of the elements that it holds, and that cannot be "
        f"cut for other ranks",
        expected=f"{_ranks(dp, checkpoint.topology, first.stage, elastic=first.elastic)}, all cut as it is",
        found=_ranks(target.world_size, target, target.stage, elastic=target.elastic),
        advice=advice,
    )


def _ranks(count: int, of: Target | Topology, stage: int, *, elastic: bool) -> str:
    each = f" for each of tp={of.tp} pp={of.pp}" if of.tp * of.pp > 1 else ""
    return f"{count} rank{'s' if count > 1 else ''}{each} of ZeRO-{stage}{', elastic' if elastic else ''}"


def _refuse_sums(target: Target) -> None:
    """Raise UnsupportedError where ranks would each have a sum that an optimizer keeps of the elements of all."""
    count = target.world_size * len(target.ranks)
    found = {
        key: None
        for group in target.checkpoint.param_groups
        for key, value in group.hyperparameters.items()
        if key in SUMS_IN_GROUPS and not (type(value) in (int, float) and value == 0)
    }
    if found and count > 1 and not is_cut_alike(target):
        raise UnsupportedError(
            f"{', '.join(found)} of param groups: sums that the optimizer keeps of all elements that a rank has, and "
            f"nothing says what they are of fewer",
            expected="one rank, or ranks that are cut as they are",
            found=f"{count} ranks",
            advice="`zckpt consolidate` writes the model, with which its optimizer begins anew",
        )


def _check_aliases(target: Target) -> None:
    """Raise UnsupportedError where one tensor is the state of several partitions, and there would be others."""
    first, own = target.origin.members[0], {value.key for value in target.checkpoint.per_rank}
    rank = target.ranks[0]
    count = sum(len(target.sub_groups(group)) for group in rank.groups) if target.stage == 3 else len(rank.groups)
    aliases.check(aliases.aliases(first), len(first.masters), count, own)


def is_cut_alike(target: Target) -> bool:
    """Tell whether each rank of a target holds the same elements in the same order as in the source."""
    details, first = target.checkpoint.details, target.origin.members[0]
    same = (
        len(target.ranks) == len(target.origin.ranks)
        and not target.regrouped
        and (target.stage == 3) == (first.stage == 3)
        and target.elastic == first.elastic
        and target.round_robin == (bool(details.get("round_robin_gradients")) and first.stage != 3)
        and target.alignment == (bool(details.get("parameter_alignment")) and first.stage != 3)
    )
    return same and all(
        len(rank.members) == target.world_size
        and all(_holds(target, rank, number, member) for number, member in enumerate(rank.members))
        for rank in target.ranks
    )


def _holds(target: Target, rank: TargetRank, number: int, member: OptimizerShard) -> bool:
    """Tell whether a data-parallel rank's partitions are those of its file."""
    found = [master.numel for master in member.masters]
    if target.stage == 3:
        cut = [(one, group.shared_by) for group in rank.groups for one in target.sub_groups(group)]
        return found == [sum(shard_numel(p.numel, count) for p in one) for one, count in cut]
    if len(found) != len(rank.groups):
        return False
    for numel, group, count in zip(found, rank.groups, member.partition_count, strict=True):
        padding = flat_padding(group.starts[-1], group.partition, group.position(number))
        if count != group.shared_by or not group.partition - padding <= numel <= group.partition:
            return False
    return True
