"""`.metadata`: which tensors and objects a directory of torch's DCP holds, in which pieces, and where each lies.

Metadata
|-- state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata
|-- planner_data          key -> path, the keys and indices that lead to it in the dict that was saved
|-- storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
`-- version               since torch 2.7

A pickle, of which nothing is executed. Keys are paths joined with dots, and names have dots themselves: only
`planner_data` tells one from the other. Strides in it are local ones and chunks come in any order; neither is used.

Items are columns of numbers. A checkpoint of thousands of parameters by thousands of ranks has millions of chunks.
Each takes some tens of bytes here and no object: a span or a node of it is made when it is asked for.

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
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.torch_files.tensors import as_mapping, span_of
from zckpt.immutable import immutable
from zckpt.state import Extent, Shape, Span, Spans, dict_of, list_of
from zckpt.state.boxes import Box, bounds, is_within
from zckpt.state.dtypes import DTYPES
from zckpt.storage.nodes import wherever
from zckpt.torchfile import DType, Layout, Object, Tensor, brief, read_pickle

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


MAXIMUM_DEPTH = 64
"""Keys and indices in a path: real ones have five."""

MAXIMUM_NUMEL = (1 << 63) - 1
"""Elements of a tensor: torch counts in int64."""

MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
"""Where Megatron-Core 0.15 has a class derived from `Metadata`, MCoreMetadata."""

OLMO = "olmo_core.distributed.checkpoint."
"""Where OLMo-core 3.0 has a `_StorageInfo` of its own, with the same fields."""

Keys = tuple[str | int, ...]
"""Keys of dicts and indices of lists that lead to a value."""

Offsets = Shape


@immutable
class Metadata:
    """What a `.metadata` says."""

    path: str
    tensors: dict[str, Entry]  # by key
    chunks: Chunks  # of all of them, and of all that is no tensor
    paths: dict[str, Keys]  # of every key, in the order of the dict that was saved
    unsaved: tuple[str, ...]  # keys of that dict of which the directory has nothing
    version: str | None


def read_metadata(directory: Path) -> Metadata:
    """Read the `.metadata` of a directory.

    Raises DamagedFileError: it is malformed, or does not say where something is; LayoutError: chunks of a tensor begin
    at the same place; UnsupportedError: tensors that are not dense, of an unknown element type, or compressed.
    """
    path = str(directory / NAME)
    file = read_pickle(path)
    with about(path):
        root = _object(file.root, "Metadata")
        entries = as_mapping(root.get("state_dict_metadata"), expected="a dict in state_dict_metadata")
        chunks, keys = Chunks(directory), list(entries)
        tensors: dict[str, Entry] = {}

        numbers: dict[str, dict[Offsets | None, int]] = {}  # of items by key and first index
        for key, entry in _drained(entries):
            if not isinstance(key, str) or not isinstance(entry, Object):
                raise _unexpected("a tensor or an object by its key", key)
            if entry.qualified.endswith(".BytesStorageMetadata"):
                numbers[key] = {None: chunks.add(key, OBJECT).first}
            else:
                tensors[key] = _tensor(key, _object(entry, "TensorStorageMetadata"), chunks)
                firsts = [chunks.box(number)[0] for number in tensors[key].numbers]
                if (twice := next((one for one, after in pairwise(firsts) if one == after), None)) is not None:
                    raise LayoutError(f"two chunks of {key} begin at {twice}")
                numbers[key] = dict(zip(firsts, tensors[key].numbers, strict=True))
        _place(as_mapping(root.get("storage_data"), expected="a dict in storage_data"), chunks, numbers)
        for key, its in numbers.items():
            if None in its and chunks.file[its[None]] == NOWHERE:
                raise DamagedFileError(f"does not say where {key} is")
        paths, unsaved = _paths(root.get("planner_data"), list(map(str, keys)))
        version = root.get("version")
        said = version if isinstance(version, str) else None
        return Metadata(path, tensors, chunks, paths, unsaved, said)


def _unexpected(expected: str, found: object) -> DamagedFileError:
    return DamagedFileError("unexpected content", expected=expected, found=brief(found))


def _object(node: object, name: str) -> Object:
    if not isinstance(node, Object) or not node.qualified.startswith(("torch.distributed.", MEGATRON, OLMO)):
        raise _unexpected(f"torch.distributed.checkpoint's {name}", node)
    if not node.qualified.endswith((f".{name}", f".MCore{name}")):
        raise _unexpected(name, node)
    return node


def _drained(entries: dict[object, object]) -> Iterator[tuple[object, object]]:
    """Yield what a dict has, which then has it no more: of many items, what is made of them takes the tree's memory."""
    keys = list(entries)[::-1]
    while keys:
        key = keys.pop()
        yield key, entries.pop(key)


def _integers(node: object, what: str) -> Shape:
    if not isinstance(node, (tuple, list)) or not all(type(n) is int and 0 <= n <= MAXIMUM_NUMEL for n in node):
        raise _unexpected(f"the {what}, non-negative numbers", node)
    return tuple(node)


def _tensor(key: str, node: Object, chunks: Chunks) -> Entry:
    properties = _object(node.get("properties"), "TensorProperties")
    values = list_of(properties.state)
    dtype, layout = (
        values[:2] if len(values) > 1 else (properties.get("dtype"), properties.get("layout", Layout("torch.strided")))
    )
    if not isinstance(dtype, DType) or dtype.name not in DTYPES:
        raise UnsupportedError(f"{key} has an unknown element type", found=brief(dtype))
    if isinstance(layout, Layout) and layout.name != "torch.strided":
        raise UnsupportedError(f"{key} is not a dense tensor", found=layout.name)
    shape = _integers(node.get("size"), f"size of {key}")
    listed = node.get("chunks")
    if math.prod(shape) > MAXIMUM_NUMEL or not isinstance(listed, list):
        raise _unexpected(f"a tensor's size and chunks of {key}", (shape, listed))
    found = set[Box]()  # replicas may be there twice
    for chunk in listed:
        one = _object(chunk, "ChunkStorageMetadata")
        offsets = _integers(one.get("offsets"), f"offsets of {key}")
        sizes = _integers(one.get("sizes"), f"sizes of {key}")
        if not is_within((offsets, sizes), shape):
            raise DamagedFileError(
                f"a chunk of {key} lies outside the tensor", expected=f"within {shape}", found=f"{sizes} at {offsets}"
            )
        if math.prod(sizes):
            found.add((offsets, sizes))
    return chunks.add(key, dtype.name, shape, sorted(found))


def _place(storage_data: dict[object, object], chunks: Chunks, numbers: dict[str, dict[Offsets | None, int]]) -> None:
    """Say where items are, of which `numbers` has those that are needed; chunks besides these are added."""
    for index, info in _drained(storage_data):
        which, where = _object(index, "MetadataIndex"), _object(info, "_StorageInfo")
        key, first = which.get("fqn"), which.get("offset")
        if not isinstance(key, str):
            raise _unexpected("a key", key)
        if transforms := where.get("transform_descriptors"):
            raise UnsupportedError(
                f"{key} was transformed (for example compressed) when it was written",
                expected="untransformed bytes",
                found=brief(transforms),
                advice="save it again without extensions",
            )
        file, offset, nbytes = where.get("relative_path"), where.get("offset"), where.get("length")
        parts = PurePosixPath(file.replace("\\", "/")).parts if isinstance(file, str) else ()
        leaves = not parts or parts[0] == "/" or ":" in parts[0] or ".." in parts
        if not isinstance(file, str) or leaves or "\0" in file:
            raise DamagedFileError(f"{key} lies outside of the directory", found=brief(file))
        start, length = _integers((offset, nbytes), f"offset and length of {key}")
        offsets = None if first is None else _integers(first, f"offsets of {key}")
        its = numbers.setdefault(key, {})
        if offsets is not None and offsets not in its:
            its[offsets] = chunks.add(key, UNUSED).first
        if offsets in its:
            chunks.put(its[offsets], file, start, length)


def _paths(planner_data: object, keys: list[str]) -> tuple[dict[str, Keys], tuple[str, ...]]:
    """Return the path of every key, in the order of the saved dict, and the keys of which nothing was saved.

    `planner_data` has the whole dict in its order, while entries come rank by rank. A planner that does not flatten
    leaves it empty: keys are those of a flat dict then.
    """
    known = dict_of(planner_data)
    needed = dict.fromkeys(keys)
    found: dict[str, Keys] = {}
    unsaved = []
    for key, value in known.items():
        if key not in needed:
            unsaved.append(str(key))
        elif (
            isinstance(value, tuple)
            and 0 < len(value) <= MAXIMUM_DEPTH
            and all(type(step) is str or (type(step) is int and step >= 0) for step in value)
        ):
            found[key] = value
        else:
            raise _unexpected(f"the path of {key}, keys and indices", value)
    for key in keys:
        found.setdefault(key, (key,))
    return found, tuple(unsaved)
