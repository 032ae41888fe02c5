"""What this rank writes: of what several ranks have, each writes about as much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zckpt.engine.tensors import dtype_name, memory_of
from zckpt.formats.native.rank_file import UNWRITTEN, Entry, Listed, slot_entry
from zckpt.optim.tensors import Share
from zckpt.state import Extent, Slot
from zckpt.state.partition import even_extents
from zckpt.training.live import Part

ALIGNMENT = 64
"""Bytes at multiples of which tensors start in staging memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a slot that one rank writes. `shape`: of the whole slot."""

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent

    @property
    def key(self) -> str:
        """What the piece is called in its file; `storage/` is for what is no slot."""
        return f"{self.slot}/{self.name}" if self.slot != "storage" else f"{self.slot}/{self.name}'"


@dataclass(slots=True)
class RankState:
    """What a rank writes, as the first rank has to know it.

    Parameters
    ----------
    pieces : list of Piece
    values : dict
        State of its parameters that is no tensor.
    random_states : dict
    file : Listed
        Its file as a whole.
    part : Part or None
        Of what ranks have in parts.
    """

    pieces: list[Piece] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    random_states: dict[str, Any] = field(default_factory=dict)
    file: Listed = UNWRITTEN
    part: Part | None = None


Held = tuple[Piece, torch.Tensor]
"""A piece, and its elements, flat."""


def divide(shares: Iterable[tuple[str, str, Share]], rank: int, members: Sequence[int]) -> list[Held]:
    """Return what this rank writes of what it has.

    Parameters
    ----------
    shares : iterable of (str, str, Share)
        Parameter, slot and share; those that several ranks have, in the same order on all of them.
    rank : int
        In the world.
    members : sequence of int
        The ranks, in the world, that save together.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[str, str, Share]]] = {}
    for one in shares:
        own = members if one[2].ranks is None else one[2].ranks
        having = tuple(member for member in own if member in members)
        by_ranks.setdefault(having, []).append(one)
    held: list[Held] = []
    for having, equal in by_ranks.items():
        if rank not in having:
            continue
        sizes = [(share.extent.numel, share.tensor.element_size()) for _, _, share in equal]
        divided = even_extents(sizes, len(having))
        for (name, slot, share), ranges in zip(equal, divided, strict=True):
            whole, elements = share.extent, share.tensor
            for r in ranges:
                if having[r.file] == rank:
                    extent = Extent(whole.offsets, whole.sizes, whole.start + r.start, r.numel)
                    piece = Piece(name, slot, dtype_name(elements.dtype), share.shape, extent)
                    held.append((piece, elements.reshape(-1)[r.start : r.start + r.numel]))
    return held


def entries(held: Iterable[Held], staging: Staging | None) -> list[Entry]:
    """Return what this rank's file is to have; its bytes are those of the tensors, or copies in staging memory."""
    pairs = list(held)
    views = [memory_of(tensor.cpu()) for _, tensor in pairs] if staging is None else staging.copy([t for _, t in pairs])
    return [
        slot_entry(piece.key, Slot(piece.slot, piece.dtype, piece.shape, ()), piece.extent, view)
        for (piece, _), view in zip(pairs, views, strict=True)
    ]


class Staging:
    """Memory of the host that tensors are copied to, so that they may change while they are written; used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Return the bytes of copies of tensors, good until the next call."""
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if self._memory.numel() < starts[-1] or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # before there is another
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        views = []
        for tensor, start in zip(tensors, starts[:-1], strict=True):
            here = self._memory[start : start + tensor.nbytes]
            if tensor.numel():
                here.view(tensor.dtype).copy_(tensor, non_blocking=True)
            views.append(memory_of(here))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return views
