"""The items of a DCP directory's files: chunks of tensors, and objects. Reads their heads, never their elements.

FILE.distcp    item | item | ...     each item is a whole file of `torch.save`, at the place that `.metadata` gives

or, where the writer uses safetensors for tensors:

FILE.distcp    object | object | ... | safetensors blob of all of the file's tensors, see `blob`
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zckpt.codes import COVERAGE, MISSING_FILE, TRUNCATED
from zckpt.engine.boxes import row_major
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError, UnsupportedError
from zckpt.formats.dcp.blob import Blob, is_blob, read_blob
from zckpt.formats.dcp.directory import rank_of
from zckpt.formats.dcp.kinds import Kinds
from zckpt.formats.dcp.metadata import Chunk, Metadata, Offsets, Place, TensorEntry
from zckpt.formats.torch_files.tensors import span_of
from zckpt.state import Extent, Slot, Span
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
    spans : tuple of Span
        One for each chunk.
    whole : Tensor or None
        The node of the tensor, where one chunk is all of it.
    path : str
        The file of that.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
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
    archives : list of (int, int)
        Offset and length of the items that are torch files.
    tree : dict of str to object
        What each item holds, by key; chunks of tensors by where they begin.
    """

    path: str
    nbytes: int
    tensor_nbytes: int = 0
    unreferenced_nbytes: int = 0
    globals: set[str] = field(default_factory=set)
    is_safetensors: bool = False
    archives: list[tuple[int, int]] = field(default_factory=list)
    tree: dict[str, object] = field(default_factory=dict, compare=False)

    def add_chunk(self, key: str, offsets: Offsets, node: Tensor) -> None:
        """Add a chunk of a tensor to the tree."""
        chunks = self.tree.setdefault(key, {})
        if isinstance(chunks, dict):
            chunks[str(list(offsets))] = node

    def add_gaps(self, used: Iterable[tuple[int, int]]) -> None:
        """Add the bytes that no item lies in to the tree, alignment aside; `used` are offsets and lengths."""
        at = 0
        for offset, nbytes in [*sorted(used), (self.nbytes, 0)]:
            aligned = offset - at < ALIGNMENT and offset % ALIGNMENT == 0
            if offset > at and not aligned:
                extent = Extent.whole((offset - at,))
                spans = (Span(extent, self.path, at, "uint8"),)
                self.tree[f"bytes {at} to {offset}"] = Slot("bytes", "uint8", (offset - at,), spans)
            at = max(at, offset + nbytes)


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
    needed, kinds = _by_file(metadata), Kinds()
    places: dict[str, list[tuple[int, int]]] = {}
    for place in [*metadata.objects.values(), *metadata.chunks.values()]:
        places.setdefault(place.file, []).append((place.offset, place.nbytes))
    files, objects = [], {}
    nodes: dict[tuple[str, Offsets], tuple[Tensor, str]] = {}
    for name, (chunks, here) in needed.items():
        with _open(directory, name, metadata) as (descriptor, file):
            files.append(file)
            for key, place in here.items():
                found = _torch_file(descriptor, file, key, place)
                objects[key] = ObjectItem(key, found, found.root)
                file.tree[key] = found.root
            blob = _has_blob(descriptor, file, chunks)
            read = _blob_chunks(descriptor, file, chunks) if blob else _torch_chunks(descriptor, file, chunks, kinds)
            for index, node in read:
                nodes[index] = node, file.path
                file.add_chunk(*index, node)
                file.tensor_nbytes += node.nbytes
                file.unreferenced_nbytes += max(node.storage.nbytes - node.nbytes, 0)
            if not blob:
                file.add_gaps(places[name])
    tensors = {key: _tensor(key, entry, nodes, metadata) for key, entry in metadata.tensors.items()}
    return Items(tensors, objects, files)


def faults(directory: Path, metadata: Metadata) -> Iterator[SourceError]:
    """Yield the first thing that is wrong with each file, where `read_items` stops at the first file.

    Raises
    ------
    SourceError
        `.metadata` contradicts itself.
    """
    for name, (chunks, here) in _by_file(metadata).items():
        try:
            with _open(directory, name, metadata) as (descriptor, file):
                for key, place in here.items():
                    _torch_file(descriptor, file, key, place)
                if _has_blob(descriptor, file, chunks):
                    read_blob(descriptor, next(iter(chunks.values()))[0].offset, file.nbytes, file.path)
                else:
                    list(_torch_chunks(descriptor, file, chunks, Kinds()))
        except SourceError as error:
            rank = rank_of(name)
            error.ranks = () if rank is None else (rank,)
            yield error


Chunks = dict[tuple[str, Offsets], tuple[Place, Chunk, TensorEntry]]
"""Chunks by key and first index, with what `.metadata` says of them."""


def _by_file(metadata: Metadata) -> dict[str, tuple[Chunks, dict[str, Place]]]:
    """Return what each file has to hold: chunks, and objects; a file of empty chunks only has to hold nothing."""
    files: dict[str, tuple[Chunks, dict[str, Place]]] = {}
    for place in metadata.chunks.values():
        files.setdefault(place.file, ({}, {}))
    for key, entry in metadata.tensors.items():
        seen: set[Offsets] = set()
        for chunk in entry.chunks:
            at = metadata.chunks.get((key, chunk.offsets))
            if at is None:
                raise ShardError(f"it does not say where the chunk of {key} at {chunk.offsets} is", path=metadata.path)
            if chunk.offsets in seen:
                raise LayoutError(f"two chunks of {key} begin at {chunk.offsets}", path=metadata.path)
            seen.add(chunk.offsets)
            files[at.file][0][key, chunk.offsets] = at, chunk, entry
        covered = sum(chunk.numel for chunk in entry.chunks)
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
        files.setdefault(place.file, ({}, {}))[1][key] = place
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
    with opened(str(path)) as descriptor:
        yield descriptor, ItemFile(str(path), os.fstat(descriptor).st_size)


def _range(descriptor: int, file: ItemFile, key: str, place: Place) -> FileRange:
    if place.offset + place.nbytes > file.nbytes:
        raise DamagedFileError(
            f"the file ends before {key} does",
            path=file.path,
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
    file.archives.append((place.offset, place.nbytes))
    return found


def _torch_chunks(
    descriptor: int, file: ItemFile, chunks: Chunks, kinds: Kinds
) -> Iterator[tuple[tuple[str, Offsets], Tensor]]:
    for index, (place, chunk, entry) in chunks.items():
        key = index[0]
        node = _node(descriptor, file, key, place, kinds)
        if not isinstance(node, Tensor):
            raise UnsupportedError(
                f"{key} is no dense tensor", path=file.path, found=getattr(node, "qualified", type(node).__name__)
            )
        _check(key, chunk, entry, node.shape, node.dtype, file)
        yield index, node


def _node(descriptor: int, file: ItemFile, key: str, place: Place, kinds: Kinds) -> object:
    source = _range(descriptor, file, key, place)
    known = kinds.known(source)
    if known is not None:
        file.archives.append((place.offset, place.nbytes))
        file.globals.update(known[1])
        return known[0]
    found = _torch_file(descriptor, file, key, place)
    kinds.learn(source, found)
    return found.root


def _has_blob(descriptor: int, file: ItemFile, chunks: Chunks) -> bool:
    """Tell whether a file holds its tensors as one safetensors blob; it is where each of them is said to be."""
    if not chunks:
        return False
    places = {place.offset for place, _, _ in chunks.values()}
    file.is_safetensors = len(places) == 1 and is_blob(descriptor, min(places), file.nbytes, file.path)
    return file.is_safetensors


def _blob_chunks(descriptor: int, file: ItemFile, chunks: Chunks) -> Iterator[tuple[tuple[str, Offsets], Tensor]]:
    place = next(iter(chunks.values()))[0]
    blob: Mapping[str, Blob] = read_blob(descriptor, place.offset, file.nbytes, file.path)
    for key, one in blob.items():
        file.add_chunk(key, one.offsets, one.tensor)
    for index, (_, chunk, entry) in chunks.items():
        key, offsets = index
        found = blob.get(key)
        if found is None or found.offsets != offsets:
            raise ShardError(
                f"the chunk of {key} at {offsets} is not in it",
                path=file.path,
                expected=f"offsets {offsets}",
                found="none" if found is None else found.offsets,
            )
        _check(key, chunk, entry, found.tensor.shape, found.tensor.dtype, file)
        yield index, found.tensor


def _check(key: str, chunk: Chunk, entry: TensorEntry, shape: tuple[int, ...], dtype: str, file: ItemFile) -> None:
    if (tuple(shape), dtype) != (chunk.sizes, entry.dtype):
        raise LayoutError(
            f"the chunk of {key} at {chunk.offsets} is another than `.metadata` says",
            path=file.path,
            expected=f"{entry.dtype} {chunk.sizes}",
            found=f"{dtype} {tuple(shape)}",
        )


def _tensor(
    key: str, entry: TensorEntry, nodes: Mapping[tuple[str, Offsets], tuple[Tensor, str]], metadata: Metadata
) -> TensorItem:
    spans = []
    for chunk in entry.chunks:
        node, path = nodes[key, chunk.offsets]
        extent = Extent(chunk.offsets, chunk.sizes, 0, chunk.numel)
        spans.append(span_of(node, path, extent))
    whole, path = None, metadata.path
    if len(spans) == 1:  # its chunk has every element, or there would be others
        whole, path = nodes[key, entry.chunks[0].offsets]
    elif not spans:
        empty = Storage(key, entry.dtype, 0, "cpu", 0)
        whole = Tensor(empty, entry.dtype, entry.shape, row_major(entry.shape), 0, "little")
    return TensorItem(key, entry.dtype, entry.shape, tuple(spans), whole, path)
