"""Slots whose elements are in no file: a function computes them, block by block, from extents of slots that are.

To a plan they are slots like any other. What fills a hole for one are the copies that its inputs need; what comes out
of a block is cast to the hole's type, once. A function sees flat elements, and never where or how anything lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from zckpt.errors import LayoutError
from zckpt.immutable import immutable
from zckpt.state import Extent, Slot
from zckpt.state.boxes import row_major
from zckpt.state.spans import position

if TYPE_CHECKING:
    from zckpt.engine.cast import Array

BLOCK_NBYTES = 1 << 21
"""Computed at once where a function leaves it open: so much that the calls of numpy, after each of which threads wait
for each other, cost little.
"""


@immutable
class Input:
    """What a block needs: an extent of a slot, read as `dtype`."""

    slot: Slot
    extent: Extent
    dtype: str


Inputs = Sequence[Callable[[], "Array"]]
"""For each of a block's: reads it, and returns its elements, flat, in memory that may be written to."""


class Function(Protocol):
    """What computes the elements of a slot; in any thread, or another process, so it must be picklable.

    The planner asks for `inputs` of each block, in order; a worker calls `compute` with as many callables.
    """

    @property
    def step(self) -> int | None:
        """Elements that are always computed together, from a multiple of it on: their values depend on no other cut.

        None: any number of them can be computed, with the same values. Several times as many are a block where that is
        within `BLOCK_NBYTES`.
        """

    @property
    def width(self) -> int:
        """Bytes that an element takes in each of the buffers that `compute` has at once, of which there are few."""

    def inputs(self, start: int, numel: int) -> Sequence[Input]:
        """Return what elements [start, start + numel) of the flattened tensor are computed from."""

    def compute(self, inputs: Inputs, start: int, numel: int, dtype: str) -> Array:
        """Return elements [start, start + numel), flat: of their own type, or cast to `dtype`, as they are wanted.

        `inputs`: one for each of the block's: reads it, and returns its elements, flat, in memory that may be written
        to.
        """


@immutable
class Computed(Slot):
    """A slot whose elements a function computes; it has no spans of its own."""

    function: Function = field(kw_only=True)


@immutable
class Block:
    """Elements of a computed slot that are computed at once; of them [skipped, skipped + kept) are used."""

    start: int
    numel: int
    skipped: int
    kept: int
    inputs: tuple[Input, ...]


def flattened(slot: Computed, extent: Extent) -> Extent:
    """Return an extent of a computed slot as a range of its flattened tensor; a box of whole rows, say, is one.

    Raises LayoutError: it is none.
    """
    if extent.sizes == slot.shape:
        return extent
    first = next((at for at, size in enumerate(extent.sizes) if size != 1), len(extent.sizes))
    if extent.sizes[first + 1 :] != slot.shape[first + 1 :]:
        raise LayoutError(
            f"{slot.name} is computed, and can only be written whole, cut along its first dimension, or cut as in ZeRO",
            expected=slot.shape,
            found=f"a box of {extent.sizes}",
        )
    return slot.flat(position(extent.offsets, row_major(slot.shape)) + extent.start, extent.numel)


def range_of(slot: Computed, extent: Extent) -> tuple[int, int]:
    """Return the first element and the number of those that are computed for an extent of a computed slot.

    Raises LayoutError: the extent is no range of the flattened tensor.
    """
    extent = flattened(slot, extent)
    step = slot.function.step or 1
    low, high = extent.start - extent.start % step, -(-(extent.start + extent.numel) // step) * step
    return low, min(high, slot.numel) - low


def blocks(slot: Computed, extent: Extent, most: int) -> Iterator[Block]:
    """Cut a range of a computed slot, flattened, into blocks that need buffers of `most` bytes, if `step` allows."""
    start, numel = range_of(slot, extent)
    end = extent.start + extent.numel
    step = slot.function.step or 1
    count = step * max(min(most, BLOCK_NBYTES) // (slot.function.width * step), 1)
    for low in range(start, start + numel, count):
        high = min(low + count, start + numel)
        first, last = max(low, extent.start), min(high, end)
        inputs = tuple(slot.function.inputs(low, high - low))
        yield Block(low, high - low, first - low, last - first, inputs)
