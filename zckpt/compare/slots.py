"""Two layouts of the same slots, compared element by element, bit for bit: in parallel, in bounded memory.

First bytes are compared, which is as fast as they are read, and no further in a slot than to its first difference.
Then those slots alone that differ are read again, for the numbers that say how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from zckpt.compare.figures import Figures, Tolerance, figures
from zckpt.compare.rounding import scratch
from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.cast import Array
from zckpt.engine.scan import SlotSet, scan
from zckpt.errors import LayoutError
from zckpt.state import Slot

FIGURES_MEMORY = 2
"""Figures are of float64, of which a block needs about as many times more than its bytes."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A slot in two places.

    Parameters
    ----------
    label : str
        `exp_avg/wte.weight`, for messages.
    a, b : Slot
        Of one shape.
    dtype : str, optional
        Element type that both are read as, cast as the copier casts; by default each is read as it is, and two of
        different types differ.
    """

    label: str
    a: Slot
    b: Slot
    dtype: str | None = None

    @property
    def dtypes(self) -> tuple[str, str]:
        """Element types they are read as."""
        return self.dtype or self.a.dtype, self.dtype or self.b.dtype


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs in one slot.

    Parameters
    ----------
    index : int
        Of the pair.
    label : str
    figures : Figures
    """

    index: int
    label: str
    figures: Figures


def differences(
    pairs: Iterable[Pair],
    *,
    tolerance: Tolerance | None = None,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
) -> list[Difference]:
    """Return what differs in each of the slots that are not equal, bit for bit, in the order of the pairs.

    Parameters
    ----------
    pairs : iterable of Pair
    tolerance : Tolerance, optional
        What is close enough to be no difference; of two element types, values count then.
    memory : int, bytes
        Upper bound of what buffers take together.
    reporter : Reporter, optional
        Told of progress, in bytes of one side.

    Raises
    ------
    LayoutError
        The two sides of a pair have different shapes, or one of them does not cover every element once.
    UnsupportedError
        They have element types of which one is not cast to the other.
    SourceError
        A file cannot be read.
    """
    whole = list(pairs)
    for pair in whole:
        if pair.a.shape != pair.b.shape:
            raise LayoutError(f"{pair.label} has two shapes", expected=pair.a.shape, found=pair.b.shape)
    limits = tolerance or Tolerance()
    sets = [SlotSet(pair.label, (pair.a, pair.b), pair.dtypes) for pair in whole]
    unequal = {index for index, one in enumerate(sets) if one.dtypes[0] != one.dtypes[1]}
    seen = scan(sets, first_difference, memory=memory, reporter=reporter, goes_on=lambda i: i not in unequal)
    for index, _ in seen:
        unequal.add(index)
    chosen = sorted(unequal)
    found = measure([sets[index] for index in chosen], limits, memory=memory)
    return [
        Difference(index, whole[index].label, one)
        for index, one in zip(chosen, found, strict=True)
        if one.num_different or (limits.is_none and sets[index].dtypes[0] != sets[index].dtypes[1])
    ]


def measure(sets: Sequence[SlotSet], tolerance: Tolerance, *, memory: int = DEFAULT_MEMORY_NBYTES) -> list[Figures]:
    """Return the figures of sets of two slots; errors are those of `differences`."""
    found = [Figures() for _ in sets]
    look = partial(measure_block, [one.dtypes for one in sets], tolerance)
    for index, one in scan(sets, look, memory=memory // FIGURES_MEMORY):
        found[index].add(one)
    return found


def first_difference(_index: int, start: int, arrays: Sequence[Array]) -> int | None:
    """Return the index of the first element of a block whose bits are not those of the other side."""
    a, b = arrays
    word = f"u{min(a.dtype.itemsize, 8)}"
    x, y = a.view(word), b.view(word)
    unequal = np.not_equal(x, y, out=scratch(len(x)).view(np.bool_)[: len(x)])
    if not unequal.any():
        return None
    return start + int(np.argmax(unequal)) * x.dtype.itemsize // a.dtype.itemsize


def measure_block(
    dtypes: Sequence[tuple[str, ...]], tolerance: Tolerance, index: int, start: int, arrays: Sequence[Array]
) -> Figures:
    """Return the figures of a block."""
    a, b = arrays
    return figures(a, b, start, (dtypes[index][0], dtypes[index][1]), tolerance)
