"""Which parameter and slot of one checkpoint is which of the other: by name, without what wrappers add to names.

A format may leave out what something else in it implies: ZeRO-3 has no weight, which is its rounded master, and a
model file of the masters' type has no masters. Such a slot is held against what implies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from zckpt.compare.logical import named, own_weight, parameter_values, single
from zckpt.compare.slots import pair
from zckpt.engine.scan import SlotSet
from zckpt.errors import UnsupportedError
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.state.dtypes import is_floating
from zckpt.torchfile import Tensor

State = dict[str, object]
"""What an optimizer has of a parameter, by key: slots and single values."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What is compared; empty means everything.

    Parameters
    ----------
    slots : tuple of str
    parameters : tuple of str
        Shell patterns of names.
    """

    slots: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Tell whether a parameter is compared."""
        return not self.parameters or any(fnmatchcase(name, pattern) for pattern in self.parameters)

    def takes_slot(self, slot: str) -> bool:
        """Tell whether a slot is compared."""
        return not self.slots or slot in self.slots


@dataclass(slots=True)
class Matches:
    """All that is to be compared of two checkpoints.

    Parameters
    ----------
    ours, theirs : dict of str to Parameter
        All parameters and buffers of A and B by canonical name.
    names : list of str
        Those that both have and that are chosen.
    slots : list of Match
    singles : list of (name, key, a, b)
        Single values of parameters that differ; None where there is none.
    only_in_a, only_in_b : list of (name, slot or None)
        None: the whole parameter.
    warnings : list of str
    """

    ours: dict[str, Parameter]
    theirs: dict[str, Parameter]
    names: list[str] = field(default_factory=list)
    slots: list[Match] = field(default_factory=list)
    singles: list[tuple[str, str, object, object]] = field(default_factory=list)
    only_in_a: list[tuple[str, str | None]] = field(default_factory=list)
    only_in_b: list[tuple[str, str | None]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def match(a: Checkpoint, b: Checkpoint, chosen: Filter) -> Matches:
    """Match the parameters, buffers and slots of two checkpoints."""
    ours, theirs = named(a), named(b)
    found = Matches(ours, theirs)
    for name in ours:
        if not chosen.takes(name):
            continue
        if name not in theirs:
            found.only_in_a.append((name, None))
            continue
        found.names.append(name)
        _match_parameter(found, name, (a, ours[name]), (b, theirs[name]), chosen)
    found.only_in_b += [(name, None) for name in theirs if name not in ours and chosen.takes(name)]
    return found


Side = tuple[Checkpoint, Parameter]


def _match_parameter(found: Matches, name: str, a: Side, b: Side, chosen: Filter) -> None:
    ours, theirs = (_owner(*side) for side in (a, b))
    alias = a[1].tied_to is not None or b[1].tied_to is not None
    if a[1].tied_to is not None and b[1].tied_to is not None:
        return  # its owner has all there is, and is compared
    values = match_values(name, ours, theirs)
    if alias:
        values = [one for one in values if isinstance(one, Match)]
    else:
        values += _match_state(found, name, (a[0], ours), (b[0], theirs))
    for one in values:
        if isinstance(one, Match):
            if chosen.takes_slot(one.slot):
                found.slots.append(one)
        elif chosen.takes_slot(one[1]):
            (found.only_in_a if one[0] == "a" else found.only_in_b).append((name, one[1]))


def _owner(checkpoint: Checkpoint, parameter: Parameter) -> Parameter:
    return parameter if parameter.tied_to is None else checkpoint.parameters[parameter.tied_to]


def _match_state(found: Matches, name: str, a: Side, b: Side) -> list[Match | Only]:
    """Match what the optimizers have; single values are compared at once."""
    ours, theirs = (_state(found, *side) for side in (a, b))
    values: list[Match | Only] = []
    for key in dict.fromkeys([*ours, *theirs]):
        mine, its = ours.get(key), theirs.get(key)
        if isinstance(mine, Slot) and isinstance(its, Slot) and (mine.shape or its.shape or mine.dtype == its.dtype):
            values.append(Match(name, key, mine, its))
        elif key not in theirs or key not in ours:
            one = mine if key in ours else its
            if isinstance(one, Slot) and one.shape:
                values.append(("a" if key in ours else "b", key))
            else:
                found.singles.append((name, key, single(mine), single(its)))
        elif single(mine) != single(its):
            found.singles.append((name, key, single(mine), single(its)))
    return values


def _state(found: Matches, checkpoint: Checkpoint, parameter: Parameter) -> State:
    try:
        return parameter_values(checkpoint, parameter)
    except UnsupportedError as error:
        warning = f"{checkpoint.source}: {error.message}; it is not compared"
        if warning not in found.warnings:
            found.warnings.append(warning)
        group = checkpoint.param_groups[parameter.group or 0].state
        own = {key: slot for key, slot in parameter.slots.items() if key not in (WEIGHT, MASTER)}
        return {**{key: one for key, one in group.items() if not isinstance(one, Tensor)}, **parameter.state, **own}


@dataclass(frozen=True, slots=True)
class Match:
    """A slot that both checkpoints have; `dtype` is what both are read as, or None: as they are."""

    name: str
    slot: str
    a: Slot
    b: Slot
    dtype: str | None = None

    @property
    def pair(self) -> SlotSet:
        """What is compared, if both have one shape."""
        return pair(f"{self.slot}/{self.name}", self.a, self.b, self.dtype)


Only = tuple[str, str]
"""Which side, `a` or `b`, has a slot that the other lacks, and which slot."""


def match_values(name: str, a: Parameter, b: Parameter) -> list[Match | Only]:
    """Match weights and masters of a parameter."""
    ours, theirs = a.slots.get(MASTER), b.slots.get(MASTER)
    x, y = own_weight(a), own_weight(b)
    if ours is not None and theirs is not None:
        return [Match(name, MASTER, ours, theirs), *_weights(name, (ours, x), (theirs, y))]
    if ours is not None:
        return _one_master(name, ours, x, y, "a")
    if theirs is not None:
        return _one_master(name, theirs, y, x, "b")
    if x is not None and y is not None:
        return [Match(name, WEIGHT, x, y)]
    return [(side, WEIGHT) for side, weight in (("a", x), ("b", y)) if weight is not None]


def _weights(name: str, a: tuple[Slot, Slot | None], b: tuple[Slot, Slot | None]) -> list[Match]:
    """Match the weights of a parameter that has masters, both given; a missing one is its rounded master."""
    (ours, x), (theirs, y) = a, b
    if x is not None and y is not None:
        return [Match(name, WEIGHT, x, y, _narrower((ours, x), (theirs, y)))]
    if x is not None and _rounds(theirs, x):
        return [Match(name, WEIGHT, x, theirs, x.dtype)]
    if y is not None and _rounds(ours, y):
        return [Match(name, WEIGHT, ours, y, y.dtype)]
    return []


def _narrower(a: tuple[Slot, Slot], b: tuple[Slot, Slot]) -> str | None:
    """Return the type that both weights are compared in: one of the masters' type is compared as it rounds."""
    (ours, x), (theirs, y) = a, b
    if x.dtype == y.dtype:
        return None
    if y.dtype == theirs.dtype and _rounds(y, x):
        return x.dtype
    return y.dtype if x.dtype == ours.dtype and _rounds(x, y) else None


def _one_master(name: str, master: Slot, own: Slot | None, other: Slot | None, side: str) -> list[Match | Only]:
    """Match a master, and its weight, with the weight that is all the other side has."""

    def ordered(slot: str, mine: Slot, its: Slot, dtype: str | None = None) -> Match:
        return Match(name, slot, mine, its, dtype) if side == "a" else Match(name, slot, its, mine, dtype)

    if other is None:
        return [(side, key) for key, slot in ((MASTER, master), (WEIGHT, own)) if slot is not None]
    if other.dtype == master.dtype:  # the model of the other side is in the masters' type
        if own is None or not (own.dtype == other.dtype or _rounds(other, own)):
            return [ordered(MASTER, master, other)]
        return [ordered(MASTER, master, other), ordered(WEIGHT, own, other, own.dtype)]
    if own is None:
        return [(side, MASTER), ordered(WEIGHT, master, other, other.dtype if _rounds(master, other) else None)]
    return [(side, MASTER), ordered(WEIGHT, own, other)]


def _rounds(master: Slot, weight: Slot) -> bool:
    return is_floating(weight.dtype) and is_floating(master.dtype)
