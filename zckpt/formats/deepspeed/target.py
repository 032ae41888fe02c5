"""A `Target`: a checkpoint of DeepSpeed that is to be written, and what each of its ranks has. `decide` makes one.

What is said of it: how layers were dealt anew, and what became of what differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.deepspeed.axes.expert_ranks import Placement
from zckpt.formats.deepspeed.axes.pipeline import TIED
from zckpt.formats.deepspeed.axes.stages import Stages
from zckpt.formats.deepspeed.axes.tp_rules import AFFINE_KEY, INFO_KEY
from zckpt.formats.deepspeed.origin import Origin, Rank
from zckpt.formats.deepspeed.shards import STRUCTURE_KEYS, ModelShard
from zckpt.formats.deepspeed.values import is_same
from zckpt.immutable import immutable
from zckpt.state import MASTER, Checkpoint, CutSpans, Parameter, ParamGroup, by_key
from zckpt.state.checkpoint import RankValue
from zckpt.state.dtypes import holding_all, is_complex
from zckpt.state.partition import (
    FlatShare,
    flat_padding,
    flat_partition_numel,
    flat_shares,
    flat_starts,
    shard_numel,
    shard_share,
    sub_groups,
)

if TYPE_CHECKING:
    from zckpt.engine.together import PackedSlot
    from zckpt.formats.deepspeed.rare.quantised import Codes
    from zckpt.formats.deepspeed.rare.requantised import Form

DEFAULT_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default of `sub_group_size`, in elements."""


@dataclass(frozen=True)
class TargetGroup:
    """A param group of one model-parallel rank of the target. What all its ranks have alike is found out once."""

    index: int
    values: ParamGroup  # its hyperparameters and single values
    experts: list[list[Parameter]]
    """For each expert rank its parameters, under the names and in the order in which they are stored; of a dense group
    one list. A slot may have fewer rows than its parameter: the rest is padding of a vocabulary.
    """
    pads: list[int]  # elements; alignment pad after each
    placement: Placement  # which ranks share which of the lists
    lane: int
    lanes: int
    """Of experts that are spread over several tensor-parallel ranks: which of them this is, and how many they are."""
    sub_group_size: int | None  # elements after which ZeRO-3 begins another sub-group

    @property
    def shared_by(self) -> int:
        """Ranks over which each list is cut."""
        return self.placement.ranks // len(self.experts)

    def expert_rank(self, rank: int) -> int:
        """Return of which of the lists a data-parallel rank holds elements."""
        return self.placement.expert_rank(rank * self.lanes + self.lane, len(self.experts))

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

    def parts(self, rank: int = 0) -> list[Part]:
        """Return what a data-parallel rank's file has one master of."""
        return self._parts[self.expert_rank(rank)]

    @cached_property
    def _parts(self) -> list[list[Part]]:
        if self.sub_group_size is None:
            shares = partial(flat_shares, self.numels, self.starts, self.partition)
            return [[Part(own, self.partition, shares, self.starts[-1])] for own in self.experts]
        cut = sub_groups(self.numels, self.shared_by, self.sub_group_size)
        return [[sub_group([own[i] for i in one], self.shared_by) for one in cut] for own in self.experts]


def dtype_of(parameters: Sequence[Parameter], key: str) -> str:
    """Return the type in which one tensor keeps every bit of a slot of some parameters.

    Raises UnsupportedError: some of them are complex, and some are not.
    """
    dtypes = {p.name: p.slots[key].dtype for p in parameters if key in p.slots}
    odd = [name for name, dtype in dtypes.items() if is_complex(dtype)]
    if 0 < len(odd) < len(dtypes):
        raise UnsupportedError(
            f"{listed(odd)}: complex, beside real parameters in a param group, which one flat tensor cannot hold",
            advice="`zckpt convert --to zckpt` or `--to=dcp` keeps them",
        )
    return holding_all(dtypes.values()) or "float32"


class Part:
    """Parameters of a group, all or, under ZeRO-3, some, of which all ranks that share them have `numel` elements.

    `shares`: which these are, by the rank's position; `total`: of a flat buffer, all ranks' without padding at its end;
    `places`: of a sub-group, where each parameter's shard begins in a rank's elements, and how many it has, but for
    those without elements. `dtypes`: of each slot the type that keeps every bit of it.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        numel: int,
        shares: Callable[[int], Iterator[FlatShare]],
        total: int = 0,
        places: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.parameters, self.numel, self.shares, self.total, self._places = parameters, numel, shares, total, places
        self.keys = list(dict.fromkeys(key for p in parameters for key in p.optimizer_slots))
        self.dtypes = {key: dtype_of(parameters, key) for key in (MASTER, *self.keys)}

    def padding(self, position: int) -> int:
        """Return how many elements at the end of a rank's share of a flat buffer belong to no parameter."""
        return flat_padding(self.total, self.numel, position) if self.total else 0

    @cached_property
    def rows(self) -> Mapping[str, PackedSlot | None]:
        """Slots of a sub-group's parameters as rows of packs; None where no one rule says where they lie."""
        return {key: self._row(key) for key in self.dtypes if self._places}

    def _row(self, key: str) -> PackedSlot | None:
        held = [p for p in self.parameters if p.numel]
        slots = [p.slots[key] for p in held if key in p.slots and not p.slots[key].replicas]
        rules = [slot.spans for slot in slots if isinstance(slot.spans, CutSpans)]
        if not rules or len(rules) < len(held):
            return None
        files = rules[0].files
        if (files.dtype, files.byteorder) != (self.dtypes[key], "little") or any(
            rule.files is not files or rule.numel != p.numel for rule, p in zip(rules, held, strict=True)
        ):
            return None  # a vocabulary's slot may have fewer rows than its parameter
        from zckpt.engine.together import PackedSlot
        from zckpt.state.cuts import Cuts

        label = f"{key} of {len(rules)} parameters"
        return PackedSlot(label, files, Cuts(rules), *map(list, zip(*self._places, strict=True)))


def sub_group(parameters: list[Parameter], shared_by: int) -> Part:
    """Return some of a group's parameters under ZeRO-3, of which all ranks have shards, end to end."""
    held = [shard_numel(p.numel, shared_by) for p in parameters]
    starts = list(accumulate(held, initial=0))

    def shares(rank: int) -> Iterator[FlatShare]:
        for index, (p, at) in enumerate(zip(parameters, starts, strict=False)):
            start, numel = shard_share(p.numel, shared_by, rank)
            yield FlatShare(index, start, at, numel)

    places = [(at, numel) for at, numel in zip(starts, held, strict=False) if numel]
    return Part(parameters, starts[-1], shares, places=places)


@immutable
class Unpartitioned:
    """How a stage-0 engine holds its optimizer."""

    form: str  # {"plain", "unfused", "fused"}
    numbered: Sequence[Sequence[str]]
    """The parameters of each group in the optimizer's numbers, frozen ones included where it has those."""
    scaling: Mapping[str, object] = field(default_factory=dict)
    """What the engine itself would write of loss scaling and clipping: taken where the checkpoint says nothing."""
    own_state: bool = False
    """Whether each parameter has all of its state itself; else a group's single values are those of its parameters."""
    named: bool = False  # whether groups list the names of their parameters, too, as torch does of `named_parameters()`


@dataclass(frozen=True)
class Target:
    """A DeepSpeed checkpoint that is to be written, every option decided."""

    checkpoint: Checkpoint
    origin: Origin
    world_size: int  # data-parallel ranks
    stage: int
    elastic: bool
    round_robin: bool
    alignment: bool
    bf16_optimizer: bool
    configured: Mapping[str, bool] = field(default_factory=dict)
    """What the training has for ZeRO-1 and 2, which the configuration states at ZeRO-3, too, that heeds none of it."""
    rules: Mapping[str, object] | None = None
    """`universal_checkpoint_info` to be written; None: as the source's files have it."""
    pp: int = 1  # stages of a pipeline, and tensor-parallel ranks of each
    tp: int = 1
    stages: Stages | None = None  # how a pipeline's layers are dealt; None: as they are
    transposed: bool = False  # whether parameters of groups are matrices transposed, as ZenFlow stores them
    lists_frozen: bool = True
    """Whether all frozen parameters are there, for the lists of ZeRO-2 and 3: an engine wants all or no list."""
    sub_group_size: int | None = None  # as its groups have it
    ranks: list[Rank] = field(default_factory=list)
    coded: dict[tuple[int, int], Codes | Form] = field(default_factory=dict, repr=False, compare=False)
    """Quantised state that is cut for other ranks, or quantised anew, by model-parallel rank and param group."""

    @property
    def regrouped(self) -> bool:
        """Whether a model-parallel rank of it is none of the source's: rank 0's files are carried to all."""
        return not (self.keeps_ranks or self.origin.is_foreign)

    @property
    def keeps_ranks(self) -> bool:
        """Whether each model-parallel rank of it is one of the source's files."""
        topology = self.checkpoint.topology
        same = self.stages is None and (self.pp, self.tp) == (topology.pp, topology.tp)
        return same and not self.origin.is_foreign

    @property
    def keeps_form(self) -> bool:
        """Whether it has the source's form and order of state, for each of the source's model-parallel ranks."""
        details, first = self.checkpoint.details, self.origin.members[0]
        flat = first.stage != 3
        return self.keeps_ranks and (self.stage != 3, self.elastic, self.round_robin, self.alignment) == (
            flat,
            first.elastic,
            flat and bool(details.get("round_robin_gradients")),
            flat and bool(details.get("parameter_alignment")),
        )

    @cached_property
    def own_values(self) -> Mapping[tuple[int, int], Sequence[RankValue]]:
        """What each rank of the source has of its own, by its model- and its data-parallel number."""
        return by_key(((one.mp_rank, one.rank), one) for one in self.checkpoint.per_rank)

    def parts(self, mp: Rank, rank: int = 0) -> list[Part]:
        """Return what a rank's file has one master of, in its order."""
        return [part for group in mp.groups for part in group.parts(rank)]


_WRITTEN = STRUCTURE_KEYS.union(["ds_config", "num_experts", INFO_KEY])
"""Keys of a model file that are not carried."""

_OF_THE_RANKS = ("data_sampler", "random_ltd")
"""DeepSpeed's own keys that belong to the number of ranks even where all ranks have the same."""


def alone_among_frozen(target: Target) -> list[str]:
    """Return frozen parameters for which a target of ZeRO-3 has no place, for others of the model are not there."""
    if target.stage != 3 or target.lists_frozen:
        return []
    return [p.name for mp in target.ranks for p in mp.parameters.values() if p.frozen and p.slots]


def rank_notes(target: Target) -> list[str]:
    """Return what became of each key that differs between ranks, or means something at the old number of ranks only."""
    ranks = target.origin.ranks
    old = len(ranks[0].model_files)
    found: dict[str, str] = {}
    if target.bf16_optimizer and target.checkpoint.zero_stage == 0:
        found["zero_stage"] = (
            "BF16_Optimizer's state is written as ZeRO-1's; the training can continue at stage 1 with "
            "grad_accum_dtype fp32: at stage 0, DeepSpeed 0.19 loads no masters, and raises on its own checkpoints"
        )
    if target.regrouped and len(ranks) > 1:
        for key in _differing([files.model for files in ranks]):
            found[key] = f"{key} differs between model-parallel ranks: mp_rank 0's is carried to all"
    if target.origin.rules is not None and AFFINE_KEY in target.origin.rules and len(ranks) % len(target.ranks):
        found[AFFINE_KEY] = (
            "slices are equal shares; AutoTP cuts attention by key and value heads, and DeepSpeed will not load this "
            f"if the number of ranks, {len(target.ranks)}, does not divide that of them"
        )
    if old > 1 and not (target.stage == 3 and target.world_size == old):
        kept = 1 if target.regrouped else len(ranks)
        for key in dict.fromkeys(key for files in ranks[:kept] for key in _differing(files.model_files)):
            fate = f"ranks below {target.world_size} keep theirs, the others' are left out"
            if target.stage != 3:
                fate = "rank 0's is carried and the others' are left out, because there is one model file"
            elif target.world_size > old:
                fate = f"ranks below {old} keep theirs, the new ones get rank 0's"
            found[key] = f"{key} differs between ranks: {fate}"
    if target.world_size != target.checkpoint.topology.dp or target.regrouped:
        content = target.origin.model.content
        named = [key for key in content if "rng" in key.lower() or "random" in key.lower()]
        for key in dict.fromkeys([*_OF_THE_RANKS, *named]):
            if content.get(key) is not None and key not in found:
                found[key] = f"{key} is carried over as it was saved at another number of ranks"
    frozen = alone_among_frozen(target)
    if frozen:
        found["frozen"] = f"{listed(frozen)}: unchanged in the engine, because not all frozen parameters can be loaded"
    return [*stage_notes(target), *found.values()]


def _differing(models: Sequence[ModelShard]) -> list[str]:
    """Return the keys and buffers of which not all of these files have the same value."""
    first = models[0]
    keys = dict.fromkeys(key for model in models for key in model.content if key not in _WRITTEN)
    buffers = [name for name in first.module if name in first.buffer_names]

    def differs(one: Mapping[str, object], model: ModelShard, other: Mapping[str, object], key: str) -> bool:
        return (key in one) != (key in other) or not is_same(first.file, one.get(key), model.file, other.get(key))

    found = [key for key in keys if any(differs(first.content, m, m.content, key) for m in models[1:])]
    return found + [f"buffer {n}" for n in buffers if any(differs(first.module, m, m.module, n) for m in models[1:])]


def stage_notes(target: Target) -> list[str]:
    """Return how layers were dealt anew."""
    stages = target.stages
    if stages is None:
        return []
    notes = ["stages of layers " + "; ".join(f"{low} to {high - 1}" for low, high in pairwise(stages.bounds))]
    for key in stages.uses if target.pp > 1 else ():
        its = ", ".join(map(str, stages.of(f"{TIED}{key}.")))
        notes.append(f"tied layer {key} is assumed to be used in stages {its}, which get its first stage's state")
    return [*notes, *stages.untold]
