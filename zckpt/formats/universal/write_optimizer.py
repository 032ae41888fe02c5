"""`zero/optimizer_state.pt`, as a tree: what all parameters have in common.

{loss_scaler, dynamic_loss_scale, overflow, clip_grad, ...    what the optimizer keeps beside its state
 zero_stage, ds_version,
 param_groups: [{lr, ..., params: [number]}]                  ZeRO-1, 2 and BF16_Optimizer take them, each its own
 optimizer_state_dict: {state: {0: {step}}, param_groups: [{...}]}
                                                              ZeRO-3 gives this step and these to every group
 zckpt: {...}}                                                what DeepSpeed has no place for, see `remainder`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.formats.remainder import KEY, remainder
from zckpt.formats.scalars import encode
from zckpt.formats.torch_archive import ValueTensor
from zckpt.formats.universal.folders import Folder
from zckpt.formats.universal.names import MASTER_STEM, STEP_STEM
from zckpt.formats.universal.write_model import DEEPSPEED_VERSION, carried_keys, filled_in
from zckpt.state import MASTER, Checkpoint, ParamGroup, Scalar
from zckpt.torchfile import alike

OWN_KEYS = frozenset({"param_groups", "optimizer_state_dict", "zero_stage", "ds_version", "state", KEY})
"""Keys of the file that are made here; metadata of the same name goes elsewhere."""

ZERO3_STEMS = (MASTER_STEM, "exp_avg", "exp_avg_sq")
"""What DeepSpeed's ZeRO-3 loads of a parameter, and all it loads."""


def optimizer_tree(checkpoint: Checkpoint, folders: Sequence[Folder]) -> dict[str, object]:
    """Return the content of the file."""
    groups = checkpoint.param_groups
    carried = {key: value for key, value in checkpoint.optimizer_metadata.items() if key not in OWN_KEYS}
    version = checkpoint.format_version if checkpoint.format in ("deepspeed", "universal") else None
    tree: dict[str, object] = {**carried}
    if checkpoint.zero_stage is not None:
        tree["zero_stage"] = checkpoint.zero_stage
    tree["ds_version"] = version or DEEPSPEED_VERSION
    tree["param_groups"] = [_group(group.hyperparameters, [number]) for number, group in enumerate(groups)]
    if zero3_hindrance(checkpoint, folders) is None:
        step = _value(groups[0].state[STEP_STEM])
        tree["optimizer_state_dict"] = {"state": {0: {STEP_STEM: step}}, "param_groups": [_group(_shared(groups), [])]}
    tree[KEY] = _rest(checkpoint, folders)
    return tree


def zero3_hindrance(checkpoint: Checkpoint, folders: Sequence[Folder]) -> str | None:
    """Say why DeepSpeed's ZeRO-3 could not load the state rightly; None if it can."""
    trained = {name for group in checkpoint.param_groups for name in group.parameters}
    found = {stem for folder in folders if folder.name in trained for stem in folder.files} - {STEP_STEM}
    if found != set(ZERO3_STEMS):
        slots = sorted(found - {MASTER_STEM})
        return f"it loads exp_avg and exp_avg_sq, and the optimizer has {', '.join(slots) or 'no state'}"
    steps = [group.state.get(STEP_STEM) for group in checkpoint.param_groups]
    if steps[0] is None or any(step != steps[0] for step in steps):
        return "it has one step for all parameters, and here they differ"
    return None


def _shared(groups: Sequence[ParamGroup]) -> dict[str, object]:
    """Return the hyperparameters that are the same in all groups."""
    first, *others = (group.hyperparameters for group in groups)
    return {key: value for key, value in first.items() if all(key in o and _same(o[key], value) for o in others)}


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and alike(one, other)


def _group(hyperparameters: Mapping[str, object], params: list[int]) -> dict[str, object]:
    return {**{key: _value(value) for key, value in hyperparameters.items()}, "params": params}


def _value(value: object) -> object:
    return ValueTensor(encode(value), value.dtype, ()) if isinstance(value, Scalar) else value


def _rest(checkpoint: Checkpoint, folders: Sequence[Folder]) -> dict[str, object]:
    """Return what neither the folders nor the rest of DeepSpeed's files have a place for."""
    top = set(carried_keys(checkpoint))
    trained = [p for p in checkpoint.parameters.values() if p.group is not None]
    return {
        **remainder(checkpoint),
        "metadata": {key: value for key, value in checkpoint.metadata.items() if key not in top},
        "optimizer_metadata": {key: v for key, v in checkpoint.optimizer_metadata.items() if key in OWN_KEYS},
        "masters": False,
        "without_master": [p.name for p in trained if MASTER not in p.slots],
        "groups": [list(group.parameters) for group in checkpoint.param_groups],
        "filled_in": list(filled_in(checkpoint)),
        "made": {folder.name: folder.made for folder in folders if folder.made},
        "values": {folder.name: folder.values for folder in folders if folder.values},
    }
