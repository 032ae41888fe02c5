"""Which ranks have which experts, and which of them share the flat buffer of an expert group.

A rank's number is dp_rank x lanes + lane. Lanes are the tensor-parallel ranks over which experts are spread as over
data-parallel ones; DeepSpeed spreads them so unless `enable_expert_tensor_parallelism` is set, which makes experts
slices like everything else: then each tensor-parallel rank has all experts, and there is one lane.

Of n ranks, at expert-parallel degree ep, rank r has the experts of expert rank e and partition p of them:

in turn (default)                         e = r mod ep        p = r div ep
`use_data_before_expert_parallelism`      e = r div (n / ep)  p = r mod (n / ep)

An expert's file is written by the first rank that has it, under that one's mp_rank: by p = 0. Each rank looks for the
files of its experts under its own mp_rank. Both agree where ep divides by the lanes; else the ranks' files of model are
not all written, either.

Source: DeepSpeed 0.14.5 to 0.19.8, `groups._create_expert_and_data_parallel`, `_create_expert_data_and_model_parallel`,
`DeepSpeedEngine._save_moe_checkpoint`, `load_moe_state_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.errors import LayoutError, UnsupportedError, listed
from zckpt.formats.deepspeed.axes.auto_ep import auto_experts
from zckpt.formats.deepspeed.axes.experts import by_layer, expert_number, experts_per_rank, is_expert, layer_of
from zckpt.formats.deepspeed.shards import Files, ModelShard, OptimizerShard, Weights, weights_of
from zckpt.formats.deepspeed.values import copies_of
from zckpt.immutable import immutable
from zckpt.state import WEIGHT, Duplicate, list_of
from zckpt.torchfile import plain

DATA_FIRST = "use_data_before_expert_parallelism"


class Placement(NamedTuple):
    """How expert ranks are numbered."""

    ranks: int  # all ranks over which experts are spread
    data_first: bool = False  # whether the ranks that share experts follow each other

    def expert_rank(self, rank: int, degree: int) -> int:
        """Return of which expert rank a rank has the experts."""
        return rank // (self.ranks // degree) if self.data_first else rank % degree

    def position(self, rank: int, degree: int) -> int:
        """Return which of the ranks with the same experts a rank is."""
        return rank % (self.ranks // degree) if self.data_first else rank // degree

    def rank(self, expert_rank: int, position: int, degree: int) -> int:
        """Return the rank that has a partition of the experts of an expert rank."""
        return expert_rank * (self.ranks // degree) + position if self.data_first else position * degree + expert_rank


def is_data_first(model: ModelShard) -> bool:
    """Tell whether the configuration numbers expert ranks data-parallel first."""
    return model.config.get(DATA_FIRST) is True


@immutable
class Spread:
    """The ranks over which experts are spread, in order."""

    members: Sequence[OptimizerShard]  # one for each rank, by its number: its optimizer file
    lanes: int = 1  # tensor-parallel ranks among them
    data_first: bool = False
    auto: Collection[str] = ()  # tensors of AutoEP's experts

    def are_experts(self, names: Collection[str]) -> bool:
        """Tell whether a group of these parameters is one of experts."""
        return bool(names) and all(is_expert(name) or name in self.auto for name in names)

    def sharing(self, own: Sequence[OptimizerShard], group: int, names: Sequence[str]) -> list[list[OptimizerShard]]:
        """Return the ranks that share a param group, by their partitions, for each expert rank; of a dense group once.

        `own`: the data-parallel ranks, in order; `names`: of the group's parameters. Raises LayoutError: the group is
        cut over fewer ranks than there are, and it is no group of experts; or that is cut over a number of ranks that
        does not divide all.
        """
        count, ranks = own[0].partition_count[group], len(self.members)
        found = f"{count} ranks for {names[0] if names else 'an empty group'}"
        if not self.are_experts(names):
            if count == len(own):
                return [list(own)]
            raise LayoutError(
                "a param group is cut over too few ranks",
                path=own[0].path,
                expected=f"{len(own)} ranks, or for experts a divisor of that",
                found=found,
            )
        if count < 1 or ranks % count:
            raise LayoutError(
                "a group of experts is cut over a number of ranks that does not divide the total",
                expected=f"a divisor of {ranks}",
                found=found,
            )
        degree, place = ranks // count, Placement(ranks, self.data_first).rank
        return [[self.members[place(e, p, degree)] for p in range(count)] for e in range(degree)]


class ExpertFiles(NamedTuple):
    """The weights of experts, which lie in files of their own under their global names."""

    by_lane: dict[int, Weights]  # by model-parallel rank
    layers: dict[str, int]
    """Number of the MoE layer by the name before its experts' numbers, counted within a stage of a pipeline; of all."""

    def of_stage(self, ranks: Sequence[int]) -> ExpertFiles:
        """Return those of one stage of a pipeline, given its model-parallel ranks."""
        held = {lane: self.by_lane[rank] for lane, rank in enumerate(ranks) if rank in self.by_lane}
        return self._replace(by_lane=held)

    def all(self) -> Weights:
        """Return each weight once, from the first rank that has it."""
        found: Weights = {}
        for lane in sorted(self.by_lane):
            for name, one in self.by_lane[lane].items():
                found.setdefault(name, one)
        return found

    def copies(self) -> Iterator[Duplicate]:
        """Yield the same weight from the files of further ranks."""
        first = self.all()
        for lane, weights in sorted(self.by_lane.items()):
            for name, slot in weights.items():
                yield from copies_of(name, {WEIGHT: slot}, {WEIGHT: first[name]}, lane)


def expert_files(files: Files) -> ExpertFiles:
    """Return what the files of experts hold."""
    by_lane: dict[int, Weights] = {}
    layers: dict[str, int] = {}
    for shard, file in files:
        weights = weights_of(file)
        by_lane.setdefault(shard.mp_rank or 0, {}).update(weights)
        for name in filter(is_expert, weights):
            layers.setdefault(layer_of(name), shard.layer or 0)
    return ExpertFiles(by_lane, layers)


def spread_over(ranks: Sequence[Sequence[OptimizerShard]], lane: int, model: ModelShard, files: ExpertFiles) -> Spread:
    """Return the ranks over which the experts of one tensor-parallel rank are spread: its own, or those of all.

    Parameters
    ----------
    ranks : sequence of sequence of OptimizerShard
        Of each tensor-parallel rank the data-parallel ones; one, where there are none or a pipeline has them.
    lane : int
        Which of them.
    files : ExpertFiles
        Those of all.

    Raises
    ------
    UnsupportedError
        Experts are spread over all ranks, and those are numbered in an order that is not known.
    """
    data_first = is_data_first(model)
    alone = Spread(ranks[lane], 1, data_first, auto_experts(model).keys())
    members, dp, tp = ranks[lane], len(ranks[lane]), len(ranks)
    if tp == 1 or any(len(one) != dp for one in ranks):
        return alone
    every = Spread([one[d] for d in range(dp) for one in ranks], tp, data_first)
    # As many experts of a layer as files speak of, or as the model file says, if that is more.
    totals = {layer: max(numbers) + 1 for layer, numbers in by_layer(files.all()).items()}
    counts = list_of(plain(model.content.get("num_experts")))
    for layer, number in files.layers.items():
        if number < len(counts) and type(counts[number]) is int:
            totals[layer] = max(totals.get(layer, 0), counts[number])
    parts = members[0].partition_count if members and members[0].stage != 3 else []
    named: Sequence[Collection[str]] | None = model.param_shapes
    if named is None:
        named = [[name for member in members for name in member.mapping(index)] for index in range(len(parts))]
    for names, count in zip(named, parts, strict=False):  # others than files have are refused where they are cut
        if not every.are_experts(names) or count < 1 or dp * tp % count:
            continue
        local = experts_per_rank(names)
        if all(totals.get(layer) == number * dp * tp // count for layer, number in local.items()):
            _check_order(every, dp * tp // count, local, files)
            return every
        if dp % count == 0 and all(totals.get(layer) == number * dp // count for layer, number in local.items()):
            return alone
    return alone if all(files.by_lane.get(m, {}).keys() == files.all().keys() for m in range(tp)) else every


def _check_order(spread: Spread, degree: int, local: Mapping[str, int], files: ExpertFiles) -> None:
    """Raise unless each expert is, or is missing, under the mp_rank of the first rank that has it."""
    placement = Placement(len(spread.members), spread.data_first)
    for name in files.all():
        number, layer = expert_number(name), layer_of(name)
        if number is None or layer not in local:
            continue
        writer = placement.rank(number // local[layer] % degree, 0, degree) % spread.lanes
        found = {lane for lane, weights in files.by_lane.items() if name in weights}
        if writer not in found:
            raise UnsupportedError(
                f"the weights of expert {number} are not in its rank's file, if tensor-parallel ranks are numbered "
                "consecutively",
                expected=f"mp_rank {writer}",
                found=f"mp_rank {listed(sorted(found))}",
            )
