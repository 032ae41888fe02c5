"""A tree of plain data, inert nodes and tensors as a file that `torch.load` reads, weights_only and mapped included.

STEM/data.pkl  STEM/byteorder  STEM/data/0 ...  STEM/version  STEM/.data/serialization_id

Without `.format_version`, by which torch may compute where records begin, and would count a descriptor behind each.

Where the bytes of a tensor in the tree come from:

    view(new_storage(dtype, numel, contents), shape, ...)     extents of slots and known bytes; zeros between them
    SlotTensor, ValueTensor                                    a new storage of its own
    FromFile(node, path)                                       every tensor of another file below it: that file

Tensors share memory when they are views of one storage object, as they do in torch.

A tree is readable where Python and torch can load it wherever they are: plain data and plain tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from zckpt.engine.congruence import residue
from zckpt.engine.targets import Checksum, Hole, Literal, TargetFile
from zckpt.errors import LayoutError
from zckpt.formats.torch_files.tensors import encode, slot_of_storage
from zckpt.immutable import immutable
from zckpt.state import Extent, Scalar, Shape, Slot
from zckpt.state.boxes import torch_strides
from zckpt.state.dtypes import DTYPES, itemsize
from zckpt.state.spans import reach_of
from zckpt.torchfile import (
    CENTRAL,
    LOCAL,
    DefaultMapping,
    Device,
    DType,
    FromFile,
    InPieces,
    Layout,
    Mentioned,
    NewRecord,
    OrderedMapping,
    Pickled,
    Size,
    Storage,
    Tensor,
    dump,
    lay_out_archive,
    node_of,
)

if TYPE_CHECKING:
    from zckpt.engine.together import Pack

MAPPINGS = (dict, OrderedMapping, DefaultMapping)
VALUES = (type(None), bool, int, float, complex, str, bytes, DType, Device, Layout, Size)
"""What has no class that a reader may not have."""

MAXIMUM_DEPTH = 64
"""Of what is opened: a file may nest without end, or hold a list that contains itself."""

MAXIMUM_NODES = 100_000
"""Of one value besides the model and the optimizer: a file may repeat one part of a tree in itself without end."""


def is_readable(value: object, *, strictly: bool = True) -> bool:
    """Tell whether torch by itself can read a value, and whether it is a tree of reasonable size.

    `strictly`: otherwise there may be anything in it but a tensor of a subclass.
    """
    waiting: list[tuple[int, object]] = [(0, value)]
    budget = MAXIMUM_NODES
    while waiting:
        depth, node = waiting.pop()
        node = node_of(node)  # each may be of another file
        budget -= 1
        if budget < 0 or depth > MAXIMUM_DEPTH - 2:
            return False
        if isinstance(node, MAPPINGS):
            if not all(isinstance(key, (str, int, float)) for key in node):
                return False
            below: list[object] = list(node.values())
        elif type(node) in (list, tuple):
            below = list(node)  # type: ignore[call-overload]
        elif type(node) is Tensor:
            if node.subclass is not None or node.metadata or node.state is not None or node.hooks:
                return False  # it is more than its elements
            continue
        elif strictly and type(node) not in VALUES:
            return False
        else:
            continue
        if len(below) > budget:
            return False
        waiting.extend((depth + 1, one) for one in below)
    return True


__all__ = ["FromFile", "NewStorage", "PackContent", "SlotContent", "SlotTensor", "ValueContent", "ValueTensor",
           "lay_out", "lay_out_pickled", "new_storage", "view"]  # fmt: skip

ZEROS = bytes(1 << 20)
"""Written where a storage has no content: its checksum then follows from those of the rest, without reading it back."""


@immutable
class SlotContent:
    """An extent of a slot from element `start` of a new storage; by default the whole slot."""

    start: int
    slot: Slot
    label: str
    extent: Extent | None = None

    @property
    def covered(self) -> Extent:
        """The extent of the slot that it covers."""
        return self.slot.whole if self.extent is None else self.extent


@immutable
class ValueContent:
    """Known bytes from element `start` of a new storage; those of a memoryview are not copied."""

    start: int
    data: bytes | memoryview


@immutable
class PackContent:
    """Shares of many parameters from element `start` of a new storage of their type: see `engine.together`."""

    start: int
    pack: Pack


Content = SlotContent | ValueContent | PackContent


@immutable(eq=False)
class NewStorage(Storage):
    """A storage that is to be written: `contents` in their order, and zeros elsewhere. `new_storage` returns one.

    It begins at `start` of the file modulo a block; None: as its contents say.
    """

    contents: tuple[Content, ...]
    start: int | None = None


@immutable(eq=False)
class SlotTensor:
    """A slot that is to be a tensor of the file. The same object twice in a tree is one storage, shared."""

    slot: Slot
    dtype: str
    label: str


@immutable(eq=False)
class ValueTensor:
    """A tensor of which the bytes are known, such as a step count."""

    data: bytes
    dtype: str
    shape: Shape


def value_node(value: object) -> object:
    """Return a single value as a torch file has it: a 0-d tensor stays one."""
    return ValueTensor(encode(value), value.dtype, ()) if isinstance(value, Scalar) else value


def new_storage(
    dtype: str, numel: int, contents: Sequence[Content] = (), *, location: str = "cpu", start: int | None = None
) -> NewStorage:
    """Return a storage that is to be written.

    Parameters
    ----------
    dtype : str
        Slots of another type are cast.
    numel : int, elements
    contents : sequence of SlotContent, ValueContent or PackContent
        In any order; elements that none of them holds are zero.
    location : str
        Device tag.
    start : int, bytes, optional
        Where it is to begin, modulo a block of the file system; by default where most of its contents can be clones.

    Raises
    ------
    LayoutError
        Parts overlap or leave the storage.
    """
    size, end = itemsize(dtype), 0
    ordered = sorted((content for content in contents if _numel(content, size)), key=lambda content: content.start)
    for content in ordered:
        if content.start < end or (isinstance(content, ValueContent) and len(content.data) % size):
            raise LayoutError("the contents of a storage overlap", expected=f"from element {end}", found=content.start)
        end = content.start + _numel(content, size)
    if end > numel:
        raise LayoutError("the contents exceed their storage", expected=f"at most {numel} elements", found=end)
    return NewStorage("", dtype, numel * size, location, 0, tuple(ordered), start)


def view(
    storage: Storage,
    shape: Shape,
    *,
    start: int = 0,
    strides: Shape | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Return a tensor that is a view of a storage.

    Parameters
    ----------
    storage : NewStorage
    shape : tuple of int, elements
    start : int, elements
        Of its first element, in the storage.
    strides : tuple of int, elements, optional
        By default it is contiguous.
    like : Tensor, optional
        Whose gradient flag, class, attributes and so on it is to have; not its lazy bits: slots have values.

    Raises
    ------
    LayoutError
        It leaves the storage.
    """
    steps = torch_strides(shape) if strides is None else strides
    end = start + reach_of(shape, steps) if math.prod(shape) else 0
    numel = storage.nbytes // itemsize(storage.dtype)
    if end > numel:
        raise LayoutError("a tensor exceeds its storage", expected=f"at most {numel} elements", found=end)
    function = "_rebuild_tensor_v2" if DTYPES[storage.dtype].storage else "_rebuild_tensor_v3"
    tensor = Tensor(storage, storage.dtype, shape, steps, start, "little", rebuild=function)
    if like is None:
        return tensor
    own = {name: getattr(tensor, name) for name in ("storage", "dtype", "shape", "strides", "storage_offset")}
    return replace(like, byteorder="little", rebuild=function, metadata=None, **own)


def in_pieces(key: str, slot: Slot) -> Tensor:
    """Return a tensor that lies in several places, as a slot says."""
    return view(InPieces(key, slot.dtype, slot.nbytes, "cpu", -1, slot), slot.shape)


def lay_out(name: str, root: object) -> TargetFile:
    """Return a torch file that holds a tree.

    `name`: file name within the target; its stem becomes the archive's root; `root`: plain data, nodes of
    `zckpt.torchfile`, and the tensors named above. Raises UnsupportedError: the tree holds something that cannot be
    written.
    """
    return lay_out_pickled(name, dump(root, _stand_ins()))


def lay_out_pickled(name: str, pickled: Pickled) -> TargetFile:
    """Return a torch file of a pickle and the storages that it mentions by their numbers; `name` is as of `lay_out`."""
    stem = _stem(name)
    identity = hashlib.blake2b(pickled.data, digest_size=16).hexdigest()
    data = [_data_record(f"{stem}/data/{key}", one) for key, one in enumerate(pickled.storages)]
    before = [_record(f"{stem}/data.pkl", pickled.data), _record(f"{stem}/byteorder", b"little")]
    after = [_record(f"{stem}/version", b"3\n"), _record(f"{stem}/.data/serialization_id", identity.encode())]
    layout = lay_out_archive([*before, *data, *after])
    file = TargetFile(name, layout.nbytes, [Literal(offset, data) for offset, data in layout.literals])
    for mentioned, placed in zip(pickled.storages, layout.placed[len(before) :], strict=False):
        if placed.record.data is not None:
            continue
        size, end = itemsize(mentioned.dtype), placed.offset
        for content in _contents(mentioned):  # holes and known bytes, and zeros between them
            at = placed.offset + content.start * size
            file.literals.extend(_zeros(end, at))
            if isinstance(content, SlotContent):
                file.holes.append(Hole(at, content.label, content.slot, content.covered, mentioned.dtype))
            elif isinstance(content, PackContent):
                file.packs.append(replace(content.pack, start=at))
            else:
                file.literals.append(Literal(at, content.data))
            end = at + _numel(content, size) * size
        whole = placed.offset + placed.record.nbytes
        file.literals.extend(_zeros(end, whole))
        file.checksums.append(Checksum(placed.offset, whole, placed.checksum_offsets))
    return file


class Stencil:
    """A file all bytes of which are known, to be had under other names of the same length; each record begins with it.

    `file`: from `lay_out`, and `fits`.
    """

    def __init__(self, file: TargetFile) -> None:
        stem = _stem(file.name).encode()
        data = bytearray(file.nbytes)
        places = [-len(stem)]
        for literal in sorted(file.literals, key=lambda literal: literal.offset):
            data[literal.offset : literal.offset + len(literal.data)] = literal.data
            for magic, at in ((b"PK\3\4", LOCAL.size), (b"PK\1\2", CENTRAL.size)):
                if literal.data[:4] == magic and literal.data[at : at + len(stem) + 1] == stem + b"/":
                    places.append(literal.offset + at)
        self._size = len(stem)
        self._between = [bytes(data[a + len(stem) : b]) for a, b in pairwise([*places, len(data)])]

    @staticmethod
    def fits(file: TargetFile) -> bool:
        """Tell whether all bytes of a file are known."""
        return not (file.holes or file.packs or file.checksums)

    def named(self, name: str) -> TargetFile | None:
        """Return the file under another name; None for one of another length."""
        stem = _stem(name).encode()
        if len(stem) != self._size:
            return None
        data = stem.join(self._between)
        return TargetFile.of(name, data)


def _stem(name: str) -> str:
    """Return what the names of an archive's records begin with, given its file's."""
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[0] or "archive"


def _record(name: str, data: bytes) -> NewRecord:
    return NewRecord(name, data, len(data))


def _data_record(name: str, mentioned: Mentioned) -> NewRecord:
    """Return a storage's record, with its data where that is one known value."""
    storage = mentioned.storage
    if not storage.nbytes:
        return _record(name, b"")
    match storage:
        case NewStorage(contents=[ValueContent(data=bytes(data))]) if len(data) == storage.nbytes:
            return _record(name, data)
    size = itemsize(mentioned.dtype)
    holes = (
        Hole(content.start * size, content.label, content.slot, content.covered, mentioned.dtype)
        for content in _contents(mentioned)
        if isinstance(content, SlotContent)
    )
    start = storage.start if isinstance(storage, NewStorage) else None
    return NewRecord(name, None, storage.nbytes, residue(holes, size) if start is None else start)


def _contents(mentioned: Mentioned) -> tuple[Content, ...]:
    """Return the contents of a new storage; of one that is in a file, all its bytes in their order."""
    storage = mentioned.storage
    if isinstance(storage, NewStorage):
        return storage.contents
    return (SlotContent(0, slot_of_storage(mentioned), f"storage {storage.key} of {mentioned.path}"),)


def _zeros(start: int, end: int) -> Iterator[Literal]:
    for at in range(start, end, len(ZEROS)):
        yield Literal(at, ZEROS[: end - at])


def _numel(content: Content, size: int) -> int:
    if isinstance(content, PackContent):
        return content.pack.row.numel
    return content.covered.numel if isinstance(content, SlotContent) else -(-len(content.data) // size)


def _stand_ins() -> Callable[[object], object]:
    """Return what gives the tensor for a SlotTensor or ValueTensor: each time a new one, of the one storage it has."""
    storages: dict[int, NewStorage] = {}

    def stand_in(node: object) -> object:
        if isinstance(node, SlotTensor):
            content: Content = SlotContent(0, node.slot, node.label)
            numel, shape = node.slot.numel, node.slot.shape
        elif isinstance(node, ValueTensor):
            content = ValueContent(0, node.data)
            numel, shape = len(node.data) // itemsize(node.dtype), node.shape
        else:
            return None
        if id(node) not in storages:
            storages[id(node)] = new_storage(node.dtype, numel, [content])
        return view(storages[id(node)], shape)

    return stand_in
