"""The optimizers of experts without ZeRO: each expert rank has a file of its own, with all that its optimizer has.

expp_rank_E_mp_rank_MM_optim_states.pt   {optimizer: a plain one, or one with masters, see `stage0`}

    param_groups   dense ones, alike on all ranks, and of experts (`moe`, name `ep_size_N`), in the model's order
    expert number  global: e x (experts per rank) + local; a rank's optimizer has its own experts only

Layers may be spread over different numbers of ranks, each in groups of its own. There is a file for each of the most
ranks, by the first rank that has those experts; of layers over fewer it has what that rank has (`expert_ranks`). Which
layers are over how many, shapes and the values of masters tell. Groups of different degrees come in an order that is
each process's own (DeepSpeed goes through a set of names), so that they are matched by what they say.

Of AutoEP's layers a rank has X.experts.w1 of its own experts: (experts of a rank, ...). Groups are in the model's
order; or, where the client's optimizer was there before DeepSpeed put its layers into the model, what that has put
there (routers and experts) comes after all else of a group.

Source: DeepSpeed 0.14 to 0.19, `_save_moe_checkpoint`, `split_params_into_different_moe_groups_for_optimizer`; 0.19.8,
`_remap_param_groups_after_module_replacement`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from zckpt.codes import MISSING_FILE, STEPS_DIFFER
from zckpt.errors import ShardError, UnsupportedError, listed
from zckpt.evidence import NAMES_ADVICE, NAMES_OF_RANK_ADVICE, Orders, in_order_or_sorted
from zckpt.formats.deepspeed.axes.auto_ep import AutoLayer, auto_layers, local
from zckpt.formats.deepspeed.axes.expert_ranks import Placement, is_data_first
from zckpt.formats.deepspeed.axes.experts import (
    expert_number,
    experts_per_rank,
    global_name,
    is_expert,
    layer_of,
    named_degree,
)
from zckpt.formats.deepspeed.layouts.layout import order_like
from zckpt.formats.deepspeed.layouts.stage0 import Numbered, keep_other_state, mark_frozen
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.shards import Files
from zckpt.formats.deepspeed.values import copies_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, GivenNames, Parameter, ParamGroup, Slot, differ, without
from zckpt.state.views import concat
from zckpt.torchfile import TorchFile


def attach_experts(checkpoint: Rank, files: Files, names: GivenNames) -> None:
    """Give a rank without ZeRO the optimizers of its expert ranks.

    Parameters
    ----------
    checkpoint : Rank
        Has its parameters already, experts under their global numbers; AutoEP's as one tensor for all of them. Its
        model file's own optimizer, where it has one, is that of the first expert rank.
    files : sequence of (Shard, TorchFile)
        By expert rank.
    names : sequence of str, optional
        Names of a rank's parameters in its optimizer's order, experts under their local numbers.

    Raises
    ------
    ShardError
        Files are missing, or of different steps.
    UnsupportedError
        Which experts a rank's optimizer has, or which parameter is which, is not known.
    """
    model = checkpoint.model
    auto, numbers = auto_layers(model), [shard.dp_rank or 0 for shard, _ in files]
    if auto and (differ([layer.degree for layer in auto]) or any(map(is_expert, checkpoint.parameters))):
        raise UnsupportedError("AutoEP's experts together with experts that are spread differently, without ZeRO",
                               path=model.path)  # fmt: skip
    first = _Optimizer(checkpoint, 0, files[0][1])
    degrees = set() if auto else set(first.degrees.values())

    layers = {} if auto else first.layers(names)
    expected = auto[0].degree if auto else max(degrees, default=len(files))
    if len(layers) < len(experts_per_rank(checkpoint.parameters)):  # of more ranks are layers not trained
        expected = max(expected, len(files))
    if numbers != list(range(expected)):
        raise ShardError(
            "optimizer files of expert ranks are missing, or there are too many",
            expected=f"{expected} ranks",
            found=", ".join(map(str, numbers)),
            code=MISSING_FILE,
        )
    placement = Placement(math.lcm(len(files), *degrees), is_data_first(model))
    found = [first, *(_Optimizer(checkpoint, rank, file, first) for rank, (_, file) in
                      enumerate(files[1:], 1))]  # fmt: skip
    copies = [] if model.optimizer is None else [_Optimizer(checkpoint, 0, model.file, first)]
    for one in (*found, *copies):
        at = placement.rank(one.rank, 0, len(files))
        one.ranks = {degree: placement.expert_rank(at, degree) for degree in degrees}
        unnamed = one.name_auto(auto, names) if auto else one.name(layers, names)
        if unnamed:
            raise UnsupportedError(
                f"it is unknown which experts the optimizer's parameters {listed(unnamed)} belong to",
                path=one.file.path,
                advice=NAMES_ADVICE if auto else NAMES_OF_RANK_ADVICE,
            )
        if one in found and one.settings != first.settings:
            raise ShardError(
                f"expert rank {one.rank} is from another step or run: its param groups differ",
                path=one.file.path,
                code=STEPS_DIFFER,
                ranks=[one.rank],
            )
    sparse = {name for layer in auto for name in layer.names}
    for index, group in enumerate(first.part.param_groups):
        # Of each expert rank of a degree the first file that has its experts; the others have copies.
        degree = None if auto else first.degrees.get(index)
        having = {0 if degree is None else one.ranks[degree]: one for one in reversed(found)}
        of_group = [having[expert_rank] for expert_rank in sorted(having)]
        members = [name for one in of_group for name in one.part.param_groups[index].parameters]
        for one in of_group:
            for name in one.held.keys() & one.part.param_groups[index].parameters:
                owner, its = checkpoint.parameters[name], one.held[name]
                slots = _whole(name, found) if name in sparse else one.slots(name)
                owner.slots, owner.group, owner.state = {**owner.slots, **slots}, index, its.state
        checkpoint.param_groups.append(replace(group, parameters=members))
    checkpoint.unnamed |= first.part.unnamed
    checkpoint.warnings += first.part.warnings
    for one in found[1:]:
        checkpoint.duplicates += one.copies({name: checkpoint.parameters[name].slots for name in one.held})
    for one in copies:
        checkpoint.duplicates += one.copies({name: first.slots(name) for name in first.held})
    checkpoint.topology = replace(checkpoint.topology, ep=len(files))
    keep_other_state(checkpoint, first.content, first.file)
    mark_frozen(checkpoint)


class _Optimizer(Numbered):
    """What the optimizer of one expert rank has, by name; its groups in the order in which another has the same.

    Attributes
    ----------
    ranks : dict of int to int
        Which expert rank this one is, of each degree; empty of AutoEP's, whose groups have all experts.
    part : Checkpoint
        What it has of parameters, by their names; experts under the name of the tensor of all, where that is one.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, file: TorchFile, like: _Optimizer | None = None) -> None:
        super().__init__(file)
        if like is not None and (order := order_like(like.state.groups, self.state.groups)) is not None:
            self.state = replace(self.state, groups=[self.state.groups[i] for i in order])
            self.flats = self.flats and [self.flats[i] for i in order]
        self.checkpoint, self.rank, self.part = checkpoint, rank, Checkpoint(checkpoint.source, checkpoint.format)
        self.ranks: dict[int, int] = {}

    @cached_property
    def degrees(self) -> dict[int, int]:
        """Over how many ranks the experts of a group are spread, by its index; not of dense ones."""
        found = {i: named_degree(ParamGroup(g, [])) for i, g in enumerate(self.state.groups) if g.get("moe") is True}
        for index, degree in found.items():
            if f"ep_size_{degree}" != (name := self.state.groups[index].get("name")):
                raise UnsupportedError(
                    "a param group of experts does not say over how many ranks they are spread",
                    path=self.file.path,
                    expected="DeepSpeed's name for it, ep_size_N",
                    found=str(name)[:80],
                )
        return found

    @property
    def held(self) -> dict[str, Parameter]:
        """What it has of parameters, by their names."""
        return self.part.parameters

    def slots(self, name: str) -> dict[str, Slot]:
        """Return what it has of a parameter."""
        return without(self.held[name].slots, WEIGHT)

    @property
    def settings(self) -> list[object]:
        """Hyperparameters and single values of each group; its members, too, where none is of a rank's own experts."""
        return [(g.hyperparameters, g.state, () if self.ranks else g.parameters) for g in self.part.param_groups]

    def copies(self, read: Mapping[str, Mapping[str, Slot]]) -> list[Duplicate]:
        """Return what it has of parameters that are read from another's file."""
        return [one for name in self.held for one in copies_of(name, self.slots(name), read[name], self.rank)]

    def layers(self, names: GivenNames) -> dict[str, set[int]]:
        """Return over how many ranks each layer's experts are spread, of those that the first rank's optimizer has.

        Its groups say their degree, and not whose experts they have. Of a layer of degree N, the groups of that degree
        have an Nth of the experts on a rank, and no others have any.

        Raises UnsupportedError: that is not certain.
        """
        degrees = sorted(set(self.degrees.values()))
        self.ranks = dict.fromkeys(degrees, 0)
        possible = {
            layer: {degree for degree in degrees if total % degree == 0}
            for layer, total in experts_per_rank(self.checkpoint.parameters).items()
        }
        while True:
            unnamed, told = self.name(possible, names), dict[str, set[int]]()
            for index, degree in self.degrees.items():
                for name in filter(is_expert, self.part.param_groups[index].parameters):
                    told.setdefault(layer_of(name), set()).add(degree)
            if (known := {**possible, **told}) == possible:
                break
            possible = known  # what is one layer's is no other's
        if len(degrees) > 1 and (unnamed or any(len(its) > 1 for its in told.values())):
            raise UnsupportedError(
                f"experts are spread over {listed(degrees)} ranks, but it is uncertain which layers over how many",
                path=self.file.path,
                advice=NAMES_OF_RANK_ADVICE,
            )
        return told

    def name(self, layers: Mapping[str, Collection[int]], names: GivenNames) -> list[str]:
        """Give each number its name; return those of experts whose names are not certain.

        `layers`: over how many ranks each layer may be spread; `names`: as for `attach_experts`.
        """
        every = self.checkpoint.parameters
        per_rank = {
            layer: {degree: max(total // degree, 1) for degree in layers.get(layer, ())}
            for layer, total in experts_per_rank(every).items()
        }
        of = {
            name: {d for d, own in per_rank[layer_of(name)].items() if number // own == self.ranks[d]}
            for name in every
            if (number := expert_number(name)) is not None
        }
        candidates = [p for name, p in every.items() if p.tied_to is None and of.get(name, True)]

        def orders(index: int, free: Sequence[str]) -> Sequence[Sequence[str]]:
            degree = self.degrees.get(index)
            if degree is None:
                return in_order_or_sorted(index, [name for name in free if name not in of])
            return [[name for name in free if degree in of.get(name, ())]]  # sorted, "10" would come before "2"

        def whole(name: str) -> str:
            for degree, own in list(per_rank.get(layer_of(name), {}).items())[:1]:
                return global_name(name, self.ranks[degree], {layer_of(name): own})
            return name

        self._attach(candidates, names and list(map(whole, names)), orders)
        return [name for name, one in self.part.unnamed.items() if one.group in self.degrees]

    def name_auto(self, layers: Sequence[AutoLayer], names: GivenNames) -> list[str]:
        """Give each number its name, with AutoEP's layers, whose experts follow their router in the model's order."""
        every, held = self.checkpoint.parameters, {name for layer in layers for name in layer.names}
        experts = {
            layer.prefix: [local(_alone(every[name]), layer, layer.degree, self.rank) for name in layer.names]
            for layer in layers
        }
        parameters: list[Parameter] = []
        previous: str | None = None
        for name, parameter in every.items():
            if name not in held and parameter.tied_to is None:
                here = next((prefix for prefix in experts if _is_of(name, prefix)), None)
                if previous is not None and here != previous:
                    parameters += experts.pop(previous)
                previous = here
                parameters.append(parameter)
        parameters += [one for its in experts.values() for one in its]

        def orders(index: int, free: Sequence[str]) -> Sequence[Sequence[str]]:
            """Return the model's, and that in which what AutoEP has put there comes after all else."""
            last = sorted(free, key=lambda name: any(_is_of(name, layer.prefix) for layer in layers))
            return [*in_order_or_sorted(index, free), last]

        self._attach(parameters, names, orders)
        shapes = {one.shape for one in parameters if one.name in held}
        return [name for name, one in self.part.unnamed.items() if one.shape in shapes]

    def _attach(self, candidates: Sequence[Parameter], given: GivenNames, orders: Orders) -> None:
        self.part = Checkpoint(self.checkpoint.source, self.checkpoint.format)
        self.part.parameters = {one.name: _alone(one) for one in candidates}
        if not self.attach(self.part, given, orders):
            raise UnsupportedError(
                "flat masters include experts, and the order of their parameters is uncertain",
                path=self.file.path,
                advice=NAMES_OF_RANK_ADVICE,
            )


def _is_of(name: str, prefix: str) -> bool:
    """Tell whether a parameter is of what AutoEP has put into the model: a layer's router and experts."""
    return name.startswith((f"{prefix.removesuffix('experts')}router.", f"{prefix}."))


def _alone(parameter: Parameter) -> Parameter:
    weight = {WEIGHT: parameter.weight} if parameter.weight else {}
    return Parameter(parameter.name, parameter.shape, parameter.dtype, weight)


def _whole(name: str, ranks: Sequence[_Optimizer]) -> dict[str, Slot]:
    """Return the slots of all experts of AutoEP's weight. A single value, as the step, is the first rank's."""
    first, held = ranks[0].held[name], [one.slots(name) for one in ranks]
    kept = [(its.state, {key: (slot.shape, slot.dtype) for key, slot in slots.items()})
            for its, slots in zip((one.held[name] for one in ranks), held, strict=True)]  # fmt: skip
    shapes = {slot.shape for slot in held[0].values() if slot.shape}
    if differ(kept) or any(len(shape) != len(first.shape) or shape[0] != first.shape[0] for shape in shapes):
        raise UnsupportedError(
            f"expert ranks have state of {name} that is not one part for each of {first.shape[0]} experts, and alike",
            path=ranks[0].file.path,
            found=listed([f"{sorted(state)}, {slots}" for state, slots in kept]),
        )
    return {key: concat([slots[key] for slots in held], 0) if slot.shape else slot for key, slot in held[0].items()}
