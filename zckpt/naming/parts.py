"""Tensors of one side of a rule that are made of those of the other: what these have in common, and their slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zckpt.compare.logical import single
from zckpt.engine.computed import Computed
from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.naming.arrange import Arrangement, arranged
from zckpt.naming.match import Instance
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import WEIGHT, Checkpoint, Parameter, Slot
from zckpt.state.boxes import overlap


def both_arranged(
    name: str, instance: Instance, targets: Sequence[Tensor], sizes: Sizes
) -> tuple[list[Arrangement], list[Arrangement], list[str]]:
    """Return the arrangements of both sides' tensors, which have the same elements, and which of them are padding.

    Raises UsageError: an element of one side is not once on the other, and no padding. `name`: of the map.
    """
    every = dict.fromkeys(letter for one in [*instance.sources, *targets] for letter in one.template.letters)
    letters = tuple(letter for letter in every if letter not in instance.shared)
    sides = [
        [Arrangement.of(letters, one.template, one.indices, sizes) for one in side]
        for side in (instance.sources, targets)
    ]
    whole = {letter: sizes.total(letter) for letter in letters}
    numel = math.prod(whole.values())
    for side in sides:
        count = sum(math.prod(one.sizes) for one in side)
        twice = overlap([(one.low, one.sizes) for one in side])
        if twice or count > numel or (count < numel and not instance.rule.padded):
            raise UsageError(
                f"{name}: not every element of {instance.sources[0].name} is on both sides once",
                expected=f"{numel} with {', '.join(f'{letter}={size}' for letter, size in whole.items())}",
                found="some are there twice" if twice else count,
            )
    notes = []
    for padded in instance.rule.padded:
        at = letters.index(padded)
        before, after = (max(one.low[at] + one.sizes[at] for one in side) for side in sides)
        if before != after:
            what = "are left out as padding" if after < before else "are added as padding, zero"
            low, high = sorted((before, after))
            notes.append(f"{name}: {padded} {low} to {high - 1} of {instance.sources[0].name} {what}")
    return sides[0], sides[1], notes


class Joined:
    """The parameters that tensors of the other side are made of: what they have in common, and their slots."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, parts: Sequence[Parameter], arrangements: Sequence[Arrangement]
    ) -> None:
        self._map, self._parts, self._arrangements = f"the map {name}", parts, arrangements
        self._names = listed([part.name for part in parts])
        for what, said in (("group", "the param group"), ("frozen", "frozen"), ("dtype", "dtype")):
            values = [getattr(one, what) for one in parts]
            if any(value != values[0] for value in values):
                raise UnsupportedError(
                    f"{self._names} are parts of one tensor in {self._map}, and differ in {said}",
                    expected="one that all have",
                    found=", ".join(map(str, values)),
                )
        if len({one.name in checkpoint.buffers for one in parts}) > 1:
            raise UnsupportedError(f"{parts[0].name} and others are a buffer and a parameter")
        self._keys = self._shared_keys([list(one.slots) for one in parts])
        state = self._shared_keys([list(one.state) for one in parts])
        self._state = {key: self._value(key, [one.state[key] for one in parts]) for key in state}

    def _shared_keys(self, keys: Sequence[list[str]]) -> list[str]:
        """Return the keys that the parts have, all of them the same."""
        for one, own in zip(self._parts, keys, strict=True):
            if set(own) != set(keys[0]):
                missing = sorted(set(keys[0]) ^ set(own))
                raise LayoutError(
                    f"{self._names} are parts of one tensor in {self._map}, and not all have {', '.join(missing)}",
                    found=f"{one.name} has {', '.join(own) or 'none'}",
                )
        return keys[0]

    def _value(self, key: str, values: Sequence[object]) -> object:
        """Return a value that all parts have."""
        told = [single(value) for value in values] if len(values) > 1 else [None]
        if any(one != told[0] for one in told):
            raise LayoutError(
                f"{self._names} are parts of one tensor in {self._map}, and differ in {key}",
                found=", ".join(map(str, told)),
            )
        return values[0]

    def parameter(self, name: str, target: Arrangement) -> Parameter:
        """Return the parameter of the other side."""
        first = self._parts[0]
        if len(self._parts) == 1 and self._arrangements[0].seen == target.seen:  # it is the part as it is
            slots = dict(first.slots)
        else:
            slots = {key: self._slot(key, target) for key in self._keys}
            for key, value in self._state.items():
                if holds_tensors(value):
                    raise self._not_arranged(key, "dequantize it, and map what was written")
        return replace(first, name=name, shape=target.shape, slots=slots, state=dict(self._state))

    def _slot(self, key: str, target: Arrangement) -> Slot:
        slots = [one.slots[key] for one in self._parts]
        first = slots[0]
        if any(isinstance(slot, Computed) for slot in slots):
            raise self._not_arranged(key, "write it without the map, and map what was written")
        if all(not slot.shape for slot in slots) and self._parts[0].shape:
            self._value(key, slots)
            return first
        for part, slot in zip(self._parts, slots, strict=True):
            if slot.shape != part.shape:
                raise UnsupportedError(
                    f"{key} of {part.name} is not one number for each element, which {self._map} arranges",
                    expected=part.shape,
                    found=slot.shape,
                    advice=None
                    if key == WEIGHT
                    else "without the optimizer's state, `zckpt consolidate` maps the model",
                )
            if slot.dtype != first.dtype or len(slot.replicas) != len(first.replicas):
                raise UnsupportedError(
                    f"{key} of {self._names}, parts of one tensor in {self._map}, is of several types",
                    found=f"{slot.dtype} and {first.dtype}",
                )
        return arranged(target, list(zip(self._arrangements, slots, strict=True)))

    def _not_arranged(self, key: str, advice: str) -> UnsupportedError:
        return UnsupportedError(
            f"{key} of {self._names} is or was quantised, in blocks that {self._map} takes apart", advice=advice
        )
