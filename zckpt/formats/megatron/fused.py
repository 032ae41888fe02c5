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

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.megatron.slices import Slice
from zckpt.state import Parameter, Slot
from zckpt.state.views import concat, reshape, transpose, unstacked

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


def expert_count(name: str, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> int:
    """Return how many experts a parameter is of.

    Parameters
    ----------
    name : str
        Of the parameter.
    shapes : mapping of str to tuple of int
        Of all that the rank has.
    ranks : int
        Expert-parallel ones.

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
        raise UnsupportedError(f"how many experts {name} has is not known",
                               expected=f"{front}router.weight beside it")  # fmt: skip
    count, odd = divmod(router[0], ranks)
    axis = 1 if match is not None and match[2] == "1" else 0
    if odd or not count or len(own) != 2 or own[axis] % count or own[1 - axis] != router[1]:
        raise LayoutError(f"{name} is not of the experts that its router has",
                          expected=f"{router[0]} on {ranks} ranks, of width {router[1]}", found=own)  # fmt: skip
    return count


def apart(name: str, parameter: Parameter, count: int) -> list[Parameter]:
    """Return each expert's own part of a parameter, as if it were one by itself.

    Parameters
    ----------
    name : str
        In the file.
    parameter : Parameter
        Its slots are of its own shape, or of one element.
    count : int
        Experts.

    Raises
    ------
    UnsupportedError
        State of another shape.
    """
    shape = parameter.shape
    rows, columns = (shape[0], shape[1] // count) if name.endswith("1") else (shape[0] // count, shape[1])
    every: list[dict[str, Slot]] = [{} for _ in range(count)]
    for key, slot in parameter.slots.items():
        if slot.shape != shape and slot.numel != 1:
            raise UnsupportedError(f"{key} of {name} is not that of experts, one behind the other",
                                   expected=shape, found=slot.shape)  # fmt: skip
        its = unstacked(reshape(slot, (count, rows, columns))) if slot.shape == shape else {}
        for expert, slots in enumerate(every):
            slots[key] = transpose(its[expert,], (1, 0)) if its else slot
    return [
        Parameter(name_of_one(parameter.name, expert), (columns, rows), parameter.dtype, slots, parameter.group,
                  state=parameter.state)
        for expert, slots in enumerate(every)
    ]  # fmt: skip


def together(slots: Sequence[Slot], own: Slice) -> Slot:
    """Return a rank's slices of experts' matrices as they follow each other, transposed.

    Parameters
    ----------
    slots : sequence of Slot
        One of each expert of the rank, whole.
    own : Slice
        The rank's slice of each.

    Returns
    -------
    Slot
        Of shape (experts times the slice's columns, its rows), of which the parameter is another view.
    """
    return concat([transpose(own.of(slot), (1, 0)) for slot in slots], 0)


def shape_of_all(name: str, count: int, one: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter of experts, by its name and that of a rank's slice of one: [F, H] or [H, F]."""
    rows, columns = one
    return (columns, count * rows) if name.endswith("1") else (count * columns, rows)
