"""Whose state each number of an optimizer is: names that every reading of the files gives, and no others.

The Trainer numbers parameters by its groups, decayed and not, each in the model's order; other programs mostly have one
group, or groups of their own. A torch file has the model's order. One of safetensors has its tensors sorted by type and
name, so that only its shards, the numbers of modules, and what is known of the model's type (`architectures`) tell of
an order; the shapes of the optimizer's state decide the rest, or leave several readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zckpt.errors import UsageError
from zckpt.formats.torch_files.optimizer import deduce_names
from zckpt.formats.torch_files.state_dicts import OptimizerState
from zckpt.formats.transformers_trainer.architectures import Architecture
from zckpt.formats.transformers_trainer.decay import group_of
from zckpt.formats.transformers_trainer.modules import Search, TooManyOrdersError
from zckpt.state.names import aligned

Shape = tuple[int, ...]

PEFT_FRONT = "base_model.model."

MAGNITUDE = "lora_magnitude_vector"
"""Of DoRA: a module with one weight, which its name in a file does not show."""

UNTRAINED = ("running_mean", "running_var", "inv_freq")
"""Last parts of names of tensors that are no parameters, whatever their type."""

ROW, COLUMN = "exp_avg_sq_row", "exp_avg_sq_col"
"""Slots of Adafactor: the shape of the parameter without its last dimension, and without the one before."""


@dataclass(slots=True)
class Weights:
    """What a model's files tell of its parameters.

    Parameters
    ----------
    shapes : dict of str to tuple
        Of all that an optimizer may have, as the files have them.
    places : dict of str to int
        Of two with a place, that with the smaller one comes first in the model.
    is_ordered : bool
        Whether `shapes` are in the model's order.
    known : Architecture
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    is_ordered: bool = False
    known: Architecture = field(default_factory=Architecture)


def shape_of(optimizer: OptimizerState, number: int) -> Shape | None:
    """Return the shape of a parameter as its state shows it; None if it has none."""
    tensors = optimizer.tensors(number)
    if ROW in tensors and COLUMN in tensors:
        return (*tensors[ROW].shape, *tensors[COLUMN].shape[-1:])
    shapes = [one.shape for key, one in tensors.items() if key not in ("step", "RMS")]
    return max(shapes, key=lambda shape: (len(shape), shape), default=None)


def read_names(
    optimizer: OptimizerState, weights: Weights, names: Sequence[str] | None = None, *, path: str = ""
) -> dict[int, str]:
    """Return the names that are certain, by number.

    Parameters
    ----------
    optimizer : OptimizerState
    weights : Weights
    names : sequence of str, optional
        From the user: in the optimizer's order, or those of all of the model in its order.
    path : str
        Of the optimizer's file.

    Raises
    ------
    UsageError
        `names` fit in neither way.
    """
    reading = _Reading(optimizer, weights)
    given = names if names is not None else reading.recorded()
    if given is not None:
        found = reading.given(_as_filed(given, weights.shapes))
        if names is not None and len(found) < len(reading.numbers):
            raise UsageError(
                "the names do not fit the optimizer",
                path=path,
                expected=f"{len(reading.numbers)} names in its order, or all of the model's in the model's order",
                found=f"{len(names)} names, {len(set(names) & set(weights.shapes))} of the model's",
            )
        if found:
            return found
    order = [*weights.shapes] if weights.is_ordered else None
    return reading.in_order(order) if order is not None else reading.in_any_order()


def _as_filed(names: Sequence[str], shapes: Mapping[str, Shape]) -> list[str]:
    """Return names as the model's files have them, whatever wrappers they have been in, PEFT's own among them."""
    plain = {name: _without_adapter(name) if name not in shapes else name for name in names}
    known = aligned(shapes, plain.values())
    return [known.get(plain[name], plain[name]) for name in names]


def _without_adapter(name: str) -> str:
    """Return PEFT's name for a parameter as its files have it: without that of the adapter."""
    parts = name.split(".")
    found: list[str] = []
    skip = False
    for at, part in enumerate(parts):
        if skip:
            skip = False
        elif part == "modules_to_save":
            skip = True
        else:
            found.append(part)
            skip = part.startswith("lora_") and at + 1 < len(parts) and parts[at + 1] not in ("weight", "bias")
    return ".".join(found).replace(f"{MAGNITUDE}.weight", MAGNITUDE)


class _Reading:
    """One optimizer and one model."""

    def __init__(self, optimizer: OptimizerState, weights: Weights) -> None:
        self.groups = optimizer.numbers
        self.numbers = optimizer.every_number
        self.optimizer = optimizer
        self.weights = weights
        self.shape = {number: shape_of(optimizer, number) for number in self.numbers}
        fewer = {n: s for n, s in weights.shapes.items() if n.rpartition(".")[2] not in UNTRAINED}
        self.candidates = weights.shapes if len(weights.shapes) == len(self.numbers) else fewer

    def recorded(self) -> list[str] | None:
        """Return the names in the optimizer's own file, if it has all."""
        found = self.optimizer.recorded_names
        return found if found and len(found) == len(self.numbers) else None

    def fits(self, number: int, name: str) -> bool:
        """Tell whether a parameter may have some state."""
        shape = self.shape[number]
        return shape is None or shape == self.candidates[name]

    def given(self, names: Sequence[str]) -> dict[int, str]:
        """Return the reading of names that someone gave; empty if they do not fit."""
        if len(names) == len(self.numbers) == len(set(names)) and set(names) <= self.candidates.keys():
            found = dict(zip(self.numbers, names, strict=True))
            if all(self.fits(number, name) for number, name in found.items()):
                return found
        order = [name for name in dict.fromkeys(names) if name in self.candidates]
        return self.in_order(order) if len(order) == len(self.candidates) else {}

    def in_order(self, order: Sequence[str]) -> dict[int, str]:
        """Return what is certain where the model's order is known."""
        order = [name for name in order if name in self.candidates]
        group_of_name = self._partition()
        if group_of_name is not None:
            members = [[name for name in order if group_of_name[name] == at] for at in range(len(self.groups))]
            if [len(one) for one in members] == [len(one) for one in self.groups]:
                pairs = [pair for g, m in zip(self.groups, members, strict=True) for pair in zip(g, m, strict=True)]
                if all(self.fits(number, name) for number, name in pairs):
                    return dict(pairs)
        return deduce_names(self.groups, order, self.fits, sorted_too=False)

    def in_any_order(self) -> dict[int, str]:
        """Return what is certain whatever order the model has that is known to be possible."""
        try:
            found = self._searched(self.weights.known) or self._searched(Architecture())
            if not found and self.weights.places:
                self.weights = replace(self.weights, places={})
                return self.in_any_order()
            if found or len(self.candidates) == len(self.numbers):
                return found
            order = only_order(self.candidates, self.weights)
        except TooManyOrdersError:
            return {}
        return self.in_order(order) if order is not None else {}

    def _searched(self, known: Architecture) -> dict[int, str]:
        group_of_name = self._partition()
        if group_of_name is None or len(self.candidates) != len(self.numbers):
            return {}
        counts = [list(group_of_name.values()).count(at) for at in range(len(self.groups))]
        if counts != [len(one) for one in self.groups]:
            return {}

        longer = {shortened(name): name for name in group_of_name}

        def fits(name: str, group: int, position: int) -> bool:
            return self.fits(self.groups[group][position], longer[name])

        groups = {shortened(name): group for name, group in group_of_name.items()}
        places = _places(self.candidates, self.weights)
        possible = Search(groups, fits, len(counts), places, known.order).possible()
        return {
            self.groups[group][position]: longer[next(iter(names))]
            for (group, position), names in possible.items()
            if len(names) == 1
        }

    def _partition(self) -> dict[str, int] | None:
        """Return the param group of each candidate, by shapes and else by the Trainer's rule; None if neither tells."""
        shapes = [{self.shape[number] for number in group} for group in self.groups]
        found: dict[str, int] = {}
        for name, shape in self.candidates.items():
            groups = [at for at, own in enumerate(shapes) if shape in own or None in own]
            if len(groups) > 1 and len(self.groups) == 2:
                groups = [group_of(shortened(name), self.weights.known)]
            if len(groups) != 1:
                return None
            found[name] = groups[0]
        return found


def model_order(weights: Weights) -> list[str]:
    """Return all parameters in the model's order, if what is known leaves only one; otherwise nothing."""
    try:
        return only_order(weights.shapes, weights) or []
    except TooManyOrdersError:
        return []


def only_order(candidates: Iterable[str], weights: Weights) -> list[str] | None:
    """Return the order of some of a model's parameters if what is known leaves only one."""
    if weights.is_ordered:
        return list(candidates)
    longer = {shortened(name): name for name in candidates}
    places = _places(longer.values(), weights)
    search = Search(dict.fromkeys(longer, 0), lambda *_: True, 1, places, weights.known.order)
    possible = search.possible()
    if not possible or any(len(names) > 1 for names in possible.values()):
        return None
    return [longer[next(iter(possible[0, position]))] for position in range(len(longer))]


def _places(candidates: Iterable[str], weights: Weights) -> dict[str, int]:
    return {shortened(name): weights.places[name] for name in candidates if name in weights.places}


def shortened(name: str) -> str:
    """Return the name that a parameter has in the model that PEFT has added to, apart from the adapter's."""
    name = name.removeprefix(PEFT_FRONT)
    return f"{name}.weight" if name.endswith(f".{MAGNITUDE}") else name
