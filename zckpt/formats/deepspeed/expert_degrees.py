"""Which layers of experts are spread over how many ranks, where an optimizer numbers its parameters.

Its groups say their degree, and not whose experts they have. If a layer is of degree N, a rank has an Nth of its
experts; so many of its parameters are in the groups of that degree, and nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod

from zckpt.formats.deepspeed.experts import is_expert, layer_of
from zckpt.state import Parameter

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
    ways = [list(_ways(layers, totals[layers[0]], held)) for layers in alike.values()]
    if prod(map(len, ways)) > _MOST_TRIED:
        return None
    found = [way for way in _products(ways) if _is_so(way, shapes, held)]
    if len(found) != 1:
        return None
    # Layers that are alike are told apart by nothing: all of them have to be of one degree.
    certain = all(len({found[0][layer] for layer in layers}) == 1 for layers in alike.values())
    return {layer: degree for layer, degree in found[0].items() if degree != UNTRAINED} if certain else None


def _ways(layers: Sequence[str], total: int, degrees: Mapping[int, object]) -> Iterator[dict[str, int]]:
    """Yield how layers that are alike can be dealt to degrees, by how many each gets."""
    possible = [UNTRAINED, *(degree for degree in degrees if total % degree == 0)]
    for chosen in combinations_with_replacement(possible, len(layers)):
        yield dict(zip(layers, chosen, strict=True))


def _products(ways: Sequence[Sequence[Mapping[str, int]]]) -> Iterator[dict[str, int]]:
    if not ways:
        yield {}
        return
    for rest in _products(ways[1:]):
        for one in ways[0]:
            yield {**one, **rest}


def _is_so(way: Mapping[str, int], shapes: Mapping[str, Counter[Shape]], held: Mapping[int, Held]) -> bool:
    """Tell whether the groups of each degree have just what one rank has of the layers dealt to it."""
    for degree, own in held.items():
        of_rank: Counter[Shape] = Counter()
        for layer in (layer for layer, dealt in way.items() if dealt == degree):
            of_rank.update({shape: number // degree for shape, number in shapes[layer].items()})
        if not own.is_of(of_rank):
            return False
    return True
