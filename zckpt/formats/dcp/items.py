"""The items of a DCP directory's files: chunks of tensors, and objects. Reads their heads, never their elements.

FILE.distcp    item | item | ...     each item is a whole file of `torch.save`, at the place that `.metadata` gives

or, where the writer uses safetensors for tensors:

FILE.distcp    object | object | ... | safetensors blob of all of the file's tensors, see `blob`
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zckpt.codes import COVERAGE, MISSING_FILE, TRUNCATED
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError, UnsupportedError, about
from zckpt.formats.dcp.chunks import NOWHERE, Chunks, ChunkSpans, FileChunks, Located, Pairs, TensorEntry, moved
from zckpt.formats.dcp.directory import rank_of
from zckpt.formats.dcp.heads import Blob, Kinds, is_blob, read_blob
from zckpt.formats.dcp.metadata import Metadata, Offsets, Place
from zckpt.state import Extent, Slot, Span
from zckpt.state.boxes import row_major
from zckpt.state.ranges import merge, without
from zckpt.storage.files import is_file, opened
from zckpt.torchfile import ALIGNMENT, FileRange, Storage, Tensor, TorchFile, read_source


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor of the saved dict.

    Parameters
    ----------
    key : str
    dtype : str
    shape : tuple of int
    spans : sequence of Span
        One for each chunk.
    whole : Tensor or None
        The node of the tensor, where one chunk is all of it.
    path : str
        The file of that.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    spans: Sequence[Span]
    whole: Tensor | None
    path: str

    def slot(self, name: str) -> Slot:
        """Return the tensor as a slot."""
        return Slot(name, self.dtype, self.shape, self.spans)


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """A value of the saved dict that is no tensor: a part of the tree of the torch file that holds it."""

    key: str
    file: TorchFile
    node: object


@dataclass(slots=True)
class ItemFile:
    """What was found in one file.

    Parameters
    ----------
    path : str
    nbytes : int
        Size of the file.
    tensor_nbytes, unreferenced_nbytes : int
        Bytes of storages that tensors use, and that they do not.
    globals : set of str
        That the pickles in it mention.
    is_safetensors : bool
    archives : Pairs
        Offset and length of the items that are torch files.
    tree : dict of str to object
        What each item holds, by key, and chunks of tensors by where they begin.
    chunks : FileChunks
        Those that are not in the tree: of tensors that have several.
    """

    path: str
    nbytes: int
    tensor_nbytes: int = 0
    unreferenced_nbytes: int = 0
    globals: set[str] = field(default_factory=set)
    is_safetensors: bool = False
    archives: Pairs = field(default_factory=Pairs)
    tree: dict[str, object] = field(default_factory=dict, compare=False)
    chunks: Iterable[tuple[tuple[str, str], Tensor]] = field(default=(), compare=False)

    def add_chunk(self, key: str, offsets: Offsets, node: Tensor) -> None:
        """Add a chunk of a tensor to the tree."""
        chunks = self.tree.setdefault(key, {})
        if isinstance(chunks, dict):
            chunks[str(list(offsets))] = node

    def add_gaps(self, used: Iterable[tuple[int, int]]) -> None:
        """Add the bytes that no item lies in to the tree, alignment aside; `used` are offsets and lengths."""
        items = merge((offset, offset + nbytes) for offset, nbytes in used)
        for low, high in without([(0, self.nbytes)], items):
            if high - low >= ALIGNMENT or high % ALIGNMENT:
                spans = (Span(Extent.whole((high - low,)), self.path, low, "uint8"),)
                self.tree[f"bytes {low} to {high}"] = Slot("bytes", "uint8", (high - low,), spans)


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a directory by key, and its files."""

    tensors: dict[str, TensorItem]
    objects: dict[str, ObjectItem]
    files: list[ItemFile]


def read_items(directory: Path, metadata: Metadata) -> Items:
    """Read where all elements of a directory are, and its objects.

    Raises
    ------
    ShardError
        A file or a chunk is missing.
    LayoutError
        Chunks of a tensor overlap, or a file disagrees with `.metadata`.
    DamagedFileError
        A file is truncated or malformed.
    UnknownFormatError
        An item is no file of `torch.save`.
    UnsupportedError
        A chunk is something other than a dense tensor.
    """
    chunks, kinds = metadata.chunks, Kinds()
    located = Located(chunks, directory)
    files, objects = [], {}
    tensors = {key: _several(entry, located, metadata) for key, entry in metadata.tensors.items()}
    for name, needed in _by_file(metadata).items():
        with _open(directory, name, metadata) as (descriptor, file):
            files.append(file)
            for key, place in needed.objects.items():
                found = _torch_file(descriptor, file, key, place)
                objects[key] = ObjectItem(key, found, found.root)
                file.tree[key] = found.root
            several = array("i")
            for number, node in _nodes(descriptor, file, needed.numbers, metadata, kinds):
                located.put(number, node)
                file.tensor_nbytes += node.nbytes
                file.unreferenced_nbytes += max(node.storage.nbytes - node.nbytes, 0)
                entry = chunks.entry(number)
                if entry.count > 1:
                    if not file.is_safetensors:  # of which there is a node for each tensor
                        several.append(number)
                    continue
                whole = located.node(number)
                tensors[entry.key] = TensorItem(entry.key, entry.dtype, entry.shape, (located.span(number),), whole,
                                                file.path)  # fmt: skip
                file.add_chunk(entry.key, chunks.box(number)[0], whole)
            if not file.is_safetensors:
                file.add_gaps(needed.used(chunks))
            file.chunks = FileChunks(several, located)
    return Items(tensors, objects, files)


def faults(directory: Path, metadata: Metadata) -> Iterator[SourceError]:
    """Yield the first thing that is wrong with each file, where `read_items` stops at the first file.

    Raises SourceError: `.metadata` contradicts itself.
    """
    for name, needed in _by_file(metadata).items():
        try:
            with _open(directory, name, metadata) as (descriptor, file):
                for key, place in needed.objects.items():
                    _torch_file(descriptor, file, key, place)
                for _ in _nodes(descriptor, file, needed.numbers, metadata, Kinds()):
                    continue
        except SourceError as error:
            rank = rank_of(name)
            error.ranks = () if rank is None else (rank,)
            yield error


@dataclass(slots=True)
class Needed:
    """What a file has to hold: chunks by number, objects, and chunks that have no elements."""

    numbers: array[int] = field(default_factory=lambda: array("i"))
    objects: dict[str, Place] = field(default_factory=dict)
    others: list[Place] = field(default_factory=list)

    def used(self, chunks: Chunks) -> Iterator[tuple[int, int]]:
        """Yield offset and length of each."""
        yield from ((chunks.offset[number], chunks.nbytes[number]) for number in self.numbers)
        yield from ((place.offset, place.nbytes) for place in (*self.objects.values(), *self.others))


def _by_file(metadata: Metadata) -> dict[str, Needed]:
    """Return what each file has to hold; a file of empty chunks only has to be there."""
    chunks = metadata.chunks
    files = {name: Needed() for name in chunks.names}
    for place in metadata.others:
        files.setdefault(place.file, Needed()).others.append(place)
    for key, entry in metadata.tensors.items():
        for number in entry.numbers:
            file = chunks.file[number]
            if file == NOWHERE:
                offsets, _ = chunks.box(number)
                raise ShardError(f"it does not say where the chunk of {key} at {offsets} is", path=metadata.path)
            files[chunks.names[file]].numbers.append(number)
        covered = chunks.numel(entry)
        if covered != math.prod(entry.shape):
            kind = LayoutError if covered > math.prod(entry.shape) else ShardError
            raise kind(
                f"the chunks of {key} are not the whole of it",
                path=metadata.path,
                expected=f"{math.prod(entry.shape)} elements",
                found=covered,
                advice="a rank's part was not saved",
                code=COVERAGE,
                parameters=[key],
            )
    for key, place in metadata.objects.items():
        files.setdefault(place.file, Needed()).objects[key] = place
    return files


@contextmanager
def _open(directory: Path, name: str, metadata: Metadata) -> Iterator[tuple[int, ItemFile]]:
    path = directory / name
    if not is_file(path):
        raise ShardError(
            f"file {name} is missing",
            path=directory,
            expected=f"every file that {Path(metadata.path).name} names",
            advice="copy it from where the rank that wrote it has left it",
            code=MISSING_FILE,
        )
    with opened(str(path)) as descriptor, about(path):
        yield descriptor, ItemFile(str(path), os.fstat(descriptor).st_size)


def _range(descriptor: int, file: ItemFile, key: str, place: Place) -> FileRange:
    if place.offset + place.nbytes > file.nbytes:
        raise DamagedFileError(
            f"the file ends before {key} does",
            expected=f"at least {place.offset + place.nbytes} bytes",
            found=file.nbytes,
            advice="copy it again from where it came from",
            code=TRUNCATED,
        )
    return FileRange(descriptor, file.path, place.offset, place.nbytes)


def _torch_file(descriptor: int, file: ItemFile, key: str, place: Place) -> TorchFile:
    """Read the torch file that an item is; errors say which item."""
    source = _range(descriptor, file, key, place)
    try:
        found = read_source(source)
    except SourceError as error:
        error.message = f"{key}: {error.message}"
        raise
    for names in found.globals.values():
        file.globals.update(names)
    file.archives.append(place.offset, place.nbytes)
    return found


def _nodes(
    descriptor: int, file: ItemFile, numbers: Sequence[int], metadata: Metadata, kinds: Kinds
) -> Iterator[tuple[int, Tensor]]:
    """Yield the chunks of a file by number, and the node of each as if its item began the file."""
    chunks = metadata.chunks
    blob: Mapping[str, Blob] | None = None
    places = {chunks.offset[number] for number in numbers}
    if len(places) == 1 and is_blob(descriptor, min(places), file.nbytes, file.path):
        file.is_safetensors = True
        blob = read_blob(descriptor, min(places), file.nbytes, file.path)
        for key, one in blob.items():
            file.add_chunk(key, one.offsets, one.tensor)
    for number in numbers:
        entry, (offsets, sizes) = chunks.entry(number), chunks.box(number)
        place = Place(file.path, chunks.offset[number], chunks.nbytes[number])
        if blob is not None:
            node: object = _in_blob(blob, entry.key, offsets, place.offset)
        else:
            node = _node(descriptor, file, entry.key, place, kinds)
        if not isinstance(node, Tensor):
            raise UnsupportedError(
                f"{entry.key} is no dense tensor", found=getattr(node, "qualified", type(node).__name__)
            )
        if (tuple(node.shape), node.dtype) != (sizes, entry.dtype):
            raise LayoutError(
                f"the chunk of {entry.key} at {offsets} is another than `.metadata` says",
                expected=f"{entry.dtype} {sizes}",
                found=f"{node.dtype} {tuple(node.shape)}",
            )
        yield number, node


def _node(descriptor: int, file: ItemFile, key: str, place: Place, kinds: Kinds) -> object:
    source = _range(descriptor, file, key, place)
    known = kinds.known(source)
    if known is not None:
        file.archives.append(place.offset, place.nbytes)
        file.globals.update(known.globals)
        return known.tensor
    found = _torch_file(descriptor, file, key, place)
    kinds.learn(source, found)
    return moved(found.root, -place.offset) if isinstance(found.root, Tensor) else found.root


def _in_blob(blob: Mapping[str, Blob], key: str, offsets: Offsets, begin: int) -> Tensor:
    found = blob.get(key)
    if found is None or found.offsets != offsets:
        raise ShardError(
            f"the chunk of {key} at {offsets} is not in it",
            expected=f"offsets {offsets}",
            found="none" if found is None else found.offsets,
        )
    return moved(found.tensor, -begin)


def _several(entry: TensorEntry, located: Located, metadata: Metadata) -> TensorItem:
    """Return a tensor of several chunks, or of none; that of one is found when its file is read."""
    whole = None
    if not entry.count:
        empty = Storage(entry.key, entry.dtype, 0, "cpu", 0)
        whole = Tensor(empty, entry.dtype, entry.shape, row_major(entry.shape), 0, "little")
    spans = ChunkSpans(located, entry) if entry.count else ()
    return TensorItem(entry.key, entry.dtype, entry.shape, spans, whole, metadata.path)
