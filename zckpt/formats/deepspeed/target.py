"""What a DeepSpeed checkpoint is to be: stage, ranks, form of the optimizer state, order and alignment. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from zckpt.dtypes import itemsize
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.origin import Origin
from zckpt.partition import (
    PARAMETER_ALIGNMENT_NBYTES,
    alignment_padding,
    check_world_size,
    round_robin_order,
    sub_groups,
)
from zckpt.state import Checkpoint, Parameter

DEFAULT_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default of `sub_group_size`, in elements."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the target is cut; None: as the source is.

    Parameters
    ----------
    world_size : int
        Data-parallel ranks.
    stage : int or None
    elastic, round_robin, alignment : bool or None
    """

    world_size: int
    stage: int | None = None
    elastic: bool | None = None
    round_robin: bool | None = None
    alignment: bool | None = None


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A param group of the target.

    Parameters
    ----------
    index : int
    parameters : list of Parameter
        In the order in which they are stored.
    pads : list of int, elements
        Alignment pad after each.
    """

    index: int
    parameters: list[Parameter]
    pads: list[int]


@dataclass(frozen=True, slots=True)
class Target:
    """A DeepSpeed checkpoint that is to be written, every option decided."""

    checkpoint: Checkpoint
    origin: Origin
    world_size: int
    stage: int
    elastic: bool
    round_robin: bool
    alignment: bool
    bf16_optimizer: bool
    groups: list[TargetGroup] = field(default_factory=list)

    @property
    def sub_group_size(self) -> int:
        """Elements after which ZeRO-3 begins another sub-group."""
        zero = self.origin.model.config.get("zero_optimization")
        size = zero.get("sub_group_size") if isinstance(zero, dict) else None
        return int(size) if isinstance(size, (int, float)) and size >= 1 else DEFAULT_SUB_GROUP_SIZE

    def sub_groups(self, group: TargetGroup) -> list[list[Parameter]]:
        """Return the sub-groups of a group under ZeRO-3."""
        numels = [p.numel for p in group.parameters]
        cut = sub_groups(numels, self.world_size, self.sub_group_size)
        return [[group.parameters[i] for i in one] for one in cut]


def decide(checkpoint: Checkpoint, options: Options) -> Target:
    """Return the target for a checkpoint and options.

    Raises
    ------
    UsageError
        The options cannot be.
    UnsupportedError
        The source is of a kind that is not cut anew.
    """
    origin = checkpoint.origin
    check_world_size(options.world_size)
    if not isinstance(origin, Origin) or not origin.members:
        raise UnsupportedError("only DeepSpeed checkpoints of ZeRO-1, 2 and 3 are cut for another number of ranks",
                               path=checkpoint.source, found=checkpoint.format)  # fmt: skip
    first = origin.members[0]
    stage = first.stage if options.stage is None else options.stage
    if stage not in (1, 2, 3):
        raise UsageError("unknown ZeRO stage", expected="1, 2 or 3", found=stage)
    elastic = first.elastic if options.elastic is None else options.elastic
    round_robin = (
        bool(checkpoint.details.get("round_robin_gradients")) if options.round_robin is None else options.round_robin
    )
    aligned = bool(checkpoint.details.get("parameter_alignment")) if options.alignment is None else options.alignment
    _refuse(checkpoint, origin, options, stage=stage, elastic=elastic)
    flat = stage != 3
    target = Target(checkpoint, origin, options.world_size, stage, elastic and flat, round_robin and flat,
                    aligned and flat, first.bf16_optimizer)  # fmt: skip
    for index, group in enumerate(checkpoint.param_groups):
        parameters = [checkpoint.parameters[name] for name in group.parameters]
        if target.round_robin:
            parameters = [parameters[i] for i in round_robin_order(len(parameters), options.world_size)]
        pads = [0] * len(parameters)
        if target.alignment and parameters:
            multiple = max(PARAMETER_ALIGNMENT_NBYTES // itemsize(parameters[0].dtype), 1)
            pads = alignment_padding([p.numel for p in parameters], multiple)
        target.groups.append(TargetGroup(index, parameters, pads))
    return target


def _refuse(checkpoint: Checkpoint, origin: Origin, options: Options, *, stage: int, elastic: bool) -> None:
    path, topology = checkpoint.source, checkpoint.topology
    if topology.tp > 1 or topology.pp > 1:
        raise UnsupportedError("tensor- or pipeline-parallel checkpoints are not cut anew", path=path,
                               found=f"tp={topology.tp} pp={topology.pp}")  # fmt: skip
    if topology.ep > 1 or "num_experts" in origin.model.content:
        raise UnsupportedError("checkpoints with experts are not cut anew", path=path)
    if origin.members[0].bf16_optimizer and (stage != 1 or elastic or options.round_robin or options.alignment):
        raise UnsupportedError("a checkpoint of BF16_Optimizer stays one: stage 1, rigid, in order", path=path)
    if not elastic and origin.members[0].elastic and stage != 3:
        raise UnsupportedError("the elastic form holds no hyperparameters, which the rigid form needs", path=path)
    if origin.members[0].elastic and stage == 3:
        raise UnsupportedError("the elastic form holds no hyperparameters, which ZeRO-3 needs", path=path)
    lost = [f"{key} of group {index}" for index, group in enumerate(checkpoint.param_groups)
            for key, value in group.state.items() if hasattr(value, "storage")]  # fmt: skip
    if lost:
        raise UnsupportedError(f"{', '.join(lost[:4])}: a tensor for a whole group is not cut anew", path=path)
