"""An item of a DCP file: a whole torch archive among others, each at a multiple of 64 bytes.

    | archive of item 0 | zeros | archive of item 1 | zeros | ...

Tensors of one type and shape have the same bytes around their elements, and equal values are equal archives, so
that each kind is laid out once, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.engine.plan import Checksum, Hole, Literal, TargetFile
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.writer import SlotPart, SlotTensor, ValueTensor
from zckpt.state import Extent, Slot
from zckpt.torchfile import ALIGNMENT

STEM = "archive"
"""The root of an archive that torch.save writes to a stream."""

SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A slot, or the rows of it that one file holds.

    Parameters
    ----------
    tensor : SlotTensor
    offsets, sizes : tuple of int, elements
        The first element of the piece, and its shape; whole but for dimension 0.
    """

    tensor: SlotTensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def extent(self) -> Extent:
        """What of the slot it is."""
        slot = self.tensor.slot
        if self.sizes == slot.shape:
            return Extent.whole(slot.shape)
        row = slot.numel // slot.shape[0]
        return Extent.flat(slot.shape, self.offsets[0] * row, self.sizes[0] * row)


class Archives:
    """Lays out the archive of each item, once for all that are alike. The values must outlive it."""

    def __init__(self) -> None:
        self._known: dict[object, TargetFile] = {}

    def nbytes(self, value: object) -> int:
        """Return the size of an item, with the zeros after it."""
        size = self._archive(value).nbytes
        return size + -size % ALIGNMENT

    def put(self, file: TargetFile, value: object) -> tuple[int, int]:
        """Append an item to a file; return its offset and length in bytes."""
        archive, at = self._archive(value), file.nbytes
        for literal in archive.literals:
            file.literals.append(Literal(at + literal.offset, literal.data) if at else literal)
        for hole in archive.holes:
            offset = at + hole.offset
            if isinstance(value, TensorPiece):
                slot, tensor = value.tensor.slot, value.tensor
                file.holes.append(Hole(offset, tensor.label, slot, value.extent, tensor.dtype))
            else:
                file.holes.append(Hole(offset, hole.label, hole.slot, hole.extent, hole.dtype))
        for checksum in archive.checksums:
            offsets = tuple(at + offset for offset in checksum.offsets)
            file.checksums.append(Checksum(at + checksum.start, at + checksum.end, offsets))
        file.nbytes = at + archive.nbytes + -archive.nbytes % ALIGNMENT
        return at, archive.nbytes

    def _archive(self, value: object) -> TargetFile:
        kind = _kind(value)
        archive = self._known.get(kind)
        if archive is None:
            archive = self._known[kind] = _joined(torch_writer.lay_out(STEM, _node(value)))
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


def _node(value: object) -> object:
    if not isinstance(value, TensorPiece):
        return value
    stand_in = Slot("", value.tensor.dtype, value.sizes, ())
    storage = torch_writer.new_storage(value.tensor.dtype, stand_in.numel, [SlotPart(0, stand_in, "")])
    return torch_writer.view(storage, value.sizes)


def _joined(archive: TargetFile) -> TargetFile:
    """Return an archive with literals that follow each other joined."""
    joined: list[tuple[int, bytearray]] = []
    for literal in sorted(archive.literals, key=lambda one: one.offset):
        if joined and joined[-1][0] + len(joined[-1][1]) == literal.offset:
            joined[-1][1].extend(literal.data)
        else:
            joined.append((literal.offset, bytearray(literal.data)))
    literals = [Literal(offset, bytes(data)) for offset, data in joined]
    return TargetFile(archive.name, archive.nbytes, literals, archive.holes, archive.checksums)
