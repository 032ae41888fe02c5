"""A tree of plain data and slots as a file that `torch.load` reads, weights_only and memory-mapped included.

STEM/data.pkl  STEM/.format_version  STEM/.storage_alignment  STEM/byteorder  STEM/data/0 ...  STEM/version
STEM/.data/serialization_id
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from zckpt.dtypes import itemsize
from zckpt.plan import Checksum, Hole, Literal, TargetFile
from zckpt.state import Extent, Slot
from zckpt.torchfile.archive_writer import ALIGNMENT, Record, lay_out_archive
from zckpt.torchfile.objects import OrderedMapping
from zckpt.torchfile.pickle_writer import NewTensor, dump


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


def lay_out(name: str, root: object) -> TargetFile:
    """Return a torch file that holds a tree in which SlotTensors and ValueTensors stand for tensors.

    Parameters
    ----------
    name : str
        File name within the target; its stem becomes the archive's root.
    root : object

    Raises
    ------
    UnsupportedError
        The tree holds something that is not plain data.
    """
    tensors: list[SlotTensor | ValueTensor] = []
    pickled = dump(_with_keys(root, tensors))
    stem = name.rsplit("/", 1)[-1].rsplit(".", 1)[0] or "archive"
    identity = hashlib.blake2b(pickled, digest_size=16).hexdigest()
    records = [
        _record(f"{stem}/data.pkl", pickled),
        _record(f"{stem}/.format_version", b"1"),
        _record(f"{stem}/.storage_alignment", str(ALIGNMENT).encode()),
        _record(f"{stem}/byteorder", b"little"),
        *(_data_record(f"{stem}/data/{key}", tensor) for key, tensor in enumerate(tensors)),
        _record(f"{stem}/version", b"3\n"),
        _record(f"{stem}/.data/serialization_id", identity.encode()),
    ]
    layout = lay_out_archive(records)
    file = TargetFile(name, layout.nbytes, [Literal(offset, data) for offset, data in layout.literals])
    holes = {f"{stem}/data/{key}": tensor for key, tensor in enumerate(tensors)}
    for placed in layout.placed:
        tensor = holes.get(placed.record.name)
        if isinstance(tensor, SlotTensor):
            extent = Extent.whole(tensor.slot.shape)
            file.holes.append(Hole(placed.offset, tensor.label, tensor.slot, extent, tensor.dtype))
            end = placed.offset + placed.record.nbytes
            file.checksums.append(Checksum(placed.offset, end, placed.checksum_offsets))
    return file


def _record(name: str, data: bytes) -> Record:
    return Record(name, data, len(data))


def _data_record(name: str, tensor: SlotTensor | ValueTensor) -> Record:
    if isinstance(tensor, ValueTensor):
        return _record(name, tensor.data)
    return Record(name, None, tensor.slot.numel * itemsize(tensor.dtype))


def _with_keys(root: object, tensors: list[SlotTensor | ValueTensor]) -> object:
    """Return the tree with each tensor replaced by one that has a storage key, numbered in order of first mention."""
    keys: dict[int, int] = {}

    def replace(node: object) -> object:
        if isinstance(node, (SlotTensor, ValueTensor)):
            if id(node) not in keys:
                keys[id(node)] = len(tensors)
                tensors.append(node)
            shape = node.slot.shape if isinstance(node, SlotTensor) else node.shape
            numel = node.slot.numel if isinstance(node, SlotTensor) else len(node.data) // itemsize(node.dtype)
            return NewTensor(str(keys[id(node)]), node.dtype, shape, numel)
        return _rebuilt(node, replace)

    return replace(root)


def _rebuilt(node: object, replace: Callable[[object], object]) -> object:
    if type(node) is OrderedMapping:
        ordered = OrderedMapping()
        ordered.update((key, replace(value)) for key, value in node.items())
        return ordered
    if type(node) is dict:
        return {key: replace(value) for key, value in node.items()}
    if type(node) is list:
        return [replace(value) for value in node]
    if type(node) is tuple:
        return tuple(replace(value) for value in node)
    return node
