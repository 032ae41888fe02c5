"""What a tensor-parallel rank has of a slot of the whole model: the other way round than `cut`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from zckpt.errors import UsageError
from zckpt.formats.megatron.cut import GATED, KEPT, PARTNER, Cut, Shape, cut_of
from zckpt.formats.torch_files.writer import SlotContent
from zckpt.state import Extent, Slot
from zckpt.state.views import concat, narrow

VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias", "lm_head.bias")


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's slice of a parameter.

    `whole`, `shape`: of the parameter, and of the slice; `pieces`: from which index of the slice on, from which of the
    parameter, and how many; what none is of are zeros.
    """

    whole: Shape
    shape: Shape
    dimension: int
    pieces: tuple[tuple[int, int, int], ...]

    def contents(self, slot: Slot, label: str, start: int = 0) -> list[SlotContent]:
        """Return the contents of a storage that has the slice from element `start`."""
        d, found = self.dimension, []
        for at, first, size in self.pieces:
            offsets = (*(0 for _ in self.whole[:d]), first, *(0 for _ in self.whole[d + 1 :]))
            sizes = (*self.whole[:d], size, *self.whole[d + 1 :])
            extent = Extent(offsets, sizes, 0, prod(sizes)) if self.whole else Extent.whole(())
            found.append(SlotContent(start + at * prod(self.whole[d + 1 :]), slot, label, extent))
        return [one for one in found if one.extent is None or one.extent.numel]

    def of(self, slot: Slot) -> Slot:
        """Return the slice as a slot; there are no zeros in it."""
        return concat([narrow(slot, self.dimension, first, size) for _, first, size in self.pieces], self.dimension)


def slice_of(shape: Shape, cut: Cut, rank: int, ranks: int, rows: int | None = None) -> Slice:
    """Return a rank's slice.

    Parameters
    ----------
    shape : tuple of int
        Of the whole, as it is.
    cut : Cut
        Divides it evenly.
    rank, ranks : int
    rows : int, optional
        How many it shall have; further ones are zeros.
    """
    if cut.dimension is None:
        return Slice(shape, shape, 0, ((0, 0, shape[0] if shape else 1),))
    d = cut.dimension
    size = (shape[d] if rows is None else rows) // (ranks * cut.parts)
    firsts = [(part * ranks + rank) * size for part in range(cut.parts)]
    pieces = tuple((part * size, first, max(min(size, shape[d] - first), 0)) for part, first in enumerate(firsts))
    return Slice(shape, (*shape[:d], size * cut.parts, *shape[d + 1 :]), d, pieces)


def cuts_of(shapes: Mapping[str, Shape], ranks: int, rows: int | None) -> dict[str, Cut]:
    """Return how each parameter is cut.

    `shapes`: of the whole model's parameters, by the names of the module; `rows`: of vocabularies in the target. Raises
    UsageError: one is not cut evenly; UnsupportedError: of one no rule is known.
    """
    if ranks == 1 and rows is None:
        return dict.fromkeys(shapes, KEPT)
    found = {}
    for name, shape in shapes.items():
        is_vocabulary = name.endswith(VOCABULARY)
        if ranks == 1:
            found[name] = Cut(0) if is_vocabulary else KEPT
            continue
        cut = Cut(0) if name.endswith("lm_head.bias") else cut_of(name, shape, gated=_is_gated(name, shapes))
        size = None if cut.dimension is None else shape[cut.dimension]
        if is_vocabulary and rows is not None:
            size = rows
        if size is not None and size % (ranks * cut.parts):
            raise UsageError(
                f"{name} is not cut evenly for {ranks} tensor-parallel ranks",
                expected="--padded-vocab-size of a multiple of them" if is_vocabulary else "a divisor of its size",
                found=shape,
            )
        found[name] = cut
    return found


def _is_gated(name: str, shapes: Mapping[str, Shape]) -> bool | None:
    module = next((one for one in GATED if f".{one}." in name), None)
    if module is None:
        return None
    front, _, rest = name.rpartition(f".{module}.")
    partner = shapes.get(f"{front}.{PARTNER[module]}.{rest.replace('bias', 'weight')}")
    return None if partner is None or len(partner) != 2 else shapes[name][0] == 2 * partner[1]
