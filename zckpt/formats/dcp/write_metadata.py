"""`.metadata`: which items there are, under which paths, and where each lies; a pickle of torch's own classes.

Metadata(
    state_dict_metadata  {key: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
    planner_data         {key: path}; None where all keys are those of a flat dict
    storage_data         {MetadataIndex(key, first element of a chunk, its number): _StorageInfo(file, offset, length)}
    storage_meta         None
    version              "1.0.0"
)

The form is that of torch 2.3 to 2.14, which later ones still read: tensor properties without strides, which came with
2.15 and which nothing before it takes; no StorageMeta, which came after 2.3 and holds only where and when it was
written. The pickle is written opcode by opcode, as there may be a million items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from zckpt.immutable import immutable
from zckpt.state import Shape
from zckpt.torchfile import Writer

T = TypeVar("T")

VERSION = "1.0.0"

CLASSES = "torch.distributed.checkpoint.metadata"
STORAGE_CLASSES = "torch.distributed.checkpoint.filesystem"

CONTIGUOUS = 0
"""The value of `_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT`."""

BYTES = "BytesStorageMetadata"

BATCH = 1000
"""Entries that are set in a dict at once, as in Python's own pickles."""


@immutable
class Chunk:
    """A piece of an item and where it lies."""

    offsets: Shape  # elements; its first element in the tensor, and its shape
    sizes: Shape
    file: str
    offset: int  # bytes; of its archive in that file
    nbytes: int


@immutable
class Entry:
    """An item: its name and path in the state dict, for a tensor its type and shape, and its chunks."""

    key: str
    path: tuple[str | int, ...]
    dtype: str | None
    shape: Shape
    chunks: tuple[Chunk, ...]


def metadata(entries: Sequence[Entry], *, paths: bool = True, flattened: Mapping[str, Shape] | None = None) -> bytes:
    """Return the content of `.metadata`.

    `paths`: whether to say the path of each key; `flattened`: the shapes of tensors that Megatron-Core flattens, by
    key: `mcore_data`, where it looks for them.
    """
    made = _Metadata()
    writer = made.writer
    made.new(CLASSES, "Metadata")
    writer.out += b"}("
    writer.text("state_dict_metadata")
    made.mapping(made.storage_metadata, entries)
    writer.text("planner_data")
    if paths:
        made.mapping(made.path, entries)
    else:
        writer.begin(None)
    writer.text("storage_data")
    made.mapping(made.storage, ((entry, number) for entry in entries for number in range(len(entry.chunks))))
    for leaf in ("storage_meta", None, "version", VERSION):
        writer.begin(leaf)
    if flattened:
        writer.text("mcore_data")
        made.mapping(made.flattened, flattened.items())
    writer.out += b"ub."
    return bytes(writer.out)


class _Metadata:
    """Writes the parts of the pickle.

    `repeated`: opcodes that mention only what is in the memo already, and so can be written again, by what they are
    about.
    """

    def __init__(self) -> None:
        self.writer = Writer(lambda _: None)
        self.sizes: dict[Shape, int] = {}
        self.repeated: dict[object, bytes] = {}

    def mapping(self, write: Callable[[T], None], entries: Iterable[T]) -> None:
        """Write a dict, of which `write` writes one key and value."""
        self.writer.out += b"}"
        waiting = iter(entries)
        while batch := list(islice(waiting, BATCH)):
            self.writer.out += b"("
            for entry in batch:
                write(entry)
            self.writer.out += b"u"

    def storage_metadata(self, entry: Entry) -> None:
        self.writer.text(entry.key)
        kind = (entry.dtype, entry.shape, tuple([(chunk.offsets, chunk.sizes) for chunk in entry.chunks]))
        self.again(kind, lambda: self.tensor(entry.dtype, entry) if entry.dtype else self.new(CLASSES, BYTES))

    def tensor(self, dtype: str, entry: Entry) -> None:
        writer = self.writer
        self.new(CLASSES, "TensorStorageMetadata")
        writer.out += b"}("
        writer.text("properties")
        self.properties(dtype)
        writer.text("size")
        self.size(entry.shape)
        writer.text("chunks")
        writer.out += b"]("
        for chunk in entry.chunks:
            self.new(CLASSES, "ChunkStorageMetadata")
            writer.out += b"}("
            writer.text("offsets")
            self.size(chunk.offsets)
            writer.text("sizes")
            self.size(chunk.sizes)
            writer.out += b"ub"
        writer.out += b"eub"

    def properties(self, dtype: str) -> None:
        """Write the properties of a dense tensor that is contiguous, needs no gradient and is in ordinary memory."""
        writer = self.writer
        self.new(CLASSES, "TensorProperties")
        writer.out += b"("
        writer.function("torch", dtype)
        writer.function("torch.serialization", "_get_layout")
        writer.text("torch.strided")
        writer.out += b"\x85R\x89"
        writer.function(CLASSES, "_MEM_FORMAT_ENCODING")
        writer.integer(CONTIGUOUS)
        writer.out += b"\x85R\x89tb"

    def path(self, entry: Entry) -> None:
        writer = self.writer
        writer.text(entry.key)
        writer.out += b"("
        for part in entry.path:
            writer.begin(part)
        writer.out += b"t"

    def flattened(self, one: tuple[str, Shape]) -> None:
        key, shape = one
        self.writer.text(key)
        self.writer.out += b"}"
        self.writer.text("nd_reformulated_orig_global_shape")
        self.writer.shape(shape)
        self.writer.out += b"s"

    def storage(self, one: tuple[Entry, int]) -> None:
        writer, (entry, number) = self.writer, one
        chunk = entry.chunks[number]
        self.again("MetadataIndex", self.begin_index)
        writer.text(entry.key)
        index = None if entry.dtype is None else number
        self.again((index, chunk.offsets, chunk.file), lambda: self.begin_place(index, chunk))
        writer.integer(chunk.offset)
        writer.text("length")
        writer.integer(chunk.nbytes)
        writer.out += b"ub"

    def begin_index(self) -> None:
        self.new(CLASSES, "MetadataIndex")
        self.writer.out += b"}("
        self.writer.text("fqn")

    def begin_place(self, index: int | None, chunk: Chunk) -> None:
        """Write the rest of a MetadataIndex, and of its _StorageInfo all up to the numbers."""
        writer = self.writer
        writer.text("index")
        writer.begin(index)
        if index is not None:
            writer.text("offset")
            self.size(chunk.offsets)
        writer.out += b"ub"
        self.new(STORAGE_CLASSES, "_StorageInfo")
        writer.out += b"}("
        writer.text("relative_path")
        writer.text(chunk.file)
        writer.text("offset")

    def new(self, module: str, name: str) -> None:
        """Write an instance of a class, created without calling `__init__`."""
        self.writer.function(module, name)
        self.writer.out += b")\x81"

    def size(self, sizes: Shape) -> None:
        """Write a `torch.Size`; the same one again is one of the memo."""
        known = self.sizes.get(sizes)
        if known is not None:
            self.writer.get(known)
            return
        self.writer.function("torch", "Size")
        self.writer.shape(sizes)
        self.writer.out += b"\x85R"
        self.sizes[sizes] = self.writer.put()

    def again(self, kind: object, write: Callable[[], None]) -> None:
        """Write what is the same for all of a kind."""
        writer = self.writer
        known = self.repeated.get(kind)
        if known is not None:
            writer.out += known
            return
        start, count = len(writer.out), writer.count
        write()
        if writer.count == count:  # nothing was put in the memo
            self.repeated[kind] = bytes(writer.out[start:])
