"""The optimizers of experts without ZeRO: each expert rank has a file of its own, with all that its optimizer has.

expp_rank_E_mp_rank_MM_optim_states.pt   {optimizer: a plain one, or one with masters, see `stage0`, `stage0_flat`}

    param_groups   dense ones, alike on all ranks, and of experts (`moe`, name `ep_size_N`), in the model's order
    expert number  global: e x (experts per rank) + local; a rank's optimizer has its own experts only

Layers may be spread over different numbers of ranks, each in groups of its own. There is a file for each of the most
ranks, by the first rank that has those experts; of layers over fewer it has what that rank has (`expert_ranks`). Which
layers are over how many, their numbers and shapes tell, or else the values. Groups of different degrees come in an
order that is each process's own (DeepSpeed goes through a set of names), so that they are matched by what they say.

Of AutoEP's layers a rank has X.experts.w1 of its own experts: (experts of a rank, ...). Groups are in the model's
order; or, where the client's optimizer was there before DeepSpeed put its layers into the model, what that has put
there (routers and experts) comes after all else of a group.

Source: DeepSpeed 0.14 to 0.19, `_save_moe_checkpoint`, `split_params_into_different_moe_groups_for_optimizer`; 0.19.8,
`_remap_param_groups_after_module_replacement`.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations_with_replacement, product

from zckpt.codes import MISSING_FILE, STEPS_DIFFER
from zckpt.errors import ShardError, UnsupportedError, listed
from zckpt.evidence import NAMES_ADVICE, NAMES_OF_RANK_ADVICE
from zckpt.formats.deepspeed.auto_ep import AutoLayer, auto_layers, local
from zckpt.formats.deepspeed.expert_ranks import Placement, is_data_first
from zckpt.formats.deepspeed.experts import (
    Files,
    experts_per_rank,
    global_name,
    is_expert,
    layer_of,
    local_experts,
    named_degree,
)
from zckpt.formats.deepspeed.group_order import order_like
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.stage0 import Numbered, keep_other_state, mark_frozen
from zckpt.formats.deepspeed.values import copies_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, ParamGroup, Shape, Slot
from zckpt.state.views import concat
from zckpt.torchfile import TorchFile


def attach_experts(checkpoint: Checkpoint, files: Files, model: ModelShard, names: Sequence[str] | None) -> None:
    """Give a checkpoint without ZeRO the optimizers of its expert ranks.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already, experts under their global numbers; AutoEP's as one tensor for all of them.
    files : sequence of (Shard, TorchFile)
        By expert rank.
    model : ModelShard
        Whose own optimizer, where it has one, is that of the first rank.
    names : sequence of str, optional
        Names of a rank's parameters in its optimizer's order, experts under their local numbers.

    Raises
    ------
    ShardError
        Files are missing, or of different steps.
    UnsupportedError
        Which experts a rank's optimizer has, or which parameter is which, is not known.
    """
    auto = auto_layers(model)
    every, having = (_of_auto_ep if auto else _of_layers)(checkpoint, files, model, names)
    first, found, copies = every[0], every[: len(files)], every[len(files) :]
    for one in found[1:]:
        if one.settings != first.settings:
            raise ShardError(
                f"expert rank {one.rank} is from another step or run: its param groups differ",
                path=one.file.path,
                code=STEPS_DIFFER,
                ranks=[one.rank],
            )
    sparse = {name for layer in auto for name in layer.names}
    for index, group in enumerate(first.groups):
        of_group = having[first.degrees[index]] if index in first.degrees else [first]
        for one in of_group:
            for name in one.groups[index].parameters:
                if name in one.held:
                    owner, its = checkpoint.parameters[name], one.held[name]
                    slots = _whole(name, found) if name in sparse else one.slots(name)
                    owner.slots, owner.group, owner.state = {**owner.slots, **slots}, index, its.state
        members = [name for one in of_group for name in one.groups[index].parameters]
        checkpoint.param_groups.append(replace(group, parameters=members))
    for part in first.parts:
        checkpoint.unnamed |= part.unnamed
        checkpoint.warnings += part.warnings
    for one in found[1:]:
        checkpoint.duplicates += one.copies({name: checkpoint.parameters[name].slots for name in one.held})
    for one in copies:
        checkpoint.duplicates += one.copies({name: first.slots(name) for name in first.held})
    checkpoint.topology = replace(checkpoint.topology, ep=len(files))
    keep_other_state(checkpoint, first.content, first.file)
    mark_frozen(checkpoint)


Ranks = tuple[list["_Optimizer"], dict[int, list["_Optimizer"]]]
"""Those of all files by rank, and what the model file has of the first; of each degree those with its expert ranks."""


def _of_layers(checkpoint: Checkpoint, files: Files, model: ModelShard, names: Sequence[str] | None) -> Ranks:
    """Return the optimizers of the ranks of DeepSpeed's own layers, by name."""
    first = _Optimizer(checkpoint, 0, *_content(files[0][1]))
    first.find_degrees()
    highest = max(shard.dp_rank or 0 for shard, _ in files)
    expected, layers = max(first.degrees.values(), default=highest + 1), first.layers(names)
    if len(layers) < len(experts_per_rank(checkpoint.parameters)):  # of more ranks are layers that are not trained
        expected = max(expected, len(files))
    found = _all(checkpoint, first, files, model, expected)
    placement = Placement(math.lcm(expected, *first.degrees.values()), is_data_first(model))
    degrees = {expected, *first.degrees.values(), *layers.values()}
    of_rank = [
        {degree: placement.expert_rank(placement.rank(rank, 0, expected), degree) for degree in degrees}
        for rank in range(expected)
    ]
    for one in found:
        one.find_degrees(like=first)
        one.name(layers, of_rank[one.rank], names)
    # Of each expert rank of a degree the first file that has its experts; the others have copies.
    having = {
        degree: [next(one for one in found if of_rank[one.rank][degree] == rank) for rank in range(degree)]
        for degree in first.degrees.values()
    }
    return found, having


def _of_auto_ep(checkpoint: Checkpoint, files: Files, model: ModelShard, names: Sequence[str] | None) -> Ranks:
    """Return the optimizers of the ranks of AutoEP's layers, by name."""
    layers = auto_layers(model)
    degrees = {layer.degree for layer in layers}
    if len(degrees) > 1 or any(is_expert(name) for name in checkpoint.parameters):
        raise UnsupportedError("AutoEP's experts next to experts that are spread otherwise, without ZeRO",
                               path=model.path)  # fmt: skip
    first = _Optimizer(checkpoint, 0, *_content(files[0][1]))
    found = _all(checkpoint, first, files, model, degrees.pop())
    for one in found:
        one.name_auto(layers, names)
    return found, {}


def _all(checkpoint: Checkpoint, first: _Optimizer, files: Files, model: ModelShard, expected: int) -> list[_Optimizer]:
    """Return the optimizers of all files, of which so many are expected, and what the model file has of the first."""
    numbers = [shard.dp_rank or 0 for shard, _ in files]
    if len(numbers) != expected or numbers != list(range(expected)):  # a file name may have any number
        raise ShardError(
            "optimizer files of expert ranks are missing, or too many",
            expected=f"{expected} ranks",
            found=", ".join(map(str, numbers)),
            code=MISSING_FILE,
        )
    own = [] if model.optimizer is None else [_Optimizer(checkpoint, 0, model.optimizer, model.file)]
    return [first, *(_Optimizer(checkpoint, rank, *_content(files[rank][1])) for rank in numbers[1:]), *own]


def _content(file: TorchFile) -> tuple[object, TorchFile]:
    """Return the optimizer of an expert rank's file."""
    return (file.root.get("optimizer") if isinstance(file.root, dict) else None), file


class _Optimizer(Numbered):
    """What the optimizer of one expert rank has, by name."""

    def __init__(self, checkpoint: Checkpoint, rank: int, content: object, file: TorchFile) -> None:
        super().__init__(content, file)
        self.checkpoint, self.rank = checkpoint, rank
        self.order = list(range(len(self.state.groups)))
        self.degrees: dict[int, int] = {}
        self.parts: list[Checkpoint] = []
        self.groups: list[ParamGroup] = []

    @cached_property
    def held(self) -> dict[str, Parameter]:
        """What it has of parameters, by their names; experts under the name of the tensor of all, where that is one."""
        return {name: p for part in self.parts for name, p in part.parameters.items()}

    def slots(self, name: str) -> dict[str, Slot]:
        """Return what it has of a parameter."""
        return {key: slot for key, slot in self.held[name].slots.items() if key != WEIGHT}

    @property
    def settings(self) -> list[object]:
        """Hyperparameters and single values of each group; its members, too, where none is of a rank's own experts."""
        return [(g.hyperparameters, g.state, () if self.degrees else g.parameters) for g in self.groups]

    def copies(self, read: Mapping[str, Mapping[str, Slot]]) -> list[Duplicate]:
        """Return what it has of parameters that are read from another's file."""
        return [one for name in self.held for one in copies_of(name, self.slots(name), read[name], self.rank)]

    def find_degrees(self, like: _Optimizer | None = None) -> None:
        """Find over how many ranks the experts of each group are spread, in the order in which another has the same."""
        if like is not None and like is not self:
            self.order = order_like(like.state.groups, self.state.groups) or self.order  # the settings then tell
        for at, group in enumerate(self.state.groups[i] for i in self.order):
            if group.get("moe") is True:
                self.degrees[at] = named_degree(ParamGroup(group, []))
                if f"ep_size_{self.degrees[at]}" != group.get("name"):
                    raise UnsupportedError(
                        "a param group of experts that does not say over how many ranks they are spread",
                        path=self.file.path,
                        expected="the name that DeepSpeed gives it, ep_size_N",
                        found=str(group.get("name"))[:80],
                    )

    def layers(self, names: Sequence[str] | None) -> dict[str, int]:
        """Return over how many ranks each layer's experts are spread, of the first rank's optimizer.

        Its groups say their degree, and not whose experts they have. If a layer is of degree N, a rank has an Nth of
        its experts; so many of its parameters are in the groups of that degree, and nothing else is.

        Raises
        ------
        UnsupportedError
            That is not certain.
        """
        degrees = sorted(set(self.degrees.values()))
        totals = experts_per_rank(self.checkpoint.parameters)
        found = degrees_of_layers(
            self.checkpoint.parameters, totals, {degree: self._is_of(degree) for degree in degrees}
        )
        if found is not None or not degrees:
            return found or {}
        if len(degrees) == 1:
            return dict.fromkeys(totals, degrees[0])
        of_number = {n: self.degrees.get(at) for at, i in enumerate(self.order) for n in self.state.numbers[i]}
        if names is not None and self.flats is None and len(names) == len(of_number):
            given = dict(zip(self.state.every_number, names, strict=True))
            return {layer_of(name): of_number[n] or 1 for n, name in given.items() if is_expert(name)}
        found = self._by_value(totals, degrees)
        if not found:
            raise UnsupportedError(
                f"experts spread over {listed([str(d) for d in degrees])} ranks, and which layer's are over how many "
                f"is not certain",
                path=self.file.path,
                advice=NAMES_OF_RANK_ADVICE,
            )
        return found

    def _is_of(self, degree: int) -> IsOf:
        """Return what tells whether the groups of a degree may have parameters of some shapes."""
        groups = [i for at, i in enumerate(self.order) if self.degrees.get(at) == degree]
        if self.flats is not None:
            numel = sum(self.flats[i].numel for i in groups)
            return lambda shapes: numel == sum(math.prod(shape) * number for shape, number in shapes.items())
        own = [self.state.shape(n) for i in groups for n in self.state.numbers[i]]
        return lambda shapes: shapes.total() == len(own) if None in own else shapes == Counter(own)

    def _by_value(self, totals: Mapping[str, int], degrees: Sequence[int]) -> dict[str, int] | None:
        """Return the degree of each layer by what its masters round to; None where that is not certain."""
        found: dict[str, int] = {}
        for degree in degrees if self.flats is not None or self.state.masters else ():
            could = {layer: degree for layer, total in totals.items() if total % degree == 0}
            part = self._part(self._places(degree), self._local(could, dict.fromkeys(degrees, 0)), None)
            named = {layer_of(name) for group in part.param_groups for name in group.parameters if is_expert(name)}
            if part.unnamed or named & found.keys():
                return None
            found |= dict.fromkeys(named, degree)
        return found

    def _places(self, degree: int | None) -> list[int]:
        return [at for at in range(len(self.order)) if self.degrees.get(at) == degree]

    def _local(self, layers: Mapping[str, int], ranks: Mapping[int, int]) -> list[Parameter]:
        """Return the experts that a rank has, given its expert rank of each degree."""
        every = self.checkpoint.parameters
        names = [name for name, p in every.items() if p.tied_to is None and is_expert(name)]
        return [every[name] for name in local_experts(names, layers, ranks)]

    def name(self, layers: Mapping[str, int], ranks: Mapping[int, int], names: Sequence[str] | None) -> None:
        """Give each number its name.

        Parameters
        ----------
        layers : mapping of str to int
            Over how many ranks each layer is spread.
        ranks : mapping of int to int
            Which expert rank this one is, of each degree.
        names : sequence of str, optional
            As for `attach_experts`.
        """
        totals = experts_per_rank(self.checkpoint.parameters)
        per_rank = {layer: total // layers.get(layer, 1) for layer, total in totals.items()}
        given = names and [
            global_name(name, ranks[layers[layer_of(name)]], per_rank) if layer_of(name) in layers else name
            for name in names
        ]
        groups: dict[int, ParamGroup] = {}
        dense = [p for name, p in self.checkpoint.parameters.items() if p.tied_to is None and not is_expert(name)]
        for degree in (None, *dict.fromkeys(self.degrees.values())):
            places, own = self._places(degree), {layer: of for layer, of in layers.items() if of == degree}
            part = self._part(places, dense if degree is None else self._local(own, ranks), given or None)
            self._refuse(part.unnamed if degree is not None else (), NAMES_OF_RANK_ADVICE)
            self.parts.append(part)
            groups |= dict(zip(places, part.param_groups, strict=True))
            part.unnamed = {n: replace(p, group=None if p.group is None else places[p.group])
                            for n, p in part.unnamed.items()}  # fmt: skip
        self.groups = [groups[at] for at in range(len(self.order))]

    def name_auto(self, layers: Sequence[AutoLayer], names: Sequence[str] | None) -> None:
        """Give each number its name, with AutoEP's layers, whose experts follow their router in the model's order."""
        every, held = self.checkpoint.parameters, dict.fromkeys(name for layer in layers for name in layer.names)
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
        replaced = {one.name for one in parameters if any(_is_of(one.name, layer.prefix) for layer in layers)}
        part = self._part(None, parameters, names, last=replaced)
        shapes = {one.shape for one in parameters if one.name in held}
        self._refuse([name for name, one in part.unnamed.items() if one.shape in shapes], NAMES_ADVICE)
        self.parts, self.groups = [part], part.param_groups

    def _part(
        self,
        places: Sequence[int] | None,
        known: Iterable[Parameter],
        given: Sequence[str] | None,
        last: Collection[str] = (),
    ) -> Checkpoint:
        """Return some of the groups and their parameters as a checkpoint of their own, under the parameters' names."""
        own = Checkpoint(self.checkpoint.source, self.checkpoint.format)
        own.parameters = {one.name: _alone(one) for one in known}
        by_name = not any(map(is_expert, own.parameters))  # of which "10" would come before "2"
        groups = None if places is None else [self.order[at] for at in places]
        if not self.attach(own, given, groups=groups, sorted_too=by_name, last=last):
            raise UnsupportedError(
                "flat masters with experts among them, and in which order parameters make them up is not certain",
                path=self.file.path,
                advice=NAMES_OF_RANK_ADVICE,
            )
        return own

    def _refuse(self, unnamed: Collection[str], advice: str) -> None:
        if unnamed:
            raise UnsupportedError(
                f"which expert's the optimizer's parameters {listed(list(unnamed))} are is not known",
                path=self.file.path,
                advice=advice,
            )


def _is_of(name: str, prefix: str) -> bool:
    """Tell whether a parameter is of what AutoEP has put into the model: a layer's router and experts."""
    return name.startswith((f"{prefix.removesuffix('experts')}router.", f"{prefix}."))


def _alone(parameter: Parameter) -> Parameter:
    weight = {WEIGHT: parameter.slots[WEIGHT]} if WEIGHT in parameter.slots else {}
    return Parameter(parameter.name, parameter.shape, parameter.dtype, weight)


def _whole(name: str, ranks: Sequence[_Optimizer]) -> dict[str, Slot]:
    """Return the slots of all experts of AutoEP's weight. A single value, as the step, is the first rank's."""
    first, path = ranks[0].held[name], ranks[0].file.path
    if any(one.held[name].state != first.state for one in ranks):
        raise UnsupportedError(f"state of {name} that each expert rank has of its own", path=path,
                               found=listed(list(first.state)))  # fmt: skip
    held, found = [one.slots(name) for one in ranks], {}
    for key in dict.fromkeys(key for slots in held for key in slots):
        own = [slots[key] for slots in held if key in slots]
        like = own[0]
        if len(own) < len(ranks) or any((slot.shape, slot.dtype) != (like.shape, like.dtype) for slot in own):
            shapes = [str(slots[key].shape if key in slots else None) for slots in held]
            raise UnsupportedError(f"{key} of {name} is not alike on all expert ranks", path=path, found=listed(shapes))
        if like.shape and (len(like.shape) != len(first.shape) or like.shape[0] != first.shape[0]):
            raise UnsupportedError(f"{key} of {name} is not state of each expert", path=path,
                                   expected=f"one for each of {first.shape[0]} experts", found=like.shape)  # fmt: skip
        found[key] = concat(own, 0) if like.shape else like
    return found


_MOST_TRIED = 4096
"""Ways to deal layers to degrees that are looked at; where there are more, shapes do not tell."""

UNTRAINED = 0
"""Degree of layers that an optimizer does not have."""

IsOf = Callable[[Counter[Shape]], bool]
"""Whether one rank's optimizer may have parameters of these shapes, so many of each, in the groups of a degree."""


def degrees_of_layers(
    parameters: Mapping[str, Parameter], totals: Mapping[str, int], held: Mapping[int, IsOf]
) -> dict[str, int] | None:
    """Return the degree of each layer that is trained; None where shapes and numbers do not tell.

    Parameters
    ----------
    totals : mapping of str to int
        Experts of each layer.
    held : mapping of int to callable
        By degree.
    """
    shapes: dict[str, Counter[Shape]] = {layer: Counter() for layer in totals}
    for name, parameter in parameters.items():
        if is_expert(name) and parameter.tied_to is None:
            shapes[layer_of(name)][parameter.shape] += 1
    alike: dict[object, list[str]] = {}
    for layer, own in shapes.items():
        alike.setdefault((totals[layer], tuple(sorted(own.items()))), []).append(layer)
    ways = []  # in which layers that are alike can be dealt to degrees, by how many each gets
    for layers in alike.values():
        possible = [UNTRAINED, *(degree for degree in held if totals[layers[0]] % degree == 0)]
        ways.append(
            [dict(zip(layers, its, strict=True)) for its in combinations_with_replacement(possible, len(layers))]
        )
    if math.prod(map(len, ways)) > _MOST_TRIED:
        return None

    def of_rank(way: Mapping[str, int], degree: int) -> Counter[Shape]:
        """Return what one rank has of the layers that are dealt to a degree."""
        found: Counter[Shape] = Counter()
        for layer in (layer for layer, dealt in way.items() if dealt == degree):
            found.update({shape: number // degree for shape, number in shapes[layer].items()})
        return found

    every = (dict(ChainMap(*chosen)) for chosen in product(*ways))
    found = [way for way in every if all(is_of(of_rank(way, degree)) for degree, is_of in held.items())]
    if len(found) != 1:
        return None
    # Layers that are alike are told apart by nothing: all of them have to be of one degree.
    certain = all(len({found[0][layer] for layer in layers}) == 1 for layers in alike.values())
    return {layer: degree for layer, degree in found[0].items() if degree != UNTRAINED} if certain else None
