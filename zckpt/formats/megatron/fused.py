"""Experts of `GroupedMLP` in the legacy files: one parameter of all experts of a rank for each of both layers. Pure.

mlp.experts.weight1     [H, E * F]     E experts of [H, F], one behind the other: the first layers, transposed
mlp.experts.weight2     [E * F, H]     the same of [F, H]: the second ones

Its columns are cut by tensor parallelism before they are put together: F is a rank's own, of a gated layer the gates
and then the others. How many experts a rank has, the router of the layer says. Everywhere else each expert's layers are
parameters of their own, `mlp.experts.local_experts.<e>.linear_fc1.weight` [F, H] and `linear_fc2.weight` [H, F].

Source: `GroupedMLP` of megatron-core 0.4 to 0.16, its `forward` and `sharded_state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.megatron.grouped import transposed
from zckpt.formats.megatron.slices import Slice
from zckpt.state import Extent, Parameter, Slot, Span
from zckpt.state.boxes import intersections, locate
from zckpt.state.dtypes import itemsize

FUSED = re.compile(r"(.*\.experts\.)weight([12])")
ONE = re.compile(r"(.*\.experts\.)local_experts\.([0-9]+)\.linear_fc([12])\.weight")
_NUMBERED = re.compile(r"(.*\.experts\.)local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))")


def is_fused(name: str) -> bool:
    """Tell whether a parameter is of all experts of a rank."""
    return FUSED.fullmatch(name) is not None


def name_of_one(name: str, expert: int) -> str:
    """Return what an expert's part of a parameter of several is called."""
    return FUSED.sub(rf"\g<1>local_experts.{expert}.linear_fc\g<2>.weight", name)


def name_of_all(name: str) -> str:
    """Return what the parameter of all experts is called that an expert's is a part of; another name as it is."""
    return ONE.sub(r"\1weight\3", name)


def numbered_name(name: str) -> str:
    """Return what Transformer Engine's module of all experts calls one's tensor; another name as it is."""
    return _NUMBERED.sub(r"\1\3\2", name)


def expert_count(name: str, shapes: Mapping[str, tuple[int, ...]], ranks: int, path: str) -> int:
    """Return how many experts a parameter is of.

    Parameters
    ----------
    name : str
        Of the parameter.
    shapes : mapping of str to tuple of int
        Of all that the rank has.
    ranks : int
        Expert-parallel ones.
    path : str

    Raises
    ------
    UnsupportedError
        The layer's router is not there.
    LayoutError
        Its experts are not those of as many ranks, or do not make up the parameter.
    """
    match = FUSED.fullmatch(name)
    front = match[1].removesuffix("experts.") if match is not None else ""
    router, own = shapes.get(f"{front}router.weight"), shapes[name]
    if router is None or len(router) != 2:
        raise UnsupportedError(f"how many experts {name} has is not known", path=path,
                               expected=f"{front}router.weight beside it")  # fmt: skip
    count, odd = divmod(router[0], ranks)
    axis = 1 if match is not None and match[2] == "1" else 0
    if odd or not count or len(own) != 2 or own[axis] % count or own[1 - axis] != router[1]:
        raise LayoutError(f"{name} is not of the experts that its router has", path=path,
                          expected=f"{router[0]} on {ranks} ranks, of width {router[1]}", found=own)  # fmt: skip
    return count


def apart(name: str, parameter: Parameter, count: int, path: str) -> list[Parameter]:
    """Return each expert's own part of a parameter, as if it were one by itself.

    Parameters
    ----------
    name : str
        In the file.
    parameter : Parameter
        Its slots are of its own shape, or of one element.
    count : int
        Experts.
    path : str

    Raises
    ------
    UnsupportedError
        State of another shape, or that is not stored end to end.
    """
    shape = parameter.shape
    rows, columns = (shape[0], shape[1] // count) if name.endswith("1") else (shape[0] // count, shape[1])
    numel = rows * columns
    found = []
    for expert in range(count):
        slots = {}
        for key, slot in parameter.slots.items():
            if slot.shape != shape and slot.numel == 1:
                slots[key] = slot
                continue
            if slot.shape != shape or any(one.strides is not None or one.extent.sizes != shape for one in slot.spans):
                raise UnsupportedError(f"{key} of {name} is not that of experts, one behind the other", path=path,
                                       expected=shape, found=slot.shape)  # fmt: skip
            spans = [its for one in slot.spans for its in _within(one, expert * numel, rows, columns)]
            slots[key] = Slot(slot.name, slot.dtype, (columns, rows), tuple(transposed(spans)))
        found.append(Parameter(name_of_one(parameter.name, expert), (columns, rows), parameter.dtype, slots,
                               parameter.group, state=parameter.state))  # fmt: skip
    return found


def _within(span: Span, first: int, rows: int, columns: int) -> list[Span]:
    """Return what a span has of a matrix that begins at an element of what the span is of."""
    own = span.extent
    low, high = max(own.start, first), min(own.start + own.numel, first + rows * columns)
    if low >= high:
        return []
    extent = Extent((0, 0), (rows, columns), low - first, high - low)
    return [replace(span, extent=extent, offset=span.offset + (low - own.start) * itemsize(span.dtype))]


def together(slots: Sequence[Slot], pieces: Slice, path: str) -> Slot:
    """Return a rank's slices of experts' matrices as they follow each other, transposed.

    Parameters
    ----------
    slots : sequence of Slot
        One of each expert of the rank, whole.
    pieces : Slice
        The rank's slice of each.
    path : str

    Returns
    -------
    Slot
        Of shape (experts times the slice's columns, its rows), of which the parameter is another view.

    Raises
    ------
    UnsupportedError
        The elements of one are rearranged, or averaged.
    """
    rows, columns = pieces.shape
    spans: list[Span] = []
    for expert, slot in enumerate(slots):
        if slot.factors is not None or slot.replicas:
            raise UnsupportedError("experts whose elements are rearranged cannot be put together", path=path,
                                   advice="`zckpt convert --to zckpt` first")  # fmt: skip
        for at, part in pieces.pieces:
            for span in slot.spans:
                spans += _placed(span, part, at // columns, expert * columns)
    first = slots[0]
    return Slot(first.name, first.dtype, (len(slots) * columns, rows), tuple(spans))


def _placed(span: Span, part: Extent, row: int, front: int) -> list[Span]:
    """Return what a span has of a part of a slice, transposed, in a parameter of several experts."""
    found = []
    for box in intersections(span.extent, part):
        first, steps = locate(span.extent, box, span.strides)
        (y, x), (height, width) = box
        at = (front + x - part.offsets[1], row + y - part.offsets[0])
        extent = Extent(at, (width, height), 0, height * width)
        offset = span.offset + first * itemsize(span.dtype)
        found.append(Span(extent, span.path, offset, span.dtype, (steps[1], steps[0]), span.byteorder, span.unresolved))
    return found


def shape_of_all(name: str, count: int, one: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter of experts, by its name and that of a rank's slice of one: [F, H] or [H, F]."""
    rows, columns = one
    return (columns, count * rows) if name.endswith("1") else (count * columns, rows)
