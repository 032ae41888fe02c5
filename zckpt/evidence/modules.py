"""In which orders a model may have its parameters, where no file says it.

`named_parameters()` goes through the modules from the root: the parameters of a module come first, then its children,
each as a whole, those of a list by their numbers. So the order of all parameters is one of siblings in each module.
What is known of that, and the shapes of an optimizer's state, leaves one order, or several. `possible` finds which
state each parameter may have in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cache

from zckpt.immutable import immutable, mutable
from zckpt.state import positions
from zckpt.state.names import is_number

MOST_DEPTH = 64
"""Of modules within modules; names of more are not searched."""

MOST_SIBLINGS = 2048
"""In one module; more are not searched: each is held against each."""

MOST_ORDERS = 4096
"""Of sets of siblings that may come first, in one module; more are not searched."""

Offsets = tuple[int, ...]
"""How many parameters of each param group come before."""


NOWHERE = 1 << 62, -1
"""The reach of what has no place."""


class TooManyOrdersError(Exception):
    """More orders than are looked through."""


@mutable(eq=False)
class Module:
    """A module: its parameters and modules by name, as yet in no order."""

    path: str  # from the root, with `*` for numbers
    own: dict[str, str] = field(default_factory=dict)  # the whole names of its parameters
    children: dict[str, Module] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)  # parameters in it, by param group
    reach: tuple[int, int] = NOWHERE
    """The first and the last place that a file has for one of them; the first is larger where none is known."""


Siblings = Callable[[str, Sequence[str]], Sequence[str]]
"""Those of a module's siblings whose order is known, in that order, by the module's path."""


def tree_of(group_of: Mapping[str, int], places: Mapping[str, int]) -> Module:
    """Return the root of the modules that have some parameters.

    `group_of`: the param group of each parameter; `places`: where a file has them: of two parameters with places, that
    with the smaller one comes first.
    """
    empty = [0] * (1 + max(group_of.values(), default=-1))
    root = Module("", widths=[*empty])
    for name, group in group_of.items():
        *above, last = name.split(".")
        if len(above) > MOST_DEPTH:
            raise TooManyOrdersError
        here = root
        path: list[str] = []
        for step in ["", *above]:
            if step or here is not root:
                path.append("*" if step.isdecimal() else step)
                here = here.children.setdefault(step, Module(".".join(path), widths=[*empty]))
            here.widths[group] += 1
            if name in places:
                here.reach = min(here.reach[0], places[name]), max(here.reach[1], places[name])
        here.own[last] = name
    return root


@immutable
class _Item:
    """A parameter or a module among its siblings."""

    of: str | Module
    widths: Offsets
    before: int
    """The siblings that come before it in every order, as bits."""


def possible(
    group_of: Mapping[str, int],
    fits: Callable[[str, int, int], bool],
    places: Mapping[str, int],
    siblings: Siblings,
) -> dict[tuple[int, int], set[str]]:
    """Return the parameters that each number may be, by its group and its position in it; empty if no order fits.

    Parameters
    ----------
    group_of, places : mapping of str to int
        As for `tree_of`.
    fits : callable
        Tells whether a parameter may have the state of a param group's n-th one: (name, group, n).
    siblings : callable

    Raises
    ------
    TooManyOrdersError
    """
    items_of = cache(lambda module: _with_order(module, group_of, places, siblings))

    @cache
    def orders(module: Module, offsets: Offsets) -> list[tuple[_Item, Offsets]] | None:
        """Return which siblings may come where in a module, in some order that fits as a whole; None if none does."""

        def may_stand(item: _Item, at: Offsets) -> bool:
            if isinstance(item.of, Module):
                return orders(item.of, at) is not None
            group = group_of[item.of]
            return fits(item.of, group, at[group])

        return _arranged(items_of(module), offsets, may_stand)

    root = tree_of(group_of, places)
    start = (root, tuple(0 for _ in root.widths))
    found: dict[tuple[int, int], set[str]] = {}
    waiting, seen = [start], {start}
    while waiting:
        for item, at in orders(*waiting.pop()) or ():
            if isinstance(item.of, str):
                group = group_of[item.of]
                found.setdefault((group, at[group]), set()).add(item.of)
            elif (item.of, at) not in seen:
                seen.add((item.of, at))
                waiting.append((item.of, at))
    return found


def _arranged(
    items: Sequence[_Item], offsets: Offsets, may_stand: Callable[[_Item, Offsets], bool]
) -> list[tuple[_Item, Offsets]] | None:
    whole = (1 << len(items)) - 1
    at = {0: offsets}
    edges: list[tuple[int, int, int]] = []
    level = [0]
    while level:
        following: dict[int, None] = {}
        for done in level:
            for number, item in enumerate(items):
                is_next = not done >> number & 1 and not item.before & ~done
                if is_next and may_stand(item, at[done]):
                    after = done | 1 << number
                    edges.append((done, after, number))
                    following[after] = None
                    at[after] = tuple(map(sum, zip(at[done], item.widths, strict=True)))
        if len(at) > MOST_ORDERS:
            raise TooManyOrdersError
        level = list(following)
    if whole not in at:
        return None
    useful, found = {whole}, []
    for done, after, number in reversed(edges):  # an edge comes after all that lead to it
        if after in useful:
            useful.add(done)
            found.append((items[number], at[done]))
    return found


def _with_order(
    module: Module, group_of: Mapping[str, int], places: Mapping[str, int], siblings: Siblings
) -> list[_Item]:
    """Return what is in a module, with what has to come before it."""
    if len(module.own) + len(module.children) > MOST_SIBLINGS:
        raise TooManyOrdersError
    names = [*module.own, *module.children]
    reaches = [(places[one],) * 2 if one in places else NOWHERE for one in module.own.values()]
    reaches += [child.reach for child in module.children.values()]
    known = positions(siblings(module.path, names))
    own = len(module.own)
    found = []
    for i, name in enumerate(names):
        before = 0
        for j, other in enumerate(names):
            is_before = (j < own <= i) or (is_number(other) and is_number(name) and int(other) < int(name))
            is_before = is_before or (other in known and name in known and known[other] < known[name])
            (first, last), end = reaches[j], reaches[i][1]  # it cannot be after this one as a whole
            is_before = is_before or (i != j and last >= 0 and end >= 0 and first < end)
            before |= is_before << j
        if i < own:
            whole = module.own[name]
            widths = tuple(int(group_of[whole] == group) for group in range(len(module.widths)))
            found.append(_Item(whole, widths, before))
        else:
            child = module.children[name]
            found.append(_Item(child, tuple(child.widths), before))
    return found
