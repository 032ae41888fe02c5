"""The order of parameters in each stage's param groups, where it is not that of modules.

A training may list all weights of a stage before its biases: for other stages the order is then not known, and for the
same ones only as long as it is kept. What another format has of the source's origin says it, for such groups alone:

    stage_orders    a text: groups with | between them; of each a check sum of its names, stages with ; before them, and
                    numbers of their parameters in the whole group, with , between them or - for ranges

An empty one is a group that is in the order of modules. A stage of one layer is so, too, where the training lists all
weights before all biases: what no stage shows of the order is taken to be that of modules, and said.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from zckpt.formats.deepspeed.axes.experts import is_expert
from zckpt.formats.deepspeed.axes.pipeline import TIED, align_groups, is_of_layer, layer_of
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.remainder import origin
from zckpt.state import Checkpoint, are_distinct, positions
from zckpt.state.names import plain_name

KEY = "stage_orders"

Orders = Sequence[Sequence[Sequence[str]] | None]
"""Each stage's parameters of each param group in its order; None where it is that of modules, or not known."""


def stage_orders(stages: Sequence[Rank]) -> dict[str, object]:
    """Return the text for the stages of a pipeline, by its key; nothing where nothing has to be said."""
    names = [name for one in stages for name in one.parameters]
    if any(map(is_expert, names)) or not all(map(is_of_layer, names)):
        return {}
    texts: list[str] = []
    for row in align_groups([one.param_groups for one in stages]):
        own = [group.parameters if group is not None else [] for group in row]
        whole = positions(dict.fromkeys(name for one in own for name in one))
        plain = is_ordered(list(whole), {}) and not _unseen(own, [list(whole)])
        shares = [_ranges([whole[name] for name in one]) for one in own]
        texts.append("" if plain else ";".join([_sum(whole), *shares]))
    return {KEY: "|".join(texts)} if any(texts) else {}


def known_orders(checkpoint: Checkpoint) -> Orders:
    """Return the orders that a source's origin says.

    What is not of the checkpoint's groups as they are is not taken.
    """
    text = origin(checkpoint).get(KEY)
    groups = text.split("|") if isinstance(text, str) else []
    if len(groups) != len(checkpoint.param_groups):
        return []
    found: list[list[list[str]] | None] = []
    for one, group in zip(groups, checkpoint.param_groups, strict=True):
        check, *stages = one.split(";")
        try:
            numbers = [_numbers(stage) for stage in stages] if check == _sum(group.parameters) else []
        except ValueError:
            return []
        every = {number for stage in numbers for number in stage}
        fits = every == set(range(len(group.parameters))) and all(map(are_distinct, numbers))
        found.append([[group.parameters[n] for n in stage] for stage in numbers] if fits and numbers else None)
    return found


def untold_orders(source: Sequence[Rank], target: Sequence[Rank], orders: Orders) -> list[str]:
    """Say, for each param group of the target, which order of its parameters no stage of the source shows.

    `orders`: as `known_orders` returns them: of these groups the source's stages are there.
    """
    group_of: dict[str, int] = {}
    shown: list[Sequence[Sequence[str]]] = []
    for number, row in enumerate(align_groups([one.param_groups for one in source])):
        own = [group.parameters for group in row if group is not None]
        shown.append((orders[number] if number < len(orders) else None) or own)
        group_of |= {name: number for names in own for name in names}
    found: dict[int, str] = {}
    for group in (group for one in target for group in one.param_groups if group.parameters):
        index = group_of.get(group.parameters[0])
        pair = None if index is None or index in found else _unseen(shown[index], [group.parameters])
        if pair is not None and index is not None:
            found[index] = (
                f"param group {index} is taken to be in the order of modules, {pair[0]} before {pair[1]}: no stage of "
                f"the source shows it, and a training that lists parameters by kind would resume with others' state"
            )
    return list(found.values())


def _unseen(shown: Iterable[Sequence[str]], wanted: Iterable[Sequence[str]]) -> tuple[str, str] | None:
    """Return two parameters, one before the other, where no list shows any of these kinds in that order."""
    known = {kinds for names in shown for kinds in _kinds(names)}
    pairs = (pair for names in wanted for kinds, pair in _kinds(names).items() if kinds not in known)
    return next(pairs, None)


def _kinds(names: Sequence[str]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the kinds of which one comes before another, with two such parameters; experts have their own order."""
    first: dict[str, str] = {}
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for name in (name for name in names if not is_expert(name)):
        kind = next((part for part in reversed(name.split(".")) if not part.isdecimal()), "")
        for other, its in first.items():
            if other != kind:
                found.setdefault((other, kind), (its, name))
        first.setdefault(kind, name)
    return found


def _sum(names: Iterable[str]) -> str:
    """Return a check sum of names in their order, whatever wrappers have put into them."""
    return f"{zlib.crc32(chr(10).join(map(plain_name, names)).encode()):08x}"


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}-{high}" if low != high else str(low) for low, high in spans)


MOST = 10**6
"""More parameters than this no group has."""


def _numbers(text: str) -> list[int]:
    """Return the numbers in a text of ranges; ValueError: it is none."""
    found: list[int] = []
    for item in filter(None, text.split(",")):
        low, _, high = item.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < MOST or len(found) + last - first >= MOST:
            raise ValueError(item)
        found += range(first, last + 1)
    return found


def is_ordered(names: Sequence[str], places: Mapping[str, int]) -> bool:
    """Tell whether parameters are in the order of modules: tied layers, the others by their number, then as in these.

    All weights before all biases are such an order in a stage of one layer, and not in one of two.
    """
    found = [(0, 0, 0) if name.startswith(TIED) else (1, layer_of(name), places.get(name, 0)) for name in names]
    return all(one <= other for one, other in pairwise(found)) and (bool(places) or goes_by_modules(names))


def goes_by_modules(names: Sequence[str]) -> bool:
    """Tell whether parameters come module by module: none is come back to after another, as `parameters()` has them."""
    within: list[str] = []
    left: set[str] = set()
    for name in names:
        modules = [name[:end] for end, character in enumerate(name) if character == "."]
        left.update(one for one in within if one not in modules)
        if not left.isdisjoint(modules):
            return False
        within = modules
    return True
