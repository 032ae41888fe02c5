"""Which parameter and slot of one checkpoint is which of the other: by name, without what wrappers add to names.

A format may leave out what something else in it implies: ZeRO-3 has no weight, which is its rounded master, and a
model file of the masters' type has no masters. Such a slot is held against what implies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from fnmatch import fnmatchcase

from zckpt.compare.logical import named, own_weight, parameter_values, single
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.adapters import short_names
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot, is_floating
from zckpt.torchfile import Tensor

State = dict[str, object]
"""What an optimizer has of a parameter, by key: slots and single values."""


@immutable
class Filter:
    """What is compared; empty means everything."""

    slots: Sequence[str] = ()
    parameters: Sequence[str] = ()  # shell patterns of names

    def check(self, *checkpoints: Checkpoint) -> None:
        """Raise UsageError if no checkpoint has one of the slots."""
        there = dict.fromkeys(key for one in checkpoints for key in one.slot_names())
        states = [held.state for one in checkpoints for held in one.holders()]
        states += [group.state for one in checkpoints for group in one.param_groups]
        known = {WEIGHT, *there, *(key for state in states for key in state)}
        unknown = [key for key in self.slots if key not in known]
        if unknown:
            raise UsageError(
                "no such slot", path=checkpoints[0].named, expected=f"some of {', '.join(there)}",
                found=", ".join(unknown),
            )  # fmt: skip

    def takes(self, name: str) -> bool:
        """Tell whether a parameter is compared."""
        return not self.parameters or any(fnmatchcase(name, pattern) for pattern in self.parameters)

    def takes_slot(self, slot: str) -> bool:
        """Tell whether a slot is compared."""
        return not self.slots or slot in self.slots


@mutable
class Matches:
    """All that is to be compared of two checkpoints."""

    ours: dict[str, Parameter]  # all parameters and buffers of A and B by canonical name
    theirs: dict[str, Parameter]
    names: list[str] = field(default_factory=list)  # those that both have and that are chosen
    slots: list[Match] = field(default_factory=list)
    singles: list[tuple[str, str, object, object]] = field(default_factory=list)
    """Single values of parameters that differ; None where there is none."""
    only_in_a: list[tuple[str, str | None]] = field(default_factory=list)  # None: the whole parameter
    only_in_b: list[tuple[str, str | None]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_singles: int = 0  # how many were compared


def match(a: Checkpoint, b: Checkpoint, chosen: Filter) -> Matches:
    """Match the parameters, buffers and slots of two checkpoints."""
    ours, theirs = named(a), named(b)
    own, short = {short: name for name, short in short_names(ours).items()}, short_names(theirs)
    if own and short:  # an adapter alone has other names in memory than in files
        theirs = {own.get(short[name], name): one for name, one in theirs.items()}
    found = Matches(ours, theirs)
    for name in ours:
        if not chosen.takes(name):
            continue
        if name not in theirs:
            found.only_in_a.append((name, None))
            continue
        found.names.append(name)
        tied = ours[name].tied_to, theirs[name].tied_to
        if None not in tied:
            continue  # its owner has all there is, and is compared
        mine = a.parameters[tied[0]] if tied[0] is not None else ours[name]
        its = b.parameters[tied[1]] if tied[1] is not None else theirs[name]
        is_owner = tied == (None, None)
        for key, x, y, dtype in (
            *_values(mine, its),
            *(_state(found, name, (a, mine), (b, its), chosen) if is_owner else ()),
        ):
            if x is not None and y is not None and chosen.takes_slot(key):
                found.slots.append(Match(name, key, x, y, dtype))
            elif is_owner and chosen.takes_slot(key):
                (found.only_in_a if y is None else found.only_in_b).append((name, key))
    found.only_in_b += [(name, None) for name in theirs if name not in ours and chosen.takes(name)]
    return found


Side = tuple[Checkpoint, Parameter]

Both = tuple[str, "Slot | None", "Slot | None", "str | None"]
"""A slot's name, what A and B have of it, and the type that both are read as; None: as they are."""


def _state(found: Matches, name: str, a: Side, b: Side, chosen: Filter) -> Iterator[Both]:
    """Match what the optimizers have; single values are compared at once."""
    ours, theirs = (_held(found, *side) for side in (a, b))
    for key in dict.fromkeys([*ours, *theirs]):
        mine, its = ours.get(key), theirs.get(key)
        x, y = (one if isinstance(one, Slot) else None for one in (mine, its))
        alone = x if key not in theirs else y if key not in ours else None
        both = x is not None and y is not None and (x.shape or y.shape or x.dtype == y.dtype)
        if both or (alone is not None and alone.shape):
            yield key, x, y, None
        elif chosen.takes_slot(key):
            found.num_singles += 1
            if key not in theirs or key not in ours or single(mine) != single(its):
                found.singles.append((name, key, single(mine), single(its)))


def _held(found: Matches, checkpoint: Checkpoint, parameter: Parameter) -> State:
    try:
        return parameter_values(checkpoint, parameter)
    except UnsupportedError as error:
        warning = f"{checkpoint.source}: {error.message}; it is not compared"
        if warning not in found.warnings:
            found.warnings.append(warning)
        group = checkpoint.param_groups[parameter.group or 0].state
        own = parameter.optimizer_slots
        return {**{key: one for key, one in group.items() if not isinstance(one, Tensor)}, **parameter.state, **own}


@immutable
class Match:
    """A slot that both checkpoints have; `dtype` is what both are read as, or None: as they are."""

    name: str
    slot: str
    a: Slot
    b: Slot
    dtype: str | None = None


def _values(a: Parameter, b: Parameter) -> Iterator[Both]:
    """Match weights and masters of a parameter."""
    master, x, other, y = a.master, own_weight(a), b.master, own_weight(b)
    if master is None and other is not None:
        yield from ((key, mine, its, dtype) for key, its, mine, dtype in _values(b, a))
    elif master is None and x is not None and y is not None:
        yield WEIGHT, x, y, None
    elif master is not None and other is not None:
        yield MASTER, master, other, None
        yield from ((WEIGHT, *one) for one in _weights((master, x), (other, y)))
    elif master is None or y is None:
        alone = (MASTER, master, None, None), (WEIGHT, x, None, None), (WEIGHT, None, y, None)
        yield from (one for one in alone if one[1] is not None or one[2] is not None)
    else:
        holds_masters = y.dtype == master.dtype  # the model of the other side is in the masters' type
        yield MASTER, master, y if holds_masters else None, None
        if x is None and not holds_masters:
            yield WEIGHT, master, y, y.dtype if _rounds(master, y) else None
        elif x is not None and not holds_masters:
            yield WEIGHT, x, y, None
        elif x is not None and (x.dtype == y.dtype or _rounds(y, x)):
            yield WEIGHT, x, y, x.dtype


def _weights(a: tuple[Slot, Slot | None], b: tuple[Slot, Slot | None]) -> list[tuple[Slot, Slot, str | None]]:
    """Return the weights of a parameter that has masters, both given; a missing one is its rounded master.

    And the type that both are compared in: one of the masters' type is compared as it rounds.
    """
    (ours, x), (theirs, y) = a, b
    if x is not None and y is not None:
        if x.dtype != y.dtype and y.dtype == theirs.dtype and _rounds(y, x):
            return [(x, y, x.dtype)]
        return [(x, y, y.dtype if x.dtype != y.dtype and x.dtype == ours.dtype and _rounds(x, y) else None)]
    if x is not None and _rounds(theirs, x):
        return [(x, theirs, x.dtype)]
    return [(ours, y, y.dtype)] if y is not None and _rounds(ours, y) else []


def _rounds(master: Slot, weight: Slot) -> bool:
    return is_floating(weight.dtype) and is_floating(master.dtype)
