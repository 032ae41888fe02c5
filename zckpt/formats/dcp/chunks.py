"""The chunks of a directory as columns of numbers, and the spans that tensors have of them.

A checkpoint of thousands of parameters by thousands of ranks has millions of chunks. Each takes some tens of bytes here
and no object: a span or a node of it is made when it is asked for.

    chunk       0   1   2   3   4 ...      numbered tensor by tensor, those of a tensor by their first index
    box         first index and size along each dimension
    tensor      a number for the tensor that it is of
    file        a number for the name
    offset      of the item in the file, and its length
    kind        a number for a node that all chunks share which differ only in where they are
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import overload

from zckpt.formats.torch_files.tensors import span_of
from zckpt.state import Extent, Span, Spans
from zckpt.state.boxes import Box, bounds
from zckpt.torchfile import Tensor

NOWHERE = -1
"""The file of a chunk that nothing says the place of."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its element type, whole shape, and the chunks of it that have elements.

    Parameters
    ----------
    key : str
    dtype : str
    shape : tuple of int
    first, count : int
        The number of its first chunk, and how many follow each other.
    at : int
        Where the boxes of these begin in their column.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    count: int
    at: int

    @property
    def numbers(self) -> range:
        """The numbers of its chunks."""
        return range(self.first, self.first + self.count)


class Chunks:
    """What `.metadata` says of the chunks that have elements: all columns but the kind.

    Attributes
    ----------
    names : list of str
        The files.
    file, offset, nbytes : array of int
        By the number of a chunk; offset and length in bytes.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.file, self.offset, self.nbytes = array("i"), array("q"), array("q")
        self._tensor, self._boxes = array("i"), array("q")
        self._tensors: list[TensorEntry] = []
        self._files: dict[str, int] = {}

    def add(self, key: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> TensorEntry:
        """Add the chunks of a tensor, in the order of their first indices; where they are is not known yet."""
        entry = TensorEntry(key, dtype, shape, len(self.file), len(boxes), len(self._boxes))
        for offsets, sizes in boxes:
            self._boxes.extend(offsets)
            self._boxes.extend(sizes)
            self._tensor.append(len(self._tensors))
            self.file.append(NOWHERE)
            self.offset.append(0)
            self.nbytes.append(0)
        self._tensors.append(entry)
        return entry

    def put(self, number: int, name: str, offset: int, nbytes: int) -> None:
        """Say where a chunk is."""
        file = self._files.setdefault(name, len(self.names))
        if file == len(self.names):
            self.names.append(name)
        self.file[number], self.offset[number], self.nbytes[number] = file, offset, nbytes

    def entry(self, number: int) -> TensorEntry:
        """Return the tensor that a chunk is of."""
        return self._tensors[self._tensor[number]]

    def box(self, number: int) -> Box:
        """Return the first index and the sizes of a chunk."""
        entry = self.entry(number)
        dimensions = len(entry.shape)
        at = entry.at + (number - entry.first) * 2 * dimensions
        middle = at + dimensions
        return tuple(self._boxes[at:middle]), tuple(self._boxes[middle : middle + dimensions])

    def numel(self, entry: TensorEntry) -> int:
        """Return how many elements the chunks of a tensor have together."""
        return sum(math.prod(self.box(number)[1]) for number in entry.numbers)


class Located:
    """Where the elements of each chunk are, found in the items: the column kind."""

    def __init__(self, chunks: Chunks, directory: Path) -> None:
        self.chunks = chunks
        self.paths = [str(directory / name) for name in chunks.names]
        self._kind = array("i", [0]) * len(chunks.file)
        self._kinds: list[tuple[Tensor, Span]] = []
        self._numbers: dict[int, int] = {}

    def put(self, number: int, node: Tensor) -> None:
        """Say what an item is: `node` is that of an item that begins its file, and may be that of others.

        Raises UnsupportedError: the bytes of its elements are not its values.
        """
        kind = self._numbers.get(id(node))
        if kind is None:
            kind = self._numbers[id(node)] = len(self._kinds)
            self._kinds.append((node, span_of(node, self.path(number))))
        self._kind[number] = kind

    def node(self, number: int) -> Tensor:
        """Return the node of a chunk."""
        node, _ = self._kinds[self._kind[number]]
        return moved(node, self.chunks.offset[number])

    def path(self, number: int) -> str:
        """Return the file of a chunk."""
        return self.paths[self.chunks.file[number]]

    def span(self, number: int) -> Span:
        """Return the span of a chunk."""
        offsets, sizes = self.chunks.box(number)
        _, like = self._kinds[self._kind[number]]
        extent = Extent(offsets, sizes, 0, math.prod(sizes))
        offset = self.chunks.offset[number] + like.offset
        return Span(extent, self.path(number), offset, like.dtype, like.strides, like.byteorder, like.unresolved)


def moved(node: Tensor, nbytes: int) -> Tensor:
    """Return the node of a tensor whose storage is so many bytes further on in its file."""
    return replace(node, storage=replace(node.storage, offset=node.storage.offset + nbytes))


class ChunkSpans(Spans):
    """The spans of a tensor of many chunks."""

    __slots__ = ("_bounds", "_entry", "_located")

    def __init__(self, located: Located, entry: TensorEntry) -> None:
        self._located, self._entry = located, entry
        self._bounds: tuple[array[int], array[int]] | None = None

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self._entry.count

    def numbered(self, index: int) -> Span:
        """Return one of them, in the order of their first indices."""
        return self._located.span(self._entry.first + index)

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that may have some of elements [low, high) of the flattened tensor."""
        lows, highs = self._sorted()
        return self[bisect_right(highs, low) : bisect_left(lows, high)]

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        located = self._located
        files = {file for file, path in enumerate(located.paths) if path in paths}
        return tuple(located.span(number) for number in self._entry.numbers if located.chunks.file[number] in files)

    def _sorted(self) -> tuple[array[int], array[int]]:
        """Return where each begins, and where it or one before it ends, in the flattened tensor."""
        if self._bounds is None:
            every = [bounds(span.extent, self._entry.shape) for span in self]
            lows, highs = array("q", [low for low, _ in every]), array("q", accumulate((h for _, h in every), max))
            self._bounds = lows, highs
        return self._bounds


class FileChunks:
    """Some chunks of a file, in the order in which they are listed."""

    def __init__(self, numbers: array[int], located: Located) -> None:
        self._numbers, self._located = numbers, located

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield the key of each and where it begins in its tensor, and its node."""
        chunks = self._located.chunks
        for number in self._numbers:
            offsets, _ = chunks.box(number)
            yield (chunks.entry(number).key, str(list(offsets))), self._located.node(number)


class Pairs(Sequence[tuple[int, int]]):
    """Offsets and lengths, in bytes, of any number of items."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = array("q")

    def append(self, offset: int, nbytes: int) -> None:
        """Add one."""
        self._numbers.extend((offset, nbytes))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._numbers) // 2

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[int, int], ...]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        """Return one, or some."""
        found = range(len(self))[index]
        if isinstance(found, int):
            return self._numbers[2 * found], self._numbers[2 * found + 1]
        return tuple((self._numbers[2 * at], self._numbers[2 * at + 1]) for at in found)

    def __eq__(self, other: object) -> bool:
        """Tell whether others are the same."""
        return self._numbers == other._numbers if isinstance(other, Pairs) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows
