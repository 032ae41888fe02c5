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

from zckpt.immutable import mutable
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
"""The reach of what has no place: it comes neither before nor after anything."""


class TooManyOrdersError(Exception):
    """More orders than are looked through."""


@mutable(eq=False)
class Module:
    """A module: its parameters and modules by name, as yet in no order; or a parameter, which has neither."""

    path: str  # from the root, with `*` for numbers; of a parameter, its whole name
    widths: list[int]  # parameters in it, by param group
    is_parameter: bool = False
    own: dict[str, Module] = field(default_factory=dict)  # its parameters
    children: dict[str, Module] = field(default_factory=dict)
    reach: tuple[int, int] = NOWHERE
    """The first and the last place that a file has for one of its parameters."""


Siblings = Callable[[str, Sequence[str]], Sequence[str]]
"""Those of a module's siblings whose order is known, in that order, by the module's path."""


def tree_of(group_of: Mapping[str, int], places: Mapping[str, int]) -> Module:
    """Return the root of the modules that have some parameters.

    `group_of`: the param group of each parameter; `places`: where a file has them: of two parameters with places, that
    with the smaller one comes first.
    """
    empty = [0] * (1 + max(group_of.values(), default=-1))
    root = Module("", [*empty])
    for name, group in group_of.items():
        *above, last = name.split(".")
        if len(above) > MOST_DEPTH:
            raise TooManyOrdersError
        way, path = [root], list[str]()
        for step in above:
            path.append("*" if step.isdecimal() else step)
            way.append(way[-1].children.setdefault(step, Module(".".join(path), [*empty])))
        parameter = way[-1].own[last] = Module(name, [*empty], is_parameter=True)
        for one in (*way, parameter):
            one.widths[group] += 1
            if name in places:
                one.reach = min(one.reach[0], places[name]), max(one.reach[1], places[name])
    return root


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
    ordered = cache(lambda module: _with_order(module, siblings))

    @cache
    def orders(one: Module, offsets: Offsets) -> list[tuple[Module, Offsets]] | None:
        """Return what may come where in a module, in some order that fits as a whole; None if none does."""
        if not one.is_parameter:
            return _arranged(ordered(one), offsets, orders)
        group = group_of[one.path]
        return [] if fits(one.path, group, offsets[group]) else None

    root = tree_of(group_of, places)
    start = (root, tuple(0 for _ in root.widths))
    found: dict[tuple[int, int], set[str]] = {}
    waiting, seen = [start], {start}
    while waiting:
        one, offsets = waiting.pop()
        if one.is_parameter:
            group = group_of[one.path]
            found.setdefault((group, offsets[group]), set()).add(one.path)
        for inner in orders(one, offsets) or ():
            if inner not in seen:
                seen.add(inner)
                waiting.append(inner)
    return found


def _arranged(
    siblings: Sequence[tuple[Module, int]], offsets: Offsets, orders: Callable[[Module, Offsets], object | None]
) -> list[tuple[Module, Offsets]] | None:
    whole = (1 << len(siblings)) - 1
    at = {0: offsets}
    edges: list[tuple[int, int, Module]] = []
    level = [0]
    while level:
        following: dict[int, None] = {}
        for done in level:
            for number, (one, before) in enumerate(siblings):
                is_next = not done >> number & 1 and not before & ~done
                if is_next and orders(one, at[done]) is not None:
                    after = done | 1 << number
                    edges.append((done, after, one))
                    following[after] = None
                    at[after] = tuple(map(sum, zip(at[done], one.widths, strict=True)))
        if len(at) > MOST_ORDERS:
            raise TooManyOrdersError
        level = list(following)
    if whole not in at:
        return None
    useful, found = {whole}, []
    for done, after, one in reversed(edges):  # an edge comes after all that lead to it
        if after in useful:
            useful.add(done)
            found.append((one, at[done]))
    return found


def _with_order(module: Module, siblings: Siblings) -> list[tuple[Module, int]]:
    """Return what is in a module, each with those that come before it in every order, as bits."""
    every = [*module.own.items(), *module.children.items()]
    if len(every) > MOST_SIBLINGS:
        raise TooManyOrdersError
    known = positions(siblings(module.path, [name for name, _ in every]))
    found = []
    for name, one in every:
        before = 0
        for number, (other, its) in enumerate(every):
            is_before = (
                (its.is_parameter and not one.is_parameter)
                or (is_number(other) and is_number(name) and int(other) < int(name))
                or (other in known and name in known and known[other] < known[name])
                or (its is not one and its.reach[0] < one.reach[1])  # it cannot be after this one as a whole
            )
            before |= is_before << number
        found.append((one, before))
    return found
