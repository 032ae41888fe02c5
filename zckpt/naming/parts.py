"""Tensors of one side of a rule that are put together from those of the other, as views of theirs: arrangements, slots.

source      (heads two half) in    ->  heads two half in  ->  narrowed, placed, padded  ->  heads half two in
target      (heads half two) in

All letters of a rule are dimensions on the way. What the parts have in common, the whole has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.compare.logical import single
from zckpt.engine.computed import Computed
from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.naming.document import Template
from zckpt.naming.match import Instance
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import WEIGHT, Checkpoint, Parameter, Shape, Slot
from zckpt.state.boxes import intersection, overlap
from zckpt.state.views import narrow, pad, placed, reshape, transpose, zeros


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A tensor as a box of all letters of a rule.

    Parameters
    ----------
    letters : tuple of str
        In one order for all tensors of the rule.
    low, sizes : tuple of int
        The box, by letter.
    axes : tuple of tuple of int
        The letters of each dimension, by number.
    """

    letters: tuple[str, ...]
    low: Shape
    sizes: Shape
    axes: tuple[Shape, ...]

    @classmethod
    def of(cls, letters: tuple[str, ...], template: Template, indices: Mapping[str, int], sizes: Sizes) -> Arrangement:
        """Return the arrangement of one tensor of a rule."""
        bounds = {letter: (indices[letter], indices[letter] + 1) for letter in letters if letter in indices}
        bounds |= {factor.name: sizes.bounds(factor) for axis in template.axes or () for factor in axis}
        number = {letter: index for index, letter in enumerate(letters)}
        return cls(
            letters,
            tuple(bounds[letter][0] for letter in letters),
            tuple(bounds[letter][1] - bounds[letter][0] for letter in letters),
            tuple(tuple(number[factor.name] for factor in axis) for axis in template.axes or ()),
        )

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(math.prod(self.sizes[letter] for letter in axis) for axis in self.axes)

    @property
    def order(self) -> list[int]:
        """All letters in the order in which the tensor has them, those that it has not first."""
        own = [letter for axis in self.axes for letter in axis]
        return [letter for letter in range(len(self.letters)) if letter not in own] + own

    @property
    def seen(self) -> tuple[object, ...]:
        """What two tensors have alike whose elements are the same, in the same order."""
        return self.shape, self.low, self.sizes, [letter for letter in self.order if self.sizes[letter] != 1]


def arranged(target: Arrangement, sources: Sequence[tuple[Arrangement, Slot]]) -> Slot:
    """Return a slot whose elements are those of others; where none has them, zeros.

    `sources`: all of one type, whose boxes do not meet. What none has is before or behind all of them, along some
    letters.
    """
    parts = []
    for one, slot in sources:
        both = intersection((one.low, one.sizes), (target.low, target.sizes))
        if both is not None:
            view = reshape(slot, tuple(one.sizes[letter] for letter in one.order))
            view = transpose(view, [one.order.index(letter) for letter in range(len(one.order))])
            for letter, (low, size) in enumerate(zip(*both, strict=True)):
                view = narrow(view, letter, low - one.low[letter], size)
            parts.append((both[0], view))
    if not parts:
        return zeros(sources[0][1], target.shape)
    first = [min(lows) for lows in zip(*(low for low, _ in parts), strict=True)]
    whole = placed([(tuple(a - b for a, b in zip(low, first, strict=True)), view) for low, view in parts])
    for letter, (low, size) in enumerate(zip(target.low, target.sizes, strict=True)):
        whole = pad(whole, letter, first[letter] - low, low + size - first[letter] - whole.shape[letter])
    return reshape(transpose(whole, target.order), target.shape)


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
