"""Tensors of one side of a rule that are made of those of the other: what these have in common, and their slots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zckpt.compare.logical import single
from zckpt.engine.computed import Computed
from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.naming.arrange import Arrangement, arranged
from zckpt.naming.match import Instance
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import WEIGHT, Checkpoint, Parameter, Slot


def both_arranged(
    name: str, instance: Instance, targets: Sequence[Tensor], sizes: Sizes
) -> tuple[list[Arrangement], list[Arrangement], list[str]]:
    """Return the arrangements of both sides' tensors, which have the same elements, and which of them are padding.

    Parameters
    ----------
    name : str
        Of the map.
    instance : Instance
    targets : sequence of Tensor
    sizes : Sizes

    Raises
    ------
    UsageError
        An element of one side is not once on the other, and no padding.
    """
    letters = tuple(dict.fromkeys(letter for one in [*instance.sources, *targets] for letter in _letters(one)))
    letters = tuple(letter for letter in letters if letter not in instance.shared)
    sides = [
        [Arrangement.of(letters, one.template, one.indices, sizes) for one in side]
        for side in (instance.sources, targets)
    ]
    whole = {letter: sizes.total(letter) for letter in letters}
    numel = math.prod(whole.values())
    for side in sides:
        count = sum(math.prod(one.sizes) for one in side)
        twice = any(_meet(one, other) for i, one in enumerate(side) for other in side[:i])
        if twice or count > numel or (count < numel and not instance.rule.padded):
            raise UsageError(
                f"{name}: not every element of {instance.sources[0].name} is on both sides once",
                expected=f"{numel} with {', '.join(f'{letter}={size}' for letter, size in whole.items())}",
                found="some are there twice" if twice else count,
            )
    notes = []
    for padded in instance.rule.padded:
        before, after = (
            max(one.low[i] + one.sizes[i] for one in side) for i in [letters.index(padded)] for side in sides
        )
        if before != after:
            what = "are left out as padding" if after < before else "are added as padding, zero"
            low, high = sorted((before, after))
            notes.append(f"{name}: {padded} {low} to {high - 1} of {instance.sources[0].name} {what}")
    return sides[0], sides[1], notes


def _letters(one: Tensor) -> Iterator[str]:
    yield from one.template.indices
    for axis in one.template.axes or ():
        yield from (factor.name for factor in axis)


def _meet(a: Arrangement, b: Arrangement) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in zip(a.low, a.sizes, b.low, b.sizes, strict=True))


class Joined:
    """The parameters that tensors of the other side are made of: what they have in common, and their slots."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, parts: Sequence[Parameter], arrangements: Sequence[Arrangement]
    ) -> None:
        self._checkpoint, self._name, self._parts, self._arrangements = checkpoint, name, parts, arrangements
        self._identity = False
        first = parts[0]
        for what in ("group", "frozen", "dtype"):
            values = [getattr(one, what) for one in parts]
            if any(value != values[0] for value in values):
                raise UnsupportedError(
                    f"{listed([one.name for one in parts])} are parts of one tensor in the map {name}, and differ in "
                    f"{'the param group' if what == 'group' else what}",
                    path=checkpoint.source,
                    expected="one that all have",
                    found=", ".join(map(str, values)),
                )
        if any((one.name in checkpoint.buffers) != (first.name in checkpoint.buffers) for one in parts):
            raise UnsupportedError(f"{first.name} and others are a buffer and a parameter", path=checkpoint.source)
        self._state = {key: self._value(key, [one.state.get(key) for one in parts]) for key in self._keys("state")}

    def _names(self) -> str:
        return listed([part.name for part in self._parts])

    def _keys(self, what: str) -> list[str]:
        """Return the keys that the parts have, all of them the same."""
        keys = [list(getattr(one, what)) for one in self._parts]
        for one, own in zip(self._parts, keys, strict=True):
            if set(own) != set(keys[0]):
                missing = sorted(set(keys[0]) ^ set(own))
                raise LayoutError(
                    f"{self._names()} are parts of one tensor in {self._name}, and not all have {', '.join(missing)}",
                    path=self._checkpoint.source,
                    found=f"{one.name} has {', '.join(own) or 'none'}",
                )
        return keys[0]

    def _value(self, key: str, values: Sequence[object]) -> object:
        """Return a value that all parts have."""
        told = [single(value) for value in values] if len(values) > 1 else [None]
        if any(one != told[0] for one in told):
            raise LayoutError(
                f"{self._names()} are parts of one tensor in the map {self._name}, and differ in {key}",
                path=self._checkpoint.source,
                found=", ".join(map(str, told)),
            )
        return values[0]

    def parameter(self, name: str, target: Arrangement) -> Parameter:
        """Return the parameter of the other side."""
        slots = {key: self._slot(key, target) for key in self._keys("slots")}
        whole = [key for key, value in self._state.items() if holds_tensors(value)]
        if whole and not self._is_alike(target):
            raise self._not_arranged(whole[0], "dequantize it, and map what was written")
        return replace(self._parts[0], name=name, shape=target.shape, slots=slots, state=dict(self._state))

    def _slot(self, key: str, target: Arrangement) -> Slot:
        slots = [one.slots[key] for one in self._parts]
        first = slots[0]
        if self._is_alike(target):
            return first
        if any(isinstance(slot, Computed) for slot in slots):
            raise self._not_arranged(key, "write it without the map, and map what was written")
        if all(not slot.shape for slot in slots) and self._parts[0].shape:
            self._value(key, slots)
            return first
        for part, slot in zip(self._parts, slots, strict=True):
            if slot.shape != part.shape:
                raise UnsupportedError(
                    f"{key} of {part.name} is not one number for each element, which the map {self._name} arranges",
                    path=self._checkpoint.source,
                    expected=part.shape,
                    found=slot.shape,
                    advice=None
                    if key == WEIGHT
                    else "without the optimizer's state, `zckpt consolidate` maps the model",
                )
            if slot.dtype != first.dtype or len(slot.replicas) != len(first.replicas):
                raise UnsupportedError(
                    f"{key} of {self._names()}, parts of one tensor in the map {self._name}, is of several types",
                    path=self._checkpoint.source,
                    found=f"{slot.dtype} and {first.dtype}",
                )
        return arranged(target, list(zip(self._arrangements, slots, strict=True)))

    def _not_arranged(self, key: str, advice: str) -> UnsupportedError:
        return UnsupportedError(
            f"{key} of {self._names()} is or was quantised, in blocks that the map {self._name} takes apart",
            path=self._checkpoint.source,
            advice=advice,
        )

    def _is_alike(self, target: Arrangement) -> bool:
        """Tell whether the parameter of the other side is the only part as it is."""
        return len(self._parts) == 1 and self._arrangements[0].seen == target.seen
