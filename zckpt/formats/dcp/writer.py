"""Lay out a directory of `torch.distributed.checkpoint`, as the ranks of an FSDP2 training would have written it.

DIR/.metadata             what there is and where: see below
DIR/__<rank>_0.distcp     items one after the other, each a whole torch archive
DIR/zckpt.pt              what such a directory has no place for: see `own`; torch leaves it alone

Each item is at a multiple of 64 bytes:

    | archive of item 0 | zeros | archive of item 1 | zeros | ...

Tensors of one type and shape have the same bytes around their elements, and equal values are equal archives, so
that each kind is laid out once, however many there are. Where the sources lie on a file system that clones, the data of
large ones begins where blocks of it are blocks of the source: those of one kind and beginning are one.

`.metadata` is a pickle of torch's own classes:

Metadata(
    state_dict_metadata  {key: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
    planner_data         {key: path}; None where all keys are those of a flat dict
    storage_data         {MetadataIndex(key, first element of a chunk, its number): _StorageInfo(file, offset, length)}
    storage_meta         None
    version              "1.0.0"
)

Its form is that of torch 2.3 to 2.14, which later ones still read: tensor properties without strides, which came with
2.15 and which nothing before it takes; no StorageMeta, which came after 2.3 and holds only where and when it was
written. The pickle is written opcode by opcode, as there may be a million items.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from zckpt.engine.congruence import residue
from zckpt.engine.targets import Checksum, Hole, Literal, TargetFile
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.dcp.own import own_tree
from zckpt.formats.dcp.write_items import FLAT, NESTED, Item, items
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, ValueTensor
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Extent, Shape, Slot, itemsize
from zckpt.state.boxes import SpanIndexes
from zckpt.state.partition import check_world_size
from zckpt.storage.disk import BLOCK_NBYTES
from zckpt.torchfile import ALIGNMENT, Writer

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


CUT_NBYTES = 1 << 16
"""Tensors above this are cut for the ranks: a smaller piece would be little more than the archive around it."""

Piece = tuple[int, object]
"""A rank, and what of an item is in its file."""

STEM = "archive"
"""The root of an archive that torch.save writes to a stream."""

SCALARS = (type(None), bool, int, float, str)


def lay_out(
    checkpoint: Checkpoint, *, world_size: int = 1, dtype: str = "keep", keys: str = NESTED
) -> list[TargetFile]:
    """Return the files of a directory.

    Parameters
    ----------
    checkpoint : Checkpoint
    world_size : int
        Files that the tensors are spread over; any number of ranks loads them. Large tensors are cut along their
        first dimension, as FSDP2 cuts them, so that as many ranks each read one file.
    dtype : {"float32", "bfloat16", "float16", "keep"}
        Of trained parameters in the model: an FSDP2 training in mixed precision has float32 ones.
    keys : {"nested", "flat"}
        As `get_state_dict` makes them; or the model's at the top and the optimizer's flattened, as torchtitan does.

    Raises
    ------
    UsageError
        A world without ranks.
    UnsupportedError
        State that no single parameter can hold, or that cannot be written.
    """
    found = items(checkpoint, dtype, keys)
    *files, index = lay_out_items(found, world_size)
    held = {item.whole_of for item in found if item.whole_of is not None}
    return [*files, torch_writer.lay_out(OWN_NAME, own_tree(checkpoint, held, flat=keys == FLAT)), index]


def lay_out_items(found: Sequence[Item], world_size: int) -> list[TargetFile]:
    """Return the files of some items, that which says where they are last; errors are those of `lay_out`."""
    check_world_size(world_size)
    archives = Archives()
    files = [TargetFile(f"__{rank}_0.distcp", 0) for rank in range(world_size)]
    entries = []
    for item, pieces in zip(found, _spread(found, world_size, archives), strict=True):
        value, chunks = item.value, []
        tensor = value.slot if isinstance(value, SlotTensor) else value
        shape = tensor.shape if isinstance(tensor, (Slot, ValueTensor)) else ()
        for rank, piece in pieces:
            offsets, sizes = (0,) * len(shape), shape
            if isinstance(piece, TensorPiece):
                offsets, sizes = piece.offsets, piece.sizes
            chunks.append(Chunk(offsets, sizes, files[rank].name, *archives.put(files[rank], piece)))
        dtype = value.dtype if isinstance(value, (SlotTensor, ValueTensor)) else None
        entries.append(Entry(item.key, item.path, dtype, shape, tuple(chunks)))
    content = metadata(entries)
    return [*(file for file in files if file.nbytes), TargetFile.of(NAME, content)]


def _spread(found: Sequence[Item], world_size: int, archives: Archives) -> list[list[Piece]]:
    """Return the pieces of each item: those of one that is cut for the ranks in turn, others for that with the least.

    Source: torch.chunk, with which FSDP2 shards dimension 0: pieces of ceil(n / world size) rows.
    """
    spread = [list(enumerate(_pieces(item, world_size))) for item in found]
    loads = [0] * world_size
    for pieces in spread:
        for rank, piece in pieces if len(pieces) > 1 else ():
            loads[rank] += archives.nbytes(piece)
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    whole = [(archives.nbytes(pieces[0][1]), pieces) for pieces in spread if len(pieces) == 1]
    for nbytes, pieces in sorted(whole, key=lambda one: -one[0]):
        load, rank = least[0]
        pieces[0] = rank, pieces[0][1]
        heapq.heapreplace(least, (load + nbytes, rank))
    return spread


def _pieces(item: Item, world_size: int) -> list[object]:
    """Return an item cut for all ranks, if it is a large tensor; of any other the one piece that it is."""
    value = item.value
    if not isinstance(value, SlotTensor):
        return [value]
    shape = value.slot.shape
    if world_size == 1 or item.whole_of is not None or not shape or value.slot.nbytes <= CUT_NBYTES:
        return [TensorPiece(value, (0,) * len(shape), shape)]
    rows, *others = shape
    step = -(-rows // world_size)
    firsts = range(0, rows, step)
    return [TensorPiece(value, (at, *(0 for _ in others)), (min(step, rows - at), *others)) for at in firsts]


@immutable
class TensorPiece:
    """A slot, or the rows of it that one file holds."""

    tensor: SlotTensor
    offsets: Shape  # elements; the first element of the piece, and its shape; whole but for dimension 0
    sizes: Shape

    @property
    def extent(self) -> Extent:
        """What of the slot it is."""
        slot = self.tensor.slot
        if self.sizes == slot.shape:
            return slot.whole
        row = slot.numel // slot.shape[0]
        return slot.flat(self.offsets[0] * row, self.sizes[0] * row)


class Archives:
    """Lays out the archive of each item, once for each kind. The values must outlive it."""

    def __init__(self) -> None:
        self._known: dict[object, TargetFile] = {}
        self._indexes = SpanIndexes()

    def nbytes(self, value: object) -> int:
        """Return the size of an item, with the zeros after it."""
        size = self._archive(value).nbytes
        return size + -size % ALIGNMENT

    def put(self, file: TargetFile, value: object) -> tuple[int, int]:
        """Append an item to a file; return its offset and length in bytes."""
        at = file.nbytes
        own, start = None, None  # where the archive's data begin in it, modulo a block, so that most can be clones
        if isinstance(value, TensorPiece):
            own = Hole(0, value.tensor.label, value.tensor.slot, value.extent, value.tensor.dtype)
            found = residue([own], itemsize(own.dtype), self._indexes)
            start = None if found is None else (found - at) % BLOCK_NBYTES
        archive = self._archive(value, start)
        for literal in archive.literals:
            file.literals.append(Literal(at + literal.offset, literal.data) if at else literal)
        file.holes += (replace(own or hole, offset=at + hole.offset) for hole in archive.holes)
        for checksum in archive.checksums:
            offsets = tuple(at + offset for offset in checksum.offsets)
            file.checksums.append(Checksum(at + checksum.start, at + checksum.end, offsets))
        file.nbytes = at + archive.nbytes + -archive.nbytes % ALIGNMENT
        return at, archive.nbytes

    def _archive(self, value: object, start: int | None = None) -> TargetFile:
        kind = _kind(value), start
        archive = self._known.get(kind)
        if archive is not None:
            return archive
        node = value
        if isinstance(value, TensorPiece):
            dtype, stand_in = value.tensor.dtype, Slot("", value.tensor.dtype, value.sizes, ())
            storage = torch_writer.new_storage(dtype, stand_in.numel, [SlotContent(0, stand_in, "")], start=start)
            node = torch_writer.view(storage, value.sizes)
        archive = torch_writer.lay_out(STEM, node)
        joined: list[tuple[int, bytearray]] = []  # literals that follow each other become one
        for literal in sorted(archive.literals, key=lambda one: one.offset):
            if joined and joined[-1][0] + len(joined[-1][1]) == literal.offset:
                joined[-1][1].extend(literal.data)
            else:
                joined.append((literal.offset, bytearray(literal.data)))
        literals = [Literal(offset, bytes(data)) for offset, data in joined]
        archive = TargetFile(archive.name, archive.nbytes, literals, archive.holes, archive.checksums)
        self._known[kind] = archive
        return archive


def _kind(value: object) -> object:
    """Return what items with the same archive have in common."""
    if isinstance(value, TensorPiece):
        return TensorPiece, value.tensor.dtype, value.sizes
    if isinstance(value, ValueTensor):
        return ValueTensor, value.dtype, value.shape, value.data
    if type(value) in SCALARS:
        return type(value), repr(value)  # 0.0 and -0.0 are equal, and are not the same
    return id(value)
