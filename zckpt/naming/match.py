"""Which rules of a map the names of a checkpoint follow, and from which of its sides to the other. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.naming.document import Map, Rule, Template
from zckpt.naming.sizes import Tensor
from zckpt.state import Shape


@dataclass(frozen=True, slots=True)
class Instance:
    """A rule for one set of tensors.

    Parameters
    ----------
    rule : Rule
    sources : tuple of Tensor
    shared : dict of str to int
        The numbers that all their names have.
    """

    rule: Rule
    sources: tuple[Tensor, ...]
    shared: dict[str, int]


@dataclass(frozen=True, slots=True)
class Fit:
    """How the names of a checkpoint follow a map_.

    Parameters
    ----------
    source, target : int
        Sides of the map_.
    instances : list of Instance
    ignored : list of str
        Names that the other side needs not.
    """

    source: int
    target: int
    instances: list[Instance]
    ignored: list[str]


def fit(map_: Map, shapes: Mapping[str, Shape]) -> Fit:
    """Return how names follow a map, given the shapes of all tensors by name.

    Raises UsageError: they follow neither side, or both; UnsupportedError: for some the other side has no place.
    """
    found = []
    misses: list[tuple[int, int, list[str]]] = []
    for number, side in enumerate(map_.sides):
        instances: list[Instance] = []
        free = dict.fromkeys(shapes)
        for rule in map_.rules:
            for instance in of_rule(rule, rule.sides[number], free, shapes):
                if all(one.name(instance.shared) in shapes for one in rule.beside[number]):
                    instances.append(instance)
                    for one in instance.sources:
                        del free[one.name]
        ignored = [name for name in free if any(one.pattern.fullmatch(name) for one in side.ignored)]
        left = [name for name in free if name not in ignored]
        if instances and not left:
            found.append(Fit(number, 1 - number, instances, ignored))
        misses.append((len(left), number, left))
    first, second = (side.name for side in map_.sides)
    if len(found) == 2:
        raise UsageError(f"{map_.name}: the names are those of both {first} and {second}")
    if found:
        return found[0]
    _, number, left = min(misses)
    side = map_.sides[number]
    known = {name: why for name in left for one, why in side.refused.items() if one.pattern.fullmatch(name)}
    if left and len(known) == len(left):
        raise UnsupportedError(
            f"{map_.name}: {listed(left)}: {known[left[0]]}",
            advice=f"a map of your own, like {map_.name}, with these in `ignored` leaves them out",
        )
    raise UsageError(
        f"the map {map_.name} has no rule for {listed(left)}",
        expected=f"the names of {first} or {second}, all parts of a tensor included",
        found=f"{len(left)} of {len(shapes)} that are none of {side.name}",
        advice="--strip-prefix and --rename come before the map; or write a map of your own",
    )


def of_rule(
    rule: Rule, templates: Sequence[Template], names: Mapping[str, None], shapes: Mapping[str, Shape]
) -> list[Instance]:
    """Return the complete instances of a rule for templates of one of its sides, among names that are not taken yet."""
    shared = rule.shared
    met: dict[tuple[int, ...], list[Tensor]] = {}
    for template in templates:
        for name in names:
            indices = template.numbers(name)
            if indices is not None:
                key = tuple(indices[one] for one in shared)
                met.setdefault(key, []).append(Tensor(template, indices, name, shapes[name]))
    return [
        Instance(rule, tuple(tensors), dict(zip(shared, key, strict=True)))
        for key, tensors in met.items()
        if _is_complete(templates, shared, tensors)
    ]


def _is_complete(templates: Sequence[Template], shared: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    """Tell whether there is a tensor of each template for all numbers, from 0 on, of letters that are not shared."""
    counts: dict[str, int] = {}
    for one in tensors:
        for letter, number in one.indices.items():
            counts[letter] = max(counts.get(letter, 0), number + 1)
    for template in templates:
        letters = [letter for letter in template.indices if letter not in shared]
        own = {tuple(one.indices[letter] for letter in letters) for one in tensors if one.template is template}
        if len(own) != math.prod(counts.get(letter, 0) for letter in letters):
            return False
    return True
