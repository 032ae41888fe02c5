"""Loss scaling in the optimizer files of a checkpoint that another program wrote.

It is carried where it is known, and never invented:

ZeRO-1, 2     loss_scaler, dynamic_loss_scale, overflow: each may be missing; then the training's configuration decides
ZeRO-3        all three must be there
Stage 0       dynamic_loss_scale, cur_scale, cur_iter and, where it is dynamic, last_overflow_iter, scale_factor,
              scale_window; without hysteresis, which ZeRO has

Source: DeepSpeed 0.14.5 to 0.19.8, `_load_global_state`, `_rigid_load_state_dict`, `FP16_UnfusedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.state import Checkpoint, dict_of
from zckpt.torchfile import DType, Global, Object, node_of, plain

LOSS_SCALER = "loss_scaler"
DYNAMIC = "dynamic_loss_scale"
OVERFLOW = "overflow"
SCALING_KEYS = (LOSS_SCALER, DYNAMIC, OVERFLOW)
"""What an optimizer file of ZeRO, at every stage, has of it."""

_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_COUNTED = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""What a dynamic loss scale of stage 0 consists of."""

HANDLED = frozenset({*SCALING_KEYS, *_COUNTED, "clip_grad"})
"""Keys next to an optimizer's state that ZeRO's files say in their own form, or the training's configuration says."""

_DEFAULTS: Mapping[str, object] = {
    "min_loss_scale": 1, "hysteresis": 2, "consecutive_hysteresis": False, "loss_scale_window": 1000,
    "initial_scale_power": 16,
}  # fmt: skip
"""Of the section `fp16` of DeepSpeed's configuration."""


def of_stage0(known: Mapping[str, object]) -> dict[str, object] | None:
    """Return the attributes of the loss scaler that metadata of a stage-0 optimizer describe; None where there is none.

    A scale that is not known to change, or how, is a fixed one.
    """
    if not isinstance(known.get("cur_scale"), (int, float)):
        return None
    dynamic = known.get(DYNAMIC) is True and all(key in known for key in _COUNTED)
    return {"dynamic": dynamic, **{key: known[key] for key in _COUNTED[: None if dynamic else 1]}}


def in_stage0(content: Mapping[str, object]) -> dict[str, object]:
    """Return what an optimizer file of ZeRO says of loss scaling, in stage 0's words."""
    node = node_of(content.get(LOSS_SCALER))
    state = dict_of(node.state if isinstance(node, Object) else None)
    found = {key: state[key] for key in (DYNAMIC, *_COUNTED) if key in state}
    return found | ({DYNAMIC: state["dynamic"]} if "dynamic" in state else {})


def scaling(
    checkpoint: Checkpoint, config: Mapping[object, object], *, stage: int, dtype: str
) -> tuple[dict[str, object], list[str]]:
    """Return what the optimizer files of a checkpoint hold of loss scaling, and what to know of it.

    `config`: DeepSpeed's configuration, as far as there is one; `stage`: {1, 2, 3}; `dtype`: of most of the model.
    """
    known, scale = checkpoint.optimizer_metadata, checkpoint.loss_scale
    keys: dict[str, object] = {}
    notes: list[str] = []
    if known.get(LOSS_SCALER) is not None:
        keys = {key: known[key] for key in SCALING_KEYS if known.get(key) is not None}
    elif (values := of_stage0(known)) is not None:
        keys = {LOSS_SCALER: _scaler(values, config), DYNAMIC: values["dynamic"]}
        notes = [
            "the loss scaler's hysteresis starts over: without ZeRO there is none",
            "moments of stage 0 in fp16 may be too small by the loss scale, which DeepSpeed 0.19.8 divides by without "
            "having multiplied (docs/formats.md): the next losses are then not those of stage 0",
        ]
        if not values["dynamic"]:
            notes = ["cur_iter is not carried: a fixed loss scale of ZeRO counts no iterations"]
    elif scale is not None and scale != 1.0 and stage != 3:
        notes = [
            f"the loss scale {scale:g} is left to the training's configuration: how it changes, the source does not say"
        ]
    if stage != 3:
        return keys, notes
    if LOSS_SCALER not in keys:  # without which ZeRO-3 does not load
        values, what = {"cur_scale": 1.0, "dynamic": False}, "scales by 1"
        if dtype == "float16":
            power = _option(config, "initial_scale_power")
            begun = 2.0 ** int(power) if isinstance(power, int) else 2.0**16
            values = {"cur_scale": begun if scale is None else scale, "dynamic": True, "cur_iter": 0,
                      "last_overflow_iter": -1, "scale_factor": 2.0,
                      "scale_window": _option(config, "loss_scale_window")}  # fmt: skip
            what = "starts as in DeepSpeed" if scale is None else f"starts at {scale:g} and counts again"
        keys[LOSS_SCALER] = _scaler(values, config)
        notes.append(f"ZeRO-3 loads nothing without a loss scaler, but the source has none: it {what}")
    node = node_of(keys[LOSS_SCALER])
    keys.setdefault(DYNAMIC, isinstance(node, Object) and node.get("dynamic") is True)
    keys.setdefault(OVERFLOW, False)  # of the last step, and set again by the next
    return keys, notes


def _option(config: Mapping[object, object], name: str) -> object:
    return dict_of(plain(config.get("fp16"))).get(name, _DEFAULTS[name])


def _scaler(values: Mapping[str, object], config: Mapping[object, object]) -> Object:
    state: dict[object, object] = {"cur_scale": values["cur_scale"], "dynamic": values["dynamic"]}
    if values["dynamic"]:
        hysteresis = _option(config, "hysteresis")
        state |= {
            **{key: values[key] for key in _COUNTED[1:]},
            "min_scale": _option(config, "min_loss_scale"),
            "delayed_shift": hysteresis, "cur_hysteresis": hysteresis,
            "consecutive_hysteresis": _option(config, "consecutive_hysteresis"),
            "raise_error_at_min_scale": True, "dtype": DType("float16"),
        }  # fmt: skip
    return scaler_of(state)


def scaler_of(state: dict[Any, Any]) -> Object:
    """Return a loss scaler as an object of DeepSpeed's class."""
    name = "DynamicLossScaler" if state["dynamic"] else "LossScaler"
    return Object(Global(_MODULE, name), how="newobj", state=state, has_state=True)
