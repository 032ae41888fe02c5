"""How tensor parallelism cuts a parameter of Megatron's, told by name and proved by shapes: both ways. Pure.

rows            linear_qkv, linear_q, linear_kv, linear_fc1, word_embeddings, output_layer, eh_proj: each rank has some
                outputs
rows, in two    linear_fc1 of a gated unit: each rank has some of the gates, then as many of the others
columns         linear_proj, linear_fc2: each rank has some inputs; their biases are whole
whole           norms, routers, position embeddings
either          down projections of latent attention: whole with Transformer Engine or ModelOpt, and rows without

Before Megatron-Core: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, key_value, query.

Source: megatron-core 0.13 and 0.16; Megatron-LM's `megatron/model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.immutable import immutable
from zckpt.state import Duplicate, Shape, Slot
from zckpt.state.views import concat, narrow, pad, plain, reshape, transpose

Shapes = Mapping[str, Shape]

ROWS = frozenset((
    "linear_qkv", "linear_q", "linear_kv", "linear_fc1", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj",
    "word_embeddings", "output_layer", "eh_proj", "query_key_value", "query", "key_value", "dense_h_to_4h",
))  # fmt: skip
COLUMNS = frozenset(["linear_proj", "linear_fc2", "dense", "dense_4h_to_h"])
WHOLE = frozenset(["router", "position_embeddings", "tokentype_embeddings", "gate_weight"])

PARTNER = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
"""Layers that may have two halves, each cut for itself, and those behind them, which tell."""

DOWN = {"linear_q_down_proj": "linear_q_up_proj", "linear_kv_down_proj": "linear_kv_up_proj"}
"""Layers of latent attention, and those behind them, which have as many columns as the rank has rows if not more."""

VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias", "lm_head.bias")

_NORM = re.compile(r".*(?:norm|layernorm|layer_norm)(?:_weight|_bias|\.weight|\.bias)")
_NUMBERED = re.compile(r"(weight|bias)[0-9]*")


@immutable
class Cut:
    """How ranks' slices make up a parameter.

    `dimension`: None: every rank has the whole; `parts`: how many equal parts each slice has, that are apart in the
    whole.
    """

    dimension: int | None
    parts: int = 1

    def shape(self, shape: Shape, ranks: int, size: int | None = None) -> Shape:
        """Return the shape of a slice; `size`: what the whole is to have along its dimension, with zeros behind it."""
        d = self.dimension
        return shape if d is None else (*shape[:d], (size or shape[d]) // ranks, *shape[d + 1 :])

    def slice(self, slot: Slot, rank: int, ranks: int, size: int | None = None) -> Slot:
        """Return a rank's slice of a whole that is divided evenly; `size` is as of `shape`."""
        d = self.dimension
        if d is None:
            return slot
        whole, each = slot.shape[d], (size or slot.shape[d]) // (ranks * self.parts)
        firsts = [min((part * ranks + rank) * each, whole) for part in range(self.parts)]
        found = concat([narrow(slot, d, first, min(each, whole - first)) for first in firsts], d)
        return pad(found, d, 0, each * self.parts - found.shape[d])

    def joined(self, name: str, slices: Sequence[Slot]) -> Slot:
        """Return the whole of which each rank has a slice.

        Raises LayoutError: the slices are of different shapes or types, or have an odd number of what comes in pairs.
        """
        first, d = slices[0], self.dimension
        for one in slices[1:]:
            check_alike(one, first, f"ranks have slices of {name} that do not match")
        if d is None or len(slices) == 1:
            return first
        size, odd = divmod(first.shape[d], self.parts)
        if odd:
            raise LayoutError(f"{name} has no {self.parts} equal parts", found=first.shape)
        return concat([narrow(one, d, part * size, size) for part in range(self.parts) for one in slices], d)

    def copies(self, kind: str, name: str, whole: Slot, slices: Sequence[Slot], original: Slot) -> Iterator[Duplicate]:
        """Yield what of a whole and of ranks' slices is there once more, given what is read.

        Raises LayoutError: a copy is of another shape or type.
        """
        every: list[tuple[int | None, Slot]] = [] if whole is original else [(None, whole)]
        every += enumerate(slices[1:], 1) if self.dimension is None else ()
        for rank, one in every:
            check_alike(one, original, f"ranks have copies of {name} that differ")
            if one.numel:
                yield Duplicate(kind, name, name, one, original, rank)


KEPT = Cut(None)


def check_alike(one: Slot, other: Slot, message: str) -> None:
    """Raise LayoutError unless slots are of one shape and type."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise LayoutError(message, expected=f"{other.dtype} {other.shape}", found=f"{one.dtype} {one.shape}")


def cut_of(name: str, shapes: Shapes, *, said: object = None, of_slices: bool = False) -> Cut:
    """Return how a parameter is cut, of which more than one rank has a slice.

    Parameters
    ----------
    name : str
    shapes : mapping of str to tuple of int
        Of all parameters, or of a rank's slices of them.
    said : object
        Whether the program says that its units are gated, where shapes do not tell; what is no bool says nothing.
    of_slices : bool
        Whether shapes are of a rank's slices.

    Raises
    ------
    UnsupportedError
        No rule is known for the name.
    LayoutError
        It does not fit the layer behind it.
    """
    *_, module, last = ("", *name.split("."))
    axes = len(shapes[name])
    if _NORM.fullmatch(name) or module in WHOLE or last in WHOLE:
        return KEPT
    if _NUMBERED.fullmatch(last) is not None and axes in (1, 2):
        if module in PARTNER:
            gated = is_gated(name, shapes, said)
            if gated is None:
                raise UnsupportedError(
                    f"it is unknown whether {name} belongs to a gated unit", expected=f"its {PARTNER[module]}"
                )
            return Cut(0, 1 + gated)
        if module in DOWN:
            front = name.removesuffix(f"{module}.{last}")
            columns = shapes.get(f"{front}{DOWN[module]}.weight", (0,))[-1]
            # Layers of Megatron-Core's own have norms apart; so have those of ModelOpt, whose ranks have the whole.
            is_local = not of_slices and f"{front}kv_layernorm.weight" in shapes
            return Cut(0) if shapes[name][0] < columns or is_local else KEPT
        if module in ROWS:
            return Cut(0)
        if module in COLUMNS:
            return Cut(1) if axes == 2 else KEPT
    raise UnsupportedError(
        f"it is unknown how tensor parallelism cuts {name}",
        expected="layers of Megatron-Core's transformer",
        found=f"shape {shapes[name]}",
        advice="convert it to one rank with its own program",
    )


def is_gated(name: str, shapes: Shapes, said: object = None) -> bool | None:
    """Tell whether a parameter is of a gated unit's first layer: it has twice the rows that the second has columns.

    None: it is that of a first layer, and the second is not there.
    """
    *_, module, last = ("", *name.split("."))
    if module not in PARTNER or _NUMBERED.fullmatch(last) is None:
        return False
    second = f"{name.removesuffix(f'{module}.{last}')}{PARTNER[module]}.{last.replace('bias', 'weight')}"
    mine, its = shapes[name], shapes.get(second)
    if its is None:
        return said if isinstance(said, bool) else None
    if len(its) != 2 or not mine or mine[0] not in (its[1], 2 * its[1]):
        raise LayoutError(f"{name} does not fit {second}",
                          expected=f"{its[-1]} rows, or twice as many", found=mine)  # fmt: skip
    return mine[0] == 2 * its[1]


def cuts_of(shapes: Shapes, ranks: int, rows: int | None = None) -> dict[str, Cut]:
    """Return how each parameter is cut.

    `shapes`: of the whole model's parameters, by the names of the module; `rows`: of vocabularies in the target. Raises
    UsageError: one is not cut evenly; UnsupportedError: of one no rule is known.
    """
    found = {}
    for name, shape in shapes.items():
        size = rows if name.endswith(VOCABULARY) else None
        if ranks == 1:
            found[name] = KEPT if size is None else Cut(0)
            continue
        found[name] = cut = Cut(0) if name.endswith("lm_head.bias") else cut_of(name, shapes)
        if cut.dimension is not None and (size or shape[cut.dimension]) % (ranks * cut.parts):
            raise UsageError(
                f"{name} cannot be cut evenly for {ranks} tensor-parallel ranks",
                expected="a --padded-vocab-size that is a multiple of them"
                if name.endswith(VOCABULARY)
                else "a divisor of its size",
                found=shape,
            )
    return found


SPLITS = {"query_key_value": 3, "key_value": 2}
"""How many kinds of rows are in one; `key_value` is that of cross attention."""

CURRENT = 2.0
"""The version of a checkpoint from which on rows of query, key and value are in today's order, [heads, 3, d]."""


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
    return concat(slots, 0) if len(slots) > 1 else first


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
