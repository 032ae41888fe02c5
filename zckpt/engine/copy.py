"""A fill cut into pieces of bounded size, and the elements of a piece: gathered, put in order, cast.

Copies whose target is contiguous are cut along their first dimension. Where several copies lie interleaved in the
target (tensor-parallel slices along an inner dimension), the target is cut into windows of whole rows, and each window
is put together in memory from all the copies that reach into it and written at once. What a function computes is cut
as the function says, and what it needs of its inputs is read when it asks for it.

Of what lies far apart in a file only the pages it is on are read, through mappings of the file: windows of bounded
size, for which there is room in an address space that is limited, however far the elements reach. Rows of a few
elements are moved as one wide element each, and what is transposed in tiles that stay in the cache: element by element,
either takes as long as reading from a disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from zckpt.engine.cast import Array, cast, is_finite, mean, numpy_dtype, resolved, swapped
from zckpt.engine.checking import Overflowed
from zckpt.engine.computed import Block, Computed, Function, blocks, flattened
from zckpt.engine.plan import WIDENED, Copy, Fill, Piece, Strided, fill
from zckpt.engine.targets import Hole, end_of
from zckpt.engine.workers import BATCH_NBYTES
from zckpt.immutable import immutable
from zckpt.state import ZEROS, Extent, Shape, Slot, is_floating, itemsize
from zckpt.state.boxes import SpanIndexes
from zckpt.state.spans import reach_of
from zckpt.storage.disk import BLOCK_NBYTES
from zckpt.storage.files import Sources
from zckpt.storage.stand_ins import Range, found

LARGE_NBYTES = 1 << 16
"""From this size on what lies end to end in the target is written by itself: what is between is not waited for."""

NEAR_NBYTES = 1 << 20
"""Of a file that is elsewhere, elements this near to each other are read at once, with what is between them."""

CAST_NBYTES = 1 << 17
"""Read at once of what is cast: small enough for the cache, and for memory that is not new to the process each time."""

WINDOW_NBYTES = 1 << 24
"""Mapped at once by a worker, for one array."""

WIDE_NBYTES = 1 << 12
"""A row of at most this is one wide element; longer ones take care of themselves."""

TILE = 1 << 5
"""Elements that lie end to end in the target and are moved at once where they do not in the source: two cache lines."""

TILE_ROWS, TILE_NBYTES = 1 << 8, 1 << 15
"""Times as many that lie end to end in the source, so that a tile is in the first cache on both sides; where these are
fewer, or small, it has more of the others.
"""


@immutable
class ComputedPiece(Piece):
    """Bytes that a function computes, from what the copies of all of its hole would bring. `dtype`: of the target."""

    function: Function
    block: Block
    dtype: str

    @property
    def is_bytewise(self) -> bool:
        """Whether the bytes are moved as they are: never."""
        return False


def pieces(one: Fill, most: int, most_bytewise: int) -> Iterator[Piece]:
    """Cut a fill into pieces.

    `most` (bytes): largest piece that goes through memory; `most_bytewise` (bytes): largest piece that is moved as it
    is.
    """
    hole, copies = one.hole, tuple(one.copies)
    if isinstance(hole.slot, Computed):
        extent, indexes = flattened(hole.slot, hole.extent), SpanIndexes()
        for block in blocks(hole.slot, extent, most):  # with only those spans of its inputs that each needs
            inputs = tuple(replace(each, slot=indexes.reaching(each.slot, each.extent)) for each in block.inputs)
            offset = hole.offset + (block.start + block.skipped - extent.start) * itemsize(hole.dtype)
            nbytes, reaching = block.kept * itemsize(hole.dtype), replace(block, inputs=inputs)
            function = hole.slot.function
            yield ComputedPiece(offset, nbytes, copies, function, reaching, hole.dtype, label=hole.label)
        return
    if len(copies) == 1 and hole.nbytes <= most_bytewise and copies[0].is_bytewise:
        yield Piece(hole.offset, hole.nbytes, copies, label=hole.label)
        return
    if all(_is_dense(copy) or _dense_nbytes(copy) >= LARGE_NBYTES for copy in copies):
        for cut in (cut for copy in copies for cut in _cut(copy, most, most_bytewise)):
            yield Piece(cut.offset, cut.nbytes, (cut,), label=hole.label)
        return
    # Windows of whole rows, on a grid that begins where the first element of the box is or would be, as long as a
    # row is not too large.
    start, end = hole.offset, end_of(hole)
    origin, step = start - hole.extent.start * itemsize(hole.dtype), max(copy.strides[0] for copy in copies)
    if step > most:
        step, origin = itemsize(copies[0].target_dtype), start
    size = max(most // step, 1) * step
    for window in range(start - (start - origin) % size, end, size):
        low, high = max(window, start), min(window + size, end)
        within = tuple(part for copy in copies for part in _window(copy, low, high))
        if len(within) == 1 and _is_dense(within[0]):
            yield from (Piece(cut.offset, cut.nbytes, (cut,), label=hole.label) for cut in _cut(within[0], most, most))
        else:
            yield Piece(low, high - low, within, label=hole.label)


def _is_dense(copy: Copy) -> bool:
    """Tell whether a copy's target is contiguous."""
    return _dense_nbytes(copy) == copy.nbytes


def _dense_nbytes(copy: Copy) -> int:
    """Return how many bytes of a copy lie end to end in the target."""
    nbytes = itemsize(copy.target_dtype)
    for size, stride in zip(reversed(copy.shape), reversed(copy.strides), strict=True):
        if stride != nbytes and size != 1:
            break
        nbytes *= size
    return nbytes


def _cut(copy: Copy, most: int, most_bytewise: int) -> Iterator[Copy]:
    """Cut a copy along its first dimension into pieces that are contiguous in the target, as large as in `pieces`.

    A row that is not contiguous, or larger by itself, is cut along the next dimension.
    """
    size, is_dense = max(itemsize(copy.source_dtype), itemsize(copy.target_dtype)), _is_dense(copy)
    most = most_bytewise if copy.is_bytewise else most
    if is_dense and copy.numel * size <= most:
        if copy.numel:
            yield copy
        return
    row = math.prod(copy.shape[1:]) * size
    if not is_dense or (row > most and len(copy.shape) > 1):
        for index in range(copy.shape[0]):
            yield from _cut(_rows(copy, index, 1, drop=True), most, most_bytewise)
        return
    begin, step = 0, max(most // row, 1)
    if copy.is_bytewise:  # the others are cut where blocks of the target begin: none is in two
        begin = max((most - copy.offset % BLOCK_NBYTES) // row, 0)
        yield from _cut(_rows(copy, 0, begin), most, most)
    for first in range(begin, copy.shape[0], step):
        yield _rows(copy, first, min(step, copy.shape[0] - first))


def _window(copy: Copy, low: int, high: int) -> Iterator[Copy]:
    """Yield copies that move what of a copy lies in bytes [low, high) of the target: of a row it may be a part."""
    step = copy.strides[0]
    inner = reach_of(copy.shape[1:], copy.strides[1:], itemsize(copy.target_dtype))
    first = max((low - inner - copy.offset) // step + 1, 0)
    last = min(-(-(high - copy.offset) // step), copy.shape[0])
    whole = max(-(-(low - copy.offset) // step), first)
    end = max(min((high - inner - copy.offset) // step + 1, last), whole)
    for index in (*range(first, min(whole, last)), *range(max(end, first), last)):
        yield from _window(_rows(copy, index, 1, drop=True), low, high)
    if whole < end:
        yield _rows(copy, whole, end - whole)


def _rows(copy: Copy, first: int, count: int, *, drop: bool = False) -> Copy:
    """Return `count` rows of a copy from `first` on; `drop` leaves the first dimension out, of which it has one."""
    kept = slice(1, None) if drop else slice(None)
    return replace(
        copy,
        shape=(count, *copy.shape[1:])[kept],
        sources=tuple(Strided(s.path, s.offset + first * s.strides[0], s.strides[kept]) for s in copy.sources),
        offset=copy.offset + first * copy.strides[0],
        strides=copy.strides[kept],
    )


def elements(piece: Piece, sources: Sources) -> memoryview:
    """Return the bytes of a piece.

    `sources`: that read the source files. Raises DamagedFileError: a source file ends too early.
    """
    if isinstance(piece, ComputedPiece):
        block = piece.block
        inputs = [partial(read_extent, each.slot, each.extent, sources, dtype=each.dtype) for each in block.inputs]
        with np.errstate(all="ignore"):  # what is no number stays none
            values = piece.function.compute(inputs, block.start, block.numel, piece.dtype)
        kept = values[block.skipped : block.skipped + block.kept]
        return np.ascontiguousarray(cast(kept, piece.dtype)).view(np.uint8).data
    if len(piece.copies) == 1 and _is_dense(piece.copies[0]):
        return in_order(_values(piece.copies[0], sources)).reshape(-1).view(np.uint8).data
    buffer = bytearray(piece.nbytes)
    for copy in piece.copies:
        dtype = numpy_dtype(copy.target_dtype)
        target: Array = np.ndarray(copy.shape, dtype, buffer, copy.offset - piece.offset, copy.strides)
        place(target, _values(copy, sources))
    return memoryview(buffer)


def overflowed(piece: Piece, data: memoryview, sources: Sources) -> list[Overflowed]:
    """Return how many elements of a piece became infinite or no number, of finite ones; one entry, or none.

    Where there are some that are not finite, what they were made of is read again.
    """
    if not is_endless(piece, data):
        return []
    dtype = _dtype_of(piece)
    wrong = ~np.isfinite(np.frombuffer(data, numpy_dtype(dtype)))
    if isinstance(piece, ComputedPiece):
        for each in piece.block.inputs:
            finite = np.isfinite(read_extent(each.slot, each.extent, sources, dtype=each.dtype))
            if len(finite) == piece.block.numel:
                wrong &= finite[piece.block.skipped : piece.block.skipped + piece.block.kept]
            else:
                wrong &= finite.all()  # of a factor, say, each element is in many
    else:
        for copy in piece.copies:
            size = numpy_dtype(dtype).itemsize
            strides = tuple(stride // size for stride in copy.strides)
            its = np.lib.stride_tricks.as_strided(wrong[(copy.offset - piece.offset) // size :], copy.shape, strides)
            for source in copy.sources:
                alone = replace(copy, sources=(source,), target_dtype=copy.source_dtype)
                its &= np.isfinite(_values(alone, sources))
    count = int(np.count_nonzero(wrong))
    return [Overflowed(piece.label, piece.offset, 0, None, count, dtype)] if count else []


def is_endless(piece: Piece, data: memoryview) -> bool:
    """Tell whether bytes that a piece became, alone or with others like it, may hold values that overflowed.

    A finite element can become one that is not where a type is narrower, or several are added.
    """
    dtype = _dtype_of(piece)
    types = [(copy.source_dtype, copy.target_dtype) for copy in piece.copies if len(copy.sources) == 1]
    kept = not isinstance(piece, ComputedPiece) and len(types) == len(piece.copies)
    if not is_floating(dtype) or (kept and all(a == b or (a, b) in WIDENED for a, b in types)):
        return False
    return not is_finite(np.frombuffer(data, numpy_dtype(dtype)))


def _dtype_of(piece: Piece) -> str:
    return piece.dtype if isinstance(piece, ComputedPiece) else piece.copies[0].target_dtype


def _values(copy: Copy, sources: Sources) -> Array:
    """Return the elements of a copy in its shape, of the target's type."""
    return _converted((_gather(copy, source, sources) for source in copy.sources), copy)


def converted(data: memoryview, copy: Copy) -> memoryview:
    """Return the bytes of elements of a copy that were read end to end, as the target has them."""
    array = _converted([np.frombuffer(data, numpy_dtype(copy.source_dtype))], copy)
    return np.ascontiguousarray(array).view(np.uint8).data


def _converted(arrays: Iterable[Array], copy: Copy) -> Array:
    """Return what the elements of each source of a copy become: in order, resolved, averaged, cast."""
    if copy.byteorder == "big":
        arrays = (swapped(array, copy.source_dtype) for array in arrays)
    if copy.unresolved:
        arrays = (resolved(array, copy.source_dtype, copy.unresolved) for array in arrays)
    array = next(iter(arrays)) if len(copy.sources) == 1 else mean(arrays, copy.source_dtype)
    return array if copy.source_dtype == copy.target_dtype else cast(array, copy.target_dtype)


def _gather(copy: Copy, source: Strided, sources: Sources) -> Array:
    """Return the elements of a copy as an array of its shape, read with one read where its strides allow.

    Of those that lie far apart, what lies near each other is read at once in a file that is elsewhere; of one here, the
    pages that they are on, through mappings.
    """
    dtype = numpy_dtype(copy.source_dtype)
    if source.path == ZEROS:
        return np.zeros(copy.shape, dtype)
    reach = reach_of(copy.shape, source.strides, dtype.itemsize)
    gathered: Array
    if reach > 2 * copy.numel * dtype.itemsize and found(source.path) is None:
        gathered = np.empty(copy.shape, dtype)
        gather_mapped(gathered, sources, source.path, source.offset, source.strides)
        sources.touch(source.path, source.offset, reach)
        return gathered
    parts = list(_near(copy.shape, source, dtype.itemsize))
    if len(parts) > 1:
        gathered = np.empty(copy.shape, dtype)
    for index, offset, nbytes, shape, strides in parts:
        buffer = bytearray(nbytes)
        sources.read(source.path, offset, memoryview(buffer))
        part: Array = np.ndarray(shape, dtype, buffer, strides=strides)
        if len(parts) == 1:
            return part.reshape(copy.shape)
        gathered[index] = part
    return gathered


_Near = tuple[tuple["int | slice", ...], int, int, Shape, Shape]
"""Elements that are read at once: their index, the offset and number of bytes that have them, shape and strides."""


def _near(shape: Shape, source: Strided, size: int) -> Iterator[_Near]:
    """Yield the parts of a source that are read at once.

    Dimensions are taken apart, the one of the largest steps first, until most of what is read is needed, or little is
    read in all.
    """
    steps = sorted(range(len(shape)), key=lambda dim: -source.strides[dim])
    for apart in range(len(steps) + 1):
        inner = sorted(steps[apart:])
        sizes, strides = tuple(shape[dim] for dim in inner), tuple(source.strides[dim] for dim in inner)
        reach = reach_of(sizes, strides, size)
        if reach <= max(2 * size * math.prod(sizes), NEAR_NBYTES):
            break
    for at in np.ndindex(*(shape[dim] for dim in steps[:apart])):
        chosen = dict(zip(steps[:apart], at, strict=True))
        offset = source.offset + sum(n * source.strides[dim] for dim, n in chosen.items())
        yield tuple(chosen.get(dim, slice(None)) for dim in range(len(shape))), offset, reach, sizes, strides


def ranges_read(some: Iterable[Piece]) -> Iterator[Range]:
    """Yield which bytes of which files pieces read, for `ahead`; of computed ones, none, for they say so later."""
    for piece in some:
        for copy in () if isinstance(piece, ComputedPiece) else piece.copies:
            for source in copy.sources:
                if found(source.path) is not None:
                    parts = _near(copy.shape, source, itemsize(copy.source_dtype))
                    yield from ((source.path, offset, nbytes) for _, offset, nbytes, _, _ in parts)


def pieces_of(hole: Hole, most: int = BATCH_NBYTES, indexes: SpanIndexes | None = None) -> Iterator[Piece]:
    """Return a hole in pieces of at most `most` bytes."""
    return pieces(Fill(hole, tuple(fill(hole, indexes))), most, most)


def read_piece(piece: Piece, into: memoryview, sources: Sources) -> memoryview:
    """Read a piece into a buffer, at its offset, and return it; what is moved as it is is not copied on the way."""
    view = into[piece.offset : end_of(piece)]
    copy = piece.copies[0] if len(piece.copies) == 1 and not isinstance(piece, ComputedPiece) else None
    if copy is not None and copy.is_bytewise:
        sources.read(copy.sources[0].path, copy.sources[0].offset, view)
    elif copy is not None and copy.is_plain:
        own, to = numpy_dtype(copy.source_dtype), np.frombuffer(view, numpy_dtype(copy.target_dtype))
        step = CAST_NBYTES // own.itemsize
        buffer: Array = np.empty(min(step, copy.numel), own)  # which stays in the cache
        for at in range(0, copy.numel, step):
            some = buffer[: min(step, copy.numel - at)]
            sources.read(copy.sources[0].path, copy.sources[0].offset + at * own.itemsize, some.view(np.uint8).data)
            with np.errstate(over="ignore", invalid="ignore"):
                to[at : at + len(some)] = some
    else:
        view[:] = elements(piece, sources)
    return view


def read_extent(slot: Slot, extent: Extent, sources: Sources, *, dtype: str | None = None) -> Array:
    """Return the elements of an extent of a slot, flat.

    `dtype`: element type of the result; by default the slot's own. Raises LayoutError: the slot's spans do not cover
    the extent exactly once; DamagedFileError: a file ends too early.
    """
    dtype = dtype or slot.dtype
    result = np.empty(extent.numel, numpy_dtype(dtype))
    if extent.numel:
        view = memoryview(result.view(np.uint8).data)
        for piece in pieces_of(Hole(0, slot.name, slot, extent, dtype)):
            read_piece(piece, view, sources)
    return result


def gather_mapped(into: Array, sources: Sources, path: str, offset: int, strides: tuple[int, ...]) -> None:
    """Fill an array of any strides with elements of a file.

    Parameters
    ----------
    into : ndarray
    sources : Sources
    path : str
        Of the file.
    offset : int, bytes
        Of the first element.
    strides : tuple of int, bytes
        In the file, by dimension; not negative.

    Raises
    ------
    DamagedFileError
        The file ends before the last of them.
    """
    reach = reach_of(into.shape, strides, into.itemsize)
    if reach <= WINDOW_NBYTES:
        mapped, start = sources.mapped(path, offset, reach)
        place(into, np.ndarray(into.shape, into.dtype, mapped, start, strides))
        return
    axis = max(range(into.ndim), key=lambda one: strides[one] if into.shape[one] > 1 else -1)
    inner = reach - (into.shape[axis] - 1) * strides[axis]
    rows = max((WINDOW_NBYTES - inner) // strides[axis] + 1, 1)
    for first in range(0, into.shape[axis], rows):
        part = into[(slice(None),) * axis + (slice(first, first + rows),)]
        gather_mapped(part, sources, path, offset + first * strides[axis], strides)


def place(target: Array, values: Array) -> None:
    """Set elements of an array to those of another, of the same shape and type, both of any strides."""
    size = values.itemsize
    if values.ndim == 0 or values.size < TILE:
        target[...] = values
        return
    last = values.shape[-1]
    if last > 1 and values.strides[-1] == target.strides[-1] == size:
        if last * size <= WIDE_NBYTES:
            kind = np.dtype(f"V{last * size}")
            target, values = target.view(kind)[..., 0], values.view(kind)[..., 0]
        target[...] = values
        return
    inner = min(range(values.ndim), key=lambda one: values.strides[one] or 1 << 62)
    if inner == values.ndim - 1 or last < TILE or values.shape[inner] < 2:
        target[...] = values
        return
    step = max(TILE_NBYTES // (size * min(values.shape[inner], TILE_ROWS)), TILE)
    for low in range(0, values.shape[inner], TILE_ROWS):
        rows = (slice(None),) * inner + (slice(low, low + TILE_ROWS),)
        to, from_ = target[rows], values[rows]
        for at in range(0, last, step):
            to[..., at : at + step] = from_[..., at : at + step].copy(order="K")  # steps of it would share cache lines


def in_order(values: Array) -> Array:
    """Return an array of the same elements that lie end to end."""
    if values.flags.c_contiguous:
        return values
    found: Array = np.empty(values.shape, values.dtype)
    place(found, values)
    return found
