"""From a checkpoint and the options for it to a `Target`. Pure but for what the checkpoint's reader has read."""

from __future__ import annotations

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.alike import refuse_to_cut
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.local_states import local_states, written_rules
from zckpt.formats.deepspeed.muon import is_of_muon
from zckpt.formats.deepspeed.options import STAGES, RecutOptions
from zckpt.formats.deepspeed.origin import Origin
from zckpt.formats.deepspeed.regroup import Unit, local_parameters, units
from zckpt.formats.deepspeed.target import Target, TargetGroup, TargetRank
from zckpt.state import Checkpoint, Parameter
from zckpt.state.dtypes import itemsize
from zckpt.state.partition import PARAMETER_ALIGNMENT_NBYTES, alignment_padding, check_world_size, round_robin_order


def decide(checkpoint: Checkpoint, options: RecutOptions) -> Target:
    """Return the target for a checkpoint and options.

    Raises
    ------
    UsageError
        The options cannot be.
    UnsupportedError
        The source is of a kind that is not cut anew.
    LayoutError
        A parameter does not divide among the target's tensor-parallel ranks.
    """
    origin = checkpoint.origin
    check_world_size(options.world_size)
    if not isinstance(origin, Origin) or not origin.members:
        raise UnsupportedError("only DeepSpeed checkpoints of ZeRO-1, 2 and 3 are cut for another number of ranks",
                               path=checkpoint.source, found=checkpoint.format,
                               advice="use `zckpt convert --to deepspeed`")  # fmt: skip
    first = origin.members[0]
    stage = first.stage if options.stage is None else options.stage
    if stage not in STAGES:
        raise UsageError("unknown ZeRO stage", expected="1, 2 or 3", found=stage)
    elastic = first.elastic if options.elastic is None else options.elastic
    round_robin = (
        bool(checkpoint.details.get("round_robin_gradients")) if options.round_robin is None else options.round_robin
    )
    aligned = (
        bool(checkpoint.details.get("parameter_alignment"))
        if options.parameter_alignment is None
        else options.parameter_alignment
    )
    _refuse(checkpoint, origin, options, stage=stage, elastic=elastic)
    _refuse_degrees(checkpoint, origin, options, stage=stage)
    degree = checkpoint.topology.tp if options.tensor_parallel_size is None else options.tensor_parallel_size
    states = local_states(checkpoint, origin, degree, options.padded_vocab_size)
    flat = stage != 3
    target = Target(checkpoint, origin, options.world_size, stage, elastic and flat, round_robin and flat,
                    aligned and flat, first.bf16_optimizer, written_rules(origin, states))  # fmt: skip
    for state in states:
        rank = TargetRank(state.mp_rank, state.models, state.members, state.parameters, state.buffers, [])
        for unit in units(checkpoint, origin, state.groups, rank.parameters, options):
            rank.groups.append(_group(target, len(rank.groups), unit, rank.parameters))
        target.ranks.append(rank)
    refuse_to_cut(target)
    return target


def _group(target: Target, index: int, unit: Unit, known: dict[str, Parameter]) -> TargetGroup:
    """Return a param group in the order in which it is stored."""
    experts = local_parameters(unit, known)
    shared_by = target.world_size // len(experts)
    if target.round_robin:
        order = round_robin_order(len(experts[0]), shared_by)
        experts = [[parameters[i] for i in order] for parameters in experts]
    pads = [0] * len(experts[0])
    if target.alignment and experts[0]:
        multiple = max(PARAMETER_ALIGNMENT_NBYTES // itemsize(experts[0][0].dtype), 1)
        pads = alignment_padding([p.numel for p in experts[0]], multiple)
    return TargetGroup(index, unit.values, experts, pads, shared_by)


def _refuse(checkpoint: Checkpoint, origin: Origin, options: RecutOptions, *, stage: int, elastic: bool) -> None:
    path = checkpoint.source
    if origin.members[0].bf16_optimizer and (
        stage != 1 or elastic or options.round_robin or options.parameter_alignment
    ):
        raise UnsupportedError("a checkpoint of BF16_Optimizer stays one: stage 1, rigid, in order", path=path)
    bare = origin.members[0].elastic and not origin.members[0].groups
    if not elastic and bare and stage != 3:
        raise UnsupportedError("the elastic form holds no hyperparameters, which the rigid form needs", path=path)
    if bare and stage == 3:
        raise UnsupportedError("the elastic form holds no hyperparameters, which ZeRO-3 needs", path=path)
    if elastic and stage != 3 and is_of_muon(checkpoint, origin.model.config):
        raise UnsupportedError(
            "the elastic form takes padding off each tensor, and Muon's momentum of whole matrices has none",
            path=path,
            expected="the rigid form",
        )


def _refuse_degrees(checkpoint: Checkpoint, origin: Origin, options: RecutOptions, *, stage: int) -> None:
    """Raise where experts, slices or stages of a pipeline would have to be put together in a way that is not known."""
    path, topology = checkpoint.source, checkpoint.topology
    for name, value in (
        ("expert-parallel", options.expert_parallel_size),
        ("tensor-parallel", options.tensor_parallel_size),
    ):
        if value is not None and value < 1:
            raise UsageError(f"unusable {name} size", expected="at least 1", found=value)
    if topology.pp > 1:
        raise UnsupportedError("pipeline-parallel checkpoints are not cut anew", path=path, found=f"pp={topology.pp}")
    experts = bool(origin.experts) or any(is_expert(name) for name in checkpoint.parameters)
    if not experts:
        if options.expert_parallel_size is not None:
            raise UsageError("the checkpoint has no experts, so an expert-parallel size does not apply", path=path)
        return
    if max(topology.tp, options.tensor_parallel_size or 1) > 1:
        raise UnsupportedError("checkpoints with experts are not cut anew under tensor parallelism", path=path)
    if stage == 3:
        raise UnsupportedError("DeepSpeed has no experts under ZeRO-3", path=path, expected="stage 1 or 2")
    if origin.model.config.get("use_data_before_expert_parallelism") is True:
        raise UnsupportedError("experts whose ranks are numbered data-parallel first are not cut anew", path=path)
