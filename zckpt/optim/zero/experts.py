"""What of a model this rank has, where not all ranks have all: experts under their global numbers, and slices.

Experts have local numbers in a rank's model, and global ones in files. Which rank of the expert-parallel ones this is,
follows from the ranks that hold the same experts; DeepSpeed has two ways of assigning experts to dp ranks, ep by ep:

    0 1 2 3 4 5   ep = 2: expert ranks     0 1 0 1 0 1     or, data before experts,     0 0 0 1 1 1

Source: `deepspeed.utils.groups`, 0.19, and the files that its engine writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.experts import expert_number, experts_per_rank, global_name, is_expert
from zckpt.optim.ranks import Ranks
from zckpt.optim.zero.flat import FlatOptimizer
from zckpt.optim.zero.stepping import ModelParallel


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among those that hold different experts of some layers.

    Parameters
    ----------
    rank, degree : int
        Among so many expert-parallel ranks.
    is_first : bool
        Whether no rank before it holds the same experts.
    data_first : bool
        Whether neighbours hold the same experts.
    """

    rank: int
    degree: int
    is_first: bool
    data_first: bool


def place_of(sharing: list[int], every: list[int]) -> Place:
    """Return a rank's place from the ranks that hold the same experts, and all data-parallel ranks.

    Raises
    ------
    UnsupportedError
        They are assigned in another way than DeepSpeed's two.
    """
    positions = sorted(every.index(rank) for rank in sharing)
    degree, first = len(every) // len(positions), positions[0]
    own = dist.get_rank() == every[first]
    if positions == list(range(first, len(every), degree)) and first < degree:
        return Place(first, degree, own, data_first=False)
    if positions == list(range(first, first + len(positions))) and first % len(positions) == 0:
        return Place(first // len(positions), degree, own, data_first=True)
    raise UnsupportedError(
        "experts are assigned to ranks in a way that no file of DeepSpeed has",
        expected=f"every {degree}th rank, or {len(positions)} neighbours",
        found=f"data-parallel ranks {', '.join(map(str, positions))} of {len(every)}",
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that a rank has.

    Parameters
    ----------
    per_rank : dict of str to int
        How many of each layer, by what its parameters' names begin with; in the model's order.
    places : dict of str to Place
        Of each layer.
    """

    per_rank: dict[str, int]
    places: dict[str, Place]

    def named(self, name: str) -> str:
        """Return the name that a parameter has in files."""
        layer = _layer(name)
        return name if layer is None else global_name(name, self.places[layer].rank, self.per_rank)

    def file_of(self, name: str) -> tuple[int, int] | None:
        """Return the numbers, of the layer and of the expert, of the file that has a parameter; None for the dense."""
        layer, number = _layer(name), expert_number(self.named(name))
        return None if layer is None or number is None else (list(self.per_rank).index(layer), number)

    def is_written_here(self, name: str) -> bool:
        """Tell whether this rank is the first to have a parameter of an expert."""
        layer = _layer(name)
        return layer is not None and self.places[layer].is_first

    @property
    def counts(self) -> list[int]:
        """How many experts each layer has, on all ranks."""
        return [count * self.places[layer].degree for layer, count in self.per_rank.items()]

    @property
    def data_first(self) -> bool:
        """Whether neighbours hold the same experts, and others hold others."""
        return any(place.data_first and place.degree > 1 for place in self.places.values())


def experts_of(optimizer: FlatOptimizer, names: Mapping[torch.Tensor, str], order: list[str] | None = None) -> Experts:
    """Return the experts that this rank has.

    Parameters
    ----------
    optimizer : FlatOptimizer
    names : mapping
        Of its parameters, as this rank's model has them.
    order : list of str, optional
        The names of all parameters of the model; by default the optimizer's.

    Raises
    ------
    UnsupportedError
        They are not those of DeepSpeed's expert layers, whose names say which is meant; or are assigned otherwise.
    """
    every = dist.get_process_group_ranks(optimizer.process_group)
    places: dict[str, Place] = {}
    for flat in optimizer.groups:
        if not flat.is_expert:
            continue
        place = place_of(dist.get_process_group_ranks(flat.process_group), every)
        for parameter in flat.parameters:
            layer = _layer(names[parameter])
            if layer is None:
                raise UnsupportedError(
                    f"{names[parameter]} is an expert's, and its name does not say of which expert",
                    expected="a name of DeepSpeed's MoE layer, ….deepspeed_moe.experts.deepspeed_experts.NUMBER.…",
                    advice="save state_dict() of each rank instead",
                )
            places[layer] = place
    known = [name for name in (order or list(names.values())) if is_expert(name)]
    per_rank = experts_per_rank(known)
    for layer in per_rank:
        if layer not in places:
            raise UnsupportedError(
                f"no param group with moe=True has experts of {layer.rstrip('.')}: it is not known which they are"
            )
    return Experts(per_rank, places)


def _layer(name: str) -> str | None:
    """Return what the names of an expert layer's parameters begin with; None for a dense parameter's."""
    return next(iter(experts_per_rank([name])), None)


# --- slices


def model_rank(model_parallel: ModelParallel | None) -> tuple[int, int]:
    """Return which part of the model this rank has, and of how many."""
    if model_parallel is None:
        return 0, 1
    return model_parallel.get_model_parallel_rank(), model_parallel.get_model_parallel_world_size()


def every_rank(process_group: dist.ProcessGroup, parts: int) -> Ranks:
    """Return the ranks that save together: those of all parts of the model.

    Raises
    ------
    UnsupportedError
        The world has other ranks besides.
    """
    if parts == 1:
        return Ranks(process_group)
    ranks = Ranks()
    expected = dist.get_world_size(process_group) * parts
    if ranks.world_size != expected:
        raise UnsupportedError(
            "a model in parts is saved by all ranks of the world together",
            expected=f"{expected} ranks, {expected // parts} for each of {parts} parts",
            found=ranks.world_size,
        )
    return ranks
