"""What a DeepSpeed checkpoint is to be, every option decided: which ranks, and what each of them has. Data only.

    Target
    `-- ranks: TargetRank           one for each model-parallel rank: its parameters, in its own shapes
        `-- groups: TargetGroup     one for each param group
            `-- experts             for each expert rank its parameters; of a dense group one list

A list of parameters is cut over the data-parallel ranks that share it: all of them, or those of one expert rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.formats.deepspeed.origin import Origin
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard
from zckpt.state import Checkpoint, Parameter, ParamGroup
from zckpt.state.partition import flat_partition_numel, flat_starts, sub_groups

DEFAULT_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default of `sub_group_size`, in elements."""


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A param group of one model-parallel rank of the target.

    Parameters
    ----------
    index : int
    values : ParamGroup
        Its hyperparameters and single values.
    experts : list of list of Parameter
        For each expert rank its parameters, under the names and in the order in which they are stored; of a dense
        group one list. A slot may have fewer rows than its parameter: the rest is padding of a vocabulary.
    pads : list of int, elements
        Alignment pad after each.
    shared_by : int
        Data-parallel ranks over which each list is cut.
    """

    index: int
    values: ParamGroup
    experts: list[list[Parameter]]
    pads: list[int]
    shared_by: int

    def of(self, rank: int) -> list[Parameter]:
        """Return the parameters of which a data-parallel rank holds a part."""
        return self.experts[rank % len(self.experts)]

    def position(self, rank: int) -> int:
        """Return which of the ranks that share its parameters a data-parallel rank is."""
        return rank // len(self.experts)

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter, which are alike on all expert ranks."""
        return [p.numel for p in self.experts[0]]

    @property
    def starts(self) -> list[int]:
        """Where each parameter starts in the flat buffer and, last, where that ends, in elements."""
        return flat_starts(self.numels, self.pads)

    @property
    def partition(self) -> int:
        """Elements of one rank's partition of the flat buffer."""
        return flat_partition_numel(self.starts[-1], self.shared_by)


@dataclass(frozen=True, slots=True)
class TargetRank:
    """One model-parallel rank of the target.

    Parameters
    ----------
    mp_rank : int
    models : sequence of ModelShard
        The source's model files from which everything is carried that is not made anew, by data-parallel rank; a rank
        that is not there takes from the first.
    members : sequence of OptimizerShard
        The same for optimizer files.
    parameters, buffers : dict of str to Parameter
        In this rank's shapes.
    groups : list of TargetGroup
    """

    mp_rank: int
    models: Sequence[ModelShard]
    members: Sequence[OptimizerShard]
    parameters: dict[str, Parameter]
    buffers: dict[str, Parameter]
    groups: list[TargetGroup]

    @property
    def model(self) -> ModelShard:
        """The first of the source's model files."""
        return self.models[0]

    def owner(self, name: str) -> Parameter:
        """Return the parameter that has the slots of the one called `name`."""
        parameter = self.parameters[name]
        return parameter if parameter.tied_to is None else self.parameters[parameter.tied_to]


@dataclass(frozen=True, slots=True)
class Target:
    """A DeepSpeed checkpoint that is to be written, every option decided.

    Parameters
    ----------
    world_size : int
        Data-parallel ranks.
    shards : dict of int to object
        What the writer of optimizer files has worked out of a sub-group, by its identity.
    rules : mapping or None
        `universal_checkpoint_info` to be written; None: as the source's files have it.
    """

    checkpoint: Checkpoint
    origin: Origin
    world_size: int
    stage: int
    elastic: bool
    round_robin: bool
    alignment: bool
    bf16_optimizer: bool
    rules: Mapping[str, object] | None = None
    ranks: list[TargetRank] = field(default_factory=list)
    shards: dict[int, object] = field(default_factory=dict, repr=False, compare=False)
    _sub_groups: dict[int, list[list[Parameter]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sub_group_size(self) -> int:
        """Elements after which ZeRO-3 begins another sub-group."""
        zero = self.origin.model.config.get("zero_optimization")
        size = zero.get("sub_group_size") if isinstance(zero, dict) else None
        return int(size) if isinstance(size, (int, float)) and size >= 1 else DEFAULT_SUB_GROUP_SIZE

    def sub_groups(self, group: TargetGroup) -> list[list[Parameter]]:
        """Return the sub-groups of a group under ZeRO-3."""
        found = self._sub_groups.get(id(group))  # the target has its groups as long as it is there
        if found is None:
            cut = sub_groups(group.numels, self.world_size, self.sub_group_size)
            found = self._sub_groups[id(group)] = [[group.experts[0][i] for i in one] for one in cut]
        return found
