"""A tensor that is put together from others, as views of theirs: all letters of a rule as dimensions, and back.

source      (heads two half) in    ->  heads two half in  ->  narrowed, placed, padded  ->  heads half two in
target      (heads half two) in
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zckpt.naming.document import Template
from zckpt.naming.sizes import Sizes
from zckpt.state import Shape, Slot
from zckpt.state.boxes import intersection
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
