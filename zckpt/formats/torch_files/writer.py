"""A tree of plain data, inert nodes and tensors as a file that `torch.load` reads, weights_only and mapped included.

STEM/data.pkl  STEM/.format_version  STEM/.storage_alignment  STEM/byteorder  STEM/data/0 ...  STEM/version
STEM/.data/serialization_id

Where the bytes of a tensor in the tree come from:

    view(new_storage(dtype, numel, parts), shape, start=...)   parts of slots and known bytes; zeros between them
    SlotTensor, ValueTensor                                    a new storage of its own
    FromFile(node, path)                                       every tensor of another file below it: that file

Tensors share memory when they are views of one storage object, as they do in torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zckpt.engine.boxes import row_major
from zckpt.engine.targets import Checksum, Hole, Literal, TargetFile
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.torch_files.tensors import encode
from zckpt.state import Extent, Scalar, Slot, Span
from zckpt.state.dtypes import DTYPES, itemsize
from zckpt.torchfile import (
    ALIGNMENT,
    CENTRAL,
    LOCAL,
    FromFile,
    Mentioned,
    NewRecord,
    Placed,
    Storage,
    Tensor,
    dump,
    lay_out_archive,
)

if TYPE_CHECKING:
    from zckpt.engine.packs import Pack

__all__ = ["FromFile", "NewStorage", "PackPart", "SlotPart", "SlotTensor", "ValuePart", "ValueTensor", "lay_out",
           "new_storage", "view"]  # fmt: skip

ZEROS = bytes(1 << 20)
"""Written where no part of a storage is: its checksum then follows from those of the parts, without reading it back."""


@dataclass(frozen=True, slots=True)
class SlotPart:
    """An extent of a slot from element `start` of a new storage; by default the whole slot."""

    start: int
    slot: Slot
    label: str
    extent: Extent | None = None

    @property
    def covered(self) -> Extent:
        """The extent of the slot that it covers."""
        return Extent.whole(self.slot.shape) if self.extent is None else self.extent


@dataclass(frozen=True, slots=True)
class ValuePart:
    """Known bytes from element `start` of a new storage; those of a memoryview are not copied."""

    start: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class PackPart:
    """Shares of many parameters from element `start` of a new storage of their type: see `engine.packs`."""

    start: int
    pack: Pack


Part = SlotPart | ValuePart | PackPart


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage(Storage):
    """A storage that is to be written: `parts` in their order, and zeros where none is. Made by `new_storage`."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SlotTensor:
    """A slot that is to be a tensor of the file. The same object twice in a tree is one storage, shared."""

    slot: Slot
    dtype: str
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class ValueTensor:
    """A tensor of which the bytes are known, such as a step count."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


def value_node(value: object) -> object:
    """Return a single value as a torch file has it: a 0-d tensor stays one."""
    return ValueTensor(encode(value), value.dtype, ()) if isinstance(value, Scalar) else value


def new_storage(dtype: str, numel: int, parts: Sequence[Part] = (), *, location: str = "cpu") -> NewStorage:
    """Return a storage that is to be written.

    Parameters
    ----------
    dtype : str
        Slots of another type are cast.
    numel : int, elements
    parts : sequence of SlotPart, ValuePart or PackPart
        In any order; elements that none of them holds are zero.
    location : str
        Device tag.

    Raises
    ------
    LayoutError
        Parts overlap or leave the storage.
    """
    size, end = itemsize(dtype), 0
    ordered = sorted((part for part in parts if _numel(part, size)), key=lambda part: part.start)
    for part in ordered:
        if part.start < end or (isinstance(part, ValuePart) and len(part.data) % size):
            raise LayoutError("parts of a storage overlap", expected=f"from element {end}", found=part.start)
        end = part.start + _numel(part, size)
    if end > numel:
        raise LayoutError("parts leave their storage", expected=f"at most {numel} elements", found=end)
    return NewStorage("", dtype, numel * size, location, 0, tuple(ordered))


def view(
    storage: Storage,
    shape: tuple[int, ...],
    *,
    start: int = 0,
    strides: tuple[int, ...] | None = None,
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
    steps = row_major([max(size, 1) for size in shape]) if strides is None else strides
    end = start + 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) if math.prod(shape) else 0
    numel = storage.nbytes // itemsize(storage.dtype)
    if end > numel:
        raise LayoutError("a tensor leaves its storage", expected=f"at most {numel} elements", found=end)
    function = "_rebuild_tensor_v2" if DTYPES[storage.dtype].storage else "_rebuild_tensor_v3"
    tensor = Tensor(storage, storage.dtype, shape, steps, start, "little", rebuild=function)
    if like is None:
        return tensor
    place = {name: getattr(tensor, name) for name in ("storage", "dtype", "shape", "strides", "storage_offset")}
    return replace(like, byteorder="little", rebuild=function, metadata=None, **place)


def lay_out(name: str, root: object) -> TargetFile:
    """Return a torch file that holds a tree.

    Parameters
    ----------
    name : str
        File name within the target; its stem becomes the archive's root.
    root : object
        Plain data, nodes of `zckpt.torchfile`, and the tensors named above.

    Raises
    ------
    UnsupportedError
        The tree holds something that cannot be written.
    """
    pickled = dump(root, _StandIns())
    stem = _stem(name)
    identity = hashlib.blake2b(pickled.data, digest_size=16).hexdigest()
    before = [
        _record(f"{stem}/data.pkl", pickled.data),
        _record(f"{stem}/.format_version", b"1"),
        _record(f"{stem}/.storage_alignment", str(ALIGNMENT).encode()),
        _record(f"{stem}/byteorder", b"little"),
    ]
    data = [_data_record(f"{stem}/data/{key}", one.storage) for key, one in enumerate(pickled.storages)]
    after = [_record(f"{stem}/version", b"3\n"), _record(f"{stem}/.data/serialization_id", identity.encode())]
    layout = lay_out_archive([*before, *data, *after])
    file = TargetFile(name, layout.nbytes, [Literal(offset, data) for offset, data in layout.literals])
    for mentioned, placed in zip(pickled.storages, layout.placed[len(before) :], strict=False):
        if placed.record.data is None:
            _fill(file, mentioned, placed)
    return file


class Stencil:
    """A file all bytes of which are known, to be had under other names of the same length; each record begins with it.

    Parameters
    ----------
    file : TargetFile
        From `lay_out`, and `fits`.
    """

    def __init__(self, file: TargetFile) -> None:
        import numpy as np

        stem = _stem(file.name).encode()
        self._data = np.zeros(file.nbytes, np.uint8)
        places = []
        for literal in file.literals:
            data = bytes(literal.data)
            self._data[literal.offset : literal.offset + len(data)] = np.frombuffer(data, np.uint8)
            for magic, at in ((b"PK\3\4", LOCAL.size), (b"PK\1\2", CENTRAL.size)):
                if data.startswith(magic) and data.startswith(stem + b"/", at):
                    places.append(literal.offset + at)
        self._size = len(stem)
        self._places = np.array(places)[:, None] + np.arange(len(stem))

    @staticmethod
    def fits(file: TargetFile) -> bool:
        """Tell whether all bytes of a file are known."""
        return not (file.holes or file.packs or file.checksums)

    def named(self, name: str) -> TargetFile | None:
        """Return the file under another name; None for one of another length."""
        import numpy as np

        stem = _stem(name).encode()
        if len(stem) != self._size:
            return None
        data = self._data.copy()
        data[self._places] = np.frombuffer(stem, np.uint8)
        return TargetFile(name, len(data), [Literal(0, data.data)])


def _stem(name: str) -> str:
    """Return what the names of an archive's records begin with, given its file's."""
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[0] or "archive"


def _record(name: str, data: bytes) -> NewRecord:
    return NewRecord(name, data, len(data))


def _data_record(name: str, storage: Storage) -> NewRecord:
    """Return a storage's record, with its data where that is one known value."""
    if not storage.nbytes:
        return _record(name, b"")
    if isinstance(storage, NewStorage) and len(storage.parts) == 1:
        (part,) = storage.parts
        if isinstance(part, ValuePart) and isinstance(part.data, bytes) and len(part.data) == storage.nbytes:
            return _record(name, part.data)
    return NewRecord(name, None, storage.nbytes)


def _fill(file: TargetFile, mentioned: Mentioned, placed: Placed) -> None:
    """Say what goes into a storage's record: holes, known bytes, zeros."""
    size = itemsize(mentioned.dtype)
    end = placed.offset
    for part in _parts(mentioned):
        at = placed.offset + part.start * size
        file.literals.extend(_zeros(end, at))
        if isinstance(part, SlotPart):
            file.holes.append(Hole(at, part.label, part.slot, part.covered, mentioned.dtype))
        elif isinstance(part, PackPart):
            file.packs.append(replace(part.pack, offset=at))
        else:
            file.literals.append(Literal(at, part.data))
        end = at + _numel(part, size) * size
    whole = placed.offset + placed.record.nbytes
    file.literals.extend(_zeros(end, whole))
    file.checksums.append(Checksum(placed.offset, whole, placed.checksum_offsets))


def _parts(mentioned: Mentioned) -> tuple[Part, ...]:
    """Return the parts of a new storage, or the one of a storage that is in a file: all its bytes, in their order."""
    storage = mentioned.storage
    if isinstance(storage, NewStorage):
        return storage.parts
    if mentioned.path is None:
        raise UnsupportedError(f"a tensor of a file that is not named cannot be written: storage {storage.key!r}")
    dtype = mentioned.dtype
    shape = (storage.nbytes // itemsize(dtype),)
    span = Span(Extent.whole(shape), mentioned.path, storage.offset, dtype, None, mentioned.byteorder)
    return (SlotPart(0, Slot("storage", dtype, shape, (span,)), f"storage {storage.key} of {mentioned.path}"),)


def _zeros(start: int, end: int) -> Iterator[Literal]:
    for at in range(start, end, len(ZEROS)):
        yield Literal(at, ZEROS[: end - at])


def _numel(part: Part, size: int) -> int:
    if isinstance(part, PackPart):
        return part.pack.numel
    return part.covered.numel if isinstance(part, SlotPart) else -(-len(part.data) // size)


class _StandIns:
    """Gives the tensor for a SlotTensor or ValueTensor: each time a new one, of the one storage it has."""

    def __init__(self) -> None:
        self.storages: dict[int, NewStorage] = {}

    def __call__(self, node: object) -> object:
        if isinstance(node, SlotTensor):
            storage = self.storages.get(id(node))
            if storage is None:
                part = SlotPart(0, node.slot, node.label)
                storage = self.storages[id(node)] = new_storage(node.dtype, node.slot.numel, [part])
            return view(storage, node.slot.shape)
        if isinstance(node, ValueTensor):
            storage = self.storages.get(id(node))
            if storage is None:
                part_of = ValuePart(0, node.data)
                numel = len(node.data) // itemsize(node.dtype)
                storage = self.storages[id(node)] = new_storage(node.dtype, numel, [part_of])
            return view(storage, node.shape)
        return None
