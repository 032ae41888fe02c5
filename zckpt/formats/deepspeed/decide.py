"""From a checkpoint and the options for it to a `Target`, or to the reason why there can be none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed.axes.auto_ep import AutoLayer, auto_experts
from zckpt.formats.deepspeed.axes.experts import SLICED_EXPERTS, is_expert
from zckpt.formats.deepspeed.axes.restage import is_staged, stage_states
from zckpt.formats.deepspeed.axes.tensor_parallel import written_rules
from zckpt.formats.deepspeed.hyperparameters import Group, read_hyperparameters, with_hyperparameters
from zckpt.formats.deepspeed.options import STAGES, RecutOptions
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.rare import aliases
from zckpt.formats.deepspeed.rare.muon import is_of_muon
from zckpt.formats.deepspeed.rare.zenflow import DETAIL, keeps_zenflow
from zckpt.formats.deepspeed.shards import OptimizerShard, section
from zckpt.formats.deepspeed.target import DEFAULT_SUB_GROUP_SIZE, Target
from zckpt.formats.deepspeed.target_groups import target_groups
from zckpt.formats.deepspeed.values import SUMS_IN_GROUPS
from zckpt.formats.remainder import origin as origin_of_state
from zckpt.state import Checkpoint, Topology
from zckpt.state.checkpoint import HAS_FROZEN, keys_listed
from zckpt.state.partition import check_world_size
from zckpt.torchfile import brief


def decide(checkpoint: Checkpoint, options: RecutOptions, *, sub_group_size: int | None = None) -> Target:
    """Return the target for a checkpoint and options.

    `sub_group_size` (elements): that of a live engine, for which the target is: what ZenFlow has saved is then not for
    ZenFlow, either. Raises UsageError: the options cannot be; UnsupportedError: the source is of a kind that is not
    resharded; LayoutError: a parameter does not divide among the target's tensor-parallel ranks.
    """
    origin = origin_of(checkpoint)
    check_world_size(options.world_size)
    if origin is not None and not origin.members and not checkpoint.param_groups:
        raise UnsupportedError(
            "holds no optimizer state, so there is nothing to reshard: all ranks have the same weights",
            found=f"DeepSpeed {checkpoint.format_version}, ZeRO stage {checkpoint.zero_stage}",
            advice="`zckpt consolidate` writes the model, which a training on any number of ranks can load",
        )
    if origin is None or not origin.members:
        raise UnsupportedError("only DeepSpeed ZeRO-1, 2 and 3 checkpoints can be resharded",
                               found=f"{checkpoint.format}, ZeRO stage {checkpoint.zero_stage}",
                               advice="use `zckpt convert --to deepspeed --stage`")  # fmt: skip
    first = origin.members[0]
    stage = first.stage if options.stage is None else options.stage
    if stage not in STAGES:
        raise UsageError("unknown ZeRO stage", expected="1, 2 or 3", found=stage)
    flat = stage != 3
    elastic = first.elastic if options.elastic is None else options.elastic
    round_robin, aligned = options.round_robin, options.parameter_alignment
    # What a checkpoint of another format was once: the training that loads it is likely to be the same.
    was = checkpoint.details if not origin.is_foreign or first.bf16_optimizer else origin_of_state(checkpoint)
    round_robin = was.get("round_robin_gradients") is True if round_robin is None else round_robin
    aligned = was.get("parameter_alignment") is True if aligned is None else aligned
    degree = checkpoint.topology.tp if options.tensor_parallel_size is None else options.tensor_parallel_size
    size = origin.model.zero.get("sub_group_size") if sub_group_size is None else sub_group_size
    size = int(size) if isinstance(size, (int, float)) and size >= 1 else DEFAULT_SUB_GROUP_SIZE
    target = Target(checkpoint, origin, options.world_size, stage, elastic and flat, round_robin and flat,
                    aligned and flat, first.bf16_optimizer,
                    {"round_robin_gradients": round_robin, "parameter_alignment": aligned}, tp=degree,
                    transposed=sub_group_size is None and keeps_zenflow(checkpoint, first.stage, stage)
                    and checkpoint.details[DETAIL] is True,
                    sub_group_size=None if flat else size,
                    lists_frozen=checkpoint.details.get(HAS_FROZEN, was.get(HAS_FROZEN)) is not False)  # fmt: skip
    path, given = options.hyperparameters, None
    if path is not None:
        if not is_bare(first):
            raise UsageError("the checkpoint has its own hyperparameters", found=f"--hyperparameters {path}")
        given = read_hyperparameters(path, len(checkpoint.param_groups), elastic=target.elastic)
    _refuse_form(target, options)
    _refuse_axes(target, options)
    target = with_ranks(target, options, given)
    cut_rank_values(target)
    # Where one tensor is the state of several partitions, there have to be as many.
    own = {value.key for value in checkpoint.per_rank}
    aliases.check(aliases.aliases(first), len(first.masters), len(target.parts(target.ranks[0])), own)
    return target


def with_ranks(target: Target, options: RecutOptions, given: Sequence[Group] | None = None) -> Target:
    """Return a target with its model-parallel ranks, and what is said of their slices and stages.

    `given`: hyperparameters of each param group. Errors are those of `stage_states`.
    """
    checkpoint, origin = target.checkpoint, target.origin
    states, dealt = stage_states(checkpoint, origin, target.tp, options)
    target = replace(target, rules=written_rules(origin, states, checkpoint), pp=len(states), stages=dealt)
    auto = auto_experts(origin.model)
    for number, one in enumerate(one for of_stage in states for one in of_stage):
        rank = replace(one, mp_rank=number, param_groups=with_hyperparameters(one.param_groups, given), auto=auto)
        rank.groups = target_groups(target, rank, options)
        target.ranks.append(rank)
    return target


def is_bare(first: OptimizerShard) -> bool:
    """Tell whether a checkpoint's files hold no hyperparameters."""
    return first.elastic and not first.groups


def _refuse_form(target: Target, options: RecutOptions) -> None:
    origin, stage = target.origin, target.stage
    if target.bf16_optimizer and (stage != 1 or target.elastic or options.round_robin or options.parameter_alignment):
        raise UnsupportedError(
            "a BF16_Optimizer checkpoint keeps its form, because its loader takes no other: stage 1, rigid, in order",
            advice="`zckpt convert --to dcp`, then `zckpt convert --to deepspeed --stage`, writes it for ZeRO's "
            "optimizers",
        )
    if is_bare(origin.members[0]) and options.hyperparameters is None and not target.elastic:
        needs = "ZeRO-3" if stage == 3 else "the rigid form"
        # What the configuration says is told and not taken: an optimizer that is handed to DeepSpeed goes before it
        # (`_configure_optimizer` of DeepSpeed 0.19).
        params = section(origin.model.config, "optimizer").get("params")
        told = f"only ds_config's, from which param groups and a scheduler may differ: {brief(params, 200)}"
        raise UnsupportedError(
            f"the elastic form holds no hyperparameters, but {needs} needs them",
            found=told if isinstance(params, dict) else None,
            advice="give --hyperparameters FILE, a JSON list with one object per param group",
        )
    if target.elastic and is_of_muon(target.checkpoint, origin.model.config):
        raise UnsupportedError(
            "the elastic form removes padding from each tensor, but Muon's momentum of whole matrices has none",
            expected="the rigid form",
        )


def _refuse_axes(target: Target, options: RecutOptions) -> None:
    """Raise where experts, slices or stages of a pipeline would have to be put together in a way that is not known."""
    checkpoint, origin, stage = target.checkpoint, target.origin, target.stage
    if options.expert_parallel_size is not None and options.expert_parallel_size < 1:
        raise UsageError("unusable --expert-parallel-size", expected="at least 1", found=options.expert_parallel_size)
    if is_staged(checkpoint, origin, options) and stage != 1:
        raise UnsupportedError("DeepSpeed has no pipelines under ZeRO-2 and 3", expected="--stage 1", found=stage)
    auto = auto_experts(origin.model)
    if auto:
        _refuse_auto(target, options, auto)
        if stage == 3:
            return
    if not (auto or origin.experts or any(map(is_expert, checkpoint.parameters))):
        if options.expert_parallel_size is not None:
            raise UsageError("the checkpoint has no experts, so --expert-parallel-size does not apply")
        if options.sliced_experts is not None:
            raise UsageError("the checkpoint has no experts to slice or spread")
        return
    asked = options.sliced_experts
    if asked is not None and target.tp == 1:
        raise UsageError(
            "the target is not sliced, so sliced or spread experts do not apply", expected="--tensor-parallel-size"
        )
    is_known = not origin.is_foreign and checkpoint.topology.tp > 1
    if asked is not None and is_known and asked != checkpoint.details.get(SLICED_EXPERTS):
        raise UnsupportedError(
            f"`reshard` keeps experts that are {('spread over' if asked else 'slices of')} tensor-parallel ranks",
            expected=f"--{'spread' if asked else 'sliced'}-experts, or neither",
            advice="`zckpt convert --to zckpt`, then `zckpt convert --to deepspeed --tensor-parallel-size`, changes it",
        )
    if origin.layers:  # DeepSpeed writes none
        raise UnsupportedError(
            "experts together with pipeline layer files, which DeepSpeed only writes for pipelines without experts: "
            "it is unknown which of the two has a stage's weights",
        )
    if stage == 3:
        raise UnsupportedError("DeepSpeed's own MoE layer does not run under ZeRO-3",
                               expected="stage 1 or 2")  # fmt: skip


def _refuse_auto(target: Target, options: RecutOptions, auto: Mapping[str, AutoLayer]) -> None:
    """Raise for what is not written of AutoEP's experts."""
    parameters, ranks = target.checkpoint.parameters, target.world_size
    if target.origin.is_foreign and options.tensor_parallel_size not in (None, 1):
        raise UnsupportedError(
            "AutoEP's experts from another format cannot be sliced",
            expected="no --tensor-parallel-size",
        )
    if target.stage != 3 and (options.round_robin or options.parameter_alignment):
        raise UnsupportedError(
            "AutoEP's experts can only be written in order",
            expected="--no-round-robin and --no-parameter-alignment",
        )
    frozen = [name for name in auto if name in parameters and parameters[name].frozen]
    if target.stage == 3 and frozen:
        raise UnsupportedError(
            "AutoEP's frozen experts cannot be written for ZeRO-3, which cuts frozen parameters over all ranks",
            expected="stage 1 or 2", found=listed(frozen, most=4),
        )  # fmt: skip
    for layer in auto.values():
        wanted = options.expert_parallel_size or layer.degree
        if layer.experts % wanted or ranks % wanted:
            raise UsageError(
                f"{layer.experts} experts of {layer.prefix} cannot be spread over {wanted} of {ranks} ranks",
                expected="an expert-parallel size that divides both", found=wanted,
                advice="choose another --expert-parallel-size",
            )  # fmt: skip


def cut_rank_values(target: Target) -> None:
    """Raise UnsupportedError where state that is each rank's own would have to be cut for others, and cannot be."""
    checkpoint, first = target.checkpoint, target.origin.members[0]
    count = target.world_size * len(target.ranks)
    sums = {
        key: None
        for group in checkpoint.param_groups
        for key, value in group.hyperparameters.items()
        if count > 1 and key in SUMS_IN_GROUPS and not (type(value) in (int, float) and value == 0)
    }
    if not (checkpoint.per_rank or sums) or is_cut_alike(target):
        return
    if sums:
        raise UnsupportedError(
            f"{', '.join(sums)} of param groups: the optimizer keeps them as sums over all elements of a rank, and "
            "they are unknown for other ranks",
            expected="one rank, or the same partition",
            found=f"{count} ranks",
            advice="`zckpt consolidate` writes the model, for a new optimizer",
        )
    from zckpt.formats.deepspeed.rare.quantised import cut_codes

    advice = cut_codes(target)
    if target.coded:
        return

    def ranks(count: int, of: Target | Topology, stage: int, elastic: bool) -> str:
        each = f" for each of tp={of.tp} pp={of.pp}" if of.tp * of.pp > 1 else ""
        return f"{count} rank{'s' if count > 1 else ''}{each} of ZeRO-{stage}{', elastic' if elastic else ''}"

    topology = checkpoint.topology
    expected = ranks(topology.dp, topology, first.stage, first.elastic)
    raise of_other_ranks(checkpoint, expected, ranks(target.world_size, target, target.stage, target.elastic), advice)


def of_other_ranks(checkpoint: Checkpoint, expected: str, found: object, advice: str | None = None) -> UnsupportedError:
    """Return the error for state that is each rank's own, where a target has others."""
    return UnsupportedError(
        f"{keys_listed(checkpoint.per_rank)}: each rank has its own, for the elements that it holds, and they "
        "cannot be cut for other ranks",
        expected=f"{expected}, with the same partition",
        found=found,
        advice=advice,
    )


def is_cut_alike(target: Target) -> bool:
    """Tell whether each rank of a target holds the same elements in the same order as in the source."""
    if not target.keeps_form or any(len(mp.members) != target.world_size for mp in target.ranks):
        return False
    for mp in target.ranks:
        for rank, member in enumerate(mp.members):
            parts = [(part, group) for group in mp.groups for part in group.parts(rank)]
            if len(parts) != len(member.masters):
                return False
            for (part, group), master, count in zip(parts, member.masters, member.partition_count, strict=True):
                least = part.numel - part.padding(group.position(rank))
                if not least <= master.numel <= part.numel or (target.stage != 3 and count != group.shared_by):
                    return False
    return True
