"""Names for an optimizer's parameters, which `torch.optim` knows only by number. Pure.

Where a file has no names, they are deduced from what it does have: the model's tensors with their shapes, the
shapes of the optimizer's state, and the order of both. A name is given only where every reading of the file
gives the same one; a number stays a number otherwise, for a wrong name would be worse than none.

The readings considered: each param group lists its parameters in the model's order, or sorted by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Fits = Callable[[int, str], bool]
"""Whether the optimizer's parameter with this number can be the model's tensor with this name."""


def deduce_names(groups: Sequence[Sequence[int]], names: Sequence[str], fits: Fits) -> dict[int, str]:
    """Return the names that are certain, by the optimizer's number.

    Parameters
    ----------
    groups : sequence of sequence of int
        The numbers in each param group, in order.
    names : sequence of str
        The model's tensors that an optimizer could own, in the model's order.
    fits : callable
    """
    certain: dict[int, str] = {}
    while True:
        found = dict(certain)
        taken = set(certain.values())
        for group in groups:
            own = {certain[number] for number in group if number in certain}
            free = [name for name in names if name not in taken or name in own]
            found.update(_deduce_group(group, free, fits))
        if len(set(found.values())) < len(found):
            return _without_conflicts(found)
        if found == certain:
            return certain
        certain = found


def _without_conflicts(found: Mapping[int, str]) -> dict[int, str]:
    """Drop names that two groups both laid claim to."""
    counts = Counter(found.values())
    return {number: name for number, name in found.items() if counts[name] == 1}


def _deduce_group(group: Sequence[int], names: Sequence[str], fits: Fits) -> dict[int, str]:
    readings = []
    for order in (list(names), sorted(names)):
        earliest = _leftmost(group, order, fits)
        if earliest is None:
            continue
        backwards = _leftmost(group[::-1], order[::-1], fits) or []
        latest = [len(order) - 1 - at for at in backwards[::-1]]
        readings.append([order[a] if a == b else None for a, b in zip(earliest, latest, strict=True)])
    if not readings:
        return {}
    return {
        number: reading[0]
        for number, *reading in zip(group, *readings, strict=True)
        if reading[0] is not None and all(name == reading[0] for name in reading)
    }


def _leftmost(group: Sequence[int], order: Sequence[str], fits: Fits) -> list[int] | None:
    """Return the leftmost positions at which the group can be found in order, or None if it cannot."""
    found: list[int] = []
    at = 0
    for number in group:
        while at < len(order) and not fits(number, order[at]):
            at += 1
        if at == len(order):
            return None
        found.append(at)
        at += 1
    return found
