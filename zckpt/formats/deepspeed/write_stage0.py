"""The optimizer of a stage-0 engine, which is in its model file. `stage0` reads what this writes.

Form      engine                                    what it holds
PLAIN     float32, or none that scales              {state: {number: slots}, param_groups}: torch's own, all parameters
UNFUSED   FP16_UnfusedOptimizer                     the same of the trained ones; fp32_groups: their masters
FUSED     FP16_Optimizer                            the same of one flat tensor for each group; fp32_groups_flat
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.formats.deepspeed.target import TargetGroup, TargetRank, Unpartitioned
from zckpt.formats.deepspeed.write_optimizer import whole
from zckpt.formats.torch_files.writer import SlotTensor, value_node
from zckpt.state import MASTER, WEIGHT, Parameter
from zckpt.torchfile import Object, node_of

PLAIN, UNFUSED, FUSED = "plain", "unfused", "fused"

_SCALING = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""Of loss scaling: what both optimizers in 16 bits hold."""


def form_of(held: Mapping[object, object]) -> str:
    """Return the form of what a model file holds of an optimizer."""
    return FUSED if "fp32_groups_flat" in held else UNFUSED if "fp32_groups" in held else PLAIN


def stage0_optimizer(mp: TargetRank, how: Unpartitioned) -> dict[str, object]:
    """Return what a stage-0 model file holds of the optimizer."""
    if how.form == PLAIN:
        return _numbered(mp, how)
    scaling = {**how.scaling, **{key: value for key, value in _known_scaling(mp).items() if key in how.scaling}}
    if how.form == FUSED:
        flat = [whole(group.experts[0], MASTER) for group in mp.groups]
        return {**scaling, "optimizer_state_dict": _of_groups(mp, how), "fp32_groups_flat": flat}
    masters = [[_whole(mp.owner(name), MASTER) for name in names] for names in how.numbered]
    return {**scaling, "optimizer_state_dict": _numbered(mp, how), "fp32_groups": masters}


def _numbered(mp: TargetRank, how: Unpartitioned) -> dict[str, object]:
    """Return an optimizer with the state of each parameter under its number."""
    state: dict[int, object] = {}
    groups: list[object] = []
    number = 0
    for group, names in zip(mp.groups, how.numbered, strict=True):
        numbers = []
        for name in names:
            numbers.append(number)
            owner = mp.owner(name) if name in mp.parameters else None
            keys = [] if owner is None else [key for key in owner.slots if key not in (WEIGHT, MASTER)]
            common = {} if how.own_state else group.values.state
            single = {**common, **owner.state} if owner is not None and owner.group is not None else {}
            if owner is not None and owner.group is not None and (keys or single):
                values = {key: value_node(value) for key, value in single.items()}
                state[number] = {**values, **{key: _whole(owner, key) for key in keys}}
            number += 1
        groups.append(_group(group, numbers, names if how.named else ()))
    return {"state": state, "param_groups": groups}


def _of_groups(mp: TargetRank, how: Unpartitioned) -> dict[str, object]:
    """Return an optimizer with one flat tensor for each group."""
    state: dict[int, object] = {}
    for group in mp.groups:
        single = group.values.state
        keys = dict.fromkeys(
            key for p in group.experts[0] for key in p.slots if key not in (WEIGHT, MASTER) and key not in single
        )
        values = {key: value_node(value) for key, value in single.items()}
        if keys or values:
            state[group.index] = {**values, **{key: whole(group.experts[0], key) for key in keys}}
    groups = [
        _group(group, [group.index], names if how.named else ())
        for group, names in zip(mp.groups, how.numbered, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _group(group: TargetGroup, numbers: list[int], names: Sequence[str]) -> dict[object, object]:
    found: dict[object, object] = {key: value_node(value) for key, value in group.values.hyperparameters.items()}
    found["params"] = numbers
    if names:
        found["param_names"] = list(names)
    return found


def _whole(parameter: Parameter, key: str) -> SlotTensor:
    slot = parameter.slots[key]
    return SlotTensor(slot, slot.dtype, f"{key}/{parameter.name}")


def _known_scaling(mp: TargetRank) -> dict[str, object]:
    """Return what the source's optimizer files say of loss scaling, in stage 0's words."""
    if not mp.members:
        return {}
    content = mp.members[0].content
    scaler = content.get("loss_scaler")
    node = node_of(scaler)
    state = node.state if isinstance(node, Object) and isinstance(node.state, dict) else {}
    found = {str(key): value for key, value in state.items() if key in _SCALING}
    if "dynamic" in state:
        found["dynamic_loss_scale"] = state["dynamic"]
    return found
