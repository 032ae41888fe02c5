"""How tensor parallelism cuts a parameter of Megatron's, told by name and proved by shapes, and put together. Pure.

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
from zckpt.state import Slot
from zckpt.state.views import concat, narrow, plain, reshape, transpose

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


KEPT = Cut(None)


def cut_of(name: str, shape: Shape, *, gated: bool | None) -> Cut:
    """Return how a parameter is cut, of which more than one rank has a slice.

    Parameters
    ----------
    name : str
    shape : tuple of int
        Of a rank's slice.
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
                    f"whether {name} is that of a gated unit is not known", expected=f"its {PARTNER[module]}"
                )
            return Cut(0, 2 if module in GATED and gated else 1)
        if module in COLUMNS and len(shape) == 2:
            return Cut(1)
        if module in COLUMNS and len(shape) == 1:
            return KEPT
    raise UnsupportedError(
        f"how tensor parallelism cuts {name} is not known",
        expected="layers of Megatron-Core's transformer",
        found=f"shape {shape}",
        advice="convert it to one rank with the program that wrote it",
    )


def joined(name: str, slots: Sequence[Slot], cut: Cut) -> Slot:
    """Return the whole of which each rank has a slice.

    Raises LayoutError: the slices are of different shapes or types, or have an odd number of what comes in pairs.
    """
    first = slots[0]
    for one in slots[1:]:
        if (one.shape, one.dtype) != (first.shape, first.dtype):
            raise LayoutError(f"ranks have slices of {name} that do not match",
                              expected=f"{first.dtype} {first.shape}", found=f"{one.dtype} {one.shape}")  # fmt: skip
    dimension = cut.dimension
    if dimension is None or len(slots) == 1:
        return first
    size, odd = divmod(first.shape[dimension], cut.parts)
    if odd:
        raise LayoutError(f"{name} has no {cut.parts} equal parts", found=first.shape)
    return concat([narrow(one, dimension, part * size, size) for part in range(cut.parts) for one in slots], dimension)


SPLITS = {"query_key_value": 3, "key_value": 2}
"""How many kinds of rows are in one; `key_value` is that of cross attention."""

CURRENT = 2.0
"""The version of a checkpoint from which on rows of query, key and value are in today's order, [heads, 3, d]."""


def splits_of(name: str) -> int | None:
    """Return how many kinds of rows a parameter has; None for another."""
    steps = name.split(".")
    return SPLITS.get(steps[-2]) if len(steps) > 1 else None


def reordered(name: str, slots: Sequence[Slot], splits: int, heads: int, version: float) -> Slot:
    """Return a parameter in today's order of rows, of which each rank has a slice in that of an old version.

    In version 0 each rank's rows are [3, heads, d], in version 1 [heads, d, 3]. Raises LayoutError: the rows are not
    those of as many heads. Source: Megatron-LM's `fix_query_key_value_ordering`.
    """
    (rows, *rest), ranks = slots[0].shape, len(slots)
    own = heads // ranks
    if heads % ranks or rows % (splits * own):
        raise LayoutError(f"{name} does not have the rows of {heads} heads", found=f"{ranks} of {slots[0].shape}")
    width = rows // (splits * own)
    there, order = ((splits, own, width), (1, 0, 2)) if version < 1 else ((own, width, splits), (0, 2, 1))
    every = [reshape(one, (*there, *rest)) for one in slots]
    turned = [transpose(one, (*order, *range(len(there), len(one.shape)))) for one in every]
    return reshape(concat(turned, 0), (rows * ranks, *rest))


def end_to_end(slots: Sequence[Slot], key: str) -> Slot:
    """Return a parameter that is written as several, one after the other; raise LayoutError: they do not fit."""
    first = slots[0]
    for one in slots[1:]:
        if not first.shape or (one.dtype, one.shape[1:]) != (first.dtype, first.shape[1:]):
            raise LayoutError(f"the tensors of {key} do not fit together",
                              expected=f"{first.dtype} {first.shape}", found=f"{one.dtype} {one.shape}")  # fmt: skip
    return concat(slots, 0)


def is_flattened(shape: Shape, of: Shape) -> bool:
    """Tell whether a tensor of this shape is a parameter [X, Y, ...] as [X/x, Y/y, ..., x*y*...]."""
    if len(shape) != len(of) + 1 or not all(shape) or any(whole % n for whole, n in zip(of, shape, strict=False)):
        return False
    return prod(shape) == prod(of)


def unflattened(slot: Slot, shape: Shape) -> Slot:
    """Return a parameter of which `fully_sharded_model_space` (megatron-core up to 0.13) has flattened blocks.

    Of a parameter [X, Y], of which tensor-parallel ranks have [x, y] each, it has [X/x, Y/y, x*y].
    """
    grid, dims = slot.shape[:-1], range(len(shape))
    blocks = reshape(slot, (*grid, *(whole // n for whole, n in zip(shape, grid, strict=True))))
    return plain(reshape(transpose(blocks, [n for dim in dims for n in (dim, dim + len(shape))]), shape))
