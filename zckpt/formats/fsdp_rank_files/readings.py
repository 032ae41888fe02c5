"""Whose state each number of an optimizer is: of all readings of the files that fit their sizes one may be left.

whole    number i is a parameter, whose state ranks hold as they hold its weight (FSDP2), or whole
pieces   number i is a parameter, of which each rank has a piece, or none (FSDP1, use_orig_params=True)
flat     number i is a unit's flat parameter, of which each rank has as many elements (FSDP1)

A flat parameter is the unit's parameters end to end, cut into shards of ceil(n / ranks) elements, the last one filled
with zeros. So its size is known up to as many elements as there are ranks, and every element has to be some
parameter's. Names come from the model's file, in its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from zckpt.errors import UnsupportedError, UsageError
from zckpt.evidence import NAMES_ADVICE, Evidence, ways
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held
from zckpt.formats.fsdp_rank_files.model import Model
from zckpt.formats.fsdp_rank_files.optimizer import Key, Optimizer
from zckpt.formats.fsdp_rank_files.ties import Ties, equal_names
from zckpt.formats.fsdp_rank_files.units import members_of, units_in, usual_wrappings
from zckpt.state import Checkpoint
from zckpt.state.dtypes import is_floating
from zckpt.state.names import aligned

WHOLE, PIECES, FLAT = "whole", "pieces", "flat"

ADVICE = f"{NAMES_ADVICE} (of flat parameters, those in each one in turn)"

MOST_ALIASES = 12
"""Of other names of tied parameters in one unit, which are tried in all combinations: models have one or two."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Whose state it is.

    `names`: the parameters of each number; one that is missing has no certain name; `ties`: names of parameters that
    are other names of ones before them, by the sizes of their units.
    """

    kind: str
    names: dict[Key, tuple[str, ...]]
    ties: tuple[tuple[str, str], ...] = ()


class Sizes:
    """What is known of the sizes of an optimizer's parameters, in one group of ranks that have everything once.

    `ranks`: in the order of their shards.
    """

    def __init__(self, optimizer: Optimizer, ranks: Sequence[int]) -> None:
        self.optimizer = optimizer
        self.count = len(ranks)
        self._ranks = set(ranks)
        self.keys = [key for group in optimizer.keys for key in group]

    def held(self, key: Key) -> list[Held]:
        """Return what ranks have of the slot that shows a parameter's shape: the one of most dimensions."""
        slots = self.optimizer.cut(key).values()
        found = [[one for rank, one in held if rank in self._ranks] for held in slots]
        return max(found, key=lambda held: max((len(one.shape), math.prod(one.shape)) for one in held), default=[])

    def fits_whole(self, key: Key, shape: tuple[int, ...]) -> bool:
        """Tell whether a parameter of some shape may have the state."""
        return all(one.shape == shape for one in self.held(key))

    def fits_pieces(self, key: Key, shape: tuple[int, ...]) -> bool:
        """Tell whether what ranks have is together as many elements."""
        held = self.held(key)
        return not held or (_is_line(held) and sum(one.shape[0] for one in held) == math.prod(shape))

    def fits_flat(self, key: Key, numel: int) -> bool:
        """Tell whether that many elements, cut for all ranks, make as large shards."""
        held = self.held(key)
        if not held:
            return True
        width = held[0].shape[0] if _is_line(held) else 0
        alike = len(held) == self.count and {one.shape for one in held} == {(width,)}
        return alike and -(-numel // self.count) == width


def _is_line(held: Sequence[Held]) -> bool:
    return all(one.kind == PLAIN and len(one.shape) == 1 for one in held)


def readings(
    checkpoint: Checkpoint, model: Model, optimizer: Optimizer, ranks: Sequence[int], names: Sequence[str] | None
) -> Reading:
    """Return the only reading that the files leave.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has the model's parameters.
    model : Model
    optimizer : Optimizer
    ranks : sequence of int
        Ranks that together have everything once, in the order of their shards.
    names : sequence of str or None
        From the user, in the optimizer's order.

    Raises
    ------
    UnsupportedError
        None fits, or several do.
    UsageError
        `names` fit none.
    """
    sizes = Sizes(optimizer, ranks)
    if sizes.keys and isinstance(sizes.keys[0], str):
        return _named(checkpoint, sizes)
    found: list[Reading] = []
    held = [sizes.held(key) for key in sizes.keys if optimizer.cut(key)]
    line = all(map(_is_line, held))
    if not (line and held) or len(ranks) == 1:
        found += _by_number(checkpoint, model, sizes, names, WHOLE)
    if line and held and len(ranks) > 1:
        found += _by_number(checkpoint, model, sizes, names, PIECES)
    if line and (held or len(sizes.keys) != len(_owners(checkpoint))):
        found = [*_flat(checkpoint, model, sizes, names), *found]
    different = {tuple(sorted(one.names.items())): one for one in found}
    if len(different) == 1:
        return _with_ties(model, sizes, next(iter(different.values())))
    if names is not None:
        raise UsageError(
            "the names do not fit the optimizer's state",
            expected=f"names of {len(sizes.keys)} parameters, or of those in {len(sizes.keys)} flat ones",
            found=f"{len(names)} names",
        )
    raise UnsupportedError(
        "the files do not say whose state the optimizer's numbers are"
        if not found
        else "the sizes of the optimizer's state fit the model in several ways",
        expected="state of the model's parameters in their order, or of units that are the model or its layers",
        found=f"{len(sizes.keys)} numbers for {len(_owners(checkpoint))} parameters",
        advice=ADVICE,
    )


def _owners(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters that are not other names of one, in the model's order."""
    return {one.name: one.shape for one in checkpoint.parameters.values() if one.tied_to is None}


def _named(checkpoint: Checkpoint, sizes: Sizes) -> Reading:
    """Return the names that the program saved, as the model's files have them."""
    known = aligned([*checkpoint.parameters, *checkpoint.buffers], [str(key) for key in sizes.keys])
    found: dict[Key, tuple[str, ...]] = {}
    for key in sizes.keys:
        name = known.get(str(key), str(key))
        one = checkpoint.parameters.get(name)
        owner = name if one is None else one.tied_to or name
        if one is not None and not sizes.fits_whole(key, one.shape) and not _factored(sizes, key):
            raise UnsupportedError(
                f"the state of {name} has another shape than the parameter",
                expected=one.shape,
                found=sizes.held(key)[0].shape,
            )
        found[key] = (owner,)
    return Reading(WHOLE, found)


def _factored(sizes: Sizes, key: Key) -> bool:
    """Tell whether a parameter's state is of several shapes, none of which need be the parameter's."""
    return len({held[0][1].shape for held in sizes.optimizer.cut(key).values()}) > 1


def _by_number(
    checkpoint: Checkpoint, model: Model, sizes: Sizes, names: Sequence[str] | None, kind: str
) -> list[Reading]:
    """Return the reading in which each number is one parameter, if there is one."""
    fit = sizes.fits_pieces if kind == PIECES else sizes.fits_whole
    owners = _owners(checkpoint)
    every = {**owners, **_plain_floats(checkpoint)}
    said = Evidence.of(checkpoint, sizes.optimizer.keys, {}, rules=(lambda key, name: fit(key, every[name]),))
    if names is not None:
        given = replace(said, candidates=every).recorded(names)
        return [Reading(kind, _one_each(given.items()))] if given else []
    certain = said.certain()
    if len(sizes.optimizer.groups) == 1:
        for shapes, ties in _in_turn(checkpoint, model, owners, len(sizes.keys)):
            if all(fit(key, shape) for key, shape in zip(sizes.keys, shapes.values(), strict=True)):
                found = _one_each(zip(sizes.keys, shapes, strict=True))
                contradicted = any(found[number] != (name,) for number, name in certain.items() if ties)
                others = [Reading(kind, _one_each(certain.items()))] if contradicted else []
                return [Reading(kind, found, tuple(ties)), *others]
    fits = all(any(fit(key, shape) for shape in owners.values()) for key in sizes.keys)
    if not fits or (kind != WHOLE and len(certain) < len(sizes.keys)):
        return []
    return [Reading(kind, _one_each(certain.items()))]


def _one_each(pairs: Iterable[tuple[Key, str]]) -> dict[Key, tuple[str, ...]]:
    return {key: (name,) for key, name in pairs}


def _in_turn(
    checkpoint: Checkpoint, model: Model, owners: Mapping[str, tuple[int, ...]], count: int
) -> Iterator[tuple[dict[str, tuple[int, ...]], Ties]]:
    """Yield the parameters that an optimizer of all of them may number in turn: as many as it has."""
    if len(owners) == count:
        yield dict(owners), []
    elif len(owners) > count:
        ties = equal_names(model, [name for name, shape in owners.items() if len(shape) > 1])
        gone = dict(ties)
        if len(owners) - len(gone) == count:
            yield {name: shape for name, shape in owners.items() if name not in gone}, ties
    else:
        kept_out = _plain_floats(checkpoint)
        if len(owners) + len(kept_out) == count:
            every = {**owners, **kept_out}
            yield {name: every[name] for name in model.held if name in every}, []


def _with_ties(model: Model, sizes: Sizes, reading: Reading) -> Reading:
    """Return a reading that knows other names of trained parameters: matrices without a number, of the same bytes."""
    if len(reading.names) < len(sizes.keys):
        return reading
    trained = {name for key, names in reading.names.items() if sizes.optimizer.cut(key) for name in names}
    numbered = {name for names in reading.names.values() for name in names}
    known = {*numbered, *(alias for alias, _ in reading.ties)}
    if all(name in known or len(held[0].shape) < 2 for name, held in model.held.items()):
        return reading
    more = tuple(
        (alias, owner)
        for alias, owner in equal_names(model, list(model.held))
        if alias not in known and owner in trained and len(model.held[alias][0].shape) > 1
    )
    return replace(reading, ties=(*reading.ties, *more))


def _plain_floats(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return what every rank has whole and may yet be parameters, which a program has kept out of FSDP."""
    return {one.name: one.shape for one in checkpoint.buffers.values() if is_floating(one.dtype)}


def _flat(checkpoint: Checkpoint, model: Model, sizes: Sizes, names: Sequence[str] | None) -> Iterator[Reading]:
    """Yield the readings in which each number is a flat parameter."""
    owners = _owners(checkpoint)
    if names is not None:
        known = aligned(checkpoint.parameters, names)
        given = [known.get(name, name) for name in names]
        if len(set(given)) == len(given) and all(name in owners for name in given):
            yield from _cut_names(given, owners, sizes)
        return
    wrapped = units_in(model.modules)
    for units in [wrapped] if wrapped else usual_wrappings(list(owners)):
        members = members_of(units, list(owners))
        if len(members) == len(sizes.keys):
            reading = _of_units(model, members, owners, sizes)
            if reading is not None:
                yield reading


def _cut_names(given: Sequence[str], owners: Mapping[str, tuple[int, ...]], sizes: Sizes) -> Iterator[Reading]:
    """Yield the only way to cut a list of names into as many flat parameters, if there is one."""

    def units(number: int, begin: int) -> Iterator[tuple[tuple[str, ...], int]]:
        key, numel = sizes.keys[number], 0
        held = sizes.held(key)
        for end, name in enumerate(given[begin:], begin + 1):
            numel += math.prod(owners[name])
            if held and numel > held[0].shape[0] * sizes.count:
                break
            if sizes.fits_flat(key, numel):
                yield tuple(given[begin:end]), end

    count, cut = ways(len(sizes.keys), 0, len(given), units)
    if count == 1:
        yield Reading(FLAT, dict(zip(sizes.keys, cut, strict=True)))


def _of_units(
    model: Model, members: Sequence[Sequence[str]], owners: Mapping[str, tuple[int, ...]], sizes: Sizes
) -> Reading | None:
    """Return the reading of some units; None where their sizes do not fit, or fit in several ways."""
    found: dict[Key, tuple[str, ...]] = {}
    ties: Ties = []
    for key, names in zip(sizes.keys, members, strict=True):
        numel = sum(math.prod(owners[name]) for name in names)
        if sizes.fits_flat(key, numel):
            found[key] = tuple(names)
            continue
        aliases = equal_names(model, names)[:MOST_ALIASES]
        fitting = [
            some
            for count in range(1, len(aliases) + 1)
            for some in combinations(aliases, count)
            if sizes.fits_flat(key, numel - sum(math.prod(owners[alias]) for alias, _ in some))
        ]
        if len(fitting) != 1:
            return None
        gone = dict(fitting[0])
        ties += fitting[0]
        found[key] = tuple(name for name in names if name not in gone)
    return Reading(FLAT, found, tuple(ties))
