"""Quantised state of bitsandbytes and torchao cut for other ranks, as it is: codes and scales, where blocks allow it.

    flat buffer   |block |block |block |block |block |...
    rank          |0             |1             |...         a partition's first block begins with it
    state1, 2     codes of a rank's partition                  } of other ranks: the same, cut elsewhere
    absmax1, 2    a scale for each of its blocks               }
    qmap1, 2      what codes stand for: the same on all ranks
    state1, 2     float32 alone, of a small partition: cut anywhere

torchao has the same in a tensor of its own for each moment, `codes`, `scale` and `qmap`, and whole blocks only.

Blocks of all ranks are blocks of the flat buffer if every partition begins with a multiple of a block, before and
after; that of a single rank always does. Otherwise a block would have elements with two scales, and what can be written
is floats, `--dequantize`, or codes anew, `--requantize`. What a longer buffer has at its end is padding of whole
blocks, of scale 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.formats.torch_files import torchao
from zckpt.formats.torch_files.quantised import NESTED
from zckpt.formats.torch_files.writer import SlotContent, new_storage, view
from zckpt.state import Extent, Slot
from zckpt.storage.files import opened, read_at
from zckpt.torchfile import FromFile, MetaTensor, Size, Tensor


@dataclass(frozen=True, slots=True)
class Codes:
    """The 8-bit state of a param group, on all ranks of the source.

    Parameters
    ----------
    values : sequence of FromFile
        As each rank has it, in order.
    pieces : sequence of mapping
        The tensors of each.
    partition : int, elements
    block : int, elements
        1, where all of it is float32.
    """

    values: Sequence[FromFile]
    pieces: Sequence[Mapping[str, Slot]]
    partition: int
    block: int

    @property
    def count(self) -> int:
        """The ranks of the source."""
        return len(self.pieces)

    def of(self, rank: int, partition: int) -> dict[object, object]:
        """Return the state of a rank of the target whose partition has so many elements, by key."""
        first = self.values[0]
        node = first.node if isinstance(first.node, dict) else {}
        cut = {key: self._tensor(key, value, rank, partition) for key, value in node.items()}
        return {NESTED: replace(first, node=cut)}

    def _tensor(self, key: object, like: Tensor, rank: int, partition: int) -> object:
        kind = str(key)[:-1]
        if kind == "qmap":
            return like
        unit = self.block if kind == "absmax" else 1
        numel, held = -(-partition // unit), -(-self.partition // unit)
        start, contents = rank * (partition // unit), []
        for source, pieces in enumerate(self.pieces):
            low, high = max(start, source * held), min(start + numel, (source + 1) * held)
            if low < high:
                slot = pieces[str(key)]
                extent = Extent.flat(slot.shape, low - source * held, high - low)
                contents.append(SlotContent(low - start, slot, f"{key} of rank {source}", extent))
        return view(new_storage(like.dtype, numel, contents), (numel,), like=like)


@dataclass(frozen=True, slots=True)
class TorchaoCodes:
    """The state of a param group that torchao has quantised, on all ranks of the source.

    Parameters
    ----------
    values : mapping of str to sequence of FromFile
        Of each moment as each rank has it, in order.
    moments : mapping of str to sequence of Quantised
        Their tensors.
    partition, block : int, elements
    """

    values: Mapping[str, Sequence[FromFile]]
    moments: Mapping[str, Sequence[torchao.Quantised]]
    partition: int
    block: int

    @property
    def count(self) -> int:
        """The ranks of the source."""
        return len(next(iter(self.values.values())))

    def of(self, rank: int, partition: int) -> dict[object, object]:
        """Return the state of a rank of the target whose partition has so many elements, by key."""
        return {key: self._moment(key, rank, partition) for key in self.values}

    def _moment(self, key: str, rank: int, partition: int) -> FromFile:
        first = self.values[key][0]
        node = first.node
        if not isinstance(node, MetaTensor):
            raise TypeError("a moment of torchao's is a tensor without elements of its own")
        per_code = 2 if self.moments[key][0].cls == torchao.PACKED else 1
        attributes = dict(node.attributes or {})
        for name, unit in (("codes", per_code), ("scale", self.block)):
            held = [one.codes if name == "codes" else one.scale for one in self.moments[key]]
            attributes[name] = _cut(f"{name} of {key}", attributes[name], held, unit, rank, partition)
        if "_shape" in attributes:
            attributes["_shape"] = Size((partition,))
        return replace(first, node=replace(node, shape=(partition,), attributes=attributes))


def _cut(what: str, like: object, held: Sequence[Slot], unit: int, rank: int, partition: int) -> Tensor:
    """Return a rank's part of tensors that lie end to end, each of whose values is of so many elements."""
    numel, own = partition // unit, held[0].numel
    start, contents = rank * numel, []
    for source, slot in enumerate(held):
        low, high = max(start, source * own), min(start + numel, (source + 1) * own)
        if low < high:
            extent = Extent.flat(slot.shape, low - source * own, high - low)
            contents.append(SlotContent(low - start, slot, f"{what} of rank {source}", extent))
    return view(new_storage(held[0].dtype, numel, contents), (numel,), like=like if isinstance(like, Tensor) else None)


KNOWN = frozenset(f"{kind}{number}" for kind in ("state", "qmap", "absmax") for number in "12")
"""Of bitsandbytes, by blocks: tensors of one dimension."""


def alike_forms(pieces: Sequence[Mapping[str, Slot]]) -> bool:
    """Tell whether all ranks have the same kinds of tensors, flat ones: AdEMAMix has two moments in one."""
    forms = [{key: (slot.dtype, slot.shape) for key, slot in one.items()} for one in pieces]
    return all(one == forms[0] for one in forms) and all(len(slot.shape) == 1 for slot in pieces[0].values())


def bytes_of(slot: Slot) -> bytes:
    """Return the bytes of a small tensor."""
    return b"".join(_read(slot))


def _read(slot: Slot) -> Iterator[bytes]:
    for span in slot.spans:
        with opened(span.path) as descriptor:
            yield read_at(descriptor, span.offset, slot.nbytes, path=span.path)
