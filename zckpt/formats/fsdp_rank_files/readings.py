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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from zckpt.errors import UnsupportedError, UsageError
from zckpt.evidence import NAMES_ADVICE, Evidence, ways
from zckpt.formats.fsdp_rank_files.contents import Key, Model, Optimizer, Ties, equal_names
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held
from zckpt.formats.fsdp_rank_files.units import members_of, units_in, usual_wrappings
from zckpt.state import Checkpoint, Shape
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
    solver = _Solver(checkpoint, model, optimizer, frozenset(ranks), names)
    if solver.keys and isinstance(solver.keys[0], str):
        return solver.named()
    found = solver.every()
    different = {tuple(sorted(one.names.items())): one for one in found}
    if len(different) == 1:
        return solver.with_ties(next(iter(different.values())))
    count = len(solver.keys)
    if names is not None:
        raise UsageError(
            "the names do not fit the optimizer's state",
            expected=f"names of {count} parameters, or of those in {count} flat ones",
            found=f"{len(names)} names",
        )
    raise UnsupportedError(
        "the files do not say whose state the optimizer's numbers are"
        if not found
        else "the sizes of the optimizer's state fit the model in several ways",
        expected="state of the model's parameters in their order, or of units that are the model or its layers",
        found=f"{count} numbers for {len(solver.owners)} parameters",
        advice=ADVICE,
    )


@dataclass
class _Solver:
    """Holds the sizes of an optimizer's state against the model's shapes; fields are the parameters of `readings`."""

    checkpoint: Checkpoint
    model: Model
    optimizer: Optimizer
    ranks: Collection[int]
    names: Sequence[str] | None

    @cached_property
    def keys(self) -> list[Key]:
        """All numbers, in the optimizer's order."""
        return [key for group in self.optimizer.keys for key in group]

    @cached_property
    def owners(self) -> dict[str, Shape]:
        """The shapes of parameters that are not other names of one, in the model's order."""
        return {one.name: one.shape for one in self.checkpoint.parameters.values() if one.tied_to is None}

    @cached_property
    def plain(self) -> dict[str, Shape]:
        """Those of what every rank has whole and may yet be parameters, which a program has kept out of FSDP."""
        return {one.name: one.shape for one in self.checkpoint.buffers.values() if is_floating(one.dtype)}

    def every(self) -> list[Reading]:
        """Return all readings that fit; of those of flat parameters first."""
        found: list[Reading] = []
        held = [self.held(key) for key in self.keys if self.optimizer.cut(key)]
        line = all(map(_is_line, held))
        if not (line and held) or len(self.ranks) == 1:
            found += self.by_number(WHOLE)
        if line and held and len(self.ranks) > 1:
            found += self.by_number(PIECES)
        if line and (held or len(self.keys) != len(self.owners)):
            found = [*self.flat(), *found]
        return found

    def held(self, key: Key) -> list[Held]:
        """Return what ranks have of the slot that shows a parameter's shape: the one of most dimensions."""
        slots = self.optimizer.cut(key).values()
        found = [[one for rank, one in held if rank in self.ranks] for held in slots]
        return max(found, key=lambda held: max((len(one.shape), math.prod(one.shape)) for one in held), default=[])

    def fits(self, kind: str, key: Key, shape: Shape) -> bool:
        """Tell whether a parameter of some shape, or a flat one of so many elements, may have the state."""
        held = self.held(key)
        if not held or kind == WHOLE:
            return all(one.shape == shape for one in held)
        if not _is_line(held):
            return False
        if kind == PIECES:
            return sum(one.shape[0] for one in held) == math.prod(shape)
        width, count = held[0].shape[0], len(self.ranks)
        return len(held) == count and {one.shape for one in held} == {(width,)} and -(-shape[0] // count) == width

    def named(self) -> Reading:
        """Return the names that the program saved, as the model's files have them."""
        parameters = self.checkpoint.parameters
        known = aligned([*parameters, *self.checkpoint.buffers], [str(key) for key in self.keys])
        found: dict[Key, tuple[str, ...]] = {}
        for key in self.keys:
            name = known.get(str(key), str(key))
            one = parameters.get(name)
            # State of several shapes is factored, and none of them need be the parameter's.
            factored = len({held[0][1].shape for held in self.optimizer.cut(key).values()}) > 1
            if one is not None and not factored and not self.fits(WHOLE, key, one.shape):
                raise UnsupportedError(
                    f"the state of {name} has another shape than the parameter",
                    expected=one.shape,
                    found=self.held(key)[0].shape,
                )
            found[key] = (name if one is None else one.tied_to or name,)
        return Reading(WHOLE, found)

    def by_number(self, kind: str) -> list[Reading]:
        """Return the reading in which each number is one parameter, if there is one."""
        every = {**self.owners, **self.plain}
        said = Evidence.of(self.checkpoint, self.optimizer.keys, {},
                           rules=(lambda key, name: self.fits(kind, key, every[name]),))  # fmt: skip
        if self.names is not None:
            given = replace(said, candidates=every).recorded(self.names)
            return [Reading(kind, _one_each(given.items()))] if given else []
        certain = said.certain()
        alone = Reading(kind, _one_each(certain.items()))
        if len(self.optimizer.groups) == 1:
            names, ties = self.in_turn()
            if names is not None and all(
                self.fits(kind, key, every[name]) for key, name in zip(self.keys, names, strict=True)
            ):
                found = _one_each(zip(self.keys, names, strict=True))
                contradicted = any(found[number] != (name,) for number, name in certain.items() if ties)
                return [Reading(kind, found, tuple(ties)), *([alone] if contradicted else [])]
        fits = all(any(self.fits(kind, key, shape) for shape in self.owners.values()) for key in self.keys)
        return [alone] if fits and (kind == WHOLE or len(certain) == len(self.keys)) else []

    def in_turn(self) -> tuple[list[str] | None, Ties]:
        """Return the parameters that an optimizer of all of them may number in turn: as many as it has."""
        more = len(self.owners) - len(self.keys)
        if more > 0:
            ties = equal_names(self.model, [name for name, shape in self.owners.items() if len(shape) > 1])
            gone = dict(ties)
            return ([name for name in self.owners if name not in gone] if len(gone) == more else None), ties
        if more == 0:
            return list(self.owners), []
        every = {*self.owners, *self.plain}
        return ([name for name in self.model.held if name in every] if len(every) == len(self.keys) else None), []

    def with_ties(self, reading: Reading) -> Reading:
        """Return a reading that knows other names of trained parameters: matrices with no number, of the same bytes."""
        if len(reading.names) < len(self.keys):
            return reading
        trained = {name for key, names in reading.names.items() if self.optimizer.cut(key) for name in names}
        known = {name for names in reading.names.values() for name in names} | {alias for alias, _ in reading.ties}
        shapes = {name: held[0].shape for name, held in self.model.held.items()}
        if all(name in known or len(shape) < 2 for name, shape in shapes.items()):
            return reading
        more = [
            (alias, owner)
            for alias, owner in equal_names(self.model, list(shapes))
            if alias not in known and owner in trained and len(shapes[alias]) > 1
        ]
        return replace(reading, ties=(*reading.ties, *more))

    def flat(self) -> Iterator[Reading]:
        """Yield the readings in which each number is a flat parameter."""
        if self.names is not None:
            known = aligned(self.checkpoint.parameters, self.names)
            given = [known.get(name, name) for name in self.names]
            if len(set(given)) == len(given) and all(name in self.owners for name in given):
                yield from self.cut_names(given)
            return
        wrapped = units_in(self.model.modules)
        for units in [wrapped] if wrapped else usual_wrappings(list(self.owners)):
            members = members_of(units, list(self.owners))
            reading = self.of_units(members) if len(members) == len(self.keys) else None
            if reading is not None:
                yield reading

    def numel(self, names: Iterable[str]) -> int:
        """Return how many elements parameters have together."""
        return sum(math.prod(self.owners[name]) for name in names)

    def cut_names(self, given: Sequence[str]) -> Iterator[Reading]:
        """Yield the only way to cut a list of names into as many flat parameters, if there is one."""

        def units(number: int, begin: int) -> Iterator[tuple[tuple[str, ...], int]]:
            key, numel = self.keys[number], 0
            held = self.held(key)
            for end, name in enumerate(given[begin:], begin + 1):
                numel += self.numel([name])
                if held and numel > held[0].shape[0] * len(self.ranks):
                    break
                if self.fits(FLAT, key, (numel,)):
                    yield tuple(given[begin:end]), end

        count, cut = ways(len(self.keys), 0, len(given), units)
        if count == 1:
            yield Reading(FLAT, dict(zip(self.keys, cut, strict=True)))

    def of_units(self, members: Sequence[Sequence[str]]) -> Reading | None:
        """Return the reading of some units; None where their sizes do not fit, or fit in several ways."""
        found: dict[Key, tuple[str, ...]] = {}
        ties: Ties = []
        for key, names in zip(self.keys, members, strict=True):
            numel = self.numel(names)
            gone: dict[str, str] = {}
            if not self.fits(FLAT, key, (numel,)):
                aliases = equal_names(self.model, names)[:MOST_ALIASES]
                fitting = [
                    dict(some)
                    for count in range(1, len(aliases) + 1)
                    for some in combinations(aliases, count)
                    if self.fits(FLAT, key, (numel - self.numel(alias for alias, _ in some),))
                ]
                if len(fitting) != 1:
                    return None
                gone = fitting[0]
            ties += gone.items()
            found[key] = tuple(name for name in names if name not in gone)
        return Reading(FLAT, found, tuple(ties))


def _is_line(held: Sequence[Held]) -> bool:
    return all(one.kind == PLAIN and len(one.shape) == 1 for one in held)


def _one_each(pairs: Iterable[tuple[Key, str]]) -> dict[Key, tuple[str, ...]]:
    return {key: (name,) for key, name in pairs}
