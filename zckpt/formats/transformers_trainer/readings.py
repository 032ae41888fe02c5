"""Whose state each number of an optimizer is: names that every reading of the files gives, and no others.

The Trainer numbers parameters by its groups, decayed and not, each in the model's order; other programs mostly have one
group, or groups of their own. A torch file has the model's order. One of safetensors has its tensors sorted by type and
name, so that only its shards, the numbers of modules, and what is known of the model's type (`architectures`) tell of
an order; the shapes of the optimizer's state decide the rest, or leave several readings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import field, replace

from zckpt.errors import UsageError
from zckpt.evidence import Evidence, in_order
from zckpt.evidence.modules import TooManyOrdersError, possible
from zckpt.formats.torch_files.optimizer import OptimizerState
from zckpt.formats.transformers_trainer.architectures import Architecture
from zckpt.immutable import mutable
from zckpt.state import GivenNames, Shape
from zckpt.state.names import MAGNITUDE, PEFT

UNTRAINED = ("running_mean", "running_var", "inv_freq")
"""Last parts of names of tensors that are no parameters, whatever their type."""


DECAYED, UNDECAYED = 0, 1
"""The Trainer's param groups."""

BY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

BIASES = re.compile("bias")
"""Of what no weight decay is said where the Trainer does not know the class of a model's norms: see `group_of`."""


def group_of(name: str, known: Architecture, undecayed: re.Pattern[str] = BY_NAME) -> int:
    """Return the Trainer's param group of a parameter, under its name in the model apart from an adapter's.

    Not decayed are those whose names say that they are a bias or of a norm, and all of a `torch.nn.LayerNorm`
    (`Trainer.get_decay_parameter_names`). Up to transformers 4.48 at least, norms went by their class: those of a class
    that was not listed, as of Qwen2, are decayed.
    """
    name = shortened(name)
    module = name.rpartition(".")[0].rpartition(".")[2]
    return UNDECAYED if undecayed.search(name.lower()) or module in known.layer_norms else DECAYED


@mutable
class Weights:
    """What a model's files tell of its parameters."""

    shapes: dict[str, Shape] = field(default_factory=dict)  # of all that an optimizer may have, as the files have them
    places: dict[str, int] = field(default_factory=dict)
    """Of two with a place, that with the smaller one comes first in the model."""
    is_ordered: bool = False  # whether `shapes` are in the model's order
    known: Architecture = field(default_factory=Architecture)
    is_converted: bool = False
    """Whether the model may have other names, and other tensors, in memory: then these tell nothing of its order."""


def read_names(optimizer: OptimizerState, weights: Weights, names: GivenNames = None) -> dict[int, str]:
    """Return the names that are certain, by number.

    `names`: from the user: in the optimizer's order, or those of all of the model in its order. Raises UsageError: they
    fit in neither way.
    """
    numbers = optimizer.every_number
    fewer = {n: shape for n, shape in weights.shapes.items() if n.rpartition(".")[2] not in UNTRAINED}
    candidates = weights.shapes if len(weights.shapes) == len(numbers) else fewer
    said = Evidence(optimizer.numbers, candidates, optimizer.shapes(candidates.values()))
    given = names if names is not None else optimizer.recorded_names
    if names is not None or len(given) == len(numbers):
        order, found = said_by(given, said, weights)
        if names is not None and len(found) < len(numbers):
            if weights.is_converted and {*order} - {*candidates}:
                return {}  # those in memory, which a map may tell
            raise UsageError(
                "the names do not match the optimizer",
                expected=f"{len(numbers)} names in its order, or all of the model's in the model's order",
                found=f"{len(names)} names, {len(set(names) & set(weights.shapes))} of the model's",
            )
        if found:
            return found
    if weights.is_ordered:
        return names_in_order(said, [*candidates], weights)
    if weights.is_converted:
        return {}
    is_whole = len(candidates) == len(said.numbers)
    groups = _groups(said, weights.known) if is_whole else None
    try:  # what is certain whatever order the model has that is known to be possible
        for one in [weights, replace(weights, places={})] if weights.places else [weights]:
            for known in (weights.known, Architecture()):
                if groups is not None and (found := _searched(said, groups, one, known)):
                    return found
        order_of_all = None if is_whole else only_order(candidates, one)
    except TooManyOrdersError:
        order_of_all = None
    return names_in_order(said, order_of_all, weights) if order_of_all is not None else {}


def said_by(names: Sequence[str], said: Evidence[int], weights: Weights) -> tuple[list[str], dict[int, str]]:
    """Return names as the candidates have them, and what they tell in the optimizer's order, or all in the model's."""
    order = said.known(names)
    found = replace(said, factored=True).recorded(order)
    if not found and {*order} >= {*said.candidates}:
        found = names_in_order(said, [name for name in dict.fromkeys(order) if name in said.candidates], weights)
    return order, found


def names_in_order(said: Evidence[int], order: Sequence[str], weights: Weights) -> dict[int, str]:
    """Return what is certain where the model's order, that of some candidates, is known."""
    said = replace(said, candidates={name: said.candidates[name] for name in order})
    groups = _groups(said, weights.known)
    found = said.recorded([name for members in groups for name in members]) if groups is not None else {}
    return found or said.certain(in_order)


def _searched(
    said: Evidence[int], members: Sequence[Sequence[str]], weights: Weights, known: Architecture
) -> dict[int, str]:
    longer = {shortened(name): name for name in said.candidates}
    groups = {shortened(name): at for at, names in enumerate(members) for name in names}

    def fits(name: str, group: int, position: int) -> bool:
        return said.fits(said.groups[group][position], longer[name])

    places = {shortened(name): weights.places[name] for name in said.candidates if name in weights.places}
    return {
        said.groups[group][position]: longer[next(iter(names))]
        for (group, position), names in possible(groups, fits, places, known.order).items()
        if len(names) == 1
    }


def _groups(said: Evidence[int], known: Architecture) -> list[list[str]] | None:
    """Return all candidates by param group, by shapes and else by the Trainer's rule; None if neither tells."""
    shapes = [{said.shapes[number] for number in group} for group in said.groups]
    for undecayed in (BY_NAME, BIASES):
        found: list[list[str]] = [[] for _ in shapes]
        by_rule, against_rule = False, False
        for name, shape in said.candidates.items():
            groups = [at for at, own in enumerate(shapes) if shape in own or None in own]
            ruled = [group_of(name, known, undecayed)] if len(shapes) == 2 else groups
            if len(groups) > 1:
                by_rule, groups = True, ruled
            if len(groups) != 1:
                return None
            against_rule |= groups != ruled
            found[groups[0]].append(name)
        if list(map(len, found)) == list(map(len, said.groups)) and not (by_rule and against_rule):
            return found
    return None


def model_order(weights: Weights) -> list[str]:
    """Return all parameters in the model's order, if what is known leaves only one; otherwise nothing."""
    try:
        return only_order(weights.shapes, weights) or []
    except TooManyOrdersError:
        return []


def only_order(candidates: Iterable[str], weights: Weights) -> list[str] | None:
    """Return the order of some of a model's parameters if what is known leaves only one."""
    names = list(candidates)
    if weights.is_ordered or weights.is_converted:
        return names if weights.is_ordered else None
    every = range(len(names))
    found = _searched(Evidence([every], dict.fromkeys(names, ())), [names], weights, weights.known)
    return [found[number] for number in every] if len(found) == len(names) and names else None


def shortened(name: str) -> str:
    """Return the name that a parameter has in the model that PEFT has added to, apart from the adapter's."""
    name = name.removeprefix(PEFT)
    return f"{name}.weight" if name.endswith(f".{MAGNITUDE}") else name
