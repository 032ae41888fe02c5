"""The items of a directory as columns of numbers, and the spans that tensors have of them.

A checkpoint of thousands of parameters by thousands of ranks has millions of chunks. Each takes some tens of bytes here
and no object: a span or a node of it is made when it is asked for.

    item        0   1   2   3   4 ...      objects, and chunks of tensors: those of one by their first index
    entry       a number for the tensor or object that it is of
    box         first index and size along each dimension
    file        a number for the name
    offset      of the item in the file, and its length
    kind        a number for a node that all chunks share which differ only in where they are
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

from zckpt.formats.torch_files.tensors import span_of
from zckpt.immutable import immutable
from zckpt.state import Extent, Shape, Span, Spans
from zckpt.state.boxes import Box, bounds
from zckpt.storage.nodes import wherever
from zckpt.torchfile import Tensor

T = TypeVar("T")

NOWHERE = -1
"""The file of an item that nothing says the place of."""

OBJECT, UNUSED = "object", "unused"
"""In the place of an element type: an entry is no tensor; it is of a chunk that no tensor has any elements in."""


@immutable
class Entry:
    """A tensor: its element type, whole shape, and the chunks of it that have elements; or an object, of one item."""

    key: str
    dtype: str
    shape: Shape
    first: int  # the number of its first item, and how many follow each other
    count: int
    at: int  # where the boxes of these begin in their column

    @property
    def numbers(self) -> range:
        """The numbers of its items."""
        return range(self.first, self.first + self.count)


class Chunks:
    """What `.metadata` says of the items of a directory; and once they were read, where the elements of each chunk are.

    Attributes
    ----------
    paths : list of str
        The files.
    file, offset, nbytes : array of int
        By the number of an item; offset and length in bytes.
    """

    def __init__(self, directory: Path) -> None:
        self.paths: list[str] = []
        self.file, self.offset, self.nbytes = array("i"), array("q"), array("q")
        self._entry, self._boxes, self._kind = array("i"), array("q"), array("i")
        self._entries: list[Entry] = []
        self._kinds: list[tuple[Tensor, Span]] = []
        self._numbers: dict[int, int] = {}  # of kinds
        self._directory, self._files = directory, dict[str, int]()

    def add(self, key: str, dtype: str, shape: Shape = (), boxes: Sequence[Box] = (((), ()),)) -> Entry:
        """Add an object, or the chunks of a tensor in the order of their first indices; where they are is not known."""
        entry = Entry(key, dtype, shape, len(self.file), len(boxes), len(self._boxes))
        for offsets, sizes in boxes:
            self._boxes.extend(offsets)
            self._boxes.extend(sizes)
            self._entry.append(len(self._entries))
            self.file.append(NOWHERE)
            for column in (self.offset, self.nbytes, self._kind):
                column.append(0)
        self._entries.append(entry)
        return entry

    def put(self, number: int, name: str, offset: int, nbytes: int) -> None:
        """Say where an item is."""
        file = self._files.setdefault(name, len(self.paths))
        if file == len(self.paths):
            self.paths.append(str(wherever(self._directory / name)))
        self.file[number], self.offset[number], self.nbytes[number] = file, offset, nbytes

    def entry(self, number: int) -> Entry:
        """Return what an item is of."""
        return self._entries[self._entry[number]]

    def box(self, number: int) -> Box:
        """Return the first index and the sizes of a chunk."""
        entry = self.entry(number)
        dimensions = len(entry.shape)
        at = entry.at + (number - entry.first) * 2 * dimensions
        middle = at + dimensions
        return tuple(self._boxes[at:middle]), tuple(self._boxes[middle : middle + dimensions])

    def read(self, number: int, node: Tensor) -> None:
        """Say what a chunk is: `node` is that of an item that begins its file, and may be that of others.

        Raises UnsupportedError: the bytes of its elements are not its values.
        """
        kind = self._numbers.get(id(node))
        if kind is None:
            kind = self._numbers[id(node)] = len(self._kinds)
            self._kinds.append((node, span_of(node, self.paths[self.file[number]])))
        self._kind[number] = kind

    def node(self, number: int) -> Tensor:
        """Return the node of a chunk."""
        node, _ = self._kinds[self._kind[number]]
        return moved(node, self.offset[number])

    def span(self, number: int) -> Span:
        """Return the span of a chunk."""
        offsets, sizes = self.box(number)
        _, like = self._kinds[self._kind[number]]
        extent, path = Extent(offsets, sizes, 0, math.prod(sizes)), self.paths[self.file[number]]
        offset = self.offset[number] + like.offset
        return Span(extent, path, offset, like.dtype, like.strides, like.byteorder, like.unresolved)

    def named(self, number: int) -> tuple[tuple[str, str], Tensor]:
        """Return the key of a chunk and where it begins in its tensor, and its node."""
        return (self.entry(number).key, str(list(self.box(number)[0]))), self.node(number)

    def range(self, number: int) -> tuple[int, int]:
        """Return where an item is in its file: offset and length, in bytes."""
        return self.offset[number], self.nbytes[number]


def moved(node: Tensor, nbytes: int) -> Tensor:
    """Return the node of a tensor whose storage is so many bytes further on in its file."""
    return replace(node, storage=replace(node.storage, offset=node.storage.offset + nbytes))


class ChunkSpans(Spans):
    """The spans of a tensor of many chunks."""

    __slots__ = ("_bounds", "_chunks", "_entry")

    def __init__(self, chunks: Chunks, entry: Entry) -> None:
        self._chunks, self._entry = chunks, entry
        self._bounds: tuple[array[int], array[int]] | None = None

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self._entry.count

    def numbered(self, index: int) -> Span:
        """Return one of them, in the order of their first indices."""
        return self._chunks.span(self._entry.first + index)

    def reaching(self, low: int, high: int) -> tuple[Span, ...]:
        """Return those that may have some of elements [low, high) of the flattened tensor."""
        if self._bounds is None:  # where each begins, and where it or one before it ends
            every = [bounds(span.extent, self._entry.shape) for span in self]
            ends = accumulate((end for _, end in every), max)
            self._bounds = array("q", [begin for begin, _ in every]), array("q", ends)
        lows, highs = self._bounds
        return self[bisect_right(highs, low) : bisect_left(lows, high)]

    def within(self, paths: Collection[str]) -> tuple[Span, ...]:
        """Return those that lie in some files."""
        chunks = self._chunks
        files = {file for file, path in enumerate(chunks.paths) if path in paths}
        return tuple(chunks.span(number) for number in self._entry.numbers if chunks.file[number] in files)


@immutable
class Each(Generic[T]):
    """What is to be known of each of some items, which is found when it is asked for."""

    numbers: array[int]
    find: Callable[[int], T]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.numbers)

    def __iter__(self) -> Iterator[T]:
        """Yield it, item by item."""
        return map(self.find, self.numbers)
