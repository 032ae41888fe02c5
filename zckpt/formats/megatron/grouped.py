"""Experts of `GroupedMLP`, whose weights are written as those of experts one by one, and whose flattened state is not.

                      one by one                       grouped
weight, fc1           [L, E, F, H]                     the same: it is transposed when it is written
state, flattened      [L, E, t, 1, F/t * H]            [L, E, 1, t, H * F/t]: of [H, F]
weight, fc2           [L, E, H, F]                     the same
state, flattened      [L, E, 1, t, H * F/t]            [L, E, t, 1, F/t * H]: of [F, H]

t is the number of tensor-parallel ranks, times two where a layer is gated. Where it is one, only values tell the
two apart: masters, rounded, are weights in one of them.

Source: `GroupedMLP.sharded_state_dict` of megatron-core 0.8 to 0.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.megatron.buckets import unproven
from zckpt.formats.megatron.keys import Stored
from zckpt.formats.torch_files.tensors import TensorItem
from zckpt.state import MASTER, WEIGHT, Slot

_EXPERTS = re.compile(r"(.*\.experts\.(?:experts|local_experts)\.(?:[0-9]+\.)?)linear_fc([12])\.weight")

Pieces = Callable[[str, bool], dict[tuple[int, ...], Slot]]
"""A slot by layer and expert; whether it is read as transposed."""


def is_transposed(one: Stored, slots: Mapping[str, Mapping[str, TensorItem]], pieces: Pieces) -> bool:
    """Tell whether the flattened state of experts' weights is of the transposed ones.

    `slots`: the tensors of each by the weights' keys. Raises UnsupportedError: neither shapes nor values tell;
    LayoutError: the layers of an expert are not of one kind.
    """
    match, axes, model = _EXPERTS.fullmatch(one.key), len(one.axes), slots[WEIGHT]

    def flattened(key: str) -> list[tuple[int, ...]]:
        every = [its[key].shape for its in slots.values() if key in its and key in model]
        return [shape for shape in every if len(shape) == len(model[key].shape) + 1]

    if match is None:
        return False
    said = {
        shape[axes + across] > 1
        for number, across in (("1", 1), ("2", 0))
        for shape in flattened(f"{match[1]}linear_fc{number}.weight")
        if max(shape[axes : axes + 2]) > 1
    }
    if len(said) > 1:
        raise LayoutError(f"the state of {match[1]}* is cut in two ways", path=model[one.parts[0]].path)
    if said or not flattened(one.key):
        return said == {True}
    fitting = []
    for turned in (False, True) if one.key in slots.get(MASTER, {}) else ():
        weights, masters = pieces(WEIGHT, False), pieces(MASTER, turned)
        if unproven({str(at): its for at, its in masters.items()}, {str(at): weights[at] for at in masters}) is None:
            fitting.append(turned)
    if len(fitting) != 1:
        raise UnsupportedError(
            f"it is uncertain whether the state of {one.key} is GroupedMLP's, transposed",
            path=model[one.key].path,
            expected="masters that round to their weights",
            found="in both ways" if fitting else "in none",
        )
    return fitting[0]
