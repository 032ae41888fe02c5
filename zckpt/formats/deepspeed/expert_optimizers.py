"""The optimizers of experts without ZeRO: each expert rank has a file of its own, with all that its optimizer has.

expp_rank_E_mp_rank_MM_optim_states.pt   {optimizer: a plain one, or one with masters, see `stage0`, `stage0_flat`}

    param_groups   dense ones, alike on all ranks, and of experts (`moe`, name `ep_size_N`), in the model's order
    expert number  global: e x (experts per rank) + local; a rank's optimizer has its own experts only

Layers may be spread over different numbers of ranks, each in groups of its own. There is a file for each of the most
ranks, by the first rank that has those experts; of layers over fewer it has what that rank has (`expert_ranks`). Which
layers are over how many, their numbers and shapes tell, or else the values. Groups of different degrees come in an
order that is each process's own (DeepSpeed goes through a set of names), so that they are matched by what they say.

Source: DeepSpeed 0.14 to 0.19, `_save_moe_checkpoint`, `split_params_into_different_moe_groups_for_optimizer`.

Which layers of experts are spread over how many ranks, where an optimizer numbers its parameters.

Its groups say their degree, and not whose experts they have. If a layer is of degree N, a rank has an Nth of its
experts; so many of its parameters are in the groups of that degree, and nothing else is.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from math import prod

from zckpt.codes import MISSING_FILE, STEPS_DIFFER
from zckpt.errors import DamagedFileError, ShardError, UnsupportedError, listed
from zckpt.evidence import NAMES_OF_RANK_ADVICE
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
from zckpt.formats.deepspeed.stage0 import keep_other_state, mark_frozen, of_content, rounds_to_weight
from zckpt.formats.deepspeed.stage0_flat import FLAT_KEY, certain_flat
from zckpt.formats.deepspeed.values import copies_of
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, parse
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, ParamGroup
from zckpt.torchfile import Tensor, TorchFile


def attach_experts(checkpoint: Checkpoint, files: Files, model: ModelShard, names: Sequence[str] | None) -> None:
    """Give a checkpoint without ZeRO the optimizers of its expert ranks.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already, experts under their global numbers.
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
    first = _Optimizer(checkpoint, 0, content_of(files[0][1]), files[0][1])
    ranks = [shard.dp_rank or 0 for shard, _ in files]
    expected = max(first.degrees.values(), default=max(ranks) + 1)
    layers = first.layers(names)
    if len(layers) < len(experts_per_rank(checkpoint.parameters)):  # of more ranks are layers that are not trained
        expected = max(expected, len(ranks))
    if len(ranks) != expected or ranks != list(range(expected)):  # a file name may have any number
        raise ShardError(
            "optimizer files of expert ranks are missing, or too many",
            expected=f"{expected} ranks",
            found=", ".join(map(str, ranks)),
            code=MISSING_FILE,
        )
    placement = Placement(math.lcm(expected, *first.degrees.values()), is_data_first(model))
    writers = [placement.rank(rank, 0, expected) for rank in ranks]
    found = [first]
    for rank, (_, file) in enumerate(files[1:], 1):
        found.append(_Optimizer(checkpoint, rank, content_of(file), file, like=first))
    own = model.optimizer
    copies = [_Optimizer(checkpoint, 0, own, model.file, like=first)] if own is not None else []
    for one in (*found, *copies):
        one.name(
            layers,
            {degree: placement.expert_rank(writers[one.rank], degree) for degree in (expected, *layers.values())},
            names,
        )
    for one in found[1:]:
        if one.settings != first.settings:
            raise ShardError(
                f"expert rank {one.rank} is from another step or run: its param groups differ",
                path=one.file.path,
                code=STEPS_DIFFER,
                ranks=[one.rank],
            )
    # Of each expert rank of a degree the first file that has its experts; the others have copies.
    having = {
        degree: [
            next(one for one in found if placement.expert_rank(writers[one.rank], degree) == rank)
            for rank in range(degree)
        ]
        for degree in first.degrees.values()
    }
    for index, group in enumerate(first.groups):
        of_group = having[first.degrees[index]] if index in first.degrees else found[:1]
        for one in of_group:
            one.give(index)
        members = [name for one in of_group for name in one.groups[index].parameters]
        checkpoint.param_groups.append(ParamGroup(group.hyperparameters, members, group.state))
    first.give_unnamed()
    for one in (*found[1:], *copies):
        checkpoint.duplicates += one.copies()
    checkpoint.topology = replace(checkpoint.topology, ep=len(files))
    keep_other_state(checkpoint, first.content, first.file)
    mark_frozen(checkpoint)


def content_of(file: TorchFile) -> dict[object, object]:
    """Return the optimizer of an expert rank's file."""
    content = file.root.get("optimizer") if isinstance(file.root, dict) else None
    if not isinstance(content, dict):
        raise DamagedFileError(
            "unexpected content", path=file.path, expected="an optimizer's state dict", found=type(content).__name__
        )
    return content


class _Optimizer:
    """What the optimizer of one expert rank has, by name."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rank: int,
        content: dict[object, object],
        file: TorchFile,
        *,
        like: _Optimizer | None = None,
    ) -> None:
        self.checkpoint, self.rank, self.content, self.file = checkpoint, rank, content, file
        self.flats: list[object] | None = None
        if FLAT_KEY in content:
            flats = content[FLAT_KEY]
            self.flats = list(flats) if isinstance(flats, (list, tuple)) else []
            self.state = parse(content.get("optimizer_state_dict"), file.path)
            if [len(numbers) for numbers in self.state.numbers] != [1] * len(self.flats):
                raise DamagedFileError("flat masters and param groups disagree", path=file.path,
                                       expected=f"{len(self.flats)} groups of one tensor")  # fmt: skip
        else:
            self.state = of_content(content, file.path)
        self.order = list(range(len(self.state.groups))) if like is None else self._order(like)
        self.degrees = {at: self._degree(i) for at, i in enumerate(self.order) if self._is_of_experts(i)}
        self.parts: list[Checkpoint] = []
        self.groups: list[ParamGroup] = []

    def _order(self, like: _Optimizer) -> list[int]:
        """Return the numbers of the groups in the order in which another rank has the same ones."""
        found = order_like(like.state.groups, self.state.groups)
        return list(range(len(self.state.groups))) if found is None else found  # the settings then tell

    def _is_of_experts(self, index: int) -> bool:
        return self.state.groups[index].get("moe") is True

    def _degree(self, index: int) -> int:
        """Return over how many ranks the experts of a group are spread."""
        group = self.state.groups[index]
        if f"ep_size_{named_degree(ParamGroup(group, []))}" != group.get("name"):
            raise UnsupportedError(
                "a param group of experts that does not say over how many ranks they are spread",
                path=self.file.path,
                expected="the name that DeepSpeed gives it, ep_size_N",
                found=str(group.get("name"))[:80],
            )
        return named_degree(ParamGroup(group, []))

    def layers(self, names: Sequence[str] | None) -> dict[str, int]:
        """Return over how many ranks each layer's experts are spread, of the first rank's optimizer.

        Raises
        ------
        UnsupportedError
            That is not certain.
        """
        degrees = sorted(set(self.degrees.values()))
        totals = experts_per_rank(self.checkpoint.parameters)
        held = {degree: self._held(degree) for degree in degrees}
        found = degrees_of_layers(self.checkpoint.parameters, totals, held)
        if found is not None or not degrees:
            return found or {}
        if len(degrees) == 1:
            return dict.fromkeys(totals, degrees[0])
        numbers = [n for i in self.order for n in self.state.numbers[i]]
        if names is not None and self.flats is None and len(names) == len(numbers):
            of_number = {n: self.degrees.get(at) for at, i in enumerate(self.order) for n in self.state.numbers[i]}
            given = dict(zip(self.state.every_number, names, strict=True))
            return {layer_of(name): of_number[n] or 1 for n, name in given.items() if is_expert(name)}
        found = self._by_value(totals, degrees)
        if found is None:
            raise UnsupportedError(
                f"experts spread over {listed([str(d) for d in degrees])} ranks, and which layer's are over how many "
                f"is not certain",
                path=self.file.path,
                advice=NAMES_OF_RANK_ADVICE,
            )
        return found

    def _held(self, degree: int) -> Held:
        """Return what there is of a degree: shapes, or elements of flat masters, or else how many parameters."""
        groups = [i for at, i in enumerate(self.order) if self.degrees.get(at) == degree]
        if self.flats is not None:
            flats = [self.flats[i] for i in groups]
            return Held(numel=sum(flat.numel for flat in flats if isinstance(flat, Tensor)))
        shapes = [self.state.shape(n) for i in groups for n in self.state.numbers[i]]
        known = [shape for shape in shapes if shape is not None]
        return Held(shapes=Counter(known)) if len(known) == len(shapes) else Held(count=len(shapes))

    def _by_value(self, totals: Mapping[str, int], degrees: Sequence[int]) -> dict[str, int] | None:
        """Return the degree of each layer by what its masters round to; None where that is not certain."""
        found: dict[str, int] = {}
        for degree in degrees if self.flats is not None or self.state.masters else ():
            places = [at for at in self.degrees if self.degrees[at] == degree]
            could = {layer: degree for layer, total in totals.items() if total % degree == 0}
            part = self._part(places, self._local(could, dict.fromkeys(degrees, 0)), None)
            named = {layer_of(name) for group in part.param_groups for name in group.parameters if is_expert(name)}
            if part.unnamed or named & found.keys():
                return None
            found |= dict.fromkeys(named, degree)
        return found or None

    def _local(self, layers: Mapping[str, int], ranks: Mapping[int, int]) -> list[str]:
        """Return the names of the experts that a rank has, given its expert rank of each degree."""
        every = [name for name, p in self.checkpoint.parameters.items() if p.tied_to is None and is_expert(name)]
        return local_experts(every, layers, ranks)

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
        owners = [name for name, p in self.checkpoint.parameters.items() if p.tied_to is None and not is_expert(name)]
        for degree in (None, *dict.fromkeys(self.degrees.values())):
            places = [at for at in range(len(self.order)) if self.degrees.get(at) == degree]
            own = {layer: of for layer, of in layers.items() if of == degree}
            known = owners if degree is None else self._local(own, ranks)
            part = self._part(places, known, given or None)
            if degree is not None and part.unnamed:
                raise UnsupportedError(
                    f"which expert's the optimizer's parameters {listed(list(part.unnamed))} are is not known",
                    path=self.file.path,
                    advice=NAMES_OF_RANK_ADVICE,
                )
            self.parts.append(part)
            groups |= dict(zip(places, part.param_groups, strict=True))
            part.unnamed = {n: replace(p, group=None if p.group is None else places[p.group])
                            for n, p in part.unnamed.items()}  # fmt: skip
        self.groups = [groups[at] for at in range(len(self.order))]

    def _part(self, places: Sequence[int], known: Sequence[str], given: Sequence[str] | None) -> Checkpoint:
        """Return some of the groups and their parameters as a checkpoint of their own, under the parameters' names."""
        own = Checkpoint(self.checkpoint.source, self.checkpoint.format)
        for name in known:
            whole = self.checkpoint.parameters[name]
            weight = {WEIGHT: whole.slots[WEIGHT]} if WEIGHT in whole.slots else {}
            own.parameters[name] = Parameter(name, whole.shape, whole.dtype, weight)
        by_name = not any(map(is_expert, known))  # of which "10" would come before "2"
        indices = [self.order[at] for at in places]
        state, path = self.state, self.file.path
        numbers = [n for i in indices for n in state.numbers[i]]
        chosen = set(numbers)
        some = OptimizerState(
            {n: one for n, one in state.state.items() if n in chosen},
            [state.groups[i] for i in indices],
            {n: master for n, master in state.masters.items() if n in chosen},
        )
        if self.flats is not None:
            mine = None if given is None else [name for name in given if name in own.parameters]
            held: dict[object, object] = {
                "optimizer_state_dict": {"state": some.state, "param_groups": some.groups},
                FLAT_KEY: [self.flats[i] for i in indices],
            }
            flat = certain_flat(own, held, path, mine, sorted_too=by_name)
            attach(own, flat.state, path, certain=flat.names)
        else:
            named = None if given is None else dict(zip(state.every_number, given, strict=False))
            mine = None if named is None else [named.get(n, "") for n in numbers]
            attach(own, some, path, names=mine, sample=rounds_to_weight(own, path, some), sorted_too=by_name)
        return own

    @property
    def settings(self) -> list[tuple[dict[str, object], dict[str, object]]]:
        """Hyperparameters and single values of each group."""
        return [(group.hyperparameters, group.state) for group in self.groups]

    def give(self, index: int) -> None:
        """Give the parameters of a group their slots."""
        for name in self.groups[index].parameters:
            found = next((part.parameters[name] for part in self.parts if name in part.parameters), None)
            if found is not None:
                owner = self.checkpoint.parameters[name]
                owner.slots = {**owner.slots, **found.slots}
                owner.group, owner.state = index, found.state

    def give_unnamed(self) -> None:
        """Give the checkpoint what has no name."""
        for part in self.parts:
            self.checkpoint.unnamed |= part.unnamed
            self.checkpoint.warnings += part.warnings

    def copies(self) -> list[Duplicate]:
        """Return what this rank has of parameters that are read from another's file."""
        found: list[Duplicate] = []
        for name, parameter in ((n, p) for part in self.parts for n, p in part.parameters.items()):
            held = {key: slot for key, slot in parameter.slots.items() if key != WEIGHT}
            found += copies_of(name, held, self.checkpoint.parameters[name].slots, self.rank)
        return found


_MOST_TRIED = 4096
"""Ways to deal layers to degrees that are looked at; where there are more, shapes do not tell."""

UNTRAINED = 0
"""Degree of layers that an optimizer does not have."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank's optimizer has of a degree: its parameters' shapes, or their elements, or their number."""

    shapes: Counter[Shape] | None = None
    numel: int | None = None
    count: int | None = None

    def is_of(self, shapes: Counter[Shape]) -> bool:
        """Tell whether it may be parameters of these shapes."""
        if self.shapes is not None:
            return self.shapes == shapes
        if self.numel is not None:
            return self.numel == sum(prod(shape) * number for shape, number in shapes.items())
        return self.count == shapes.total()


def degrees_of_layers(
    parameters: Mapping[str, Parameter], totals: Mapping[str, int], held: Mapping[int, Held]
) -> dict[str, int] | None:
    """Return the degree of each layer that is trained; None where shapes and numbers do not tell.

    Parameters
    ----------
    totals : mapping of str to int
        Experts of each layer.
    held : mapping of int to Held
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
    if prod(map(len, ways)) > _MOST_TRIED:
        return None
    found = [way for chosen in product(*ways) if _is_so(way := dict(ChainMap(*chosen)), shapes, held)]
    if len(found) != 1:
        return None
    # Layers that are alike are told apart by nothing: all of them have to be of one degree.
    certain = all(len({found[0][layer] for layer in layers}) == 1 for layers in alike.values())
    return {layer: degree for layer, degree in found[0].items() if degree != UNTRAINED} if certain else None


def _is_so(way: Mapping[str, int], shapes: Mapping[str, Counter[Shape]], held: Mapping[int, Held]) -> bool:
    """Tell whether the groups of each degree have just what one rank has of the layers dealt to it."""
    for degree, own in held.items():
        of_rank: Counter[Shape] = Counter()
        for layer in (layer for layer, dealt in way.items() if dealt == degree):
            of_rank.update({shape: number // degree for shape, number in shapes[layer].items()})
        if not own.is_of(of_rank):
            return False
    return True
