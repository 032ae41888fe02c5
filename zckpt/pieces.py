"""A copy cut into pieces of bounded size, and the elements of a piece: gathered, put in order, cast.

Loads numpy only when a piece needs it; a plan that moves bytes as they are runs without.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.dtypes import itemsize
from zckpt.errors import DamagedFileError
from zckpt.plan import Copy, Strided
from zckpt.storage import read_into

if TYPE_CHECKING:
    from zckpt.cast import Array

Descriptor = Callable[[str], int]


def cut(copy: Copy, most: int) -> Iterator[Copy]:
    """Cut a copy along its first dimension into pieces of at most `most` bytes on both sides.

    A row that is larger than that by itself is cut along the next dimension.

    Parameters
    ----------
    copy : Copy
    most : int, bytes
    """
    size = max(itemsize(copy.source_dtype), itemsize(copy.target_dtype))
    if copy.numel * size <= most:
        if copy.numel:
            yield copy
        return
    row = math.prod(copy.shape[1:]) * size
    if row > most and len(copy.shape) > 1:
        for index in range(copy.shape[0]):
            yield from cut(_rows(copy, index, 1, drop=True), most)
        return
    step = max(most // row, 1)
    for first in range(0, copy.shape[0], step):
        yield _rows(copy, first, min(step, copy.shape[0] - first))


def _rows(copy: Copy, first: int, count: int, *, drop: bool = False) -> Copy:
    """Return the part of a copy from row `first`; `drop` leaves the first dimension out, of which it has one."""
    kept = slice(1, None) if drop else slice(None)
    return replace(
        copy,
        shape=(count, *copy.shape[1:])[kept],
        sources=tuple(Strided(s.path, s.offset + first * s.strides[0], s.strides[kept]) for s in copy.sources),
        offset=copy.offset + first * copy.strides[0],
        strides=copy.strides[kept],
    )


def elements(copy: Copy, descriptor: Descriptor) -> Iterator[tuple[int, memoryview]]:
    """Yield the contiguous runs of the target that a piece writes: byte offset and bytes.

    Parameters
    ----------
    copy : Copy
        A piece, small enough to be held in memory.
    descriptor : callable
        Gives an open descriptor for a source path.
    """
    import numpy as np

    from zckpt.cast import cast, mean, numpy_dtype, swapped

    arrays = [_gather(copy, source, descriptor) for source in copy.sources]
    if copy.byteorder == "big":
        arrays = [swapped(array, copy.source_dtype) for array in arrays]
    array = arrays[0] if len(arrays) == 1 else mean(arrays, copy.source_dtype)
    if copy.source_dtype != copy.target_dtype:
        array = cast(array, copy.target_dtype)
    array = np.ascontiguousarray(array).astype(numpy_dtype(copy.target_dtype), copy=False).reshape(copy.shape)
    yield from _runs(array, copy)


def _runs(array: Array, copy: Copy) -> Iterator[tuple[int, memoryview]]:
    """Yield the runs of the target in which the elements are contiguous."""
    import numpy as np

    inner = len(copy.shape)
    step = itemsize(copy.target_dtype)
    while inner and copy.strides[inner - 1] == step:
        inner -= 1
        step *= copy.shape[inner]
    data = memoryview(array.reshape(-1).view(np.uint8).data)
    for count, index in enumerate(np.ndindex(copy.shape[:inner])):
        offset = copy.offset + sum(i * s for i, s in zip(index, copy.strides, strict=False))
        yield offset, data[count * step : (count + 1) * step]


def _gather(copy: Copy, source: Strided, descriptor: Descriptor) -> Array:
    """Return the elements of a piece as an array of its shape, read with as few reads as its strides allow."""
    import numpy as np

    from zckpt.cast import numpy_dtype

    dtype = numpy_dtype(copy.source_dtype)
    reach = dtype.itemsize + sum((n - 1) * s for n, s in zip(copy.shape, source.strides, strict=True))
    if reach <= 2 * copy.numel * dtype.itemsize:
        buffer = bytearray(reach)
        read_into(descriptor(source.path), source.offset, memoryview(buffer), path=source.path)
        gathered: Array = np.ndarray(copy.shape, dtype, buffer, strides=source.strides)
        return gathered
    return _gather_mapped(copy, source, descriptor, reach)


def _gather_mapped(copy: Copy, source: Strided, descriptor: Descriptor, reach: int) -> Array:
    """Gather elements that lie far apart through a mapping of the file: only the pages they are on are read."""
    import numpy as np

    from zckpt.cast import numpy_dtype

    start = source.offset - source.offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(
            descriptor(source.path), source.offset - start + reach, access=mmap.ACCESS_READ, offset=start
        )
    except ValueError as error:
        raise DamagedFileError(
            "the file ends too early", path=source.path, expected=f"at least {source.offset + reach} bytes"
        ) from error
    view: Array = np.ndarray(copy.shape, numpy_dtype(copy.source_dtype), mapped, source.offset - start, source.strides)
    found: Array = view.copy()
    return found
