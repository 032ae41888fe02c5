"""Weights and masters of a parameter in two checkpoints, matched by what they mean.

A format may leave out what another part of it implies: ZeRO-3 has no weight, which is its rounded master, and a
model file of the masters' type has no masters. Such a part is held against what implies it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.compare.logical import own_weight
from zckpt.compare.slots import Pair
from zckpt.state import MASTER, WEIGHT, Parameter, Slot
from zckpt.state.dtypes import is_floating


@dataclass(frozen=True, slots=True)
class Match:
    """A slot that both checkpoints have; `dtype` is what both are read as, or None: as they are."""

    name: str
    slot: str
    a: Slot
    b: Slot
    dtype: str | None = None

    @property
    def pair(self) -> Pair:
        """What is compared, if both have one shape."""
        return Pair(f"{self.slot}/{self.name}", self.a, self.b, self.dtype)


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
        return [Match(name, WEIGHT, x, y)]
    if x is not None and _rounds(theirs, x):
        return [Match(name, WEIGHT, x, theirs, x.dtype)]
    if y is not None and _rounds(ours, y):
        return [Match(name, WEIGHT, ours, y, y.dtype)]
    return []


def _one_master(name: str, master: Slot, own: Slot | None, other: Slot | None, side: str) -> list[Match | Only]:
    """Match a master, and the weight beside it, with the weight that is all the other side has."""

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
