"""A `Target`: a checkpoint of DeepSpeed that is to be written, and what each of its ranks has. `decide` makes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from zckpt.formats.deepspeed.expert_ranks import Placement
from zckpt.formats.deepspeed.origin import Origin
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, section
from zckpt.formats.deepspeed.stages import Stages
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, ParamGroup
from zckpt.state.checkpoint import RankValue
from zckpt.state.partition import (
    flat_partition_numel,
    flat_starts,
    shard_numel,
    sub_groups,
)

if TYPE_CHECKING:
    from zckpt.formats.deepspeed.codes import Codes, Form

DEFAULT_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default of `sub_group_size`, in elements."""


@dataclass(frozen=True)
class TargetGroup:
    """A param group of one model-parallel rank of the target. What all its ranks have alike is found out once.

    Parameters
    ----------
    values : ParamGroup
        Its hyperparameters and single values.
    experts : list of list of Parameter
        For each expert rank its parameters, under the names and in the order in which they are stored; of a dense
        group one list. A slot may have fewer rows than its parameter: the rest is padding of a vocabulary.
    pads : list of int, elements
        Alignment pad after each.
    shared_by : int
        Ranks over which each list is cut.
    lane, lanes : int
        Of experts that are spread over several tensor-parallel ranks: which of them this is, and how many they are.
    data_first : bool
        How expert ranks are numbered, see `expert_ranks`.
    """

    index: int
    values: ParamGroup
    experts: list[list[Parameter]]
    pads: list[int]
    shared_by: int
    lane: int = 0
    lanes: int = 1
    data_first: bool = False

    @property
    def placement(self) -> Placement:
        """Which ranks share which of the lists."""
        return Placement(self.shared_by * len(self.experts), self.data_first)

    def of(self, rank: int) -> list[Parameter]:
        """Return the parameters of which a data-parallel rank holds elements."""
        return self.experts[self.placement.expert_rank(rank * self.lanes + self.lane, len(self.experts))]

    def position(self, rank: int) -> int:
        """Return which of the ranks that share its parameters a data-parallel rank is."""
        return self.placement.position(rank * self.lanes + self.lane, len(self.experts))

    @cached_property
    def numels(self) -> Sequence[int]:
        """Elements of each parameter, which are alike on all expert ranks."""
        return [p.numel for p in self.experts[0]]

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each parameter starts in the flat buffer and, last, where that ends, in elements."""
        return flat_starts(self.numels, self.pads)

    @cached_property
    def partition(self) -> int:
        """Elements of one rank's partition of the flat buffer."""
        return flat_partition_numel(self.starts[-1], self.shared_by)

    def keys(self, rank: int) -> list[str]:
        """Return the optimizer's keys for the parameters of which a data-parallel rank holds elements, each once."""
        return list(self._keys[self.placement.expert_rank(rank * self.lanes + self.lane, len(self.experts))])

    @cached_property
    def _keys(self) -> list[list[str]]:
        return list(map(slot_keys, self.experts))


def slot_keys(parameters: Iterable[Parameter]) -> list[str]:
    """Return the optimizer's keys for parameters, each once."""
    return list(dict.fromkeys(key for p in parameters for key in p.slots if key not in (MASTER, WEIGHT)))


@dataclass(frozen=True, slots=True)
class Unpartitioned:
    """How a stage-0 engine holds its optimizer.

    Parameters
    ----------
    form : {"plain", "unfused", "fused"}
    numbered : sequence of sequence of str
        The parameters of each group in the optimizer's numbers, frozen ones included where it has those.
    scaling : mapping
        What the engine itself would write of loss scaling and clipping: taken where the checkpoint says nothing.
    own_state : bool
        Whether each parameter has all of its state itself; else a group's single values are those of its parameters.
    named : bool
        Whether groups list the names of their parameters, too, as torch does of `named_parameters()`.
    """

    form: str
    numbered: Sequence[Sequence[str]]
    scaling: Mapping[str, object] = field(default_factory=dict)
    own_state: bool = False
    named: bool = False


@dataclass(frozen=True, slots=True)
class TargetRank:
    """One model-parallel rank of the target.

    Parameters
    ----------
    models : sequence of ModelShard
        The source's model files, from which the rest is carried, by data-parallel rank; a rank that is not there
        takes from the first.
    members : sequence of OptimizerShard
        The same for optimizer files.
    parameters, buffers : dict of str to Parameter
        In this rank's shapes.
    lanes : int
        Tensor-parallel ranks over which experts are spread.
    unpartitioned : Unpartitioned or None
        How its optimizer is held at stage 0; None where there is none.
    """

    mp_rank: int
    models: Sequence[ModelShard]
    members: Sequence[OptimizerShard]
    parameters: dict[str, Parameter]
    buffers: dict[str, Parameter]
    groups: list[TargetGroup]
    lanes: int = 1
    unpartitioned: Unpartitioned | None = None

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
    pp, tp : int
        Stages of a pipeline, and tensor-parallel ranks of each.
    stages : Stages or None
        How a pipeline's layers are dealt; None: as they are.
    codes, forms : dict of (int, int) to Codes or Form
        Quantised state that is cut for other ranks, or quantised anew, by model-parallel rank and param group.
    shards : dict of int to object
        What the writer of optimizer files has worked out of a sub-group, by its identity.
    rules : mapping or None
        `universal_checkpoint_info` to be written; None: as the source's files have it.
    transposed : bool
        Whether parameters of groups are matrices transposed, as ZenFlow stores them.
    lists_frozen : bool
        Whether all frozen parameters are there, for the lists of ZeRO-2 and 3: an engine wants all or no list.
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
    pp: int = 1
    tp: int = 1
    stages: Stages | None = None
    transposed: bool = False
    lists_frozen: bool = True
    ranks: list[TargetRank] = field(default_factory=list)
    shards: dict[int, object] = field(default_factory=dict, repr=False, compare=False)
    codes: dict[tuple[int, int], Codes] = field(default_factory=dict, repr=False, compare=False)
    forms: dict[tuple[int, int], Form] = field(default_factory=dict, repr=False, compare=False)
    _sub_groups: dict[int, list[list[Parameter]]] = field(default_factory=dict, repr=False, compare=False)
    _own_values: dict[tuple[int, int], list[RankValue]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def regrouped(self) -> bool:
        """Whether a model-parallel rank of it is none of the source's: rank 0's files are carried to all."""
        topology = self.checkpoint.topology
        return bool(self.origin.ranks) and (self.stages is not None or (self.pp, self.tp) != (topology.pp, topology.tp))

    def own_values(self, mp_rank: int, rank: int) -> Sequence[RankValue]:
        """Return what a rank of the source has of its own, which is looked for in all ranks' once."""
        if not self._own_values:
            for one in self.checkpoint.per_rank:
                self._own_values.setdefault((one.mp_rank, one.rank), []).append(one)
        return self._own_values.get((mp_rank, rank), ())

    @property
    def sub_group_size(self) -> int:
        """Elements after which ZeRO-3 begins another sub-group."""
        size = section(self.origin.model.config, "zero_optimization").get("sub_group_size")
        return int(size) if isinstance(size, (int, float)) and size >= 1 else DEFAULT_SUB_GROUP_SIZE

    def sub_groups(self, group: TargetGroup, rank: int = 0) -> list[list[Parameter]]:
        """Return the sub-groups of a group under ZeRO-3, as a data-parallel rank has them."""
        own = group.of(rank)
        found = self._sub_groups.get(id(own))  # the target has its groups as long as it is there
        if found is None:
            cut = sub_groups(group.numels, group.shared_by, self.sub_group_size)
            found = self._sub_groups[id(own)] = [[own[i] for i in one] for one in cut]
        return found

    def partitions(self, mp: TargetRank, rank: int = 0) -> list[tuple[list[Parameter], int]]:
        """Return what a rank's file has one master of: its parameters, and how many elements that has."""
        if self.stage != 3:
            return [(group.of(rank), group.partition) for group in mp.groups]
        cut = [(own, group.shared_by) for group in mp.groups for own in self.sub_groups(group, rank)]
        return [(own, sum(shard_numel(p.numel, count) for p in own)) for own, count in cut]
