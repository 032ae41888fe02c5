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
from zckpt.formats.dcp.items import TensorItem
from zckpt.formats.megatron.proof import unproven
from zckpt.state import MASTER, WEIGHT, Slot

_EXPERTS = re.compile(r"(.*\.experts\.(?:experts|local_experts)\.(?:[0-9]+\.)?)linear_fc([12])\.weight")

Pieces = Callable[[str, bool], dict[tuple[int, ...], Slot]]
"""A slot by layer and expert; whether it is read as transposed."""


def is_transposed(
    key: str, axes: int, slots: Mapping[str, Mapping[str, TensorItem]], model: Mapping[str, TensorItem], pieces: Pieces
) -> bool:
    """Tell whether the flattened state of experts' weights is of the transposed ones.

    Parameters
    ----------
    key : str
        Of the weights.
    axes : int
        That count layers and experts.
    slots : mapping of str to mapping
        Of every slot, the tensors by the weights' keys.
    model : mapping of str to TensorItem
        The weights.
    pieces : callable
        What a slot of this key is, read in one way or the other.

    Raises
    ------
    UnsupportedError
        Neither shapes nor values tell.
    LayoutError
        The layers of an expert are not of one kind.
    """
    match = _EXPERTS.fullmatch(key)
    if match is None:
        return False
    said = set()
    for number, across in (("1", 1), ("2", 0)):
        other = f"{match[1]}linear_fc{number}.weight"
        for its in slots.values():
            item = its.get(other)
            if item is None or other not in model or len(item.shape) != len(model[other].shape) + 1:
                continue
            blocks = item.shape[axes : axes + 2]
            if max(blocks) > 1:
                said.add(blocks[across] > 1)
    if len(said) > 1:
        raise LayoutError(f"the state of {match[1]}* is cut in two ways", path=model[key].path)
    if said:
        return said.pop()
    own = [its[key] for its in slots.values() if key in its]
    if not any(len(item.shape) == len(model[key].shape) + 1 for item in own):
        return False
    fitting = [turned for turned in (False, True) if _proves(key, slots, pieces, turned)]
    if len(fitting) != 1:
        raise UnsupportedError(
            f"whether the state of {key} is that of GroupedMLP, transposed, is not certain",
            path=model[key].path,
            expected="masters that round to the weights beside them",
            found="in both ways" if fitting else "in none",
        )
    return fitting[0]


def _proves(key: str, slots: Mapping[str, Mapping[str, TensorItem]], pieces: Pieces, turned: bool) -> bool:
    """Tell whether every master is its weight, read in one way."""
    if key not in slots.get(MASTER, {}):
        return False
    weights, masters = pieces(WEIGHT, False), pieces(MASTER, turned)
    return unproven({str(at): one for at, one in masters.items()}, {str(at): weights[at] for at in masters}) is None
