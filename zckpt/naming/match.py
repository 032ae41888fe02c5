"""Which rules of a map the names of a checkpoint follow, and from which of its sides to the other. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.naming.document import Map, Rule, Template
from zckpt.naming.sizes import Tensor


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


def fit(map_: Map, shapes: Mapping[str, tuple[int, ...]], path: str) -> Fit:
    """Return how names follow a map_.

    Parameters
    ----------
    map_ : Map
    shapes : mapping of str to tuple of int
        Of all tensors, by name.
    path : str
        For messages.

    Raises
    ------
    UsageError
        They follow neither side, or both.
    UnsupportedError
        There are tensors for which the other side has no place.
    """
    found = []
    misses: list[tuple[int, int, list[str]]] = []
    for side in (0, 1):
        instances, ignored, left = _instances(map_, shapes, side)
        if instances and not left:
            found.append(Fit(side, 1 - side, instances, ignored))
        misses.append((len(left), side, left))
    if len(found) == 2:
        raise UsageError(f"{map_.name}: the names are those of both {map_.sides[0]} and {map_.sides[1]}", path=path)
    if not found:
        _, side, left = min(misses)
        _refuse_known(map_, side, left, path)
        raise UsageError(
            f"the map {map_.name} has no rule for {listed(left)}",
            path=path,
            expected=f"the names of {map_.sides[0]} or {map_.sides[1]}, all parts of a tensor included",
            found=f"{len(left)} of {len(shapes)} that are none of {map_.sides[side]}",
            advice="--strip-prefix and --rename come before the map; or write a map of your own",
        )
    return found[0]


def _refuse_known(map_: Map, side: int, left: Sequence[str], path: str) -> None:
    """Raise UnsupportedError if all that no rule has are tensors for which the other side is known to have no place."""
    known = {name: why for name in left for one, why in map_.refused[side] if one.pattern.fullmatch(name)}
    if left and len(known) == len(left):
        raise UnsupportedError(
            f"{map_.name}: {listed(left)}: {next(iter(known.values()))}",
            path=path,
            advice=f"a map of your own, like {map_.name}, with these in `ignored` leaves them out",
        )


def _instances(
    map_: Map,
    shapes: Mapping[str, tuple[int, ...]],
    side: int,
) -> tuple[list[Instance], list[str], list[str]]:
    """Return the instances of rules, names that are ignored, and names that nothing is said of."""
    found: list[Instance] = []
    left = dict.fromkeys(shapes)
    for rule in map_.rules:
        for instance in of_rule(rule, rule.sides[side], left, shapes):
            if not all(one.name(instance.shared) in shapes for one in rule.beside[side]):
                continue
            found.append(instance)
            for one in instance.sources:
                del left[one.name]
    ignored = [name for name in left if any(one.pattern.fullmatch(name) for one in map_.ignored[side])]
    return found, ignored, [name for name in left if name not in ignored]


def of_rule(
    rule: Rule, templates: Sequence[Template], names: Mapping[str, None], shapes: Mapping[str, tuple[int, ...]]
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
