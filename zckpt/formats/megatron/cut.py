"""How tensor parallelism cuts a parameter of Megatron's, told by its name and proved by its shapes. Pure.

rows            linear_qkv, linear_q, linear_kv, linear_fc1, word_embeddings, output_layer, eh_proj: each rank has some
                outputs
rows, in two    linear_fc1 of a gated unit: each rank has some of the gates, then as many of the others
columns         linear_proj, linear_fc2: each rank has some inputs; their biases are whole
whole           norms, routers, position embeddings, down projections of latent attention

Before Megatron-Core: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, key_value, query.

Source: megatron-core 0.13 and 0.16; Megatron-LM's `megatron/model`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.state import Extent, Slot, Span
from zckpt.state.dtypes import itemsize

Shape = tuple[int, ...]

ROWS = frozenset((
    "linear_qkv", "linear_q", "linear_kv", "linear_fc1", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj",
    "word_embeddings", "output_layer", "eh_proj", "query_key_value", "query", "key_value", "dense_h_to_4h",
))  # fmt: skip
COLUMNS = frozenset(["linear_proj", "linear_fc2", "dense", "dense_4h_to_h"])
WHOLE = frozenset(["router", "position_embeddings", "tokentype_embeddings", "gate_weight"])
GATED = frozenset(["linear_fc1", "dense_h_to_4h"])
"""Layers that may have two halves, each cut for itself; their partners tell."""

PARTNER = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}

_NORM = re.compile(r".*(?:norm|layernorm|layer_norm)(?:_weight|_bias|\.weight|\.bias)")
_NUMBERED = re.compile(r"(weight|bias)[0-9]*")


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks' slices make up a parameter.

    `dimension`: None: every rank has the whole; `parts`: how many equal parts each slice has, that are apart in the
    whole.
    """

    dimension: int | None
    parts: int = 1

    def whole(self, shape: Shape, ranks: int) -> Shape:
        """Return the shape of the whole of which a rank has a slice of `shape`."""
        if self.dimension is None:
            return shape
        return tuple(n * ranks if at == self.dimension else n for at, n in enumerate(shape))


KEPT = Cut(None)


def cut_of(name: str, shape: Shape, path: str, *, gated: bool | None) -> Cut:
    """Return how a parameter is cut, of which more than one rank has a slice.

    Parameters
    ----------
    name : str
    shape : tuple of int
        Of a rank's slice.
    path : str
        For messages.
    gated : bool or None
        Of a first layer of two, whether it has two halves; None: that is not known.

    Raises
    ------
    UnsupportedError
        No rule is known for the name.
    """
    steps = name.split(".")
    module, last = (steps[-2], steps[-1]) if len(steps) > 1 else ("", steps[-1])
    if _NORM.fullmatch(name) or module in WHOLE or last in WHOLE:
        return KEPT
    if _NUMBERED.fullmatch(last) is not None:
        if module in ROWS and len(shape) in (1, 2):
            if module in GATED and gated is None:
                raise UnsupportedError(
                    f"whether {name} is that of a gated unit is not known", path=path, expected=f"its {PARTNER[module]}"
                )
            return Cut(0, 2 if module in GATED and gated else 1)
        if module in COLUMNS and len(shape) == 2:
            return Cut(1)
        if module in COLUMNS and len(shape) == 1:
            return KEPT
    raise UnsupportedError(
        f"how tensor parallelism cuts {name} is not known",
        path=path,
        expected="layers of Megatron-Core's transformer",
        found=f"shape {shape}",
        advice="convert it to one rank with the program that wrote it",
    )


def joined(name: str, slots: Sequence[Slot], cut: Cut, path: str) -> Slot:
    """Return the whole of which each rank has a slice.

    Spans of a slice are ranges of it, or boxes with strides. Raises LayoutError: the slices are of different shapes or
    types, or have an odd number of what comes in pairs.
    """
    first = slots[0]
    for one in slots[1:]:
        if (one.shape, one.dtype) != (first.shape, first.dtype):
            raise LayoutError(f"ranks have slices of {name} that do not match", path=path,
                              expected=f"{first.dtype} {first.shape}", found=f"{one.dtype} {one.shape}")  # fmt: skip
    dimension = cut.dimension
    if dimension is None or len(slots) == 1:
        return first
    size, odd = divmod(first.shape[dimension], cut.parts)
    if odd:
        raise LayoutError(f"{name} has no {cut.parts} equal parts", path=path, found=first.shape)
    shape = cut.whole(first.shape, len(slots))
    spans: list[Span] = []
    for rank, one in enumerate(slots):
        for part in range(cut.parts):
            at = (part * len(slots) + rank) * size
            offsets = tuple(at if d == dimension else 0 for d in range(len(shape)))
            sizes = tuple(size if d == dimension else n for d, n in enumerate(one.shape))
            box = Extent(offsets, sizes, 0, one.numel // cut.parts)
            spans += filter(None, (_part(span, dimension, part, box) for span in one.spans))
    return Slot(first.name, first.dtype, shape, tuple(spans))


def _part(span: Span, dimension: int, part: int, box: Extent) -> Span | None:
    """Return what a span of a slice has of one of its parts, as what that is of the whole; None if nothing.

    Only what is cut along its first dimension has parts, so that each is a range of the slice.
    """
    if span.strides is not None:
        own, first, size = span.extent, part * box.sizes[dimension], box.sizes[dimension]
        start, end = own.offsets[dimension], own.offsets[dimension] + own.sizes[dimension]
        low, high = max(start, first), min(end, first + size)
        if low >= high:
            return None
        at = box.offsets[dimension] + low - first
        offsets = tuple(at if d == dimension else n for d, n in enumerate(own.offsets))
        sizes = tuple(high - low if d == dimension else n for d, n in enumerate(own.sizes))
        offset = span.offset + (low - start) * span.strides[dimension] * itemsize(span.dtype)
        extent = Extent(offsets, sizes, 0, prod(sizes))
        return Span(extent, span.path, offset, span.dtype, span.strides, span.byteorder, span.unresolved)
    before = part * box.numel
    low = max(span.extent.start, before)
    high = min(span.extent.start + span.extent.numel, before + box.numel)
    if low >= high:
        return None
    extent = Extent(box.offsets, box.sizes, low - before, high - low)
    offset = span.offset + (low - span.extent.start) * itemsize(span.dtype)
    return Span(extent, span.path, offset, span.dtype, None, span.byteorder, span.unresolved)


def contiguous(shape: Shape) -> Shape:
    """Return the strides of a tensor that is stored end to end, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
