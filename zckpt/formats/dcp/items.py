"""The items of a DCP directory's files: chunks of tensors, and objects. Reads their heads, never their elements.

FILE.distcp    item | item | ...     each item is a whole file of `torch.save`, at the place that `.metadata` gives

or, where the writer uses safetensors for tensors, with one blob of all of the file's tensors:

FILE.distcp    object | object | ... | 8 bytes length | header, JSON | data to the end of the file

The header's metadata says under DCP_SHARDING_INFO, as JSON once more, which chunk of its tensor each one is. The
places in `.metadata` all say where the blob begins, and nothing of where a tensor is in it (torch 2.15).

A checkpoint has few shapes of tensors and very many chunks of each. Two torch files of a tensor of one type and shape
differ in its elements, in their checksum, which is in three places, and in the record that identifies the file. Nothing
else of a file bears on where its elements are, and neither do those. So an item whose every other byte is that of one
that was read before is the same with other elements.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path

from zckpt.codes import COVERAGE, MISSING_FILE, TRUNCATED
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError, UnsupportedError
from zckpt.formats.dcp.directory import rank_of
from zckpt.formats.dcp.metadata import NOWHERE, OBJECT, UNUSED, Chunks, ChunkSpans, Each, Metadata, Offsets, moved
from zckpt.formats.dcp.quantised import Chunk, pieces_of
from zckpt.formats.lost import stand_in, tensor_of
from zckpt.formats.safetensors.file import header_in, offsets_in
from zckpt.formats.torch_files.quantised import is_torchaos
from zckpt.formats.torch_files.tensors import TensorItem
from zckpt.immutable import immutable
from zckpt.state import Shape, Slot
from zckpt.state.boxes import merge, row_major, without
from zckpt.storage.files import is_file, opened
from zckpt.storage.nodes import ADVICE
from zckpt.torchfile import (
    ALIGNMENT,
    FileRange,
    Storage,
    Tensor,
    TorchFile,
    read_entries,
    read_source,
    unwrapped,
    walk_tensors,
)

MAXIMUM_KINDS = 4096
"""Kinds that are remembered, in some kB each."""

KINDS_OF_A_SIZE = 8
"""Kinds of one length that are compared: (2, 8), (4, 4), (8, 2) ..."""

MAXIMUM_FRAME = 1 << 14
"""Bytes around the elements: real ones have 1.5 kB."""

READ_WHOLE = 1 << 14
"""Bytes of an item below which it is read at once."""

IDENTITY = "/.data/serialization_id"

DESCRIPTOR = b"PK\7\x08"
CRC_IN_LOCAL, CRC_IN_CENTRAL, CRC_IN_DESCRIPTOR = 14, 16, 4
"""Where the checksum is in each header, in bytes."""


@immutable
class Kind:
    """Items of which every byte but the elements and their checksum is the same."""

    tensor: Tensor  # of an item that would begin its file
    begin: int  # bytes; of the elements in the item
    end: int
    parts: tuple[tuple[int, bytes], ...]  # all bytes that are the same, by their offset


class Kinds:
    """Remembers the kinds of items that a directory has."""

    def __init__(self) -> None:
        self._kinds: dict[int, list[Kind]] = {}
        self._once: set[int] = set()
        self._count = 0

    def known(self, source: FileRange) -> Kind | None:
        """Return the kind of an item that is like one before; None if it is not."""
        kinds = self._kinds.get(source.nbytes)
        if kinds is None:
            return None
        whole = source.read(0, source.nbytes) if source.nbytes <= READ_WHOLE else None
        for kind in kinds:
            head = source.read(0, kind.begin) if whole is None else whole
            tail, start = (source.read(kind.end, source.nbytes - kind.end), kind.end) if whole is None else (whole, 0)
            if all(
                head.startswith(data, at) if at < kind.begin else tail.startswith(data, at - start)
                for at, data in kind.parts
            ):
                return kind
        return None

    def learn(self, source: FileRange, file: TorchFile) -> None:
        """Remember an item, once there was another of its length: many have one that no other has."""
        if source.nbytes not in self._once:
            self._once.add(source.nbytes)
            return
        kinds = self._kinds.setdefault(source.nbytes, [])
        if len(kinds) >= KINDS_OF_A_SIZE or self._count >= MAXIMUM_KINDS:
            return
        kind = _kind(source, file)
        if kind is not None:
            self._count += 1
            kinds.append(kind)


def _kind(source: FileRange, file: TorchFile) -> Kind | None:
    """Return what an item has in common with others of its kind; None for one that is not of the usual form."""
    tensor = file.root
    if file.container != "zip" or not isinstance(tensor, Tensor) or len(file.storages) != 1:
        return None
    begin = tensor.storage.offset - source.base
    end = begin + tensor.storage.nbytes
    if source.nbytes - tensor.storage.nbytes > MAXIMUM_FRAME:
        return None
    alike = without([(0, source.nbytes)], merge([(begin, end), *_differences(source, file)]))
    parts = [(low, source.read(low, high - low)) for low, high in alike]
    if any(at < begin < at + len(data) for at, data in parts):
        return None
    bare = replace(tensor, storage=replace(tensor.storage, offset=begin))
    return Kind(bare, begin, end, tuple(parts))


def _differences(source: FileRange, file: TorchFile) -> list[tuple[int, int]]:
    """Return the bytes of checksums of the elements and of the identity, and of the identity itself."""
    found: list[tuple[int, int]] = []
    variable = {f"{file.archive}{IDENTITY}", *(f"{file.archive}/data/{key}" for key in file.storages)}
    data = {record.name: (record.offset - source.base, record.nbytes) for record in file.records}
    directory, entries = read_entries(source)
    for entry in entries:
        if entry.name in variable:
            start, nbytes = data[entry.name]
            stated = entry.header + CRC_IN_LOCAL, directory + entry.at + CRC_IN_CENTRAL
            found += [(at, at + 4) for at in stated]
            if entry.name.endswith(IDENTITY):
                found.append((start, start + nbytes))
            after = start + nbytes
            if after + CRC_IN_DESCRIPTOR + 4 <= directory and source.read(after, 4) == DESCRIPTOR:
                found.append((after + CRC_IN_DESCRIPTOR, after + CRC_IN_DESCRIPTOR + 4))
    return found


@immutable
class Blob:
    """A chunk: its node, and its first index in its tensor."""

    tensor: Tensor
    offsets: Shape


def read_blob(source: FileRange) -> dict[str, Blob] | None:
    """Read the header of a blob that ends with its file; None where there is none: an archive has a zero there.

    Raises DamagedFileError: it is malformed, or its tensors leave holes, overlap or reach beyond the file.
    """
    if source.nbytes <= 8 or source.read(8, 1) != b"{":
        return None
    slots, metadata = header_in(source)
    found = {}
    for name, offsets in offsets_in(slots, metadata).items():
        slot = slots[name]
        storage = Storage(name, slot.dtype, slot.nbytes, "cpu", slot.spans[0].offset if slot.spans else 0)
        found[name] = Blob(Tensor(storage, slot.dtype, slot.shape, row_major(slot.shape), 0, "little"), offsets)
    return found


def is_empty(path: Path) -> bool:
    """Tell whether a file is of a rank that had nothing to save: nothing is in it, or a blob without tensors."""
    if not path.stat().st_size:
        return True
    with suppress(DamagedFileError), opened(path) as source:
        return read_blob(source) == {}
    return False


@immutable
class ObjectItem:
    """A value of the saved dict that is no tensor: a part of the tree of the torch file that holds it."""

    key: str
    file: TorchFile
    node: object


class ItemFile:
    """A file that is read, item by item, and what was found in it.

    Attributes
    ----------
    path : str
    nbytes : int
        Size of the file.
    tensor_nbytes, unreferenced_nbytes : int
        Bytes of storages that tensors use, and that they do not.
    is_safetensors : bool
    archives, several : Each
        Offset and length of the items that are torch files; chunks of tensors that have several, not in the tree.
    tree : dict of str to object
        What each item holds, by key, and chunks of tensors by where they begin.
    """

    def __init__(self, path: str, nbytes: int, chunks: Chunks) -> None:
        self.path, self.nbytes, self._chunks = path, nbytes, chunks
        self.tensor_nbytes = self.unreferenced_nbytes = 0
        self.is_safetensors = False
        self.archives, self.several = Each(array("i"), chunks.range), Each(array("i"), chunks.named)
        self.tree: dict[str, object] = {}

    def add_chunk(self, key: str, offsets: Offsets, node: object) -> None:
        """Add a chunk of a tensor to the tree."""
        chunks = self.tree.setdefault(key, {})
        if isinstance(chunks, dict):
            chunks[str(list(offsets))] = node

    def items(
        self, descriptor: int, numbers: Sequence[int], kinds: Kinds
    ) -> Iterator[tuple[int, TorchFile | Tensor | Chunk]]:
        """Yield the items by number: objects, then chunks, the node of each as if its item began the file.

        Of quantised chunks they are those of the whole file.
        """
        chunks, place = self._chunks, self._chunks.offset
        objects = [number for number in numbers if chunks.entry(number).dtype == OBJECT]
        for number in objects:
            yield number, self._torch_file(self._range(descriptor, number), number)
        empty = [number for number in numbers if chunks.entry(number).dtype == UNUSED]
        numbers = [number for number in numbers if chunks.entry(number).dtype not in (OBJECT, UNUSED)]
        if empty:  # of which nothing is read: that the last is there tells of a file that was cut
            self._range(descriptor, max(empty, key=lambda number: place[number] + chunks.nbytes[number]))
        some = numbers or empty  # a rank may have chunks without elements alone
        if some:
            first = place[some[0]]
        else:  # behind values alone is a blob without tensors
            first = max((sum(chunks.range(number)) for number in objects), default=0)
        blob = None
        if all(place[number] == first for number in some):
            blob = read_blob(FileRange(descriptor, self.path, first, self.nbytes - first))
        self.is_safetensors = blob is not None
        for number in empty if blob is None and not numbers else ():  # else what is read tells whose file it is
            if chunks.nbytes[number]:
                self._read(descriptor, number, kinds)
        for key, one in (blob or {}).items():
            self.add_chunk(key, one.offsets, one.tensor)
        for number in numbers:
            entry, (offsets, sizes) = chunks.entry(number), chunks.box(number)
            if blob is not None:
                found = blob.get(entry.key)
                if found is None or found.offsets != offsets:
                    raise ShardError(
                        f"does not hold the chunk of {entry.key} at {offsets}",
                        expected=f"offsets {offsets}",
                        found="none" if found is None else found.offsets,
                    )
                node: object = moved(found.tensor, -first)
            else:
                node, file = self._read(descriptor, number, kinds)
            if is_torchaos(node):
                yield number, Chunk(chunks.box(number), node, self.path, file)
                continue
            if not isinstance(node, Tensor):
                kind = getattr(node, "subclass", None) or getattr(node, "qualified", type(node).__name__)
                raise UnsupportedError(f"{entry.key} is not a dense tensor", found=kind)
            if (tuple(node.shape), node.dtype) != (sizes, entry.dtype):
                raise LayoutError(
                    f"the chunk of {entry.key} at {offsets} differs from `.metadata`",
                    expected=f"{entry.dtype} {sizes}",
                    found=f"{node.dtype} {tuple(node.shape)}",
                )
            yield number, node

    def _read(self, descriptor: int, number: int, kinds: Kinds) -> tuple[object, TorchFile | None]:
        """Return what the item of a chunk is, and its torch file; None where it is like one before.

        Raises an error unless it is a torch file.
        """
        source = self._range(descriptor, number)
        known = kinds.known(source)
        if known is not None:
            self.archives.numbers.append(number)
            return known.tensor, None
        file = self._torch_file(source, number)
        kinds.learn(source, file)
        root = unwrapped(file.root)
        return moved(root, -source.base) if isinstance(root, Tensor) else root, file

    def _range(self, descriptor: int, number: int) -> FileRange:
        offset, nbytes = self._chunks.range(number)
        if offset + nbytes > self.nbytes:
            raise DamagedFileError(
                f"the file ends before {self._chunks.entry(number).key} does",
                expected=f"at least {offset + nbytes} bytes",
                found=self.nbytes,
                advice="copy it again from its origin",
                code=TRUNCATED,
            )
        return FileRange(descriptor, self.path, offset, nbytes)

    def _torch_file(self, source: FileRange, number: int) -> TorchFile:
        """Read the torch file that an item is; errors say which item."""
        try:
            found = read_source(source)
        except SourceError as error:
            error.message = f"{self._chunks.entry(number).key}: {error.message}"
            raise
        self.archives.numbers.append(number)
        return found


@immutable
class Items:
    """The items of a directory by key, and its files; of slots that torchao has quantised, their pieces."""

    tensors: dict[str, TensorItem]
    objects: dict[str, ObjectItem]
    files: list[ItemFile]
    quantised: list[str] = field(default_factory=list)


def read_items(metadata: Metadata) -> Items:
    """Read where all elements of a directory are, and its objects.

    Raises ShardError: a file or a chunk is missing; LayoutError: chunks of a tensor overlap, or a file disagrees with
    `.metadata`; DamagedFileError: a file is truncated or malformed; UnknownFormatError: an item is no file of
    `torch.save`; UnsupportedError: a chunk is something other than a dense tensor.
    """
    chunks, kinds, path = metadata.chunks, Kinds(), metadata.path
    found = Items({}, {}, [])
    coded: dict[str, list[Chunk]] = {}
    for key, entry in metadata.tensors.items():  # one of one chunk is found when its file is read
        whole = None if entry.count else tensor_of(entry.dtype, entry.shape, key)
        spans = ChunkSpans(chunks, entry) if entry.count else ()
        found.tensors[key] = TensorItem(key, entry.dtype, entry.shape, spans, whole, path)
    for at, numbers in _by_file(metadata).items():
        if not is_file(chunks.paths[at]):
            _lose(metadata, at, numbers, found)
            continue
        with _open(metadata, at) as (descriptor, file):
            found.files.append(file)
            for number, node in file.items(descriptor, numbers, kinds):
                entry = chunks.entry(number)
                if isinstance(node, TorchFile):
                    found.objects[entry.key] = ObjectItem(entry.key, node, node.root)
                    file.tree[entry.key] = node.root
                    continue
                if isinstance(node, Chunk):
                    coded.setdefault(entry.key, []).append(node)
                    file.add_chunk(entry.key, node.box[0], node.node)
                    file.tensor_nbytes += sum(tensor.nbytes for _, tensor in walk_tensors(node.node))
                    continue
                _place(found, chunks, number, node)
                file.tensor_nbytes += node.nbytes
                file.unreferenced_nbytes += max(node.storage.nbytes - node.nbytes, 0)
                if entry.count == 1:
                    file.add_chunk(entry.key, chunks.box(number)[0], found.tensors[entry.key].whole)
                elif not file.is_safetensors:  # of which there is a node for each tensor
                    file.several.numbers.append(number)
            used = merge((offset, offset + nbytes) for offset, nbytes in map(chunks.range, numbers))
            for low, high in without([(0, file.nbytes)], used) if not file.is_safetensors else ():
                if high - low >= ALIGNMENT or high % ALIGNMENT:  # more than lies between items
                    file.tree[f"bytes {low} to {high}"] = Slot.at(file.path, low, "uint8", (high - low,), "bytes")
    for key, some in coded.items():
        entry, known = metadata.tensors[key], {one.box for one in some}
        others = [number for number in entry.numbers if chunks.box(number) not in known]
        some += [Chunk(chunks.box(one), chunks.node(one), chunks.paths[chunks.file[one]]) for one in others]
        pieces, told = pieces_of(key, entry.shape, some)
        *above, last = metadata.paths.get(key, (key,))
        for name, piece in pieces.items():
            found.tensors[piece.key] = piece
            metadata.paths[piece.key] = (*above, f"{last}.{name}")
        del found.tensors[key]
        found.objects[key] = ObjectItem(key, next(one.file for one in some if one.file is not None), told)
        found.quantised.append(key)
    return found


def faults(metadata: Metadata) -> Iterator[SourceError]:
    """Yield the first thing that is wrong with each file, where `read_items` stops at the first file.

    Raises SourceError: `.metadata` contradicts itself.
    """
    for at, numbers in _by_file(metadata).items():
        try:
            with _open(metadata, at) as (descriptor, file):
                for _ in file.items(descriptor, numbers, Kinds()):
                    continue
        except SourceError as error:
            rank = rank_of(metadata.chunks.paths[at])
            error.ranks = () if rank is None else (rank,)
            yield error


def _by_file(metadata: Metadata) -> dict[int, array[int]]:
    """Return the items of each file, by its number; one of chunks without elements only has to be there."""
    chunks = metadata.chunks
    for key, entry in metadata.tensors.items():
        for number in entry.numbers:
            if chunks.file[number] == NOWHERE:
                offsets, _ = chunks.box(number)
                raise ShardError(f"does not say where the chunk of {key} at {offsets} is", path=metadata.path)
        covered = sum(math.prod(chunks.box(number)[1]) for number in entry.numbers)
        numel = math.prod(entry.shape)
        if covered != numel:
            kind = LayoutError if covered > numel else ShardError
            raise kind(
                f"the chunks of {key} are not the whole of it",
                path=metadata.path,
                expected=f"{numel} elements",
                found=covered,
                advice="a rank's part was not saved",
                code=COVERAGE,
                parameters=[key],
            )
    files = {file: array("i") for file in range(len(chunks.paths))}
    for number, file in enumerate(chunks.file):
        if file != NOWHERE:
            files[file].append(number)
    return files


def _missing(metadata: Metadata, at: int) -> ShardError:
    path, directory = Path(metadata.chunks.paths[at]), Path(metadata.path).parent
    return ShardError(
        f"file {path.relative_to(directory)} is missing",
        path=directory,
        expected=f"every file that {Path(metadata.path).name} names",
        advice=ADVICE,
        code=MISSING_FILE,
    )


def _lose(metadata: Metadata, at: int, numbers: Sequence[int], found: Items) -> None:
    """Take what a lost file held as holes: of objects and single values the names, of chunks where they are."""
    chunks = metadata.chunks
    entries = {number: entry for number in numbers if (entry := chunks.entry(number)).dtype != UNUSED}
    named = [entry.key for entry in entries.values() if entry.dtype == OBJECT or not entry.shape]
    chunks.paths[at] = stand_in(_missing(metadata, at), chunks.paths[at], named)
    for number, entry in entries.items():
        if entry.dtype == OBJECT or not entry.shape:
            found.tensors.pop(entry.key, None)
            continue
        _place(found, chunks, number, tensor_of(entry.dtype, chunks.box(number)[1]))


def _place(found: Items, chunks: Chunks, number: int, node: Tensor) -> None:
    """Say where the elements of a chunk are; the only one of a tensor is all of it."""
    chunks.read(number, node)
    entry = chunks.entry(number)
    if entry.count == 1:
        key, span = entry.key, chunks.span(number)
        found.tensors[key] = replace(found.tensors[key], spans=(span,), whole=chunks.node(number), path=span.path)


@contextmanager
def _open(metadata: Metadata, at: int) -> Iterator[tuple[int, ItemFile]]:
    path = Path(metadata.chunks.paths[at])
    if not is_file(path):
        raise _missing(metadata, at)
    with opened(path) as source:
        yield source.descriptor, ItemFile(source.path, source.nbytes, metadata.chunks)
