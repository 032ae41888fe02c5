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
from collections.abc import Sequence

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.megatron.cut import Shapes
from zckpt.state import Shape, Slot
from zckpt.state.views import concat, reshape, transpose, unstacked

FUSED = re.compile(r"(.*\.experts\.)weight([12])")
ONE = re.compile(r"(.*\.experts\.)local_experts\.[0-9]+\.linear_fc([12])\.weight")


def is_fused(name: str) -> bool:
    """Tell whether a parameter is of all experts of a rank."""
    return FUSED.fullmatch(name) is not None


def name_of_one(name: str, expert: int) -> str:
    """Return what an expert's part of a parameter of several is called; another name as it is."""
    match = FUSED.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{expert}.linear_fc{match[2]}.weight"


def expert_count(name: str, shapes: Shapes, ranks: int) -> int:
    """Return how many experts a parameter of a rank is of. `shapes`: of all that the rank has.

    Raises UnsupportedError: the layer's router is not there; LayoutError: its experts are not those of as many
    expert-parallel ranks, or do not make up the parameter.
    """
    front, _, last = name.rpartition("experts.")
    router, own = shapes.get(f"{front}router.weight"), shapes[name]
    if router is None or len(router) != 2:
        raise UnsupportedError(f"it is unknown how many experts {name} has",
                               expected=f"{front}router.weight next to it")  # fmt: skip
    count, odd = divmod(router[0], ranks)
    axis = 1 if last == "weight1" else 0
    if odd or not count or len(own) != 2 or own[axis] % count or own[1 - axis] != router[1]:
        raise LayoutError(f"{name} does not have its router's experts",
                          expected=f"{router[0]} on {ranks} ranks, of width {router[1]}", found=own)  # fmt: skip
    return count


def apart(slot: Slot, name: str, count: int) -> list[Slot]:
    """Return each expert's own part of a parameter, by its name."""
    rows, columns = slot.shape
    inner = (rows, columns // count) if name.endswith("1") else (rows // count, columns)
    return [transpose(one, (1, 0)) for one in unstacked(reshape(slot, (count, *inner))).values()]


def together(slots: Sequence[Slot], name: str) -> Slot:
    """Return the parameter that experts' slices are, by its name: the other way round than `apart`."""
    return reshape(concat([transpose(one, (1, 0)) for one in slots], 0), shape_of_all(name, len(slots), slots[0].shape))


def shape_of_all(name: str, count: int, one: Shape) -> Shape:
    """Return the shape of a parameter of experts, by its name and that of a rank's slice of one: [F, H] or [H, F]."""
    rows, columns = one
    return (columns, count * rows) if name.endswith("1") else (count * columns, rows)
