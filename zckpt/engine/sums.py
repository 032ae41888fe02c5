"""Functions that compute a slot as a sum or mean of others, each step rounded as torch rounds it.

Sum      w0*x0 + w1*x1 + ...                            a bias, and what an adapter adds to it
Mean     w0*x0 + w1*x1 + ...                            a model soup, or the last checkpoints of a run; of equal
         (x0 + x1 + ...) / n                            weights, which together are 1 in any case
Decayed  m = x0;  m = d*m + (1-d)*x1; ...               what an average that is kept during training does

LowRank  W + scale * (left @ right), rounded once       an adapter merged into its model

DoRA gives each row of the sum, or each column where W lies as (in, out), a norm of its own: it is divided by the norm
it has, and multiplied by that. Norms of columns need all of a tensor: they are computed once, and kept, too.

W is seen as a matrix: its first dimension, and all others. Whole rows of it are computed together, as many in each
block whoever asks, since a product of matrices may be summed in another order where their sizes differ. The right
factor, which every block of a tensor needs whole, is kept while others of it are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import ClassVar

import numpy as np

from zckpt.engine.cast import Array, cast, numpy_dtype
from zckpt.engine.computed import BLOCK_NBYTES, Input, Inputs
from zckpt.immutable import immutable
from zckpt.state import Extent, Slot, itemsize
from zckpt.storage.recent import Recent


@immutable
class _OfSeveral:
    """A function of the same elements of several slots of one shape; `dtype`, float32 or float64, computes it."""

    slots: tuple[Slot, ...]
    dtype: str

    step: ClassVar[None] = None
    """Any elements can be computed by themselves."""

    @property
    def width(self) -> int:
        """Bytes of an element, as it is computed or as the widest of the slots has it."""
        return max(itemsize(dtype) for dtype in (self.dtype, *(slot.dtype for slot in self.slots)))

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return the same elements of each slot."""
        return [Input(slot, slot.flat(start, numel), self.dtype) for slot in self.slots]


@immutable
class Sum(_OfSeveral):
    """The sum of slots, in their order, each times its weight."""

    weights: tuple[float, ...]

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002  # alike everywhere
        """Return the sum of a block."""
        number = numpy_dtype(self.dtype).type
        total = _weighted(self.weights[0], inputs[0], number)
        for weight, read in zip(self.weights[1:], inputs[1:], strict=True):
            total += _weighted(weight, read, number)
        return total


@immutable
class Mean(Sum):
    """The mean of slots, whose weights together are 1; of equal weights, the sum is divided by their number."""

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:
        """Return the mean of a block."""
        count = len(self.weights)
        if len(set(self.weights)) > 1:
            return Sum.compute(self, inputs, start, numel, dtype)
        total = Sum(self.slots, self.dtype, (1.0,) * count).compute(inputs, start, numel, dtype)
        total /= numpy_dtype(self.dtype).type(count)
        return total


def _weighted(weight: float, read: Callable[[], Array], number: Callable[[float], float]) -> Array:
    values = read()
    if weight != 1.0:
        values *= number(weight)
    return values


@immutable
class Decayed(_OfSeveral):
    """The exponential mean of slots: of what was there, `decay` stays, and 1 - `decay` of the next slot is added."""

    decay: float

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002  # alike everywhere
        """Return the mean of a block."""
        number = numpy_dtype(self.dtype).type
        first, *others = inputs
        total = first()
        for read in others:
            values = read()
            total *= number(self.decay)
            values *= number(1 - self.decay)
            total += values
        return total


KEPT_NBYTES = 1 << 25
"""Of right factors that are kept: workers are at two or three tensors at once, whose factors have few rows each."""


@immutable(eq=False)
class LowRank:
    """What a slot is after a product of two matrices has been added to it."""

    base: Slot  # at least 1-d
    left: Slot
    right: Slot
    """Of shapes (rows, rank, ...) and (rank, columns, ...), the former with a last dimension of 1 or none; where
    `transposed`, of shapes (rank, rows) and (columns, rank).
    """
    scale: float
    dtype: str  # {"float32", "float64"}; in which it is computed
    transposed: bool
    kept: Recent[int, tuple[Slot, Array]] = field(repr=False)
    """Right factors that were read, by the identity of slots, which these keep; shared by all tensors of an operation.
    """
    experts: int = 1
    """Matrices of as many rows one below the other, in each factor too; if more than 1, it is not `transposed`."""
    magnitude: Slot | None = None  # the norm of each row, or column where `transposed`
    norms: Slot | None = None  # what `Norms` computes of the same without a `magnitude`, where `transposed`

    @property
    def columns(self) -> int:
        """Elements of a row, of which there is one at least."""
        return max(math.prod(self.base.shape[1:]), 1)

    @property
    def rank(self) -> int:
        """Columns of the left factor."""
        return self.left.shape[0] if self.transposed else self.left.shape[1]

    @property
    def step(self) -> int:
        """Elements of as many rows as are computed together."""
        return max(BLOCK_NBYTES // itemsize(self.dtype) // self.columns, 1) * self.columns

    @property
    def width(self) -> int:
        """Bytes of an element, as it is computed or as the slot has it."""
        return max(itemsize(self.dtype), itemsize(self.base.dtype))

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return the rows of the slot, those of the left factor, and the right factor."""
        first, count, rank = start // self.columns, numel // self.columns, self.rank
        left = self.left.flat(first * rank, count * rank)
        if self.transposed:
            left = Extent((0, first), (rank, count), 0, rank * count)
        found = [
            Input(self.base, self.base.flat(start, numel), self.base.dtype),  # to which what is computed is rounded
            Input(self.left, left, self.dtype),
            Input(self.right, self.right.whole, self.dtype),
        ]
        for slot in (self.magnitude, self.norms):
            if slot is not None:
                found.append(Input(slot, slot.whole if self.transposed else slot.flat(first, count), self.dtype))
        return found

    def _once(self, slot: Slot, read: Callable[[], Array]) -> Array:
        """Return the elements of a slot, which are read if they are not kept; nobody may write to them."""
        found = self.kept.get(id(slot))
        if found is None:
            found = slot, read()
            self.kept.put(id(slot), found, found[1].nbytes)
        return found[1]

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002
        """Return rows of the slot with the product added."""
        read_base, read_left, read_right, *read_norms = inputs
        right = self._once(self.right, read_right)
        left = read_left()
        if self.transposed:
            left, right = left.reshape(self.rank, -1).T, right.reshape(-1, self.rank).T
        else:
            left, right = left.reshape(-1, self.rank), right.reshape(self.experts * self.rank, -1)
        if self.experts == 1:
            found: Array = np.matmul(left, right)
        else:
            found = np.empty((len(left), self.columns), left.dtype)
            first, rows = start // self.columns, self.base.shape[0] // self.experts
            for one in range(first // rows, -(-(first + len(left)) // rows)):
                part = slice(max(one * rows - first, 0), (one + 1) * rows - first)
                np.matmul(left[part], right[one * self.rank :][: self.rank], out=found[part])
        found *= numpy_dtype(self.dtype).type(self.scale)
        total = cast(read_base(), self.dtype)
        total += found.reshape(-1)
        if self.magnitude is not None:
            matrix = total.reshape(-1, self.columns)
            wanted = read_norms[0]()
            if self.norms is None:
                matrix *= (wanted / np.linalg.norm(matrix, axis=1).astype(matrix.dtype))[:, None]
            else:
                matrix *= wanted / self._once(self.norms, read_norms[1])
        return total


@immutable(eq=False)
class Norms:
    """The norm of each column of what a slot is after a product has been added to it."""

    of: LowRank

    @property
    def step(self) -> int:
        """All of them."""
        return self.of.columns

    @property
    def width(self) -> int:
        """Bytes of a float64, in which they are summed."""
        return 8

    def _blocks(self) -> range:
        return range(0, self.of.base.numel, self.of.step)

    def inputs(self, start: int, numel: int) -> list[Input]:  # noqa: ARG002
        """Return what all blocks of the slot need."""
        last = self.of.base.numel
        return [one for low in self._blocks() for one in self.of.inputs(low, min(self.of.step, last - low))]

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:  # noqa: ARG002
        """Return the norms."""
        total = np.zeros(self.of.columns, np.float64)
        for at, low in enumerate(self._blocks()):
            rows = self.of.compute(inputs[3 * at : 3 * at + 3], low, 0, dtype).reshape(-1, self.of.columns)
            total += np.square(rows, dtype=np.float64).sum(axis=0)
        return np.sqrt(total).astype(numpy_dtype(self.of.dtype))
